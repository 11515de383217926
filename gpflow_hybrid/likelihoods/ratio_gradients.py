"""Derivatives of the ratios of likelihood and site, for the total gradient of the power-EP family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf
from gpflow.likelihoods import Likelihood

from ..namespaces import functions_of
from .expectations import expectation_gradients, expected_log_site
from .node_rules import PointDerivatives, point_derivatives
from .ratios import cavity, covering_rule, log_expected_power, log_expected_ratio, tilting


class RatioGradients(NamedTuple):
    """``ℓ = Σ (1/α) log E_q[(p/t)^α]`` and its derivatives, ``[N, L]``."""

    value: Any
    m: Any
    v: Any
    lambda_1: Any
    lambda_2: Any


class ParameterGradients(NamedTuple):
    """Derivatives in all numbers that a likelihood's parameters are made of, in a row, ``[P]``."""

    in_a_row: Any


def ratio_gradients(
    likelihood: Likelihood,
    X: Any,
    Y: Any,
    m: tf.Tensor,
    v: tf.Tensor,
    lambda_1: tf.Tensor,
    lambda_2: tf.Tensor,
    alpha: float,
    blend: bool = True,
) -> RatioGradients:
    """``Σ ℓ_α`` and its derivatives; by quadrature, sums over nodes ``f = m + √v z`` that follow q.

    With ``h = log p − log t`` and the tilted weights ``π ∝ w exp(αh)``, ``∂ℓ_α = Σ π ∂h``; for α < 1 there
    is also what :func:`log_expected_ratio` blends in, if it shall.
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
    rule = covering_rule(type(likelihood), m, v, cav)
    at = point_derivatives(likelihood, X, Y, rule[0], False)
    E = expectation_gradients(likelihood, X, m, v, Y) if blend and alpha < 1.0 else None
    return ratio_gradients_by(rule, at, (m, v, lambda_1, lambda_2), alpha, E)


def ratio_gradients_by(
    rule: tuple[Any, Any], at: PointDerivatives, arguments: tuple[Any, ...], alpha: float, E: Any
) -> RatioGradients:
    """``Σ ℓ_α`` and its derivatives in m, v, λ₁ and λ₂ by nodes, of tensors or arrays.

    :param E: the likelihood's own expectations, which are blended in for α < 1; None without them.
    """
    m, v, lambda_1, lambda_2 = arguments
    nodes, log_weights = rule
    xp = functions_of(m)
    weights, value, mean, finite = tilting(
        nodes, log_weights, at.log_prob, lambda_1, lambda_2, alpha, E is not None
    )
    if len(weights.shape) == 2:
        weights, finite = weights[..., None], finite[..., None]
    d_h = weights * xp.where(finite, at.first - (lambda_1 - lambda_2 * nodes), 0.0)
    of_nodes = weights * nodes
    found = [
        xp.sum(d_h, 0),
        xp.sum(d_h * (nodes - m), 0) / (2.0 * v),
        -xp.sum(of_nodes, 0),
        0.5 * xp.sum(of_nodes * nodes, 0),
    ]
    total = xp.sum(value)
    if E is not None:
        log_site = xp.sum(expected_log_site(m, v, lambda_1, lambda_2))
        total += (1.0 - alpha) * (xp.sum(E.value) - log_site - xp.sum(mean))
        own = (
            E.mean - (lambda_1 - lambda_2 * m),
            E.variance + 0.5 * lambda_2,
            -m,
            0.5 * (m * m + v),
        )
        found = [x + (1.0 - alpha) * y for x, y in zip(found, own, strict=True)]
    return RatioGradients(total, *found)


def closed_ratio_gradients(
    log_expected: Callable[[Any, Any], tuple[Any, Any, Any] | None],
    arguments: tuple[Any, ...],
    alpha: float = 1.0,
) -> RatioGradients | None:
    """``Σ ℓ_α`` and its derivatives in m, v, λ₁ and λ₂ from a closed form, on tensors or arrays.

    By the chain rule through the cavity ``V = v/κ``, ``M = m − αsV``, with ``κ = 1 − αλ₂v`` and
    ``s = λ₁ − λ₂m``: ``∂M = ∂m/κ − αs∂v/κ² − αV∂λ₁ + αMV∂λ₂`` and ``∂V = ∂v/κ² + αV²∂λ₂``.

    :param log_expected: ``(1/α) log E_N(f; M, V)[p^α]`` and its derivatives in M and V, ``[N, L]``; where
        that is None so is the result.
    """
    m, v, lambda_1, lambda_2 = arguments
    M, V, log_scale = cavity(m, v, lambda_1, lambda_2, alpha)
    found = log_expected(M, V)
    if found is None:
        return None
    value, d_M, d_V = found
    xp = functions_of(m)
    slope, shrinkage = lambda_1 - lambda_2 * m, 1.0 - alpha * lambda_2 * v
    return RatioGradients(
        xp.sum(value) + xp.sum(log_scale),
        (d_M - slope) / shrinkage,
        (d_V - alpha * slope * (d_M - 0.5 * slope)) / (shrinkage * shrinkage)
        + 0.5 * lambda_2 / shrinkage,
        -alpha * d_M * V - M,
        alpha * V * (d_M * M + d_V * V) + 0.5 * M * M + 0.5 * V,
    )
