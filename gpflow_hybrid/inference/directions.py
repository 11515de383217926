"""A Newton system in the few directions in which the likelihood curves much, to precondition with.

With ``x = (a, b)``, ``F = diag(Σ, −Σ∘Σ)``, ``D = diag(1, −2)`` and C the curvature of every datum,
``[E_mm + g₂, E_mv; E_vm, E_vv]``, the system of :mod:`~gpflow_hybrid.inference.newton` is
``J = c I − D C F``. In units of the posterior C has few large eigenvalues. With those,
``C ≈ V W Vᵀ``, only

    c I − S W,     S = Vᵀ F D V = Vᵀ diag(Σ, 2 Σ∘Σ) V

is factorised, as large as there are directions: ``J⁻¹r = (r + D V W s)/c`` with ``(c I − S W) s = VᵀF r``,
and ``J⁻ᵀr = (r + F V W s)/c`` with ``(c I − S W) s = VᵀD r``.
"""

from __future__ import annotations

import numpy as np
from scipy.linalg import get_lapack_funcs

from .. import tuning
from ..likelihoods.curvature import Curvature
from ..priors import Array, Covariance
from ..priors.protocol import Solver
from .options import NEWTON


class StrongDirections:
    """V, W and S of a likelihood's curvature at one λ.

    :param g2: ``g₂ = −2 ∂E/∂v``, ``[L, N]``.
    """

    def __init__(self, covariance: Covariance, curvature: Curvature, g2: Array) -> None:
        self._covariance = covariance
        mm, mv, vm, vv = curvature
        L = len(g2)
        C = np.concatenate([np.concatenate([mm, mv], 2), np.concatenate([vm, vv], 2)], 1)
        C[:, np.arange(L), np.arange(L)] += g2.T
        v = covariance.variance.T
        units = np.concatenate([np.sqrt(v), v], 1)
        weights, vectors = np.linalg.eigh(C * (units[:, :, None] * units[:, None]))
        size = np.abs(weights)  # [N, 2L]
        limit = NEWTON.strong_curvature
        most = min(tuning.DIRECTIONS, int(tuning.DIRECTIONS_PER_DATUM * len(size)))
        if size.size > most:
            limit = max(limit, np.partition(size, -most, None)[-most])
        self._strong = np.nonzero(size > limit)
        self._weights = weights[self._strong]  # [R]
        data, which = self._strong
        self._V = (vectors / units[:, :, None])[data, :, which].T.reshape(2, L, -1)  # [2, L, R]
        self._S = covariance.between(data, *self._V)

    def solver(self, c: float) -> Solver | None:
        """``J⁻¹r``, or ``J⁻ᵀr``, of vectors ``[2, L, N]``; None where the prior has no S."""
        if self._S is None:
            return None
        if len(self._S) == 0:
            return lambda r, _: r / c
        # (c I − S W) with t = W s, so that no weight is divided by
        getrf, getrs = get_lapack_funcs(("getrf", "getrs"), (self._S,))
        matrix = -self._S * self._weights
        matrix[np.diag_indices(len(matrix))] += c
        factors = getrf(matrix, overwrite_a=1)[:2]
        V, (data, _), D = self._V, self._strong, np.array([1.0, -2.0])[:, None, None]

        def solve(r: Array, transpose: bool) -> Array:
            pulled = D * r if transpose else self._spread(r)
            t = self._weights * getrs(*factors, np.einsum("klr,klr->r", V, pulled[..., data]))[0]
            rows = (V * t).reshape(-1, len(t))
            pushed = np.stack([np.bincount(data, x, r.shape[-1]) for x in rows]).reshape(r.shape)
            return (r + (self._spread(pushed) if transpose else D * pushed)) / c

        return solve

    def _spread(self, x: Array) -> Array:
        """``F x``."""
        a, b = x
        return np.stack([self._covariance.product(a), -self._covariance.squared_product(b)])
