"""Laplace's method: the Gaussian at the mode of the posterior with the curvature there.

With ``ℓ = log p(y|f)`` per datum, the mode maximises ``ψ(f) = Σ ℓ(fₙ) − ½ (f − μ₀)ᵀK⁻¹(f − μ₀)``. In sites,

    λ₂ = W = −ℓ''(m),   λ₁ = Wm + ℓ'(m),   m = E_q[f],

a fixed point whose posterior mean is the mode, and whose q is Laplace's approximation. The log
marginal likelihood ``ψ(m) − ½ log|I + KW|`` is ``log Z(λ) + Σ ℓ(m) − log t(m)``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from gpflow.base import RegressionData, TensorType
from gpflow.likelihoods import Likelihood, ScalarLikelihood

from ..linalg import (
    EvaluatedCovariance,
    Marginals,
    add_prior_mean,
    evaluate,
    marginals,
    matvec,
    offset_sites,
)
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
    relative_norm,
    unpack,
    with_total_gradient,
)

SUFFICIENT_RISE = 1e-4
"""Part of the predicted rise of ψ that a step has to keep (Armijo)."""

SMALLEST_STEP = 1e-9
"""Part of a Newton step below which ψ cannot be raised any more at this precision."""


class PointValues(NamedTuple):
    """``ℓ(f)`` and its first and second derivatives, ``[N]`` and ``[N, L]`` twice."""

    value: tf.Tensor
    first: tf.Tensor
    second: tf.Tensor


def point_values(
    likelihood: ScalarLikelihood, X: TensorType, F: tf.Tensor, Y: TensorType
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


def residual_of(q: Marginals, sites: SiteValues, at_mean: PointValues) -> Residual:
    """``a = ℓ'(m) − (λ₁ − λ₂m)``, ``b = −ℓ''(m) − λ₂``: zero at the fixed point."""
    return Residual(
        at_mean.first - (sites.lambda_1 - sites.lambda_2 * q.mean),
        -at_mean.second - sites.lambda_2,
    )


def log_marginal_likelihood(
    q: Marginals, sites: SiteValues, likelihood: Likelihood, data: RegressionData
) -> tf.Tensor:
    """Laplace's value ``log Z + Σ ℓ(m) − log t(m)``, shape ``[]``."""
    X, Y = data
    log_t = (sites.lambda_1 - 0.5 * sites.lambda_2 * q.mean) * q.mean
    return (
        q.log_normaliser + tf.reduce_sum(likelihood.log_prob(X, q.mean, Y)) - tf.reduce_sum(log_t)
    )


class Evaluation(NamedTuple):
    """Everything known at one λ, whose posterior mean is the point at hand."""

    sites: SiteValues
    q: Marginals
    weights: tf.Tensor  # β = K⁻¹(m − μ₀) = λ₁ − λ₂m
    at_mean: PointValues
    log_joint: tf.Tensor  # ψ(m)
    residual: tf.Tensor


class Problem:
    """One search for the mode: a prior, a likelihood and data, all fixed."""

    def __init__(self, prior: Prior, likelihood: ScalarLikelihood, data: RegressionData) -> None:
        self.prior = Prior(*(tf.stop_gradient(x) for x in prior))
        self.likelihood = likelihood
        self.data = data
        # Each is used in several places of the graph and traced once.
        self.at_mean = tf.function(
            lambda mean: point_values(likelihood, data[0], mean, data[1]), autograph=False
        )
        self.posterior = tf.function(lambda sites: marginals(*self.prior, *sites), autograph=False)

    def evaluate(self, sites: SiteValues, q: Marginals) -> Evaluation:
        """ψ and the residual at the mean of q, the posterior of these sites."""
        at_mean = self.at_mean(q.mean)
        weights = sites.lambda_1 - sites.lambda_2 * q.mean
        log_joint = tf.reduce_sum(at_mean.value) - 0.5 * tf.reduce_sum(
            weights * (q.mean - self.prior.mean)
        )
        said = Residual(at_mean.first, -at_mean.second)
        norm = relative_norm(q, residual_of(q, sites, at_mean), said)
        ok = is_valid(q) & tf.math.is_finite(log_joint) & tf.math.is_finite(norm)
        infinite = tf.constant(np.inf, norm.dtype)
        return Evaluation(sites, q, weights, at_mean, log_joint, tf.where(ok, norm, infinite))

    def full_step(self, at: Evaluation) -> tuple[SiteValues, Marginals]:
        """Newton's step: the sites ``(Wm + ℓ', W)`` and their posterior, with ``W₊`` if W is not valid."""

        def target(W: tf.Tensor) -> tuple[SiteValues, Marginals]:
            sites = SiteValues(W * at.q.mean + at.at_mean.first, W)
            return sites, self.posterior(sites)

        W = -at.at_mean.second
        sites, q = target(W)
        # K⁻¹ + W₊ is positive definite: an ascent direction of ψ, whatever the likelihood.
        return tf.cond(is_valid(q), lambda: (sites, q), lambda: target(tf.maximum(W, 0.0)))

    def newton(self, start: SiteValues, tolerance: tf.Tensor, max_steps: tf.Tensor) -> Solution:
        """Newton's method on ψ with a backtracking line search."""
        first = self.evaluate(start, self.posterior(start))
        one = tf.ones((), first.log_joint.dtype)
        eps = np.finfo(one.dtype.as_numpy_dtype).eps

        def unfinished(at: Any, part: Any, steps: Any) -> tf.Tensor:
            return (
                (steps < max_steps)
                & (at.residual > tolerance)
                & (part > SMALLEST_STEP)
                & tf.math.is_finite(first.residual)
            )

        def body(at: Any, part: Any, steps: Any) -> Any:
            sites, q = self.full_step(at)
            move = q.mean - at.q.mean
            new_weights = sites.lambda_1 - sites.lambda_2 * q.mean
            slope = tf.reduce_sum((at.at_mean.first - at.weights) * move)  # ψ'
            noise = 100.0 * eps * (tf.reduce_sum(tf.abs(at.at_mean.value)) + tf.abs(at.log_joint))

            def candidate(part: tf.Tensor) -> Evaluation:
                # β and m move together; the site precisions are those of the full step.
                mean = at.q.mean + part * move
                weights = at.weights + part * (new_weights - at.weights)
                partial = SiteValues(weights + sites.lambda_2 * mean, sites.lambda_2)
                return self.evaluate(partial, Marginals(mean, q.variance, q.log_normaliser))

            def too_long(part: tf.Tensor, new: Evaluation) -> tf.Tensor:
                rises = new.log_joint - at.log_joint >= SUFFICIENT_RISE * part * slope - noise
                return ~(rises & tf.math.is_finite(new.log_joint)) & (part > SMALLEST_STEP)

            def halve(part: tf.Tensor, new: Evaluation) -> Any:
                return 0.5 * part, candidate(0.5 * part)

            part, new = tf.while_loop(too_long, halve, (one, candidate(one)))
            # A stationary point that is no mode: the step is nothing, and W is not valid.
            moves = tf.reduce_max(tf.abs(move) / tf.sqrt(q.variance)) > eps
            part = tf.where(moves | (new.residual <= tolerance), part, 0.0)
            keep = part > SMALLEST_STEP
            at = tf.nest.map_structure(lambda x, y: tf.where(keep, x, y), new, at)
            return at, part, steps + 1

        at, part, steps = tf.while_loop(unfinished, body, (first, one, tf.constant(0)))
        status = tf.case(
            [
                (~tf.math.is_finite(first.residual), lambda: INVALID_START),
                (at.residual <= tolerance, lambda: CONVERGED),
                (part <= SMALLEST_STEP, lambda: STALLED),
            ],
            default=lambda: EXHAUSTED,
        )
        return Solution(at.sites, status, steps, steps + 1, at.log_joint, at.residual)


def infer_laplace(likelihood: Likelihood, *tensors: tf.Tensor) -> Solution:
    """:meth:`Problem.newton` from plain tensors; the limits are tolerance and number of steps."""
    prior, likelihood, data, start, tolerance, max_steps = unpack(likelihood, *tensors)
    return Problem(prior, likelihood, data).newton(start, tolerance, max_steps)


def collapse(likelihood: Likelihood, *tensors: tf.Tensor) -> Collapse:
    """The mode from a warm start, and the weights of the implicit term of the gradient.

    In a and b the residual moves by ``−a`` and ``−b − ℓ'''Σa``, and the value by ``−½ vᵀb``; so
    ``w_b = −½ v`` and ``w_a = ½ Σ(ℓ'''v)``.
    """
    prior, likelihood, data, warm, tolerance, max_steps = unpack(likelihood, *tensors)
    problem = Problem(prior, likelihood, data)
    solution, _ = from_warm_start(
        lambda start: (problem.newton(start, tolerance, max_steps), ()), warm, by_value=True
    )
    K, mean = problem.prior
    r, lam = offset_sites(mean, *solution.sites)
    known = evaluate(K, r, lam)
    q = add_prior_mean(known.posterior, mean, *solution.sites)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(q.mean)
        second = point_values(likelihood, data[0], q.mean, data[1]).second
    third = tape.gradient(second, q.mean, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    Sigma = known.covariance(K, lam)
    wa = 0.5 * matvec(Sigma, tf.transpose(third * q.variance))
    return Collapse(
        solution,
        Residual(tf.transpose(wa), -0.5 * q.variance),
        EvaluatedCovariance(known.posterior, Sigma),
    )


def surrogate(
    prior: Prior, collapsed: Collapse, likelihood: Likelihood, data: RegressionData
) -> tf.Tensor:
    """Laplace's log marginal likelihood with its total gradient, by plain automatic differentiation."""
    sites = SiteValues(*(tf.stop_gradient(x) for x in collapsed.solution.sites))
    q = marginals(*prior, *sites, collapsed.known)
    value = log_marginal_likelihood(q, sites, likelihood, data)
    residual = residual_of(q, sites, point_values(likelihood, data[0], q.mean, data[1]))
    return with_total_gradient(value, collapsed.weights, residual)


def laplace() -> Method:
    """Laplace's method as a method of inference and learning."""
    return Method(
        key="laplace",
        sites_key="laplace",
        solve=infer_laplace,
        collapse=collapse,
        surrogate=surrogate,
        when_stalled=(
            "no step raises the log joint density any further. Either this is the limit of the "
            "arithmetic, and the sites can be used, or this is a stationary point that is no mode, or "
            "the likelihood is not smooth there: start from other sites."
        ),
    )
