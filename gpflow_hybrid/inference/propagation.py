"""Expectation propagation: sites whose α-th powers make q match the tilted moments.

All sites are updated at once, ``λ ← λ + ρ (λ̂ − λ)`` with λ̂ the matching sites of the present
cavities, accelerated by the last few updates (Anderson): the combination of them whose mismatch
``λ̂ − λ`` is smallest if that were linear in λ. ρ starts at one, falls where the mismatch grows and
rises where it shrinks; a step that would leave no valid q, or a cavity without positive precision, is
taken back, first without the memory, then at half the length. Where that does not converge, short
plain steps from zero sites are tried as well. At the fixed point

    L_α = log Z(λ) + (1/α) Σₙ log E_q[(p/t)^α]

is stationary in λ, so that its total derivative in the hyperparameters is the explicit one.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from gpflow.likelihoods import Likelihood

from ..likelihoods.nodes import NUM_NODES
from ..likelihoods.ratios import has_cavity, log_expected_ratio
from ..likelihoods.tilted import (
    TiltedSites,
    mismatch_under_finer_rule,
    tilted_sites,
)
from ..linalg import Marginals
from ..priors import Array, Prior
from ..sites import SiteValues
from .common import (
    INVALID_START,
    Collapse,
    FixedPoint,
    Method,
    SitePair,
    Solution,
    ended,
    from_warm_start,
    is_valid,
    no_collapse,
    relative_norm,
    without_state,
    zeros_like,
)
from .options import PROPAGATION, REPORT
from .own_parameters import parameter_question
from .questions import Iteration, Question, ratios
from .reports import QuadratureError


class Questions(NamedTuple):
    """What EP with one power asks of a likelihood, from m, v, λ₁ and λ₂."""

    sites: Question
    """The matching sites, and the normalisers of the tilted distributions."""
    gradients: Question
    quadrature_error: Question


@functools.cache
def questions_of(alpha: float) -> Questions:
    """For the power α."""

    def error(likelihood: Likelihood, X: Any, Y: Any, *arrays: Any) -> QuadratureError:
        return QuadratureError(mismatch_under_finer_rule(alpha, likelihood, X, Y, *arrays))

    def sites(
        likelihood: Likelihood, X: Any, Y: Any, m: Any, v: Any, l1: Any, l2: Any
    ) -> TiltedSites:
        return tilted_sites(likelihood, X, m, v, Y, l1, l2, alpha)

    return Questions(
        Question(("tilted_sites", alpha), sites, TiltedSites, 4, (1, 2, 2)),
        ratios(alpha, blend=False),
        Question(("tilted_quadrature_error", alpha), error, QuadratureError, 4, (0,)),
    )


def log_marginal_likelihood(
    q: Marginals, sites: SiteValues, likelihood: Likelihood, X: Any, Y: Any, alpha: float
) -> tf.Tensor:
    """EP's ``L_α``, shape ``[]``; NaN where a cavity ``1/v − αλ₂`` is not positive."""
    ratio = log_expected_ratio(likelihood, X, q.mean, q.variance, Y, *sites, alpha, blend=False)
    return q.log_normaliser + tf.reduce_sum(ratio)


class MatchEvaluation(NamedTuple):
    """Everything known at one λ; an infinite residual where q or a cavity is not valid."""

    sites: SiteValues
    q: Marginals
    mismatch: SitePair
    """``λ̂ − λ``."""
    value: float
    """``L_α``."""
    residual_norm: float

    @property
    def step(self) -> Array:
        """``λ̂ − λ`` as ``[2, N, L]``."""
        return np.stack(self.mismatch.step(self.q.mean))

    def in_units(self, steps: Array) -> Array:
        """``(a√v, bv)`` of steps ``[..., 2, N, L]`` in λ, flat, ``[..., 2NL]``."""
        step_1, step_2 = steps[..., 0, :, :], steps[..., 1, :, :]
        m, v = self.q.mean, self.q.variance
        scaled = np.stack([(step_1 - m * step_2) * np.sqrt(v), step_2 * v], axis=-3)
        return scaled.reshape(*steps.shape[:-3], -1)


def evaluate(alpha: float, prior: Prior, sites: SiteValues) -> Iteration[MatchEvaluation]:
    """The posterior at λ and where the tilted distributions would take the sites."""
    q = prior.posterior(sites).marginals
    lambda_1, lambda_2 = sites
    tilted = yield questions_of(alpha).sites(q.mean, q.variance, *sites)
    found = SitePair(tilted.slope - (lambda_1 - lambda_2 * q.mean), tilted.precision - lambda_2)
    norm = relative_norm(q, found, SitePair(tilted.slope, tilted.precision))
    value = float(q.log_normaliser + np.sum(tilted.log_ratio))
    ok = is_valid(q) and has_cavity(q.variance, lambda_2, alpha).all()
    ok = ok and np.isfinite(found.rows).all() and np.isfinite(value)
    return MatchEvaluation(sites, q, found, value, norm if ok else math.inf)


class Memory:
    """Differences of the last sites and of the last updates, ``[2, N, L]`` each, newest first."""

    def __init__(self) -> None:
        self.sites: list[Array] = []
        self.steps: list[Array] = []

    def push(self, at: MatchEvaluation, new: MatchEvaluation) -> None:
        """The step from ``at`` to ``new``."""
        for differences, newest in (
            (self.sites, np.stack(new.sites) - np.stack(at.sites)),
            (self.steps, new.step - at.step),
        ):
            differences.insert(0, newest)
            del differences[PROPAGATION.memory :]

    def clear(self) -> None:
        """After a step that was taken back."""
        self.sites.clear()
        self.steps.clear()

    def propose(self, at: MatchEvaluation, lr: float, allowed: bool) -> tuple[SiteValues, bool]:
        """The next sites ``λ + ρs − Σᵢ γᵢ (Δλᵢ + ρΔsᵢ)``, and whether γ is not zero.

        γ minimises ``|s − Σᵢ γᵢ Δsᵢ|`` in units of the posterior. Where the combination would all but
        remove a positive site, the plain update is taken.
        """
        s = at.step
        plain = np.stack(at.sites) + lr * s
        if not (allowed and self.steps):
            return SiteValues(*plain), False
        A = at.in_units(np.stack(self.steps))  # [memory, 2NL]
        norms = np.linalg.norm(A, axis=-1)
        scale = np.divide(1.0, norms, out=np.zeros_like(norms), where=norms > 0.0)
        A = A * scale[:, None]
        gram = A @ A.T + PROPAGATION.ridge * np.eye(len(A), dtype=A.dtype)
        gamma = scale * np.linalg.solve(gram, A @ at.in_units(s))
        moves = np.stack(self.sites) + lr * np.stack(self.steps)
        accelerated = plain - np.tensordot(gamma, moves, 1)
        smaller = np.minimum(at.sites.lambda_2, at.sites.lambda_2 + s[1])
        vanishing = (smaller > 0.0) & (accelerated[1] < PROPAGATION.shrink_limit * smaller)
        if vanishing.any() or not norms.any():
            return SiteValues(*plain), False
        return SiteValues(*accelerated), True


def propagate(
    alpha: float, prior: Prior, start: SiteValues, tolerance: float, max_steps: int
) -> Iteration[Solution]:
    """Parallel EP with automatic damping; the sites of smallest mismatch are kept."""
    budget = max(max_steps // 2, min(max_steps, PROPAGATION.enough_steps))
    first = yield from _attempt(alpha, prior, start, tolerance, budget, 1.0)
    left = max_steps - (first.num_evaluations - 1)
    if first.residual <= tolerance or not first.has_started or left <= 1:
        return first
    cautious = PROPAGATION.cautious_step
    second = yield from _attempt(alpha, prior, zeros_like(start), tolerance, left - 1, cautious)
    best = second if second.residual < first.residual else first
    return best._replace(
        num_steps=first.num_steps + second.num_steps,
        num_evaluations=first.num_evaluations + second.num_evaluations,
    )


def _attempt(
    alpha: float,
    prior: Prior,
    start: SiteValues,
    tolerance: float,
    max_steps: int,
    largest_step: float,
) -> Iteration[Solution]:
    """One run; the acceleration has a part in it only if full steps are allowed."""
    at = yield from evaluate(alpha, prior, start)
    if not np.isfinite(at.residual_norm):
        return Solution(at.sites, INVALID_START, 0, 1, at.value, at.residual_norm)
    best, memory, lr, steps, evaluations = at, Memory(), largest_step, 0, 1
    while (
        evaluations <= max_steps
        and best.residual_norm > tolerance
        and lr > PROPAGATION.smallest_step
    ):
        proposal, accelerated = memory.propose(at, lr, largest_step >= 1.0)
        new = yield from evaluate(alpha, prior, proposal)
        evaluations += 1
        shrinks = new.residual_norm < at.residual_norm
        grown = accelerated and new.residual_norm > at.residual_norm
        if np.isfinite(new.residual_norm) and not grown:
            if shrinks:
                lr = min(PROPAGATION.growth * lr, largest_step)
            else:
                lr = max(PROPAGATION.decay * lr, PROPAGATION.floor)
            memory.push(at, new)
            at, steps = new, steps + 1
        else:
            # Tried again: without the memory if it had a part in it, else at half length.
            memory.clear()
            lr = lr if accelerated else 0.5 * lr
        if at.residual_norm < best.residual_norm:
            best = at
    status = ended(best.residual_norm <= tolerance, lr <= PROPAGATION.smallest_step)
    return Solution(best.sites, status, steps, evaluations, best.value, best.residual_norm)


def collapse(
    alpha: float, prior: Prior, start: SiteValues, tolerance: float, max_steps: int
) -> Iteration[Collapse]:
    """EP's sites from a warm start; its value is stationary in them."""

    solve = without_state(lambda sites: propagate(alpha, prior, sites, tolerance, max_steps))
    solution, _ = yield from from_warm_start(solve, start, by_value=False)
    if not solution.has_started:
        return no_collapse(solution)
    posterior = prior.posterior(solution.sites)
    q = posterior.marginals
    found = yield questions_of(alpha).gradients(q.mean, q.variance, *solution.sites)
    return Collapse(
        solution,
        q.log_normaliser + found.value,
        q,
        SitePair(np.zeros_like(q.mean), np.zeros_like(q.mean)),
        posterior.covariance(for_adjoint=True),
        found.m,
        found.v,
    )


def likelihood_value(
    alpha: float, likelihood: Likelihood, X: tf.Tensor, Y: tf.Tensor, fixed: FixedPoint
) -> tf.Tensor:
    """What EP's value has of the likelihood's own parameters, at a constant q."""
    return log_marginal_likelihood(fixed.q, fixed.sites, likelihood, X, Y, alpha)


@functools.cache
def expectation_propagation(alpha: float) -> Method:
    """Power EP with power α as a method of inference and learning."""
    asked = questions_of(alpha)
    return Method(
        sites_key=f"expectation propagation {alpha!r}",
        solve=functools.partial(propagate, alpha),
        collapse=functools.partial(collapse, alpha),
        questions=(asked.sites, asked.gradients),
        parameter_question=parameter_question(
            ("propagation", alpha), functools.partial(likelihood_value, alpha)
        ),
        when_stalled=(
            "every update, however short, leaves no valid q(f) or a cavity without positive "
            "precision. Use a smaller power alpha, or CVIModel, whose inference always has a valid q."
        ),
        by_value=False,
        when_exhausted=(
            "Raise max_steps; where the residual does not fall, EP has no fixed point within reach: use "
            "a smaller power alpha, or CVIModel."
        ),
        quadrature_error=asked.quadrature_error,
        tolerated_error=REPORT.tilted_error,
        when_inaccurate=(
            f"The quadrature (a rule of {NUM_NODES[1]} points) cannot resolve the tilted "
            "distributions, whose likelihood is too narrow for their cavities: widen the likelihood, "
            "lower the kernel's variance, or use CVIModel."
        ),
    )
