"""Inference of q(u), whose sites are summed over the data.

In whitened coordinates ``q(w) ∝ N(w; 0, I) exp(λ₁ᵀw − ½ wᵀΛ₂w)`` has the precision ``P = I + Λ₂`` and the
mean ``P⁻¹λ₁``. Of the data it needs sums over rows alone, which blocks, a stream or other machines take
alike (:class:`Rows`). The optimum of

    ELBO = Σₙ Eₙ(mₙ, vₙ) − KL[q(w) ‖ N(0, I)]

is the fixed point of the natural-gradient map ``G₁ = Σ Aₙ (∂E/∂m + λ₂ₙ aₙ)``, ``G₂ = Σ λ₂ₙ Aₙ Aₙᵀ`` with
``λ₂ₙ = −2 ∂E/∂v`` and aₙ the mean of the projection. Steps are natural gradients, accelerated by Anderson's
method once the residual is small, and taken back where they do not raise the ELBO. Where that is slow,
damped Newton steps take over, whose linear systems cost sums over the data too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from scipy.sparse.linalg import LinearOperator, gmres

from ..linalg.products import cholesky, congruence, solve_lower
from ..priors.protocol import Array
from .common import CONVERGED, EXHAUSTED, INVALID_START, STALLED
from .options import INDUCING, NEWTON, RESIDUAL


class SummedSites(NamedTuple):
    """``λ₁ [L, M]`` and ``Λ₂ [L, M, M]``: minus the natural parameters of N(0, I), those of q."""

    lambda_1: Array
    lambda_2: Array

    def step(self, target: SummedSites, lr: float) -> SummedSites:
        """``(1 − ρ)λ + ρ λ'``."""
        return SummedSites(*(x + lr * (y - x) for x, y in zip(self, target, strict=True)))

    def at_other_factors(self, old: Sequence[Array], new: Sequence[Array]) -> SummedSites:
        """The same statement about ``u = Lw`` where ``K_uu = L Lᵀ`` has changed: ``λ₁ ← Tᵀλ₁`` and
        ``Λ₂ ← TᵀΛ₂T`` with ``T = L₀⁻¹L``. Data say much the same of u at other hyperparameters."""
        T = np.stack([solve_lower(L0, L) for L0, L in zip(old, new, strict=True)])
        T = np.broadcast_to(T, self.lambda_2.shape)
        return SummedSites(
            np.einsum("lij,li->lj", T, self.lambda_1), np.swapaxes(T, 1, 2) @ self.lambda_2 @ T
        )

    def __sub__(self, other: SummedSites) -> SummedSites:
        return SummedSites(*(x - y for x, y in zip(self, other, strict=True)))


class Pair(NamedTuple):
    """A change of q(w), or weights of one, in units of q: ``a [L, M]`` and ``B [L, M, M]``."""

    a: Array
    B: Array

    def flat(self) -> Array:
        """All numbers in a row."""
        return np.concatenate([self.a.ravel(), self.B.ravel()])

    @classmethod
    def of_flat(cls, x: Array, num_latent: int) -> Pair:
        """From :meth:`flat`, with as many inducing variables as fit."""
        M = round((np.sqrt(1.0 + 4.0 * x.size / num_latent) - 1.0) / 2.0)
        size = num_latent * M
        return cls(x[:size].reshape(num_latent, M), x[size:].reshape(num_latent, M, M))


class InducingPosterior:
    """q(w): ``P = C Cᵀ``, ``h = C⁻¹λ₁``, mean ``C⁻ᵀh``; of every latent."""

    def __init__(self, sites: SummedSites) -> None:
        self.sites = sites
        M = sites.lambda_1.shape[1]
        eye = np.eye(M)
        self.chol = np.stack([cholesky(eye + x) for x in sites.lambda_2])
        self.is_valid = bool(np.isfinite(self.chol).all() and np.isfinite(sites.lambda_1).all())
        if not self.is_valid:
            return
        self.inverse = np.stack([solve_lower(C, eye) for C in self.chol])
        self.h = np.einsum("lij,lj->li", self.inverse, sites.lambda_1)
        self.mean = np.einsum("lji,lj->li", self.inverse, self.h)
        log_det = 2.0 * np.sum(np.log(np.einsum("lii->li", self.chol)))
        squares = np.sum(self.inverse**2) + np.sum(self.mean**2)
        self.kl = 0.5 * (squares - self.mean.size + log_det)

    def in_units(self, step: SummedSites) -> Pair:
        """A change of the sites as ``a = C⁻¹(δλ₁ − δΛ₂ μ)`` and ``B = C⁻¹ δΛ₂ C⁻ᵀ``: 1 is a standard
        deviation."""
        B = [congruence(*x) for x in zip(self.inverse, step.lambda_2, strict=True)]
        return Pair(self.shift_in_units(step), np.stack(B))

    def shift_in_units(self, step: SummedSites) -> Array:
        """Its a alone, without a product of matrices."""
        a = step.lambda_1 - np.einsum("lij,lj->li", step.lambda_2, self.mean)
        return np.asarray(np.einsum("lij,lj->li", self.inverse, a))

    def moved(self, x: Pair) -> SummedSites:
        """The sites after such a change."""
        d2 = np.stack([congruence(*y) for y in zip(self.chol, x.B, strict=True)])
        d1 = np.einsum("lij,lj->li", self.chol, x.a) + np.einsum("lij,lj->li", d2, self.mean)
        return SummedSites(self.sites.lambda_1 + d1, self.sites.lambda_2 + d2)

    def weights_of_sites(self, w: Pair) -> Pair:
        """Weights of changes in units of q as such of changes of the sites: ``a = C⁻ᵀw_a`` and
        ``B = C⁻ᵀw_B C⁻¹ − ½(aμᵀ + μaᵀ)``, so that the weighted sums are the same."""
        a = np.einsum("lji,lj->li", self.inverse, w.a)
        B = np.stack([congruence(C.T, x) for C, x in zip(self.inverse, w.B, strict=True)])
        return Pair(a, B - self._with_mean(a))

    def weights_in_units(self, w: Pair) -> Pair:
        """The way back."""
        B = w.B + self._with_mean(w.a)
        B = np.stack([congruence(C.T, x) for C, x in zip(self.chol, B, strict=True)])
        return Pair(np.einsum("lji,lj->li", self.chol, w.a), B)

    def _with_mean(self, a: Array) -> Array:
        """``½(aμᵀ + μaᵀ)``."""
        product = np.einsum("li,lj->lij", a, self.mean)
        return 0.5 * (product + np.swapaxes(product, 1, 2))


class ExpectationSums(NamedTuple):
    """Over all rows, at some q."""

    expected: float
    """``Σ E``."""
    target: SummedSites
    """``G``."""


class Rows(Protocol):
    """The data, as sums over them at given q(w) and hyperparameters."""

    def expectations(
        self, q: InducingPosterior, largest_variance: float = math.inf
    ) -> ExpectationSums:
        """``Σ E`` and the natural-gradient map.

        :param largest_variance: marginal variances are taken for no more than this.
        """

    def product(self, q: InducingPosterior, x: Pair) -> Pair:
        """``(∂G/∂q) x``."""


class InducingSolution(NamedTuple):
    """What the iteration returns: the best sites seen, and how it went."""

    q: InducingPosterior
    status: int
    num_steps: int
    num_evaluations: int
    elbo: float
    residual: float
    step: SummedSites | None = None
    """``G(x) − x`` there."""
    num_products: int = 0
    """Sums over the data for Newton steps, besides evaluations."""


class MapEvaluation:
    """Everything known at some sites."""

    def __init__(self, rows: Rows, sites: SummedSites) -> None:
        self.q = InducingPosterior(sites)
        self.elbo, self.residual = math.nan, math.inf
        if not self.q.is_valid:
            return
        sums = rows.expectations(self.q)
        self.target = sums.target
        self.elbo = sums.expected - self.q.kl
        if not (np.isfinite(self.elbo) and all(np.isfinite(x).all() for x in sums.target)):
            self.elbo = math.nan
            return
        self.step = self.target - sites
        self.rounding_error = INDUCING.rounding_error * (abs(sums.expected) + self.q.kl)
        size = np.max(np.abs(self.q.shift_in_units(self.target)))
        if size < 1.0:
            size = np.max(np.abs(self.q.in_units(self.target).flat()))
        self.step_in_units = self.q.in_units(self.step).flat()
        found = np.max(np.abs(self.step_in_units))
        # Relative where the data barely move the prior.
        self.residual = float(found / max(min(size, 1.0), RESIDUAL.least_target))

    @property
    def is_valid(self) -> bool:
        return math.isfinite(self.elbo)

    def improves(self, old: MapEvaluation) -> bool:
        """Whether the ELBO has risen; below its rounding error the residual decides."""
        if not self.is_valid:
            return False
        gain = self.elbo - old.elbo
        if gain > old.rounding_error:
            return True
        return gain >= -old.rounding_error and self.residual < old.residual


def solve(rows: Rows, start: SummedSites, tolerance: float, max_steps: int) -> InducingSolution:
    """To the fixed point, monotone in the ELBO."""
    lr, near, steps, evaluations = 1.0, INDUCING.accelerated_from, 0, 1
    at = None
    if not start.lambda_2.any():
        # A prior so wide that its expectations say nothing of where the data are: as if its variance were
        # one, they are a start.
        first = rows.expectations(InducingPosterior(start), INDUCING.first_variance).target
        at = MapEvaluation(rows, first)
        steps, evaluations = 1, 2
    if at is None or not at.is_valid:
        at = MapEvaluation(rows, start)
        steps, evaluations = 0, evaluations + steps
    if not at.is_valid:
        return InducingSolution(at.q, INVALID_START, 0, evaluations, at.elbo, at.residual)
    memory: list[MapEvaluation] = []
    damping: float | None = None  # of Newton's method, where natural gradients are slow
    residuals, products = [*[math.inf] * INDUCING.patience, at.residual], 0
    while evaluations <= max_steps and at.residual > tolerance and lr > INDUCING.smallest_step:
        accelerates = damping is None and bool(memory) and at.residual < near
        if damping is not None:
            proposal, count = _newton_step(rows, at, damping)
            products += count
        elif accelerates:
            proposal = _accelerated(at, memory)
        else:
            proposal = at.q.sites.step(at.target, lr)
        new = MapEvaluation(rows, proposal)
        evaluations += 1
        if new.improves(at):
            if at.residual < INDUCING.remembered_from:
                memory = [*memory[1 - INDUCING.memory :], at]
            at, steps = new, steps + 1
            if damping is not None:
                too_small = damping <= NEWTON.no_damping_below
                damping = 0.0 if too_small else damping / NEWTON.damping_factor
            elif not accelerates:
                lr = min(1.0, 2.0 * lr)
        elif damping is not None:
            damping = max(NEWTON.damping_factor * damping, NEWTON.first_damping)
            lr = lr if damping < NEWTON.max_damping else 0.0
        elif accelerates:
            memory, near = [], INDUCING.caution * near
        else:
            lr *= 0.5
        residuals.append(at.residual)
        if damping is None and at.residual > INDUCING.slow * residuals[-1 - INDUCING.patience]:
            damping = 0.0
    status = STALLED if lr <= INDUCING.smallest_step else EXHAUSTED
    if at.residual <= tolerance:
        status = CONVERGED
    return InducingSolution(
        at.q, status, steps, evaluations, at.elbo, at.residual, at.step, products
    )


def natural_gradient_steps(
    rows: Rows, start: SummedSites, num_steps: int, lr: float
) -> InducingSolution:
    """So many plain steps; where one has left no valid q, none after it."""
    at = MapEvaluation(rows, start)
    taken = 0
    while at.is_valid and taken < num_steps:
        at = MapEvaluation(rows, at.q.sites.step(at.target, lr))
        taken += 1
    status = EXHAUSTED if at.is_valid else STALLED
    return InducingSolution(at.q, status, taken, taken + 1, at.elbo, at.residual)


def _newton_step(rows: Rows, at: MapEvaluation, damping: float) -> tuple[SummedSites, int]:
    """``(I − ∂G/∂x + μ) δ = G(x) − x``, and how many products it took, each a sum over the rows."""
    num_latent, count, r = len(at.q.h), 0, at.step_in_units

    def product(x: Array) -> Array:
        nonlocal count
        count += 1
        moved = rows.product(at.q, Pair.of_flat(x, num_latent)).flat()
        return (1.0 + damping) * x - moved

    J = LinearOperator((r.size, r.size), product, dtype=r.dtype)
    limit = min(INDUCING.newton_iterations, r.size)
    x, _ = gmres(J, r, rtol=INDUCING.newton_tolerance, restart=limit, maxiter=1)
    return at.q.moved(Pair.of_flat(x, num_latent)), count


def _accelerated(at: MapEvaluation, memory: list[MapEvaluation]) -> SummedSites:
    """Anderson's step: the combination of remembered steps whose residual is smallest; each in units of its
    own q, nearly the same ones."""
    now = at.step_in_units
    changes = np.stack([old.step_in_units - now for old in memory], 1)
    norms = np.maximum(np.linalg.norm(changes, axis=0), np.finfo(np.float64).tiny)
    weights = -np.linalg.lstsq(changes / norms, now, rcond=INDUCING.least_squares)[0] / norms
    parts = zip(at.target, *(old.target for old in memory), strict=True)
    return SummedSites(
        *(
            x + sum(w * (y - x) for w, y in zip(weights, others, strict=True))
            for x, *others in parts
        )
    )
