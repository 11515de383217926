"""The collapsed objective ``θ ↦ L_α(λ*(θ), θ)``, ``λ*(θ) = argmax_λ L_0(λ, θ)``, and its total gradient.

With ``ρ(λ, θ)`` the residual of the E-step and w the solution of ``Jᵀw = ∂L_α/∂λ`` at ``λ*``,

    L_α(λ*, θ) + wᵀρ(λ*, θ)

at constant λ* and w has the value of the collapsed objective, because ``ρ(λ*, θ) = 0``, and its total
derivative, by implicit differentiation. For the ELBO ``∂L_0/∂λ = 0`` and w vanishes (envelope theorem).
"""

from __future__ import annotations

import functools

import tensorflow as tf
from gpflow.base import RegressionData
from gpflow.likelihoods import Likelihood

from .. import objectives
from ..likelihoods.expectations import expectation_gradients, expected_log_site
from ..likelihoods.ratios import log_expected_ratio
from ..linalg import EvaluatedCovariance, marginals, matvec
from ..sites import SiteValues
from .common import (
    Collapse,
    Method,
    Prior,
    Residual,
    from_warm_start,
    no_weights,
    unpack,
    with_total_gradient,
)
from .newton import HostNewtonSystem, NewtonSystem
from .reports import quadrature_error
from .variational import Evaluation, Problem, infer_newton, residual_of

GRADIENT_ERROR = 1e-5
"""Relative error of the solved system above which the gradient is not called exact."""

NOT_EXACT = (
    "gpflow_hybrid: the total gradient is not exact at these hyperparameters; relative error"
)


def collapse(alpha: float, likelihood: Likelihood, *tensors: tf.Tensor) -> Collapse:
    """Infer ``λ*`` from the given sites and solve for the weights of the total gradient of ``L_α``.

    :param tensors: as for :func:`~gpflow_hybrid.inference.variational.infer_newton`.
    """
    *parts, warm, tolerance, max_steps = unpack(likelihood, *tensors)
    problem = Problem(*parts)
    solution, at = from_warm_start(
        lambda start: problem.newton(start, tolerance, max_steps), warm, by_value=True
    )
    if alpha == 0.0:
        return no_weights(solution, at.known)
    system = problem.newton_system(at)
    weights = _weights(problem, at, system, alpha)
    return Collapse(solution, weights, EvaluatedCovariance(at.known.posterior, system.Sigma))


def _weights(
    problem: Problem, at: Evaluation, system: NewtonSystem | HostNewtonSystem, alpha: float
) -> Residual:
    """``w = J⁻ᵀ ∂L_α/∂λ`` in the coordinates ``a = δλ₁ − m δλ₂``, ``b = δλ₂``."""
    X, Y = problem.data
    m, v = at.q.mean, at.q.variance
    lambda_1, lambda_2 = at.sites
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch((m, v, lambda_1, lambda_2))
        ratio = tf.reduce_sum(
            log_expected_ratio(problem.likelihood, X, m, v, Y, lambda_1, lambda_2, alpha)
        )
    gradients = tape.gradient(
        ratio, (m, v, lambda_1, lambda_2), unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    d_m, d_v, d_1, d_2 = (tf.transpose(g) for g in gradients)
    # ∂m/∂λ₁ = Σ, ∂m/∂λ₂ = −Σ diag(m), ∂v/∂λ₂ = −Σ∘Σ; ∂log Z/∂λ = (m, −½(m² + v))
    m, v = tf.transpose(m), tf.transpose(v)
    Sigma = system.Sigma
    Sigma_d_m = matvec(Sigma, d_m)
    d_1 = d_1 + m + Sigma_d_m
    d_2 = d_2 - 0.5 * (tf.square(m) + v) - m * Sigma_d_m - matvec(tf.square(Sigma), d_v)
    wa, wb, error = system.transpose_solve(d_1, d_2 + m * d_1, tolerance=1e-10)
    tf.cond(error > GRADIENT_ERROR, lambda: tf.print(NOT_EXACT, error), tf.no_op)
    return Residual(tf.transpose(wa), tf.transpose(wb))


def surrogate(
    alpha: float, prior: Prior, collapsed: Collapse, likelihood: Likelihood, data: RegressionData
) -> tf.Tensor:
    """``L_α(λ*, θ)`` with the gradient of the collapsed objective, by plain automatic differentiation."""
    sites = SiteValues(*(tf.stop_gradient(x) for x in collapsed.solution.sites))
    q = marginals(prior.K, prior.mean, *sites, collapsed.known)
    if alpha == 0.0:
        return objectives.elbo(q, sites, likelihood, data)

    # Where a cavity does not exist L_α does not either; the ELBO, its lower bound, stands in, so that
    # an optimiser can back away. The branch not taken stays finite, or its gradient would be NaN.
    kept = 1.0 - alpha * sites.lambda_2 * tf.stop_gradient(q.variance)
    finite = [tf.math.is_finite(w) for w in collapsed.weights]
    exists = tf.reduce_all((kept > 0.0) & finite[0] & finite[1])
    safe = SiteValues(
        sites.lambda_1, tf.where(kept > 0.0, sites.lambda_2, tf.zeros_like(sites.lambda_2))
    )
    value = objectives.power_ep(q, safe, likelihood, data, alpha)
    E = expectation_gradients(likelihood, data[0], q.mean, q.variance, data[1])
    weights = Residual(
        *(
            tf.where(ok, w, tf.zeros_like(w))
            for ok, w in zip(finite, collapsed.weights, strict=True)
        )
    )
    value = with_total_gradient(value, weights, residual_of(q, sites, E))
    expected_log_t = expected_log_site(q.mean, q.variance, *sites)
    bound = q.log_normaliser + tf.reduce_sum(E.value) - tf.reduce_sum(expected_log_t)
    message = (
        "gpflow_hybrid: a cavity does not exist at these hyperparameters; the training loss falls "
        "back to the ELBO, a lower bound of the objective."
    )
    tf.cond(exists, tf.no_op, lambda: tf.print(message))
    return tf.where(exists, value, bound)


def variational_inference(alpha: float) -> Method:
    """CVI with the learning objective ``L_α`` as a method of inference and learning."""
    return Method(
        key=("variational", alpha),
        sites_key="variational",
        solve=infer_newton,
        collapse=functools.partial(collapse, alpha),
        surrogate=functools.partial(surrogate, alpha),
        when_stalled=(
            "no step raises the ELBO any further. Either this is the limit of the arithmetic, and "
            "the sites can be used, or the expectations of the likelihood are not smooth: give its "
            "quadrature more points."
        ),
        quadrature_error=quadrature_error,
    )
