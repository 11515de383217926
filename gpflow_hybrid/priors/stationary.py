"""Kernel matrices of GPflow's stationary kernels on arrays, and their adjoints, without a graph.

Tracing a kernel and its gradient takes TensorFlow longer than a small fit takes in all. Of the kernels
below both are a few lines: with ``r² = Σ_d (x_d − x'_d)²/ℓ_d²`` and ``k = σ² h(r²)``,

    ∂k/∂σ² = h,     ∂k/∂ℓ = −(2/ℓ) r² σ² h'(r²),     ∂k/∂ℓ_d = −(2/ℓ_d³) (x_d − x'_d)² σ² h'(r²)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from gpflow.base import Parameter
from gpflow.kernels import (
    Exponential,
    Kernel,
    Matern12,
    Matern32,
    Matern52,
    SquaredExponential,
)

from .. import tuning
from ..array_parameters import value_of
from ..covariances import latent_kernels
from ..linalg.distances import distances_of_rows
from ..linalg.symmetric import mirror, row_blocks
from .protocol import Array

Profile = Callable[[Array], tuple[Array, Array]]
"""``h(r²)`` and ``r² h'(r²)``, which is finite at zero."""


def _squared_exponential(r2: Array) -> tuple[Array, Array]:
    h = np.exp(-0.5 * r2)
    return h, -0.5 * r2 * h


def _matern12(r2: Array) -> tuple[Array, Array]:
    r = np.sqrt(r2)
    h = np.exp(-r)
    return h, -0.5 * r * h


def _exponential(r2: Array) -> tuple[Array, Array]:
    return _matern12(0.25 * r2)  # exp(−r/2)


def _matern32(r2: Array) -> tuple[Array, Array]:
    s = np.sqrt(3.0 * r2)
    e = np.exp(-s)
    return (1.0 + s) * e, -1.5 * r2 * e


def _matern52(r2: Array) -> tuple[Array, Array]:
    s = np.sqrt(5.0 * r2)
    e = np.exp(-s)
    linear = 1.0 + s
    return (linear + (5.0 / 3.0) * r2) * e, (-5.0 / 6.0) * r2 * linear * e


PROFILES: dict[type, Profile] = {
    SquaredExponential: _squared_exponential,
    Matern12: _matern12,
    Exponential: _exponential,
    Matern32: _matern32,
    Matern52: _matern52,
}
"""Of every kernel that is known here."""


def is_stationary(kernel: Kernel) -> bool:
    """Whether it is one of these kernels as GPflow made it."""
    return type(kernel) in PROFILES and all(
        isinstance(p, Parameter) for p in (kernel.variance, kernel.lengthscales)
    )


def matrices(kernel: Kernel, X: Array) -> Array | None:
    """``k(X, X)`` of the latents, ``[L or 1, N, N]``, at the present parameters; None if not known."""
    kernels = latent_kernels(kernel)
    is_large = len(X) > tuning.KEPT_DISTANCES  # distances are another matrix
    if is_large or X.dtype != np.float64 or not all(is_stationary(k) for k in kernels):
        return None
    found = []
    for k in kernels:
        matrix = StationaryMatrix(k, X)
        with np.errstate(all="ignore"):  # NaN where ℓ² has no inverse
            found.append(matrix.evaluate(*(value_of(p) for p in matrix.parameters)))
    return np.stack(found)


class StationaryMatrix:
    """``(σ², ℓ) ↦ k(X, X)`` at constant inputs, and its adjoint."""

    def __init__(self, kernel: Kernel, X: Array) -> None:
        self.parameters: Sequence[Any] = (kernel.variance, kernel.lengthscales)
        self._profile = PROFILES[type(kernel)]
        columns = kernel.slice(tf.constant(X), None)[0].numpy()
        self._X = np.ascontiguousarray(columns)
        self._distances = None if kernel.ard else distances_of_rows(self._X)

    def _scaled_distances(self, lengthscales: Array) -> tuple[Array, float]:
        """Squared distances, and by what they are still to be multiplied."""
        if self._distances is not None:
            return self._distances, float(1.0 / np.square(lengthscales))
        return distances_of_rows(self._X / lengthscales), 1.0

    def evaluate(self, variance: Array, lengthscales: Array) -> Array:
        """``K``, ``[N, N]``."""
        D, factor = self._scaled_distances(lengthscales)
        K = np.empty_like(D)
        for rows in row_blocks(len(D)):
            part, _ = self._profile(factor * D[rows, : rows.stop])
            np.multiply(part, variance, out=K[rows, : rows.stop])
        mirror(K)
        return K

    def pull_back(self, variance: Array, lengthscales: Array, K_bar: Array) -> tuple[Any, Any]:
        """The derivatives in variance and lengthscales, from those in a symmetric K."""
        D, factor = self._scaled_distances(lengthscales)
        in_variance, in_scale = 0.0, 0.0
        W = None if self._distances is not None else np.empty_like(D)
        for rows in row_blocks(len(D)):
            r2 = factor * D[rows, : rows.stop]
            h, slope = self._profile(r2)
            bar = 2.0 * K_bar[rows, : rows.stop]  # on both sides of the diagonal
            bar[:, rows] = K_bar[rows, rows]
            in_variance += np.vdot(bar, h)
            if W is None:
                in_scale += np.vdot(bar, slope)
            else:
                # Where r = 0 the inputs are equal, and the quotient is not needed.
                weights = K_bar[rows, : rows.stop] * slope
                np.divide(weights, r2, out=W[rows, : rows.stop], where=r2 > 0.0)
                W[rows, : rows.stop][r2 <= 0.0] = 0.0
        if W is None:
            return in_variance, -2.0 * variance * in_scale / lengthscales
        mirror(W)
        # Σᵢⱼ Wᵢⱼ (xᵢ − xⱼ)² = 2 Σᵢ (W1)ᵢ xᵢ² − 2 Σᵢ xᵢ (Wx)ᵢ, of every column
        Z = self._X / lengthscales
        sums = 2.0 * (W.sum(1) @ np.square(Z)) - 2.0 * np.sum(Z * (W @ Z), axis=0)
        return in_variance, -2.0 * variance * sums / lengthscales
