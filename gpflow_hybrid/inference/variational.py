"""The E-step: bring the sites to the optimum of the ELBO.

The optimum is the fixed point ``λ = g(λ)`` of the natural-gradient map
``g₁ = ∂E/∂m − 2m ∂E/∂v``, ``g₂ = −2 ∂E/∂v``, with ``E(m, v) = E_q[log p]``. Two ways there:

- *plain damping*, ``λ ← (1 − ρ)λ + ρ g(λ)`` with a fixed ρ, as in the paper;
- *damped Newton* (automatic): the step δ solves ``(J + μI) δ = g(λ) − λ`` with ``J = I − ∂g/∂λ``. As
  μ → ∞ it is a short natural-gradient step, an ascent direction of the ELBO; at μ = 0 it is
  Newton's, quadratically convergent. μ rises until the ELBO does not fall, and falls again.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..linalg import Marginals
from ..priors import Prior
from ..sites import SiteValues
from .bound import BoundEvaluation, evaluate, has_digits, improves, is_accepted
from .common import INVALID_START, SitePair, Solution, ended, moved
from .newton import NewtonSystem
from .options import NEWTON
from .questions import CURVATURE, EXPECTATIONS, ROUGH_CURVATURE, Iteration


def natural_gradient_step(q: Marginals, sites: SiteValues, E: Any, lr: Any) -> SiteValues:
    """``λ ← (1 − ρ)λ + ρ (∂E/∂m − 2m ∂E/∂v, −2 ∂E/∂v)``, of arrays or tensors."""
    target_2 = -2.0 * E.variance
    target_1 = E.mean + target_2 * q.mean
    return SiteValues(
        sites.lambda_1 + lr * (target_1 - sites.lambda_1),
        sites.lambda_2 + lr * (target_2 - sites.lambda_2),
    )


def natural_gradient_steps(
    prior: Prior, start: SiteValues, num_steps: int, lr: float
) -> Iteration[BoundEvaluation]:
    """So many steps of fixed size, fewer where one left no valid q; the last evaluation."""
    at = yield from evaluate(prior, start)
    for _ in range(num_steps):
        if not np.isfinite(at.elbo):
            break
        at = yield from evaluate(prior, natural_gradient_step(at.q, at.sites, at.E, lr))
    return at


def damped(
    prior: Prior, start: SiteValues, tolerance: float, max_steps: int, lr: float
) -> Iteration[Solution]:
    """Plain damping with a fixed step; the best λ of all those visited is kept."""
    at = best = yield from evaluate(prior, start)
    has_started, count = bool(np.isfinite(at.elbo)), 0
    while count < max_steps and at.residual_norm > tolerance and np.isfinite(at.elbo):
        new = yield from evaluate(prior, natural_gradient_step(at.q, at.sites, at.E, lr))
        closer = new.residual_norm < best.residual_norm
        if improves(new.elbo - best.elbo, new.rounding_error, closer) and has_digits(
            new, best.elbo, at.rounding_error
        ):
            best = new
        at, count = new, count + 1
    status = ended(best.residual_norm <= tolerance, not np.isfinite(at.elbo))
    status = status if has_started else INVALID_START
    return Solution(best.sites, status, count, count + 1, best.elbo, best.residual_norm)


def newton(
    prior: Prior,
    start: SiteValues,
    tolerance: float,
    max_steps: int,
    keeping: tuple[BoundEvaluation, ...] = (),
) -> Iteration[tuple[Solution, BoundEvaluation]]:
    """Damped Newton from the given sites; what it found, and everything known there."""
    # Without a name for the first evaluation, whose matrices would stay until the last.
    return (
        yield from newton_from(
            prior, (yield from evaluate(prior, start, keeping)), tolerance, max_steps, keeping
        )
    )


def newton_from(
    prior: Prior,
    at: BoundEvaluation,
    tolerance: float,
    max_steps: int,
    keeping: tuple[BoundEvaluation, ...] = (),
) -> Iteration[tuple[Solution, BoundEvaluation]]:
    """Damped Newton, monotone in the ELBO, from evaluated sites, which count as the first evaluation.

    Far from the optimum a Newton step that must not be taken whole is no better than one along the natural
    gradient, and much dearer if the likelihood couples latents: then :func:`_approach` goes on where the
    first one is met.
    """
    has_started = bool(np.isfinite(at.elbo))
    residual = at.residual_norm
    mu, steps, evaluations, failures, may_approach = 0.0, 0, 1, 0, True
    system: NewtonSystem | None = None
    while (
        evaluations <= max_steps
        and residual > tolerance
        and mu < NEWTON.max_damping
        and np.isfinite(at.elbo)
    ):
        # q = prior: the sites are all zero, and the natural gradient is the better start.
        if not at.sites.lambda_2.any():
            proposal = yield from _first_step(at, mu)
        else:
            if system is None:
                system = yield from newton_system(at, rough=True)
            step = _newton_step(system, at, mu)
            far = may_approach and residual > NEWTON.near
            if far and system.is_coupled and _goes_too_far(step, at):
                may_approach, system = False, None
                at, taken, tried = yield from _approach(prior, at, max_steps - evaluations, keeping)
                residual, steps, evaluations = at.residual_norm, steps + taken, evaluations + tried
                continue
            # μ is raised without evaluation until the step is admissible.
            while mu < NEWTON.max_damping and _goes_too_far(step, at):
                mu = _more_damping(mu)
                step = _newton_step(system, at, mu)
            proposal = moved(at.sites, step)
        if prior.spares_memory:
            system = None  # another Σ after a step that failed is cheaper
        new = yield from evaluate(prior, proposal, (at, *keeping))
        evaluations += 1
        if is_accepted(new, at):
            if failures == 0:
                mu = mu / NEWTON.damping_factor if mu > NEWTON.no_damping_below else 0.0
            at, residual, system = new, new.residual_norm, None
            steps, failures = steps + 1, 0
        else:
            mu, failures = _more_damping(mu), failures + 1
        del new  # one matrix less while the next is factorised
    status = ended(residual <= tolerance, mu >= NEWTON.max_damping)
    status = status if has_started else INVALID_START
    return Solution(at.sites, status, steps, evaluations, at.elbo, residual), at


def solve(prior: Prior, start: SiteValues, tolerance: float, max_steps: int) -> Iteration[Solution]:
    """:func:`newton` without what is known at its solution."""
    solution, _ = yield from newton(prior, start, tolerance, max_steps)
    return solution


def newton_system(
    at: BoundEvaluation, *, rough: bool, for_adjoint: bool = False
) -> Iteration[NewtonSystem]:
    """The Newton system at an evaluated λ, without damping.

    :param rough: a curvature to three digits will do, from likelihoods that have one.
    """
    g2 = -2.0 * at.E.variance
    question = ROUGH_CURVATURE if rough else CURVATURE
    curvature = yield question(at.q.mean, at.q.variance, g2)
    return NewtonSystem(at.posterior.covariance(for_adjoint=for_adjoint), curvature, g2.T)


def newton_direction(
    system: NewtonSystem, at: BoundEvaluation, tolerance: float, *, exact: bool = False
) -> SitePair:
    """``(J + μI)⁻¹ (g(λ) − λ)``."""
    return SitePair.of_rows(system.solve(at.residual.rows, tolerance, exact=exact))


def _first_step(at: BoundEvaluation, mu: float) -> Iteration[SiteValues]:
    # A prior so wide that p(y|f) is absurd under it (exp(f) with v = 100) would give absurd sites: as if
    # its variance were one, they are a start.
    E = at.E
    if np.max(np.abs(E.variance) * at.q.variance) > NEWTON.wild_site:
        E = yield EXPECTATIONS(at.q.mean, np.minimum(at.q.variance, 1.0))
    return natural_gradient_step(at.q, at.sites, E, 1.0 / (1.0 + mu))


def _approach(
    prior: Prior, at: BoundEvaluation, max_steps: int, keeping: tuple[BoundEvaluation, ...]
) -> Iteration[tuple[BoundEvaluation, int, int]]:
    """Natural-gradient steps that raise the ELBO, while they gain much; where they end, how many were taken
    and how many were tried."""
    lr, taken, tried, gain = NEWTON.first_lr, 0, 0, math.inf
    while (
        tried < max_steps
        and lr >= NEWTON.smallest_lr
        and gain >= NEWTON.slow_gain * len(at.q.mean)
        and at.residual_norm > NEWTON.near
    ):
        proposal = natural_gradient_step(at.q, at.sites, at.E, lr)
        new = yield from evaluate(prior, proposal, (at, *keeping))
        tried += 1
        if is_accepted(new, at):
            lr, gain = min(NEWTON.lr_growth * lr, 1.0), new.elbo - at.elbo
            at, taken = new, taken + 1
        else:
            lr *= NEWTON.lr_decay
    return at, taken, tried


def _newton_step(system: NewtonSystem, at: BoundEvaluation, mu: float) -> SiteValues:
    """The step at damping μ; of a coupled system to as many digits as the residual has."""
    tolerance = NEWTON.step_tolerance
    if system.is_coupled:
        tolerance = max(tolerance, min(at.residual_norm, NEWTON.far_tolerance))
    return newton_direction(system.damped(mu), at, tolerance).step(at.q.mean)


def _goes_too_far(step: SiteValues, at: BoundEvaluation) -> bool:
    """Whether a step would take away more of a marginal's precision, or of a positive site, than it may."""
    b, lambda_2, target = step.lambda_2, at.sites.lambda_2, -2.0 * at.E.variance
    limit = NEWTON.shrink_limit
    shrinks = (lambda_2 > 0.0) & (target > 0.0) & (lambda_2 + b < (1.0 - limit) * lambda_2)
    is_finite = np.isfinite(b) & np.isfinite(step.lambda_1)
    return bool((shrinks | (b * at.q.variance < -limit) | ~is_finite).any())


def _more_damping(mu: float) -> float:
    """The next larger μ."""
    return max(NEWTON.damping_factor * mu, NEWTON.first_damping)
