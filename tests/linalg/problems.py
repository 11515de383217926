"""Kernel matrices and valid sites of every sign, and differences to check an adjoint by."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests import reference

SIGNS = ["positive", "mixed", "zero", "negative"]

Moves = list[tuple[tuple[int, ...], ...]]
"""Sets of indices that move together."""


def make_kernels(rng: np.random.Generator, N: int, num_kernels: int) -> np.ndarray:
    """Squared-exponential kernel matrices of different scales, ``[num_kernels, N, N]``."""
    X = rng.uniform(-2.0, 2.0, (N, 2))
    distance = ((X[:, None] - X[None]) ** 2).sum(-1)
    variances, scales = rng.uniform(0.5, 2.0, (2, num_kernels, 1, 1))
    return variances * np.exp(-0.5 * distance / scales**2)


def make_sites(
    rng: np.random.Generator, K: np.ndarray, L: int, signs: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``μ₀, λ₁, λ₂`` ``[N, L]`` with a valid q; each latent has one negative site more."""
    N = K.shape[-1]
    mean, lambda_1, lambda_2 = rng.normal(size=(3, N, L))
    lambda_2 = 3.0 * np.abs(lambda_2)
    if signs == "zero":
        lambda_2 *= 0.0
    if signs in ("mixed", "negative"):
        for i in range(L):
            num_negative = N if signs == "negative" else min(N, 1 + i)
            lambda_2[rng.permutation(N)[:num_negative], i] *= -1.0
        negative = lambda_2 < 0.0
        while reference.smallest_eigenvalue(K, lambda_2) < 0.1:
            lambda_2[negative] *= 0.8
    return mean, lambda_1, lambda_2


def symmetric_moves(K: np.ndarray) -> Moves:
    """Every element of a stack of symmetric matrices, with its mirror image."""
    num_kernels, N, _ = K.shape
    return [
        tuple({(k, a, b), (k, b, a)})
        for k in range(num_kernels)
        for a in range(N)
        for b in range(a + 1)
    ]


def single_moves(x: np.ndarray) -> Moves:
    """Every element by itself."""
    return [(index,) for index in np.ndindex(x.shape)]


def finite_differences(
    value: Callable[[np.ndarray], float], x: np.ndarray, moves: Moves, h: float = 1e-5
) -> np.ndarray:
    """Central differences of ``value(x)`` along index sets that move together."""
    gradient = []
    for indices in moves:
        step = np.zeros_like(x)
        for index in indices:
            step[index] = h
        gradient.append((value(x + step) - value(x - step)) / (2.0 * h))
    return np.array(gradient)


def along(gradient: np.ndarray, moves: Moves) -> np.ndarray:
    """The derivatives that :func:`finite_differences` should find."""
    return np.array([sum(gradient[index] for index in indices) for indices in moves])
