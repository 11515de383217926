"""Covariances of GPflow's stationary kernels between two sets of inputs, on arrays, and their adjoints.

In the notation of :mod:`~gpflow_hybrid.priors.stationary`, with ``W = K̄ ∘ σ² h'(r²)`` and inputs in units
of lengthscales,

    ℓ̄_d = −(2/ℓ_d) Σᵢⱼ Wᵢⱼ (z_id − x_jd)²,     z̄_id = (2/ℓ_d) Σⱼ Wᵢⱼ (z_id − x_jd)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from gpflow.kernels import Kernel

from .. import tuning
from ..linalg.products import product
from .protocol import Array
from .stationary import PROFILES


class CrossBars(NamedTuple):
    """Derivatives in σ², in ℓ and in the left inputs."""

    variance: Any
    lengthscales: Any
    Z: Array


class StationaryCross:
    """``k(Z, ·)`` of one kernel at given parameters.

    :param kernel: says which kernel it is, and which columns it sees.
    """

    def __init__(self, kernel: Kernel, variance: Array, lengthscales: Array, Z: Array) -> None:
        self._profile, self._columns = PROFILES[type(kernel)], kernel.active_dims
        self.variance, self._lengthscales, self._Z = variance, lengthscales, Z
        # Distances are differences of squares, which lose digits where those are large beside them.
        self._centre = Z[:, self._columns].mean(0)
        self._left = self._scaled(Z)

    def _scaled(self, X: Array) -> Array:
        return np.ascontiguousarray((X[:, self._columns] - self._centre) / self._lengthscales)

    def _on_pieces(self, right: Array, function: Callable[[slice, Array], None]) -> Array:
        """A matrix ``[M, N]`` with ``r²`` in it, some rows of which at a time, that stay in a core's
        cache, a function has worked on."""
        D = product(-2.0 * self._left, right.T)
        left_squares, right_squares = (np.sum(x * x, 1) for x in (self._left, right))

        size = max(1, tuning.CACHED_ELEMENTS // max(1, D.shape[1]))
        for rows in (slice(i, i + size) for i in range(0, len(D), size)):
            r2 = D[rows]
            with np.errstate(all="ignore"):  # NaN where ℓ² has no inverse
                r2 += right_squares
                r2 += left_squares[rows, None]
                np.maximum(r2, 0.0, out=r2)
                function(rows, r2)
        return D

    def evaluate(self, X: Array) -> Array:
        """``k(Z, X)``, ``[M, N]``."""

        def of_rows(rows: slice, r2: Array) -> None:
            np.multiply(self._profile(r2)[0], self.variance, out=r2)

        return self._on_pieces(self._scaled(X), of_rows)

    def evaluate_at_Z(self) -> Array:
        """``k(Z, Z)``, symmetric and with its exact diagonal."""
        K = self.evaluate(self._Z)
        K = 0.5 * (K + K.T)
        np.fill_diagonal(K, self.variance)
        return K

    def pull_back(self, X: Array, K_bar: Array) -> CrossBars:
        """From the derivatives in ``k(Z, X)``."""
        right, M = self._scaled(X), len(self._Z)
        in_variance, in_scale = np.zeros(M), np.zeros(M)

        def of_rows(rows: slice, r2: Array) -> None:
            h, slope = self._profile(r2)
            bar = K_bar[rows]
            in_variance[rows] = np.einsum("ij,ij->i", bar, h)
            slope *= bar
            in_scale[rows] = np.sum(slope, 1)
            # Where r = 0 the inputs are equal, and the quotient is not needed.
            with_distance = r2 > 0.0
            np.divide(slope, r2, out=r2, where=with_distance)
            r2[~with_distance] = 0.0

        W = self._on_pieces(right, of_rows)
        sums, weighted = W.sum(1), product(W, right)
        in_left = sums[:, None] * self._left - weighted
        if np.ndim(self._lengthscales) == 0:
            in_scales = np.sum(in_scale)
        else:
            squares = sums @ np.square(self._left) + W.sum(0) @ np.square(right)
            in_scales = squares - 2.0 * np.sum(self._left * weighted, 0)
        in_Z = np.zeros_like(self._Z)
        in_Z[:, self._columns] = 2.0 * self.variance * in_left / self._lengthscales
        return CrossBars(
            np.sum(in_variance), -2.0 * self.variance * in_scales / self._lengthscales, in_Z
        )

    def pull_back_at_Z(self, K_bar: Array) -> CrossBars:
        """From those in a symmetric ``k(Z, Z)``: the inputs are on both sides."""
        found = self.pull_back(self._Z, K_bar)
        return found._replace(Z=2.0 * found.Z)
