"""Laplace's method: the Gaussian at the mode of the posterior with the curvature there.

With ``ℓ = log p(y|f)`` per datum, the mode maximises ``ψ(f) = Σ ℓ(fₙ) − ½ (f − μ₀)ᵀK⁻¹(f − μ₀)``. In sites,

    λ₂ = W = −ℓ''(m),   λ₁ = Wm + ℓ'(m),   m = E_q[f],

a fixed point whose posterior mean is the mode, and whose q is Laplace's approximation. The log
marginal likelihood ``ψ(m) − ½ log|I + KW|`` is ``log Z(λ) + Σ ℓ(m) − log t(m)``.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from gpflow.base import TensorType
from gpflow.likelihoods import Likelihood, ScalarLikelihood

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
)
from .options import LAPLACE
from .own_parameters import parameter_question
from .questions import Iteration, Question


class PointValues(NamedTuple):
    """``ℓ(f)`` and its first and second derivatives, ``[N]`` and ``[N, L]`` twice."""

    value: Any
    first: Any
    second: Any


class ThirdDerivative(NamedTuple):
    """``ℓ'''(f)``, ``[N, L]``."""

    third: Any


def point_values(
    likelihood: ScalarLikelihood, X: TensorType, Y: TensorType, F: tf.Tensor
) -> PointValues:
    """``ℓ``, ``ℓ'`` and ``ℓ''`` at f; an outer tape may differentiate all three once more."""
    zero = tf.UnconnectedGradients.ZERO
    with tf.GradientTape(watch_accessed_variables=False) as outer:
        outer.watch(F)
        with tf.GradientTape(watch_accessed_variables=False) as inner:
            inner.watch(F)
            value = likelihood.log_prob(X, F, Y)
        first = inner.gradient(value, F, unconnected_gradients=zero)
    return PointValues(value, first, outer.gradient(first, F, unconnected_gradients=zero))


def _third_derivative(
    likelihood: ScalarLikelihood, X: TensorType, Y: TensorType, F: tf.Tensor
) -> ThirdDerivative:
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(F)
        second = point_values(likelihood, X, Y, F).second
    zero = tf.UnconnectedGradients.ZERO
    return ThirdDerivative(tape.gradient(second, F, unconnected_gradients=zero))


POINT_VALUES = Question("point_values", point_values, PointValues, 1, (1, 2, 2))
THIRD_DERIVATIVE = Question("third_derivative", _third_derivative, ThirdDerivative, 1, (2,))


def log_marginal_likelihood(q: Marginals, sites: SiteValues, log_prob: Any) -> Any:
    """Laplace's value ``log Z + Σ ℓ(m) − log t(m)``, of arrays or tensors.

    :param log_prob: ``Σ ℓ(m)``.
    """
    log_t = (sites.lambda_1 - 0.5 * sites.lambda_2 * q.mean) * q.mean
    total = np.sum(log_t) if isinstance(log_t, np.ndarray) else tf.reduce_sum(log_t)
    return q.log_normaliser + log_prob - total


class JointEvaluation(NamedTuple):
    """Everything known at one λ, whose posterior mean is the point at hand."""

    sites: SiteValues
    q: Marginals
    at_mean: PointValues
    log_joint: float
    """``ψ(m)``."""
    residual_norm: float

    @property
    def weights(self) -> Array:
        """``β = K⁻¹(m − μ₀) = λ₁ − λ₂m``."""
        return self.sites.lambda_1 - self.sites.lambda_2 * self.q.mean

    @property
    def residual(self) -> SitePair:
        """``a = ℓ'(m) − (λ₁ − λ₂m)``, ``b = −ℓ''(m) − λ₂``: zero at the fixed point."""
        return SitePair(
            self.at_mean.first - self.weights, -self.at_mean.second - self.sites.lambda_2
        )


def evaluate(prior: Prior, sites: SiteValues, q: Marginals) -> Iteration[JointEvaluation]:
    """ψ and the residual at the mean of q, the posterior of these sites."""
    at_mean = yield POINT_VALUES(q.mean)
    at = JointEvaluation(sites, q, at_mean, math.nan, math.inf)
    log_joint = np.sum(at_mean.value) - 0.5 * np.sum(at.weights * (q.mean - prior.mean))
    norm = relative_norm(q, at.residual, SitePair(at_mean.first, -at_mean.second))
    ok = is_valid(q) and np.isfinite(log_joint) and np.isfinite(norm)
    return at._replace(log_joint=float(log_joint), residual_norm=norm if ok else math.inf)


def _full_step(prior: Prior, at: JointEvaluation) -> tuple[SiteValues, Marginals]:
    """Newton's step: the sites ``(Wm + ℓ', W)`` and their posterior, with ``|W|`` if W is not valid.

    Not with ``W₊``: on the flank of a narrow peak, where ℓ is convex and steep, the step would be as long
    as the prior is wide, and would have to be shortened to nothing.
    """

    def target(W: Array) -> tuple[SiteValues, Marginals]:
        sites = SiteValues(W * at.q.mean + at.at_mean.first, W)
        return sites, prior.posterior(sites).marginals

    W = -at.at_mean.second
    sites, q = target(W)
    # K⁻¹ + |W| is positive definite: an ascent direction of ψ, whatever the likelihood.
    return (sites, q) if is_valid(q) else target(np.abs(W))


def find_mode(
    prior: Prior, start: SiteValues, tolerance: float, max_steps: int
) -> Iteration[Solution]:
    """Newton's method on ψ with a backtracking line search."""
    at = yield from evaluate(prior, start, prior.posterior(start).marginals)
    if not np.isfinite(at.residual_norm):
        return Solution(at.sites, INVALID_START, 0, 1, at.log_joint, at.residual_norm)
    part, steps = 1.0, 0
    while steps < max_steps and at.residual_norm > tolerance and part > LAPLACE.smallest_step:
        sites, q = _full_step(prior, at)
        part, new = yield from _line_search(prior, at, sites, q)
        # A stationary point that is no mode: the step is nothing, and W is not valid.
        move = np.abs(q.mean - at.q.mean) / np.sqrt(q.variance)
        if not (np.max(move) > np.finfo(move.dtype).eps or new.residual_norm <= tolerance):
            part = 0.0
        if part > LAPLACE.smallest_step:
            at = new
        steps += 1
    status = ended(at.residual_norm <= tolerance, part <= LAPLACE.smallest_step)
    return Solution(at.sites, status, steps, steps + 1, at.log_joint, at.residual_norm)


def _line_search(
    prior: Prior, at: JointEvaluation, sites: SiteValues, q: Marginals
) -> Iteration[tuple[float, JointEvaluation]]:
    """The part of the full step to ``sites`` that raises ψ enough, and where it leads."""
    move, weights = q.mean - at.q.mean, at.weights
    new_weights = sites.lambda_1 - sites.lambda_2 * q.mean
    slope = np.sum((at.at_mean.first - weights) * move)  # ψ'
    eps = np.finfo(move.dtype).eps
    noise = LAPLACE.rounding_errors * eps * (np.sum(np.abs(at.at_mean.value)) + abs(at.log_joint))
    part = 1.0
    while True:
        # β and m move together; the site precisions are those of the full step.
        mean = at.q.mean + part * move
        lambda_1 = weights + part * (new_weights - weights) + sites.lambda_2 * mean
        partial = SiteValues(lambda_1, sites.lambda_2)
        new = yield from evaluate(prior, partial, q._replace(mean=mean))
        rise = new.log_joint - at.log_joint
        if rise >= LAPLACE.sufficient_rise * part * slope - noise or part <= LAPLACE.smallest_step:
            return part, new
        part *= LAPLACE.shortening


def collapse(
    prior: Prior, start: SiteValues, tolerance: float, max_steps: int
) -> Iteration[Collapse]:
    """The mode from a warm start, and the weights of the implicit term of the gradient.

    In a and b the residual moves by ``−a`` and ``−b − ℓ'''Σa``, and the value by ``−½ vᵀb``; so
    ``w_b = −½ v`` and ``w_a = ½ Σ(ℓ'''v)``. At constant w, ``∂ρ_a = (ℓ'' + λ₂)∂m`` and
    ``∂ρ_b = −ℓ'''∂m``.
    """

    solve = without_state(lambda sites: find_mode(prior, sites, tolerance, max_steps))
    solution, _ = yield from from_warm_start(solve, start, by_value=True)
    if not solution.has_started:
        return no_collapse(solution)
    posterior = prior.posterior(solution.sites)
    q = posterior.marginals
    at = yield from evaluate(prior, solution.sites, q)
    third = (yield THIRD_DERIVATIVE(q.mean)).third
    covariance = posterior.covariance(for_adjoint=True)
    wa = 0.5 * covariance.product((third * q.variance).T).T
    wb = -0.5 * q.variance
    a, b = at.residual
    value = log_marginal_likelihood(q, at.sites, np.sum(at.at_mean.value))
    return Collapse(
        solution,
        value + np.sum(wa * a) + np.sum(wb * b),
        q,
        SitePair(wa, wb),
        covariance,
        mean_bar=a - b * wa - third * wb,
        variance_bar=np.zeros_like(wb),
    )


def likelihood_value(
    likelihood: Likelihood, X: tf.Tensor, Y: tf.Tensor, fixed: FixedPoint
) -> tf.Tensor:
    """What Laplace's value and ``wᵀρ`` have of the likelihood's own parameters, at a constant q."""
    at, weights = point_values(likelihood, X, Y, fixed.q.mean), fixed.weights
    implicit = tf.reduce_sum(weights.a * at.first) - tf.reduce_sum(weights.b * at.second)
    return tf.reduce_sum(at.value) + implicit


@functools.cache
def laplace() -> Method:
    """Laplace's method as a method of inference and learning."""
    return Method(
        sites_key="laplace",
        solve=find_mode,
        collapse=collapse,
        questions=(POINT_VALUES, THIRD_DERIVATIVE),
        parameter_question=parameter_question("laplace", likelihood_value),
        when_stalled=(
            "no step raises the log joint density any further. Either this is the limit of the "
            "arithmetic, and the sites can be used, or this is a stationary point that is no mode, or "
            "the likelihood is not smooth there: start from other sites."
        ),
    )
