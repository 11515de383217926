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
from ..likelihoods.expectations import expectation_gradients
from ..likelihoods.ratios import RatioGradients, log_expected_ratio
from ..linalg import EvaluatedCovariance, Marginals, marginals, matvec
from ..sites import SiteValues
from . import collapsed_host, variational_host
from .collapsed_host import HostCollapse
from .common import (
    GRADIENT_ERROR,
    NO_CAVITY,
    NOT_EXACT,
    Adjoint,
    Collapse,
    Method,
    Prior,
    Residual,
    Solution,
    from_warm_start,
    no_weights,
    unpack,
    with_total_gradient,
)
from .newton import Curvature, HostNewtonSystem, NewtonSystem
from .reports import quadrature_error
from .variational import Evaluation, Problem, infer_newton, residual_of


def collapse(alpha: float, likelihood: Likelihood, *tensors: tf.Tensor) -> Collapse | HostCollapse:
    """Infer ``λ*`` from the given sites and solve for the total gradient of ``L_α``.

    :param tensors: as for :func:`~gpflow_hybrid.inference.variational.infer_newton`.
    """
    if alpha in (0.0, 1.0) and variational_host.works_on_host(likelihood):
        return collapsed_host.collapse(alpha, likelihood, *tensors)
    *parts, warm, tolerance, max_steps = unpack(likelihood, *tensors)
    problem = Problem(*parts)
    solution, at = from_warm_start(
        lambda start: problem.newton(start, tolerance, max_steps), warm, by_value=True
    )
    # E_q[log t] = λ₁m − ½λ₂(m² + v); the derivative in m is the residual a
    lambda_2 = at.sites.lambda_2
    bound = Adjoint(at.elbo, residual_of(at.q, at.sites, at.E).a, at.E.variance + 0.5 * lambda_2)
    if alpha == 0.0:
        return no_weights(solution, at.known, bound)
    system = problem.newton_system(at, rough=False)
    ratio = _ratio_gradients(problem, at, alpha)
    weights = _weights(at, system, ratio)
    adjoint = _total_adjoint(at, system.hessian, ratio, weights)

    # Where a cavity does not exist L_α does not either; the ELBO, its lower bound, stands in, so that
    # an optimiser can back away.
    exists = _cavities_exist(at.q, at.sites, alpha) & _all_finite(*weights)
    tf.cond(exists | ~solution.has_started, tf.no_op, lambda: tf.print(NO_CAVITY))
    adjoint = Adjoint(*(tf.where(exists, x, y) for x, y in zip(adjoint, bound, strict=True)))
    return Collapse(
        solution, weights, EvaluatedCovariance(at.known.posterior, system.Sigma), adjoint
    )


def _ratio_gradients(problem: Problem, at: Evaluation, alpha: float) -> RatioGradients:
    X, Y = problem.data
    arguments = (at.q.mean, at.q.variance, *at.sites)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(arguments)
        m, v, lambda_1, lambda_2 = arguments
        ratio = tf.reduce_sum(
            log_expected_ratio(problem.likelihood, X, m, v, Y, lambda_1, lambda_2, alpha)
        )
    gradients = tape.gradient(ratio, arguments, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return RatioGradients(ratio, *gradients)


def _weights(
    at: Evaluation, system: NewtonSystem | HostNewtonSystem, ratio: RatioGradients
) -> Residual:
    """``w = J⁻ᵀ ∂L_α/∂λ`` in the coordinates ``a = δλ₁ − m δλ₂``, ``b = δλ₂``."""
    d_m, d_v, d_1, d_2 = (tf.transpose(g) for g in ratio[1:])
    # δm = Σa, δv = −(Σ∘Σ)b, δλ₁ = a + mb, δλ₂ = b; ∂log Z/∂λ = (m, −½(m² + v))
    m, v = tf.transpose(at.q.mean), tf.transpose(at.q.variance)
    d_1, d_2 = d_1 + m, d_2 - 0.5 * (tf.square(m) + v)
    (wa, wb), error = system.transpose_solve((d_1, d_2 + m * d_1), (d_m, d_v), tolerance=1e-10)
    tf.cond(error > GRADIENT_ERROR, lambda: tf.print(NOT_EXACT, error), tf.no_op)
    return Residual(tf.transpose(wa), tf.transpose(wb))


def _total_adjoint(
    at: Evaluation, hessian: Curvature, ratio: RatioGradients, weights: Residual
) -> Adjoint:
    """``L_α + wᵀρ`` and its derivatives in m and v: those of the ratio, and ``wᵀ∂ρ`` with
    ``∂ρ_a = (E_mm + λ₂) ∂m + E_mv ∂v``, ``∂ρ_b = −2 (E_vm ∂m + E_vv ∂v)``."""

    def pull(H: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        return matvec(H, w, transpose_a=True)  # [N, L, L] and [N, L]

    wa, wb = weights
    value = with_total_gradient(
        at.q.log_normaliser + ratio.value, weights, residual_of(at.q, at.sites, at.E)
    )
    return Adjoint(
        value,
        ratio.m + pull(hessian.mm, wa) + at.sites.lambda_2 * wa - 2.0 * pull(hessian.vm, wb),
        ratio.v + pull(hessian.mv, wa) - 2.0 * pull(hessian.vv, wb),
    )


def _cavities_exist(q: Marginals, sites: SiteValues, alpha: float) -> tf.Tensor:
    return tf.reduce_all(alpha * sites.lambda_2 * q.variance < 1.0)


def _all_finite(*tensors: tf.Tensor) -> tf.Tensor:
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(x)) for x in tensors])


def surrogate(
    alpha: float,
    prior: Prior,
    collapsed: Collapse | HostCollapse,
    likelihood: Likelihood,
    data: RegressionData,
) -> tf.Tensor:
    """``L_α(λ*, θ)`` with the gradient of the collapsed objective, by plain automatic differentiation."""
    if isinstance(collapsed, HostCollapse):
        return collapsed.with_gradient(prior)
    sites = SiteValues(*(tf.stop_gradient(x) for x in collapsed.solution.sites))
    q = marginals(prior.K, prior.mean, *sites, collapsed.known)
    at = Marginals(*(tf.stop_gradient(x) for x in q))
    assert collapsed.adjoint is not None  # collapse() gives it
    value, mean_bar, variance_bar = (tf.stop_gradient(x) for x in collapsed.adjoint)
    value += (
        q.log_normaliser
        - at.log_normaliser
        + tf.reduce_sum(mean_bar * (q.mean - at.mean))
        + tf.reduce_sum(variance_bar * (q.variance - at.variance))
    )
    if likelihood.variables:  # held ones too: they may be trainable when a graph is differentiated
        part = _likelihood_part(alpha, at, sites, collapsed.weights, likelihood, data)
        value += part - tf.stop_gradient(part)
    return value


def _likelihood_part(
    alpha: float,
    q: Marginals,
    sites: SiteValues,
    weights: Residual,
    likelihood: Likelihood,
    data: RegressionData,
) -> tf.Tensor:
    """What ``L_α + wᵀρ`` has of the likelihood's own parameters, at a constant q."""
    if alpha == 0.0:
        return objectives.elbo(q, sites, likelihood, data)
    # The branch not taken stays finite, or its gradient would be NaN.
    exists = _cavities_exist(q, sites, alpha) & _all_finite(*weights)
    lambda_1, lambda_2, wa, wb = (tf.where(exists, x, tf.zeros_like(x)) for x in (*sites, *weights))
    safe = SiteValues(lambda_1, lambda_2)
    value = objectives.power_ep(q, safe, likelihood, data, alpha)
    E = expectation_gradients(likelihood, data[0], q.mean, q.variance, data[1])
    value = with_total_gradient(value, Residual(wa, wb), residual_of(q, sites, E))
    return tf.where(exists, value, tf.reduce_sum(E.value))


def _solve(likelihood: Likelihood, *tensors: tf.Tensor) -> Solution:
    on_host = variational_host.works_on_host(likelihood)
    return (variational_host.infer_newton if on_host else infer_newton)(likelihood, *tensors)


def variational_inference(alpha: float) -> Method:
    """CVI with the learning objective ``L_α`` as a method of inference and learning."""
    return Method(
        key=("variational", alpha),
        sites_key="variational",
        solve=_solve,
        collapse=functools.partial(collapse, alpha),
        surrogate=functools.partial(surrogate, alpha),
        when_stalled=(
            "no step raises the ELBO any further. Either this is the limit of the arithmetic, and "
            "the sites can be used, or the expectations of the likelihood are not smooth: give its "
            "quadrature more points."
        ),
        quadrature_error=quadrature_error,
    )
