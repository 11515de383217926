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
from typing import Any, NamedTuple

import numpy as np

from .. import tuning
from ..likelihoods.expectations import ExpectationGradients, expected_log_site
from ..linalg import Marginals
from ..priors import Array, Posterior, Prior
from ..sites import SiteValues
from .common import (
    INVALID_START,
    SitePair,
    Solution,
    ended,
    is_valid,
    moved,
    relative_norm,
)
from .newton import NewtonSystem
from .options import NEWTON
from .questions import CURVATURE, EXPECTATIONS, ROUGH_CURVATURE, Iteration


class Evaluation(NamedTuple):
    """Everything known at one λ."""

    sites: SiteValues
    q: Marginals
    posterior: Posterior
    """What q is made of; one of sites nearby after a step without factorisation."""
    E: ExpectationGradients
    elbo: float
    """NaN where no valid q exists, or an expectation is not finite."""
    rounding_error: float
    """Of the ELBO."""

    @property
    def residual(self) -> SitePair:
        """``g(λ) − λ``: ``a = ∂E/∂m − (λ₁ − λ₂m)``, ``b = −2 ∂E/∂v − λ₂``; zero at the optimum."""
        lambda_1, lambda_2 = self.sites
        return SitePair(
            self.E.mean - (lambda_1 - lambda_2 * self.q.mean), -2.0 * self.E.variance - lambda_2
        )

    @property
    def residual_norm(self) -> float:
        """In units of the posterior; infinite where there is no valid q."""
        if not np.isfinite(self.elbo):
            return math.inf
        return relative_norm(self.q, self.residual, SitePair(self.E.mean, -2.0 * self.E.variance))


def evaluate(
    prior: Prior, sites: SiteValues, keeping: tuple[Evaluation, ...] = ()
) -> Iteration[Evaluation]:
    """Posterior, expectations and ELBO at λ.

    :param keeping: evaluations that are still needed.
    """
    posterior = prior.posterior(sites, tuple(at.posterior for at in keeping))
    q = posterior.marginals
    if is_valid(q):
        E = yield EXPECTATIONS(q.mean, q.variance)
    else:
        nothing = np.full_like(q.mean, np.nan)
        E = ExpectationGradients(nothing[:, 0], nothing, nothing)
    return assess(prior, sites, posterior, q, E)


def assess(
    prior: Prior,
    sites: SiteValues,
    posterior: Posterior,
    q: Marginals,
    E: ExpectationGradients,
) -> Evaluation:
    """The ELBO where posterior and expectations are known."""
    log_t = expected_log_site(q.mean, q.variance, *sites)
    elbo = q.log_normaliser + (np.sum(E.value) - np.sum(log_t))
    is_finite = is_valid(q) and np.isfinite(E.mean).all() and np.isfinite(E.variance).all()
    error = np.finfo(q.mean.dtype).eps * _cancelled(prior, sites, q, E.value, log_t)
    return Evaluation(sites, q, posterior, E, float(elbo) if is_finite else math.nan, float(error))


def _cancelled(
    prior: Prior, sites: SiteValues, q: Marginals, expected: Array, log_t: Array
) -> float:
    """The size of the numbers that the ELBO is a difference of."""
    lambda_1, lambda_2 = sites
    terms = (
        np.abs(q.log_normaliser)
        + np.sum(np.abs(expected))
        + np.sum(np.abs(lambda_1 * q.mean))
        + np.sum(np.abs(log_t))
    )
    # A wide prior: m = μ₀ + Kβ with β = λ₁ − λ₂m is a difference of much larger numbers.
    r, beta = lambda_1 - lambda_2 * prior.mean, lambda_1 - lambda_2 * q.mean
    in_mean = np.sum(np.abs(r)) * np.sum(np.abs(beta)) * prior.largest_variance
    return float(NEWTON.rounding_errors * terms + 4.0 * in_mean)


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
) -> Iteration[Evaluation]:
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
    first = at = best = yield from evaluate(prior, start)
    count = 0
    while count < max_steps and at.residual_norm > tolerance and np.isfinite(at.elbo):
        new = yield from evaluate(prior, natural_gradient_step(at.q, at.sites, at.E, lr))
        closer = new.residual_norm < best.residual_norm
        if _improves(new.elbo - best.elbo, new.rounding_error, closer) and _has_digits(
            new, best.elbo, at.rounding_error
        ):
            best = new
        at, count = new, count + 1
    status = ended(best.residual_norm <= tolerance, not np.isfinite(at.elbo))
    status = status if np.isfinite(first.elbo) else INVALID_START
    return Solution(best.sites, status, count, count + 1, best.elbo, best.residual_norm)


def newton(
    prior: Prior,
    start: SiteValues,
    tolerance: float,
    max_steps: int,
    keeping: tuple[Evaluation, ...] = (),
) -> Iteration[tuple[Solution, Evaluation]]:
    """Damped Newton, monotone in the ELBO; what it found, and everything known there."""
    at = yield from evaluate(prior, start, keeping)
    has_started = bool(np.isfinite(at.elbo))
    residual = at.residual_norm
    mu, steps, evaluations, failures = 0.0, 0, 1, 0
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
            mu, proposal = _newton_step(system, at, mu)
        if prior.spares_memory:
            system = None  # another Σ after a step that failed is cheaper
        new = yield from evaluate(prior, proposal, (at, *keeping))
        new_residual = new.residual_norm
        evaluations += 1
        rises = _improves(new.elbo - at.elbo, at.rounding_error, new_residual < residual)
        if rises and _has_digits(new, at.elbo, at.rounding_error):
            if failures == 0:
                mu = mu / NEWTON.damping_factor if mu > NEWTON.no_damping_below else 0.0
            at, residual, system = new, new_residual, None
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
    at: Evaluation, *, rough: bool, for_adjoint: bool = False
) -> Iteration[NewtonSystem]:
    """The Newton system at an evaluated λ, without damping.

    :param rough: a curvature to three digits will do, where that is cheaper.
    """
    g2 = -2.0 * at.E.variance
    is_rough = rough and len(g2) > tuning.FEW_DATA
    question = ROUGH_CURVATURE if is_rough else CURVATURE
    curvature = yield question(at.q.mean, at.q.variance, g2)
    return NewtonSystem(at.posterior.covariance(for_adjoint=for_adjoint), curvature, g2.T)


def newton_direction(
    system: NewtonSystem, at: Evaluation, tolerance: float, *, exact: bool = False
) -> SitePair:
    """``(J + μI)⁻¹ (g(λ) − λ)``."""
    return SitePair.of_rows(system.solve(at.residual.rows, tolerance, exact=exact))


def _first_step(at: Evaluation, mu: float) -> Iteration[SiteValues]:
    # A prior so wide that p(y|f) is absurd under it (exp(f) with v = 100) would give absurd sites: as if
    # its variance were one, they are a start.
    E = at.E
    if np.max(np.abs(E.variance) * at.q.variance) > NEWTON.wild_site:
        E = yield EXPECTATIONS(at.q.mean, np.minimum(at.q.variance, 1.0))
    return natural_gradient_step(at.q, at.sites, E, 1.0 / (1.0 + mu))


def _newton_step(system: NewtonSystem, at: Evaluation, mu: float) -> tuple[float, SiteValues]:
    """The step at damping μ, raised without evaluation until the step is admissible."""
    while True:
        step = newton_direction(system.damped(mu), at, NEWTON.step_tolerance).step(at.q.mean)
        if mu >= NEWTON.max_damping or not _goes_too_far(step, at):
            return mu, moved(at.sites, step)
        mu = _more_damping(mu)


def _goes_too_far(step: SiteValues, at: Evaluation) -> bool:
    """Whether a step would take away more of a marginal's precision, or of a positive site, than it may."""
    b, lambda_2, target = step.lambda_2, at.sites.lambda_2, -2.0 * at.E.variance
    limit = NEWTON.shrink_limit
    shrinks = (lambda_2 > 0.0) & (target > 0.0) & (lambda_2 + b < (1.0 - limit) * lambda_2)
    is_finite = np.isfinite(b) & np.isfinite(step.lambda_1)
    return bool((shrinks | (b * at.q.variance < -limit) | ~is_finite).any())


def _improves(gain: float, rounding_error: float, closer: bool) -> bool:
    """Whether the ELBO has risen; below its rounding error the residual decides."""
    return gain > rounding_error or (gain >= -rounding_error and closer)


def _has_digits(new: Evaluation, elbo: float, rounding_error: float) -> bool:
    """Whether the new ELBO is a number at all, and not what rounding left of one.

    Sites of enormous precision make ``I + KΛ`` singular to working precision.
    """
    return new.rounding_error <= max(rounding_error, 1.0, NEWTON.few_digits * abs(elbo))


def _more_damping(mu: float) -> float:
    """The next larger μ."""
    return max(NEWTON.damping_factor * mu, NEWTON.first_damping)
