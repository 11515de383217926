"""The linear system behind a Newton step on λ, and behind the gradient of the collapsed objective.

Newton's method on the fixed point ``λ = g(λ)`` of the natural-gradient map needs ``J = I − ∂g/∂λ``. It
is written in ``a = δλ₁ − m δλ₂`` and ``b = δλ₂``, in which the posterior moves by
``δm = Σa`` and ``δv = −(Σ∘Σ)b``:

    c a − (E_mm + g₂) Σa + E_mv (Σ∘Σ) b = ∂E/∂m − (λ₁ − λ₂m),     c = 1 + μ
    c b + 2 E_vm Σa − 2 E_vv (Σ∘Σ) b   = g₂ − λ₂

Exact expectations have ``E_mm + g₂ = 0``; then, and where the latents are not coupled, a is eliminated:

    M b = r_b − (2/c) E_vm Σ r_a,     M = c I − 2 E_vv (Σ∘Σ) − (2/c) E_vm Σ E_mv (Σ∘Σ)

A small M is factorised; a large one is solved by GMRES at two products with Σ an iteration, few
of which are needed near a solution, and factorised where that does not converge. What elimination leaves
out, the error of a quadrature or the coupling of the latents, GMRES on the whole system puts right,
preconditioned with the :mod:`~gpflow_hybrid.inference.directions` in which the likelihood curves much.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import numpy as np
from scipy.sparse.linalg import LinearOperator, gmres

from .. import tuning
from ..likelihoods.curvature import Curvature
from ..priors import Array, Covariance
from ..priors.protocol import Solver
from .directions import StrongDirections
from .options import NEWTON

Map = Callable[[Array], Array]


class NewtonSystem:
    """``J + μI`` and its transpose at one λ; vectors are pairs ``(a, b)``, ``[2, L, N]``.

    :param g2: ``g₂ = −2 ∂E/∂v``, ``[L, N]``.
    """

    def __init__(
        self, covariance: Covariance, curvature: Curvature, g2: Array, damping: float = 0.0
    ) -> None:
        self.covariance = covariance
        self.curvature = curvature
        self.mm, self.mv, self.vm, self.vv = (np.einsum("nll->ln", h) for h in curvature)
        self.g2 = g2
        self.c = 1.0 + damping
        v = covariance.variance
        self.units = np.stack([np.sqrt(v), v])
        # The same for every damping.
        self._directions = functools.cache(lambda: StrongDirections(covariance, curvature, g2))

    @functools.cached_property
    def is_coupled(self) -> bool:
        """Whether the likelihood couples the latents of a datum."""
        L = len(self.g2)
        between = ~np.eye(L, dtype=bool)
        return L > 1 and any(h[:, between].any() for h in self.curvature)

    def damped(self, damping: float) -> NewtonSystem:
        """The same with another μ."""
        other = copy.copy(self)
        other.c = 1.0 + damping
        for of_damping in ("_factors", "_by_directions"):
            vars(other).pop(of_damping, None)
        return other

    def solve(self, r: Array, tolerance: float, *, exact: bool = False) -> Array:
        """``(J + μI)⁻¹ r``, in units of the posterior: ``a √v`` and ``b v``.

        Of a small system without coupling by elimination alone, unless it shall be exact: a step need not
        know the error of the likelihood's quadrature.
        """
        may_leave_out = self._is_small and not self.is_coupled and not exact
        return self._solve(r, tolerance, may_leave_out, transpose=False)

    def transpose_solve(
        self, r: Array, d_m: Array, d_v: Array, tolerance: float
    ) -> tuple[Array, float]:
        """``(J + μI)⁻ᵀ (r_a + Σ d_m, r_b − (Σ∘Σ) d_v)`` and the relative error of the solved system."""
        r = r + np.stack([self.covariance.product(d_m), -self.covariance.squared_product(d_v)])
        w = self._solve(r, tolerance, False, transpose=True)
        size = np.linalg.norm(r)
        error = np.linalg.norm(self._transpose_apply(w) - r) / size if size > 0.0 else 0.0
        return w, float(error)

    def _solve(self, r: Array, tolerance: float, may_leave_out: bool, *, transpose: bool) -> Array:
        # The diagonal of Σ bounds the rest of it.
        if not all(np.isfinite(x).all() for x in (self.units, *self.curvature, self.g2, r)):
            return np.full_like(r, np.nan)
        tolerance = max(tolerance, NEWTON.solved_errors * float(np.finfo(r.dtype).eps))
        apply = self._transpose_apply if transpose else self._apply
        units = 1.0 / self.units if transpose else self.units

        if self.is_coupled:
            return self._solve_whole(apply, r, units, tolerance, transpose)
        left_out = 0.0 if may_leave_out else self._left_out()
        x = np.zeros_like(r)
        if left_out <= NEWTON.eliminated_error:
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
        if not self._is_small and "_factors" not in vars(self):  # where they are, they are better
            correction, converged = _gmres(apply, rest, units, wanted / left)
        if not converged:
            correction = self._solve_whole(apply, rest, units, wanted / left, transpose)
        return x + correction

    def _solve_whole(
        self, apply: Map, r: Array, units: Array, tolerance: float, transpose: bool
    ) -> Array:
        """By GMRES, preconditioned with the strong directions where the prior can."""
        solve = self._by_directions
        if solve is None:
            return _gmres(apply, r, units, tolerance)[0]
        return _gmres(apply, r, units, tolerance, lambda x: solve(x, transpose))[0]

    def _left_out(self) -> float:
        """The largest ``E_mm + g₂`` in units of the posterior."""
        return float(np.max(np.abs(self.mm + self.g2) * self.units[1]))

    def _apply(self, x: Array) -> Array:
        a, b = x
        mm, mv, vm, vv = self.curvature
        dm, dv = self.covariance.product(a), -self.covariance.squared_product(b)
        into_a = self.c * a - self.g2 * dm - per_datum(mm, dm) - per_datum(mv, dv)
        into_b = self.c * b + 2.0 * (per_datum(vm, dm) + per_datum(vv, dv))
        return np.stack([into_a, into_b])

    def _transpose_apply(self, w: Array) -> Array:
        wa, wb = w
        mm, mv, vm, vv = self.curvature
        into_m = -per_datum(mm, wa, True) - self.g2 * wa + 2.0 * per_datum(vm, wb, True)
        into_v = per_datum(mv, wa, True) - 2.0 * per_datum(vv, wb, True)
        pulled = [self.covariance.product(into_m), self.covariance.squared_product(into_v)]
        return self.c * w + np.stack(pulled)

    def _eliminated(self, r: Array, solve_reduced: Map, transpose: bool) -> Array:
        """``(a, b)`` from b, or ``(w_a, w_b)`` from w_b, of the reduced system."""
        product, squared_product = self.covariance.product, self.covariance.squared_product
        ra, rb = r
        if transpose:
            wb = solve_reduced(rb - squared_product(self.mv * ra) / self.c)
            return np.stack([(ra - 2.0 * product(self.vm * wb)) / self.c, wb])
        b = solve_reduced(rb - 2.0 * self.vm * product(ra) / self.c)
        return np.stack([(ra - self.mv * squared_product(b)) / self.c, b])

    def _reduced(self, b: Array) -> Array:
        """``M b``."""
        squared = self.covariance.squared_product(b)
        through_a = self.vm * self.covariance.product(self.mv * squared) / self.c
        return self.c * b - 2.0 * (self.vv * squared + through_a)

    def _transpose_reduced(self, w: Array) -> Array:
        """``Mᵀ w``."""
        through_a = self.mv * self.covariance.product(self.vm * w) / self.c
        return self.c * w - 2.0 * self.covariance.squared_product(self.vv * w + through_a)

    def _solve_reduced(self, rhs: Array, units: Array, tolerance: float, transpose: bool) -> Array:
        if not self._is_small or self._factors is None:
            apply = self._transpose_reduced if transpose else self._reduced
            x, converged = _gmres(apply, rhs, units, tolerance)
            if converged or self._factors is None:
                return x
        return self._factors(rhs, transpose)

    @property
    def _is_small(self) -> bool:
        return self.g2.shape[-1] <= tuning.FEW_DATA

    @functools.cached_property
    def _factors(self) -> Solver | None:
        return self.covariance.reduced_solver(self.mv, self.vm, self.vv, self.c)

    @functools.cached_property
    def _by_directions(self) -> Solver | None:
        return self._directions().solver(self.c)


def _limit(size: int, tolerance: float, has_factors: bool) -> int:
    """Iterations that GMRES may take for so many data."""
    if has_factors:
        return NEWTON.preconditioned_iterations
    if tolerance < NEWTON.gradient_tolerance:
        return NEWTON.iterations
    return min(NEWTON.iterations, max(NEWTON.fewest_iterations, size // NEWTON.size_per_iteration))


def _gmres(
    apply: Map,
    r: Array,
    units: Array,
    tolerance: float,
    precondition: Map | None = None,
) -> tuple[Array, bool]:
    """``A x = r`` in the given units, and whether it converged."""
    inverse: Map = (lambda x: x) if precondition is None else precondition
    limit = _limit(r.shape[-1], tolerance, precondition is not None)

    def operator(x: Array) -> Array:
        return (units * apply(inverse(x.reshape(r.shape) / units))).ravel()

    A = LinearOperator((r.size, r.size), operator, dtype=r.dtype)
    x, info = gmres(A, (units * r).ravel(), rtol=tolerance, restart=min(limit, r.size), maxiter=1)
    return inverse(x.reshape(r.shape) / units), info == 0


def per_datum(H: Array, x: Array, transpose: bool = False) -> Array:
    """``Hₙ xₙ`` for every datum: ``[N, L, L]`` and ``[L, N]`` to ``[L, N]``."""
    if len(x) == 1:
        return H[:, 0, 0] * x
    return np.einsum("nkl,kn->ln" if transpose else "nlk,kn->ln", H, x)
