"""The collapsed objective ``θ ↦ L_α(λ*(θ), θ)``, ``λ*(θ) = argmax_λ L_0(λ, θ)``, and its total gradient.

With ``ρ(λ, θ)`` the residual of the E-step and w the solution of ``Jᵀw = ∂L_α/∂λ`` at ``λ*``,

    L_α(λ*, θ) + wᵀρ(λ*, θ)

at constant λ* and w has the value of the collapsed objective, because ``ρ(λ*, θ) = 0``, and its total
derivative, by implicit differentiation. For the ELBO ``∂L_0/∂λ = 0`` and w vanishes (envelope theorem).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tensorflow as tf
from gpflow.base import RegressionData
from gpflow.likelihoods import Likelihood

from . import objectives
from .inference import Evaluation, Prior, Problem, Residual, Solution, problem_from, residual_of
from .likelihoods.expectations import (
    expectation_gradients,
    expected_log_site,
    log_expected_ratio,
)
from .linalg import marginals, matvec
from .sites import SiteValues

ACCEPTABLE_RESIDUAL = 1e-4
"""Residual above which an E-step from a warm start is tried again from zero sites."""


class Collapse(NamedTuple):
    """``λ*`` and the weights w of the residual, constants of the surrogate."""

    solution: Solution
    weights: Residual  # [N, L] each


def collapse(alpha: float, likelihood: Likelihood, *tensors: tf.Tensor) -> Collapse:
    """Infer ``λ*`` from the given sites and solve for the weights of the total gradient of ``L_α``.

    :param tensors: as for :func:`~gpflow_hybrid.inference.infer_newton`.
    """
    problem, warm, (tolerance, max_steps) = problem_from(likelihood, *tensors)
    # A warm start can be a bad one after a long step in θ: a cold one is then tried as well, and
    # the better kept.
    cold = SiteValues(*(tf.zeros_like(x) for x in warm))

    def attempt(count: tf.Tensor, best: Solution) -> tuple[tf.Tensor, Solution]:
        first = tf.equal(count, 0)
        start = tf.nest.map_structure(lambda x, y: tf.where(first, x, y), warm, cold)
        new = problem.newton(start, tolerance, max_steps)
        better = first | (new.elbo > best.elbo) | ~tf.math.is_finite(best.elbo)
        return count + 1, tf.nest.map_structure(lambda x, y: tf.where(better, x, y), new, best)

    infinite = tf.constant(np.inf, warm.lambda_1.dtype)
    zero = tf.constant(0)
    nothing = Solution(cold, zero, zero, zero, -infinite, infinite)
    _, solution = tf.while_loop(
        lambda count, best: (count < 2) & (best.residual > ACCEPTABLE_RESIDUAL),
        attempt,
        (zero, nothing),
    )
    if alpha == 0.0:
        return Collapse(solution, Residual(*cold))
    return Collapse(solution, _weights(problem, problem.evaluate(solution.sites), alpha))


def _weights(problem: Problem, at: Evaluation, alpha: float) -> Residual:
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
    d_1 = d_1 + m + matvec(at.Sigma, d_m)
    d_2 = (
        d_2
        - 0.5 * (tf.square(m) + v)
        - m * matvec(at.Sigma, d_m)
        - matvec(tf.square(at.Sigma), d_v)
    )
    wa, wb = problem.newton_system(at).transpose_solve(d_1, d_2 + m * d_1, tolerance=1e-10)
    return Residual(tf.transpose(wa), tf.transpose(wb))


def surrogate(
    prior: Prior,
    collapsed: Collapse,
    likelihood: Likelihood,
    data: RegressionData,
    alpha: float,
) -> tf.Tensor:
    """``L_α(λ*, θ)`` with the gradient of the collapsed objective, by plain automatic differentiation."""
    sites = SiteValues(*(tf.stop_gradient(x) for x in collapsed.solution.sites))
    q = marginals(prior.K, prior.mean, *sites)
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
    correction = tf.add_n(
        [
            tf.reduce_sum(tf.stop_gradient(tf.where(ok, w, tf.zeros_like(w))) * r)
            for ok, w, r in zip(finite, collapsed.weights, residual_of(q, sites, E), strict=True)
        ]
    )
    # ρ is zero only to the tolerance of the E-step; the value stays that of L_α.
    value = value + correction - tf.stop_gradient(correction)
    expected_log_t = expected_log_site(q.mean, q.variance, *sites)
    bound = q.log_normaliser + tf.reduce_sum(E.value) - tf.reduce_sum(expected_log_t)
    message = (
        "gpflow_hybrid: a cavity does not exist at these hyperparameters; the training loss falls "
        "back to the ELBO, a lower bound of the objective."
    )
    tf.cond(exists, tf.no_op, lambda: tf.print(message))
    return tf.where(exists, value, bound)
