"""The Newton system of :mod:`~gpflow_hybrid.inference.newton` on NumPy arrays, by SciPy.

Vectors are pairs ``(a, b)``, ``[2, L, N]``. A small system is factorised; a large one is solved by GMRES at
two products with an N×N matrix an iteration, few of which are needed near a solution, and factorised where
that does not converge. The factors leave out what couples the latents: they precondition GMRES.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.linalg import get_blas_funcs, get_lapack_funcs
from scipy.sparse.linalg import LinearOperator, gmres

from ..linalg.lapack import row_blocks, symmetric_product

Array = npt.NDArray[Any]
Map = Callable[[Array], Array]

SMALL = 300
"""Number of data up to which a factorisation is cheaper than iterations."""

LARGE = 3000
"""Number of data above which ``Σ∘Σ`` is not kept: memory is dearer there than its elements."""

ITERATIONS = 60
"""Of GMRES without factors."""

PRECONDITIONED_ITERATIONS = 200
"""Of GMRES with factors, where the latents are coupled."""


class HostSystem:
    """``J + μI`` and its transpose at one λ: ``Σ [L, N, N]``, Hessians ``[N, L, L]``, ``g₂ [L, N]``."""

    def __init__(
        self,
        Sigma: Array,
        hessian: tuple[Array, Array, Array, Array],
        g2: Array,
        damping: float,
        is_coupled: bool,
    ) -> None:
        self.Sigma = Sigma
        self.Sigma2 = Sigma * Sigma if Sigma.shape[-1] <= LARGE else None
        self.mm, self.mv, self.vm, self.vv = hessian
        self.g2 = g2
        self.c = 1.0 + damping
        self.size = g2.shape[-1]
        self.is_coupled = is_coupled
        v = np.einsum("lii->li", Sigma)
        self.units = np.stack([np.sqrt(v), v])

    def solve(self, r: Array, tolerance: float) -> Array:
        """``(J + μI)⁻¹ r``, in units of the posterior: ``a √v`` and ``b v``.

        Of a small system without coupling, by its factors alone: they leave out ``E_mm + g₂``, which is
        the error of the likelihood's quadrature.
        """
        if self.size <= SMALL and not self.is_coupled and np.isfinite(self.Sigma).all():
            return self._factorised()(r)
        return self._solve(self._apply, self._factorised, r, self.units, tolerance)

    def transpose_solve(self, r: Array, tolerance: float) -> tuple[Array, Array]:
        """``(J + μI)⁻ᵀ r`` and the relative error of the solved system."""
        apply = self._transpose_apply
        w = self._solve(apply, self._transpose_factorised, r, 1.0 / self.units, tolerance)
        size = np.linalg.norm(r)
        error = np.linalg.norm(apply(w) - r) / size if size > 0.0 else 0.0
        return w, np.asarray(error, r.dtype)

    def _solve(
        self, apply: Map, factorised: Callable[[], Map], r: Array, units: Array, tolerance: float
    ) -> Array:
        if not np.isfinite(self.Sigma).all() or not np.isfinite(r).all():
            return np.full_like(r, np.nan)

        def iterate(precondition: Map, limit: int) -> tuple[Array, bool]:
            def operator(x: Array) -> Array:
                return (units * apply(precondition(x.reshape(r.shape) / units))).ravel()

            A = LinearOperator((r.size, r.size), operator, dtype=r.dtype)
            x, info = gmres(
                A, (units * r).ravel(), rtol=tolerance, restart=min(limit, r.size), maxiter=1
            )
            return precondition(x.reshape(r.shape) / units), info == 0

        if self.size > SMALL and not self.is_coupled:
            x, converged = iterate(lambda x: x, ITERATIONS)
            if converged:
                return x
        x, _ = iterate(factorised(), PRECONDITIONED_ITERATIONS)
        return x

    def _squared_products(self, x: Array) -> Array:
        """``(Σ∘Σ) x``."""
        return squared_products(self.Sigma, x) if self.Sigma2 is None else products(self.Sigma2, x)

    # (1 + μ) a − (E_mm + g₂) Σa + E_mv (Σ∘Σ) b and (1 + μ) b + 2 E_vm Σa − 2 E_vv (Σ∘Σ) b

    def _apply(self, x: Array) -> Array:
        a, b = x
        dm, dv = products(self.Sigma, a), -self._squared_products(b)
        into_a = self.c * a - self.g2 * dm - _per_datum(self.mm, dm) - _per_datum(self.mv, dv)
        into_b = self.c * b + 2.0 * (_per_datum(self.vm, dm) + _per_datum(self.vv, dv))
        return np.stack([into_a, into_b])

    def _factorised(self) -> Map:
        mv, vm, _ = self._diagonals()
        solve_matrix = self._matrix_solver(transpose=False)

        def solve(r: Array) -> Array:
            ra, rb = r
            b = solve_matrix(rb - 2.0 * vm * products(self.Sigma, ra) / self.c)
            return np.stack([(ra - mv * self._squared_products(b)) / self.c, b])

        return solve

    def _transpose_apply(self, w: Array) -> Array:
        wa, wb = w
        into_m = -_per_datum(self.mm, wa, True) - self.g2 * wa + 2.0 * _per_datum(self.vm, wb, True)
        into_v = _per_datum(self.mv, wa, True) - 2.0 * _per_datum(self.vv, wb, True)
        return self.c * w + np.stack([products(self.Sigma, into_m), self._squared_products(into_v)])

    def _transpose_factorised(self) -> Map:
        mv, vm, _ = self._diagonals()
        solve_matrix = self._matrix_solver(transpose=True)

        def solve(r: Array) -> Array:
            ra, rb = r
            wb = solve_matrix(rb - self._squared_products(mv * ra) / self.c)
            return np.stack([(ra - 2.0 * products(self.Sigma, vm * wb)) / self.c, wb])

        return solve

    def _diagonals(self) -> tuple[Array, ...]:
        return tuple(np.einsum("nll->ln", h) for h in (self.mv, self.vm, self.vv))

    def _matrix_solver(self, *, transpose: bool) -> Map:
        getrf, getrs = get_lapack_funcs(("getrf", "getrs"), (self.Sigma,))
        factors = [getrf(self._matrix(i), overwrite_a=1)[:2] for i in range(len(self.Sigma))]

        def solve(rhs: Array) -> Array:
            pairs = zip(factors, rhs, strict=True)
            return np.stack([getrs(*lu, x, trans=int(transpose))[0] for lu, x in pairs])

        return solve

    def _matrix(self, latent: int) -> Array:
        """``c I − 2 E_vv (Σ∘Σ) − (2/c) E_vm Σ E_mv (Σ∘Σ)``."""
        mv, vm, vv = (d[latent] for d in self._diagonals())
        Sigma = self.Sigma[latent]
        Sigma2 = Sigma * Sigma if self.Sigma2 is None else self.Sigma2[latent]
        symm = get_blas_funcs("symm", (Sigma,))
        M = symm(1.0, Sigma.T, (Sigma2 * mv).T, lower=0)  # (Σ∘Σ E_mv)ᵀ = E_mv (Σ∘Σ)
        M *= -(2.0 / self.c) * vm[:, None]
        for rows in row_blocks(self.size):
            M[rows] -= 2.0 * vv[rows, None] * Sigma2[rows]
        # An exactly singular matrix is moved off by a rounding error.
        largest = max(M.max(), -M.min())
        M[np.diag_indices(self.size)] += self.c + np.finfo(M.dtype).eps * largest
        return M


def products(matrices: Array, vectors: Array) -> Array:
    """``A x`` for every latent, ``[L, N]``; the matrices are symmetric."""
    return np.stack([symmetric_product(A, x) for A, x in zip(matrices, vectors, strict=True)])


def squared_products(matrices: Array, vectors: Array) -> Array:
    """``(A∘A) x`` for every latent, ``[L, N]``, without another matrix."""
    found = np.empty_like(vectors)
    for A, x, y in zip(matrices, vectors, found, strict=True):
        for rows in row_blocks(len(x)):
            y[rows] = np.einsum("ij,ij,j->i", A[rows], A[rows], x)
    return found


def _per_datum(H: Array, x: Array, transpose: bool = False) -> Array:
    """``Hₙ xₙ`` for every datum: ``[N, L, L]`` and ``[L, N]`` to ``[L, N]``."""
    if len(x) == 1:
        return H[:, 0, 0] * x
    return np.einsum("nkl,kn->ln" if transpose else "nlk,kn->ln", H, x)
