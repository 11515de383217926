"""The Newton system of :mod:`~gpflow_hybrid.inference.newton` on NumPy arrays, by SciPy.

Vectors are pairs ``(a, b)``, ``[2, L, N]``. Exact expectations have ``E_mm + g₂ = 0``; then, and where the
latents are not coupled, a is eliminated:

    M b = r_b − (2/c) E_vm Σ r_a,     M = c I − 2 E_vv (Σ∘Σ) − (2/c) E_vm Σ E_mv (Σ∘Σ),     c = 1 + μ

A small M is factorised; a large one is solved by GMRES at two products with an N×N matrix an iteration, few
of which are needed near a solution, and factorised where that does not converge. What elimination leaves
out, the error of a quadrature or the coupling of the latents, GMRES on the whole system puts right.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.linalg import get_blas_funcs, get_lapack_funcs
from scipy.sparse.linalg import LinearOperator, gmres

from ..linalg.buffers import empty_matrix
from ..linalg.lapack import mirror, row_blocks, symmetric_product

Array = npt.NDArray[Any]
Map = Callable[[Array], Array]

SMALL = 300
"""Number of data up to which a factorisation is cheaper than iterations."""

LARGE = 3000
"""Number of data above which ``Σ∘Σ`` is not kept: memory is dearer there than its elements."""

ITERATIONS = 60
"""Of GMRES without factors."""

PRECONDITIONED_ITERATIONS = 200
"""Of GMRES with factors."""

MUCH = 0.01
"""Error of the likelihood's quadrature, in units of the posterior, that is not left out at first."""


class HostSystem:
    """``J + μI`` and its transpose at one λ: ``Σ [L, N, N]``, Hessians ``[N, L, L]``, ``g₂ [L, N]``.

    Up to ``LARGE`` data only what is on and below the diagonal of Σ is read.
    """

    def __init__(
        self,
        Sigma: Array,
        hessian: tuple[Array, Array, Array, Array],
        g2: Array,
        damping: float,
        is_coupled: bool,
    ) -> None:
        self.Sigma = Sigma
        self.Sigma2 = _squares(Sigma) if Sigma.shape[-1] <= LARGE else None
        self.hessian = hessian
        self.mv, self.vm, self.vv = (np.einsum("nll->ln", h) for h in hessian[1:])
        self.g2 = g2
        self.c = 1.0 + damping
        self.size = g2.shape[-1]
        self.is_coupled = is_coupled
        v = np.einsum("lii->li", Sigma)
        self.units = np.stack([np.sqrt(v), v])

    def damped(self, damping: float) -> HostSystem:
        """The same with another μ."""
        other = copy.copy(self)
        other.c = 1.0 + damping
        vars(other).pop("_factors", None)
        return other

    def solve(self, r: Array, tolerance: float) -> Array:
        """``(J + μI)⁻¹ r``, in units of the posterior: ``a √v`` and ``b v``.

        Of a small system without coupling, by elimination alone: a step need not know the error of the
        likelihood's quadrature.
        """
        may_leave_out = self.size <= SMALL and not self.is_coupled
        return self._solve(r, tolerance, may_leave_out, transpose=False)

    def transpose_solve(
        self, r: Array, d_m: Array, d_v: Array, tolerance: float
    ) -> tuple[Array, Array]:
        """``(J + μI)⁻ᵀ (r_a + Σ d_m, r_b − (Σ∘Σ) d_v)`` and the relative error of the solved system."""
        r = r + np.stack([products(self.Sigma, d_m), -self.squared_products(d_v)])
        w = self._solve(r, tolerance, False, transpose=True)
        size = np.linalg.norm(r)
        error = np.linalg.norm(self._transpose_apply(w) - r) / size if size > 0.0 else 0.0
        return w, np.asarray(error, r.dtype)

    def _solve(self, r: Array, tolerance: float, may_leave_out: bool, *, transpose: bool) -> Array:
        # The diagonal of Σ bounds the rest of it.
        if not all(np.isfinite(x).all() for x in (self.units, *self.hessian, self.g2, r)):
            return np.full_like(r, np.nan)
        tolerance = max(tolerance, 10.0 * float(np.finfo(r.dtype).eps))
        apply = self._transpose_apply if transpose else self._apply
        units = 1.0 / self.units if transpose else self.units

        def by_factors(r: Array) -> Array:
            return self._eliminated(r, lambda rhs: self._factors_solve(rhs, transpose), transpose)

        if self.is_coupled:
            return _gmres(apply, r, units, tolerance, by_factors)[0]
        left_out = 0.0 if may_leave_out else self._left_out()
        x = np.zeros_like(r)
        if left_out <= MUCH:
            x = self._eliminated(
                r, lambda rhs: self._solve_reduced(rhs, units[1], tolerance, transpose), transpose
            )
            if left_out <= tolerance:
                return x
        rest = r - apply(x)
        left = float(np.linalg.norm(units * rest))
        wanted = tolerance * float(np.linalg.norm(units * r))
        if left <= wanted:
            return x
        converged = False
        if self.size > SMALL and "_factors" not in vars(self):  # where they are, they are better
            correction, converged = _gmres(apply, rest, units, wanted / left)
        if not converged:
            correction, _ = _gmres(apply, rest, units, wanted / left, by_factors)
        return x + correction

    def _left_out(self) -> float:
        """The largest ``E_mm + g₂`` in units of the posterior."""
        mm = np.einsum("nll->ln", self.hessian[0])
        return float(np.max(np.abs(mm + self.g2) * self.units[1]))

    def squared_products(self, x: Array) -> Array:
        """``(Σ∘Σ) x``."""
        return squared_products(self.Sigma, x) if self.Sigma2 is None else products(self.Sigma2, x)

    # (1 + μ) a − (E_mm + g₂) Σa + E_mv (Σ∘Σ) b and (1 + μ) b + 2 E_vm Σa − 2 E_vv (Σ∘Σ) b

    def _apply(self, x: Array) -> Array:
        a, b = x
        mm, mv, vm, vv = self.hessian
        dm, dv = products(self.Sigma, a), -self.squared_products(b)
        into_a = self.c * a - self.g2 * dm - _per_datum(mm, dm) - _per_datum(mv, dv)
        into_b = self.c * b + 2.0 * (_per_datum(vm, dm) + _per_datum(vv, dv))
        return np.stack([into_a, into_b])

    def _transpose_apply(self, w: Array) -> Array:
        wa, wb = w
        mm, mv, vm, vv = self.hessian
        into_m = -_per_datum(mm, wa, True) - self.g2 * wa + 2.0 * _per_datum(vm, wb, True)
        into_v = _per_datum(mv, wa, True) - 2.0 * _per_datum(vv, wb, True)
        return self.c * w + np.stack([products(self.Sigma, into_m), self.squared_products(into_v)])

    def _eliminated(self, r: Array, solve_reduced: Map, transpose: bool) -> Array:
        """``(a, b)`` from b, or ``(w_a, w_b)`` from w_b, of the reduced system."""
        ra, rb = r
        if transpose:
            wb = solve_reduced(rb - self.squared_products(self.mv * ra) / self.c)
            return np.stack([(ra - 2.0 * products(self.Sigma, self.vm * wb)) / self.c, wb])
        b = solve_reduced(rb - 2.0 * self.vm * products(self.Sigma, ra) / self.c)
        return np.stack([(ra - self.mv * self.squared_products(b)) / self.c, b])

    def _reduced(self, b: Array) -> Array:
        """``M b``."""
        squared = self.squared_products(b)
        through_a = self.vm * products(self.Sigma, self.mv * squared) / self.c
        return self.c * b - 2.0 * (self.vv * squared + through_a)

    def _transpose_reduced(self, w: Array) -> Array:
        """``Mᵀ w``."""
        through_a = self.mv * products(self.Sigma, self.vm * w) / self.c
        return self.c * w - 2.0 * self.squared_products(self.vv * w + through_a)

    def _solve_reduced(self, rhs: Array, units: Array, tolerance: float, transpose: bool) -> Array:
        if self.size > SMALL:
            apply = self._transpose_reduced if transpose else self._reduced
            x, converged = _gmres(apply, rhs, units, tolerance)
            if converged:
                return x
        return self._factors_solve(rhs, transpose)

    def _factors_solve(self, rhs: Array, transpose: bool) -> Array:
        getrs = get_lapack_funcs("getrs", (self.Sigma,))
        pairs = zip(self._factors, rhs, strict=True)
        return np.stack([getrs(*lu, x, trans=int(transpose))[0] for lu, x in pairs])

    @functools.cached_property
    def _factors(self) -> list[tuple[Array, Array]]:
        getrf = get_lapack_funcs("getrf", (self.Sigma,))
        return [getrf(self._matrix(i), overwrite_a=1)[:2] for i in range(len(self.Sigma))]

    def _matrix(self, latent: int) -> Array:
        """``M`` of one latent."""
        mv, vm, vv = (d[latent] for d in (self.mv, self.vm, self.vv))
        Sigma = self.Sigma[latent]
        Sigma2 = Sigma * Sigma if self.Sigma2 is None else self.Sigma2[latent]
        mirror(Sigma2)
        symm = get_blas_funcs("symm", (Sigma,))
        M = symm(1.0, Sigma.T, (Sigma2 * mv).T, lower=0)  # (Σ∘Σ E_mv)ᵀ = E_mv (Σ∘Σ)
        M *= -(2.0 / self.c) * vm[:, None]
        for rows in row_blocks(self.size):
            M[rows] -= 2.0 * vv[rows, None] * Sigma2[rows]
        # An exactly singular matrix is moved off by a rounding error.
        largest = max(M.max(), -M.min())
        M[np.diag_indices(self.size)] += self.c + np.finfo(M.dtype).eps * largest
        return M


def _gmres(
    apply: Map, r: Array, units: Array, tolerance: float, precondition: Map | None = None
) -> tuple[Array, bool]:
    """``A x = r`` in the given units, and whether it converged."""
    inverse: Map = (lambda x: x) if precondition is None else precondition
    limit = ITERATIONS if precondition is None else PRECONDITIONED_ITERATIONS

    def operator(x: Array) -> Array:
        return (units * apply(inverse(x.reshape(r.shape) / units))).ravel()

    A = LinearOperator((r.size, r.size), operator, dtype=r.dtype)
    x, info = gmres(A, (units * r).ravel(), rtol=tolerance, restart=min(limit, r.size), maxiter=1)
    return inverse(x.reshape(r.shape) / units), info == 0


def _squares(matrices: Array) -> Array:
    """``A∘A`` on and below the diagonals."""
    size = matrices.shape[-1]
    found = (
        empty_matrix(size, matrices.dtype)[None] if len(matrices) == 1 else np.empty_like(matrices)
    )
    for rows in row_blocks(size):
        part = matrices[:, rows, : rows.stop]
        np.multiply(part, part, out=found[:, rows, : rows.stop])
    return found


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
