"""Derivatives of the ratios of likelihood and site, for the total gradient of the power-EP family."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from gpflow.likelihoods import Likelihood, ScalarLikelihood

from ..namespaces import functions_of
from .expectations import expectation_gradients, expected_log_site, variational_expectations
from .node_rules import point_derivatives
from .nodes import log_prob_and_weights, mean_and_power_mean
from .ratios import cavity, covering_rule, log_expected_power, log_expected_ratio


class RatioGradients(NamedTuple):
    """``ℓ = Σ (1/α) log E_q[(p/t)^α]`` and its derivatives, ``[N, L]``."""

    value: Any
    m: Any
    v: Any
    lambda_1: Any
    lambda_2: Any


def ratio_gradients(
    likelihood: Likelihood,
    X: Any,
    Y: Any,
    m: tf.Tensor,
    v: tf.Tensor,
    lambda_1: tf.Tensor,
    lambda_2: tf.Tensor,
    alpha: float,
) -> RatioGradients:
    """``Σ ℓ_α`` and its derivatives; by quadrature, sums over nodes ``f = m + √v z`` that follow q.

    With ``h = log p − log t`` and the tilted weights ``π ∝ w exp(αh)``, ``∂ℓ_α = Σ π ∂h``; for α < 1 there
    is also what :func:`log_expected_ratio` blends in.
    """
    cav = cavity(m, v, lambda_1, lambda_2, alpha)
    if log_expected_power(likelihood, X, cav.mean, cav.variance, Y, alpha) is not None:
        arguments = (m, v, lambda_1, lambda_2)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(arguments)
            closed = log_expected_ratio(likelihood, X, m, v, Y, lambda_1, lambda_2, alpha)
            total = tf.reduce_sum(closed)
        zero = tf.UnconnectedGradients.ZERO
        return RatioGradients(total, *tape.gradient(total, arguments, unconnected_gradients=zero))
    nodes, log_weights = covering_rule(likelihood, m, v, cav)
    at = point_derivatives(likelihood, X, Y, nodes, False)
    # A node so far out that log p overflows has p = 0, and no part in any sum.
    finite = tf.math.is_finite(at.log_prob)
    log_p = tf.where(finite, at.log_prob, tf.zeros_like(at.log_prob))
    log_weights = tf.where(finite, log_weights, tf.constant(-np.inf, m.dtype))
    slope = lambda_1 - lambda_2 * nodes
    log_t = (lambda_1 - 0.5 * lambda_2 * nodes) * nodes
    is_scalar = isinstance(likelihood, ScalarLikelihood)
    h = log_p - (log_t if is_scalar else tf.reduce_sum(log_t, -1))
    weights = tf.nn.softmax(log_weights + alpha * h, axis=0)
    if alpha == 1.0:
        value = tf.reduce_logsumexp(log_weights + h, 0)
    else:
        mean, value = mean_and_power_mean(log_weights, h, alpha)
        weights -= (1.0 - alpha) * tf.exp(log_weights)
    if not is_scalar:
        weights, finite = weights[..., None], finite[..., None]
    d_h = tf.where(finite, at.first - slope, tf.zeros_like(nodes))
    found = [
        tf.reduce_sum(weights * d_h, 0),
        tf.reduce_sum(weights * d_h * (nodes - m), 0) / (2.0 * v),
        -tf.reduce_sum(weights * nodes, 0),
        0.5 * tf.reduce_sum(weights * tf.square(nodes), 0),
    ]
    total = tf.reduce_sum(value)
    if alpha < 1.0:
        E = expectation_gradients(likelihood, X, m, v, Y)
        log_site = tf.reduce_sum(expected_log_site(m, v, lambda_1, lambda_2))
        total += (1.0 - alpha) * (tf.reduce_sum(E.value) - log_site - tf.reduce_sum(mean))
        own = (
            E.mean - (lambda_1 - lambda_2 * m),
            E.variance + 0.5 * lambda_2,
            -m,
            0.5 * (tf.square(m) + v),
        )
        found = [x + (1.0 - alpha) * y for x, y in zip(found, own, strict=True)]
    return RatioGradients(total, *found)


def tilted_log_prob(
    likelihood: Likelihood,
    X: Any,
    Y: Any,
    m: tf.Tensor,
    v: tf.Tensor,
    lambda_1: tf.Tensor,
    lambda_2: tf.Tensor,
    alpha: float,
) -> tf.Tensor:
    """A function of the likelihood's parameters with the derivative of ``Σ ℓ_α``, shape ``[]``.

    ``Σ π log p`` with the tilted weights π held constant, where there is no closed form.
    """
    if alpha == 0.0:
        return tf.reduce_sum(variational_expectations(likelihood, X, m, v, Y))
    cav = cavity(m, v, lambda_1, lambda_2, alpha)
    closed_form = log_expected_power(likelihood, X, cav.mean, cav.variance, Y, alpha)
    if closed_form is not None:
        return tf.reduce_sum(closed_form)
    nodes, log_weights = covering_rule(likelihood, m, v, cav)
    nodes, log_p, log_weights = log_prob_and_weights(likelihood, nodes, log_weights, X, Y, m)
    log_t = (lambda_1 - 0.5 * lambda_2 * nodes) * nodes
    h = log_p - (log_t if len(log_p.shape) == 3 else tf.reduce_sum(log_t, -1))
    weights = tf.nn.softmax(log_weights + alpha * h, axis=0)
    if alpha < 1.0:
        weights -= (1.0 - alpha) * tf.exp(log_weights)
    value = tf.reduce_sum(tf.stop_gradient(weights) * log_p)
    if alpha < 1.0:
        expected = variational_expectations(likelihood, X, m, v, Y)
        value += (1.0 - alpha) * tf.reduce_sum(expected)
    return value


def closed_ratio_gradients(
    likelihood: Any, X: Any, Fmu: Any, Fvar: Any, Y: Any, lambda_1: Any, lambda_2: Any
) -> RatioGradients:
    """``ℓ_1`` for a likelihood with ``log_expected_derivatives``, on tensors or arrays.

    By the chain rule through the cavity ``V = v/κ``, ``M = m − sV`` with ``κ = 1 − λ₂v``, ``s = λ₁ − λ₂m``:
    ``∂M = ∂m/κ − s∂v/κ² − V∂λ₁ + MV∂λ₂`` and ``∂V = ∂v/κ² + V²∂λ₂``.
    """
    xp = functions_of(Fmu)
    slope = lambda_1 - lambda_2 * Fmu
    shrinkage = 1.0 - lambda_2 * Fvar
    V = Fvar / shrinkage
    shift = slope * V
    M = Fmu - shift
    value, d_M, d_V = likelihood.log_expected_derivatives(X, M, V, Y)
    # The cavity's scale, log E_q[1/t], and its derivatives.
    scale = (
        -(lambda_1 - 0.5 * lambda_2 * Fmu) * Fmu
        - 0.5 * xp.log1p(-lambda_2 * Fvar)
        + 0.5 * slope * shift
    )
    return RatioGradients(
        xp.sum(value) + xp.sum(scale),
        (d_M - slope) / shrinkage,
        (d_V - d_M * slope + 0.5 * slope * slope) / (shrinkage * shrinkage)
        + 0.5 * lambda_2 / shrinkage,
        -d_M * V - M,
        d_M * M * V + d_V * V * V + 0.5 * M * M + 0.5 * V,
    )
