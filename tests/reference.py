"""Slow, obvious NumPy versions of what the package computes: dense inverses, brute-force integrals.

Shapes are the package's: ``K [L, N, N]`` (or ``[1, N, N]`` if shared), everything else ``[N, L]``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp

LogProb = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""``log p(y|f)`` element by element, for arrays that broadcast."""

REACH = 16.0
"""Half-width of the brute-force integrals, in standard deviations of q and of the cavity."""

NUM_POINTS = 20_001


class Posterior(NamedTuple):
    mean: np.ndarray  # [N, L]
    variance: np.ndarray  # [N, L]
    covariance: np.ndarray  # [L, N, N]
    log_normaliser: float


def posterior(
    K: np.ndarray, mean: np.ndarray, lambda_1: np.ndarray, lambda_2: np.ndarray
) -> Posterior:
    """``q(f) ∝ N(f; μ₀, K) Π exp(λ₁f − ½λ₂f²)``; K may be singular, λ₂ has any sign."""
    N, L = lambda_1.shape
    m, v, Sigmas, log_Z = np.empty((N, L)), np.empty((N, L)), [], 0.0
    for i, K_i in enumerate(np.broadcast_to(K, (L, N, N))):
        mu, lam = mean[:, i], lambda_2[:, i]
        r = lambda_1[:, i] - lam * mu
        M = np.eye(N) + K_i * lam  # I + KΛ
        Sigma = np.linalg.inv(M) @ K_i
        m[:, i], v[:, i] = mu + Sigma @ r, np.diag(Sigma)
        _, log_det = np.linalg.slogdet(M)
        log_Z += -0.5 * log_det + 0.5 * r @ Sigma @ r
        log_Z += mu @ lambda_1[:, i] - 0.5 * mu @ (lam * mu)
        Sigmas.append(Sigma)
    return Posterior(m, v, np.stack(Sigmas), float(log_Z))


def smallest_eigenvalue(K: np.ndarray, lambda_2: np.ndarray) -> float:
    """Of ``I + KΛ`` over all latents, through the similar symmetric ``I + √K Λ √K``."""
    N, L = lambda_2.shape
    smallest = np.inf
    for K_i, lam in zip(np.broadcast_to(K, (L, N, N)), lambda_2.T, strict=True):
        values, vectors = np.linalg.eigh(K_i)
        root = vectors * np.sqrt(np.maximum(values, 0.0)) @ vectors.T
        smallest = min(smallest, np.linalg.eigvalsh(np.eye(N) + root * lam @ root)[0])
    return float(smallest)


def log_normal(f: np.ndarray, m: np.ndarray, v: np.ndarray) -> np.ndarray:
    return -0.5 * (np.log(2.0 * np.pi * v) + (f - m) ** 2 / v)


def grid(*gaussians: tuple[np.ndarray, np.ndarray], num: int = NUM_POINTS) -> np.ndarray:
    """Points ``[num, ...]`` that cover every one of the Gaussians ``(m, v)``, equally spaced."""
    low = np.min([m - REACH * np.sqrt(v) for m, v in gaussians], axis=0)
    high = np.max([m + REACH * np.sqrt(v) for m, v in gaussians], axis=0)
    return np.linspace(low, high, num)


def log_integral(log_values: np.ndarray, f: np.ndarray) -> np.ndarray:
    """``log ∫ exp(log_values) df`` over the leading axis; the integrand vanishes at both ends."""
    return logsumexp(log_values, axis=0) + np.log(f[1] - f[0])


def log_expected_power(
    m: np.ndarray, v: np.ndarray, Y: np.ndarray, log_prob: LogProb, alpha: float
) -> np.ndarray:
    """``(1/α) log E_N(f; m, v)[p(y|f)^α]``, element by element."""
    f = grid((m, v))
    return log_integral(log_normal(f, m, v) + alpha * log_prob(f, Y), f) / alpha


def expected_log_prob(m: np.ndarray, v: np.ndarray, Y: np.ndarray, log_prob: LogProb) -> np.ndarray:
    """``E_N(f; m, v)[log p(y|f)]``, element by element."""
    f = grid((m, v))
    density = np.exp(log_normal(f, m, v))
    # 0 · (−∞) in the far tails is 0.
    terms = np.where(density > 0.0, density * log_prob(f, Y), 0.0)
    return np.sum(terms, axis=0) * (f[1] - f[0])


def power_ep(
    K: np.ndarray,
    mean: np.ndarray,
    lambda_1: np.ndarray,
    lambda_2: np.ndarray,
    Y: np.ndarray,
    log_prob: LogProb,
    alpha: float,
) -> float:
    """``L_α = log Z + (1/α) Σ log E_q[(p/t)^α]``, one observation for each datum and latent."""
    q = posterior(K, mean, lambda_1, lambda_2)

    def log_t(f: np.ndarray) -> np.ndarray:
        return lambda_1 * f - 0.5 * lambda_2 * f**2

    if alpha == 0.0:
        ratio = expected_log_prob(q.mean, q.variance, Y, lambda f, y: log_prob(f, y) - log_t(f))
        return q.log_normaliser + float(np.sum(ratio))
    cavity_variance = 1.0 / (1.0 / q.variance - alpha * lambda_2)
    cavity_mean = cavity_variance * (q.mean / q.variance - alpha * lambda_1)
    f = grid((q.mean, q.variance), (cavity_mean, cavity_variance))
    log_values = log_normal(f, q.mean, q.variance) + alpha * (log_prob(f, Y) - log_t(f))
    return q.log_normaliser + float(np.sum(log_integral(log_values, f))) / alpha


def cavities(
    K: np.ndarray, mean: np.ndarray, lambda_1: np.ndarray, lambda_2: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of every ``q₋ₙ(fₙ)``, ``[N, L]``: the posterior without the nth site."""
    m, v = np.empty_like(lambda_1), np.empty_like(lambda_1)
    for n in range(len(lambda_1)):
        without_1, without_2 = lambda_1.copy(), lambda_2.copy()
        without_1[n], without_2[n] = 0.0, 0.0
        q = posterior(K, mean, without_1, without_2)
        m[n], v[n] = q.mean[n], q.variance[n]
    return m, v


def loo(
    K: np.ndarray,
    mean: np.ndarray,
    lambda_1: np.ndarray,
    lambda_2: np.ndarray,
    Y: np.ndarray,
    log_prob: LogProb,
) -> np.ndarray:
    """``log ∫ q₋ₙ(f) p(yₙ|f) df``, ``[N]``."""
    m, v = cavities(K, mean, lambda_1, lambda_2)
    return log_expected_power(m, v, Y, log_prob, 1.0).sum(axis=1)


def log_evidence_2d(
    m: np.ndarray, v: np.ndarray, log_prob: Callable[[np.ndarray], np.ndarray], num: int = 601
) -> float:
    """``log ∫ N(f; m, diag v) p(y|f) df`` for one datum, two latents; ``log_prob`` of [Q, 2]."""
    f = np.linspace(m - 12.0 * np.sqrt(v), m + 12.0 * np.sqrt(v), num)  # [num, 2]
    points = np.stack(np.meshgrid(f[:, 0], f[:, 1], indexing="ij"), -1).reshape(-1, 2)
    log_values = log_normal(points, m, v).sum(-1) + log_prob(points)
    return float(logsumexp(log_values) + np.log(f[1] - f[0]).sum())
