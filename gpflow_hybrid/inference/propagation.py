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
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from gpflow.base import RegressionData
from gpflow.likelihoods import Likelihood

from ..likelihoods.nodes import NUM_NODES
from ..likelihoods.tilted import tilted_log_ratio, tilted_sites
from ..linalg import Marginals, marginals
from ..sites import SiteValues
from .common import (
    CONVERGED,
    EXHAUSTED,
    INVALID_START,
    STALLED,
    Collapse,
    Method,
    Prior,
    Residual,
    Solution,
    from_warm_start,
    is_valid,
    no_weights,
    relative_norm,
    unpack,
)

SMALLEST_STEP = 1e-4
"""ρ below which the iteration gives up: every step, however short, leaves the valid region."""

GROWTH, DECAY, FLOOR = 1.2, 0.6, 0.05
"""How ρ follows the mismatch: up after it shrank, down after it grew, never below the floor."""


MEMORY = 5
"""Updates that the acceleration remembers."""

ENOUGH_STEPS = 40
"""Steps that the first attempt may always try; of more, half are kept for a second."""

CAUTIOUS_STEP = 0.2
"""Largest ρ of the second attempt, from zero sites and without memory, where the first fails."""

SHRINK_LIMIT = 0.05
"""An accelerated step may not take a site below this part of what it is and of what it should be."""


class Evaluation(NamedTuple):
    """Everything known at one λ; an infinite residual where q or a cavity is not valid."""

    sites: SiteValues
    q: Marginals
    step: SiteValues  # λ̂ − λ
    value: tf.Tensor  # L_α
    residual: tf.Tensor


def log_marginal_likelihood(
    q: Marginals, sites: SiteValues, likelihood: Likelihood, data: RegressionData, alpha: float
) -> tf.Tensor:
    """EP's ``L_α``, shape ``[]``; NaN where a cavity ``1/v − αλ₂`` is not positive."""
    X, Y = data
    return q.log_normaliser + tf.reduce_sum(
        tilted_log_ratio(likelihood, X, q.mean, q.variance, Y, *sites, alpha)
    )


def evaluate(
    alpha: float, prior: Prior, likelihood: Likelihood, data: RegressionData, sites: SiteValues
) -> Evaluation:
    """The posterior at λ and where the tilted distributions would take the sites."""
    X, Y = data
    q = marginals(*prior, *sites)
    tilted = tilted_sites(likelihood, X, q.mean, q.variance, Y, *sites, alpha)
    step_2 = tilted.precision - sites.lambda_2
    found = Residual(tilted.slope - (sites.lambda_1 - sites.lambda_2 * q.mean), step_2)
    norm = relative_norm(q, found, Residual(tilted.slope, tilted.precision))
    value = q.log_normaliser + tf.reduce_sum(tilted.log_ratio)
    has_cavities = tf.reduce_all(1.0 - alpha * sites.lambda_2 * q.variance > 0.0)
    finite = tf.reduce_all(tf.math.is_finite(found.a) & tf.math.is_finite(found.b))
    ok = is_valid(q) & has_cavities & finite & tf.math.is_finite(value)
    return Evaluation(
        sites,
        q,
        SiteValues(found.a + q.mean * step_2, step_2),
        value,
        tf.where(ok, norm, tf.constant(np.inf, norm.dtype)),
    )


class Memory(NamedTuple):
    """Differences of the last sites and of the last updates, ``[MEMORY, 2, N, L]``, newest first."""

    sites: tf.Tensor
    steps: tf.Tensor

    def propose(
        self, at: Evaluation, lr: tf.Tensor, allowed: tf.Tensor
    ) -> tuple[SiteValues, tf.Tensor]:
        """The next sites ``λ + ρs − Σᵢ γᵢ (Δλᵢ + ρΔsᵢ)``, and whether γ is not zero.

        γ minimises ``|s − Σᵢ γᵢ Δsᵢ|`` in units of the posterior. Where the combination would all but
        remove a positive site, the plain update is taken.
        """
        x, s = tf.stack(at.sites), tf.stack(at.step)

        def rows(steps: tf.Tensor) -> tf.Tensor:  # (a√v, bv) of every update
            step_1, step_2 = tf.unstack(steps, axis=-3)
            m, v = at.q.mean, at.q.variance
            scaled = tf.stack([(step_1 - m * step_2) * tf.sqrt(v), step_2 * v], axis=-3)
            return tf.reshape(scaled, tf.concat([tf.shape(steps)[:-3], [-1]], 0))

        A = rows(self.steps)  # [MEMORY, 2NL]
        norms = tf.norm(A, axis=-1)
        A = tf.math.divide_no_nan(A, norms[:, None])
        # Rows not filled yet are zero; the ridge keeps them, and dependent ones, out.
        gram = tf.matmul(A, A, transpose_b=True) + 1e-10 * tf.eye(MEMORY, dtype=A.dtype)
        rhs = tf.linalg.matvec(A, rows(s))
        gamma = tf.math.divide_no_nan(tf.linalg.solve(gram, rhs[:, None])[:, 0], norms)

        plain = x + lr * s
        accelerated = plain - tf.tensordot(gamma, self.sites + lr * self.steps, 1)
        smaller = tf.minimum(at.sites.lambda_2, at.sites.lambda_2 + at.step.lambda_2)
        vanishing = (smaller > 0.0) & (accelerated[1] < SHRINK_LIMIT * smaller)
        use = allowed & tf.reduce_any(norms > 0.0) & ~tf.reduce_any(vanishing)
        return SiteValues(*tf.unstack(tf.where(use, accelerated, plain))), use

    def updated(self, at: Evaluation, new: Evaluation, accepted: tf.Tensor) -> Memory:
        """With the step from ``at`` to ``new`` in front; empty after a rejected step."""

        def push(old: tf.Tensor, before: SiteValues, after: SiteValues) -> tf.Tensor:
            difference = tf.stack(after) - tf.stack(before)
            return tf.where(
                accepted, tf.concat([difference[None], old[:-1]], 0), tf.zeros_like(old)
            )

        return Memory(push(self.sites, at.sites, new.sites), push(self.steps, at.step, new.step))


def propagate(
    alpha: float,
    prior: Prior,
    likelihood: Likelihood,
    data: RegressionData,
    start: SiteValues,
    tolerance: tf.Tensor,
    max_steps: tf.Tensor,
) -> Solution:
    """Parallel EP with automatic damping; the sites of smallest mismatch are kept."""
    one = tf.ones((), start.lambda_1.dtype)

    def attempt(start: SiteValues, num_steps: tf.Tensor, largest_step: tf.Tensor) -> Solution:
        return _attempt(alpha, prior, likelihood, data, start, tolerance, num_steps, largest_step)

    compiled = tf.function(attempt, autograph=False)  # used twice and traced once
    budget = tf.maximum(max_steps // 2, tf.minimum(max_steps, ENOUGH_STEPS))
    first = compiled(start, budget, one)
    left = max_steps - (first.num_evaluations - 1)

    def second() -> Solution:
        zeros = SiteValues(*(tf.zeros_like(x) for x in start))
        new = compiled(zeros, left - 1, CAUTIOUS_STEP * one)
        better = new.residual < first.residual
        best = tf.nest.map_structure(lambda x, y: tf.where(better, x, y), new, first)
        return best._replace(
            num_steps=first.num_steps + new.num_steps,
            num_evaluations=first.num_evaluations + new.num_evaluations,
        )

    failed = (first.residual > tolerance) & first.has_started
    return tf.cond(failed & (left > 1), second, lambda: first)


def _attempt(
    alpha: float,
    prior: Prior,
    likelihood: Likelihood,
    data: RegressionData,
    start: SiteValues,
    tolerance: tf.Tensor,
    max_steps: tf.Tensor,
    largest_step: tf.Tensor,
) -> Solution:
    """One run; the acceleration has a part in it only if full steps are allowed."""
    prior = Prior(*(tf.stop_gradient(x) for x in prior))
    # Used twice in the graph and traced once.
    at_sites = tf.function(
        lambda sites: evaluate(alpha, prior, likelihood, data, sites), autograph=False
    )
    first = at_sites(start)
    full_steps = largest_step >= 1.0

    def unfinished(
        at: Any, best: Any, memory: Any, lr: Any, steps: Any, evaluations: Any
    ) -> tf.Tensor:
        return (
            (evaluations <= max_steps)
            & (best.residual > tolerance)
            & (lr > SMALLEST_STEP)
            & tf.math.is_finite(first.residual)
        )

    def body(
        at: Any, best: Any, memory: Memory, lr: Any, steps: Any, evaluations: Any
    ) -> tuple[Any, ...]:
        proposal, accelerated = memory.propose(at, lr, full_steps)
        new = at_sites(proposal)
        valid = tf.math.is_finite(new.residual)
        grown = accelerated & (new.residual > at.residual)
        accept = valid & ~grown
        # A rejected step is tried again: without the memory if it had a part in it, else at half length.
        memory = memory.updated(at, new, accept)
        followed = tf.where(
            new.residual < at.residual,
            tf.minimum(GROWTH * lr, largest_step),
            tf.maximum(DECAY * lr, FLOOR),
        )
        lr = tf.where(accept, followed, tf.where(accelerated, lr, 0.5 * lr))
        choose = tf.nest.map_structure
        at = choose(lambda x, y: tf.where(accept, x, y), new, at)
        best = choose(lambda x, y: tf.where(at.residual < best.residual, x, y), at, best)
        return at, best, memory, lr, steps + tf.cast(accept, tf.int32), evaluations + 1

    empty = tf.zeros_like(tf.stack([tf.stack(start)] * MEMORY))
    _, best, _, lr, steps, evaluations = tf.while_loop(
        unfinished,
        body,
        (first, first, Memory(empty, empty), largest_step, tf.constant(0), tf.constant(1)),
    )
    status = tf.case(
        [
            (~tf.math.is_finite(first.residual), lambda: INVALID_START),
            (best.residual <= tolerance, lambda: CONVERGED),
            (lr <= SMALLEST_STEP, lambda: STALLED),
        ],
        default=lambda: EXHAUSTED,
    )
    return Solution(best.sites, status, steps, evaluations, best.value, best.residual)


def quadrature_error(
    alpha: float,
    likelihood: Likelihood,
    data: RegressionData,
    m: tf.Tensor,
    v: tf.Tensor,
    sites: SiteValues,
) -> tf.Tensor:
    """How far the matching sites move under a finer rule, in units of the posterior; ``[]``."""
    X, Y = data
    coarse, fine = (
        tilted_sites(likelihood, X, m, v, Y, *sites, alpha, num_nodes)
        for num_nodes in (NUM_NODES[1], 4 * NUM_NODES[1] + 1)
    )
    return tf.maximum(
        tf.reduce_max(tf.abs(coarse.precision - fine.precision) * v),
        tf.reduce_max(tf.abs(coarse.slope - fine.slope) * tf.sqrt(v)),
    )


def infer_propagation(alpha: float, likelihood: Likelihood, *tensors: tf.Tensor) -> Solution:
    """:func:`propagate` from plain tensors; the limits are tolerance and number of steps."""
    return propagate(alpha, *unpack(likelihood, *tensors))


def collapse(alpha: float, likelihood: Likelihood, *tensors: tf.Tensor) -> Collapse:
    """EP's sites from a warm start; its value is stationary in them."""
    prior, likelihood, data, warm, *limits = unpack(likelihood, *tensors)
    return no_weights(
        from_warm_start(
            lambda start: (propagate(alpha, prior, likelihood, data, start, *limits), ()),
            warm,
            by_value=False,
        )[0]
    )


def surrogate(
    alpha: float, prior: Prior, collapsed: Collapse, likelihood: Likelihood, data: RegressionData
) -> tf.Tensor:
    """EP's log marginal likelihood, whose explicit derivative at constant λ is the total one."""
    sites = SiteValues(*(tf.stop_gradient(x) for x in collapsed.solution.sites))
    return log_marginal_likelihood(marginals(*prior, *sites), sites, likelihood, data, alpha)


def expectation_propagation(alpha: float) -> Method:
    """Power EP with power α as a method of inference and learning."""
    return Method(
        key=("expectation propagation", alpha),
        sites_key=f"expectation propagation {alpha!r}",
        solve=functools.partial(infer_propagation, alpha),
        collapse=functools.partial(collapse, alpha),
        surrogate=functools.partial(surrogate, alpha),
        when_stalled=(
            "every update, however short, leaves no valid q(f) or a cavity without positive "
            "precision. Use a smaller power alpha, or CVIModel, whose inference always has a valid q."
        ),
        when_exhausted=(
            "Raise max_steps; where the residual does not fall, EP has no fixed point within reach: use "
            "a smaller power alpha, or CVIModel."
        ),
        quadrature_error=functools.partial(quadrature_error, alpha),
        tolerated_error=1e-3,
        when_inaccurate=(
            f"The quadrature (a rule of {NUM_NODES[1]} points) cannot resolve the tilted "
            "distributions, whose likelihood is too narrow for their cavities: widen the likelihood, "
            "lower the kernel's variance, or use CVIModel."
        ),
    )
