"""Expectations ``E_q[log p(yₙ|fₙ)]`` and their derivatives, deterministic for every likelihood.

They are the likelihood's own, as in GPflow; Monte-Carlo likelihoods take a fixed set of points instead
of random ones.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import tensorflow as tf
from gpflow.base import TensorType
from gpflow.likelihoods import Likelihood, MonteCarloLikelihood, ScalarLikelihood

from ..namespaces import functions_of
from .node_rules import expectation_gradients_by, own_rule, point_derivatives
from .nodes import NUM_NODES, covering_nodes, fixed_nodes, log_prob_at, weighted_mean


def variational_expectations(
    likelihood: Likelihood, X: TensorType, Fmu: TensorType, Fvar: TensorType, Y: TensorType
) -> tf.Tensor:
    """``E_q[log p(yₙ|fₙ)]``, ``[N]``: the likelihood's own, or fixed points where that is random."""
    if not isinstance(likelihood, MonteCarloLikelihood):
        return likelihood.variational_expectations(X, Fmu, Fvar, Y)
    if isinstance(likelihood, ScalarLikelihood):
        return _scalar_expectations(likelihood, X, Fmu, Fvar, Y)
    nodes, log_weights = fixed_nodes(Fmu, Fvar)
    return weighted_mean(log_weights, log_prob_at(likelihood, nodes, X, Y))


def has_independent_rule(likelihood: Likelihood) -> bool:
    """Whether the likelihood's own quadrature can be checked by another rule for one latent."""
    return isinstance(likelihood, ScalarLikelihood) and (
        type(likelihood)._variational_expectations is ScalarLikelihood._variational_expectations
    )


def quadrature_error(E: ExpectationGradients, mm: Any, other_mean: Any, v: Any) -> Any:
    """How far expectations are from exact, in units of the posterior, ``v`` and ``√v``, by two symptoms.

    Exact ones obey the heat equation ``∂²E/∂m² = 2 ∂E/∂v``, and their slope ``∂E/∂m`` is that of another
    rule.

    :param mm: ``∂²E/∂m²``, ``[N, L]``.
    :param other_mean: ``∂E/∂m`` by another rule, or None.
    """
    xp = functions_of(v)
    heat = xp.max(xp.abs(mm - 2.0 * E.variance) * v)
    if other_mean is None:
        return heat
    return xp.maximum(heat, xp.max(xp.abs(E.mean - other_mean) * xp.sqrt(v)))


def _scalar_expectations(
    likelihood: ScalarLikelihood, X: TensorType, Fmu: tf.Tensor, Fvar: tf.Tensor, Y: TensorType
) -> tf.Tensor:
    nodes, log_weights = covering_nodes(Fmu, Fvar, Fmu, Fvar, NUM_NODES[1])
    return tf.reduce_sum(weighted_mean(log_weights, log_prob_at(likelihood, nodes, X, Y)), -1)


class ExpectationGradients(NamedTuple):
    """``E_q[log p]`` ``[N]`` and its derivatives in the marginal mean and variance ``[N, L]``."""

    value: tf.Tensor
    mean: tf.Tensor
    variance: tf.Tensor


def expectation_gradients(
    likelihood: Likelihood, X: TensorType, Fmu: TensorType, Fvar: TensorType, Y: TensorType
) -> ExpectationGradients:
    """``E``, ``∂E/∂m`` and ``∂E/∂v``; an outer tape may differentiate all three once more.

    A likelihood that has them together, as ``expectation_derivatives``, is asked for them.
    """
    if hasattr(likelihood, "expectation_derivatives"):
        return ExpectationGradients(*likelihood.expectation_derivatives(X, Fmu, Fvar, Y))
    rule = own_rule(likelihood, Fmu.shape[-1], Fmu.dtype)
    if rule is not None:
        at_nodes = functools.partial(point_derivatives, likelihood, X, Y)
        return ExpectationGradients(*expectation_gradients_by(rule, at_nodes, Fmu, Fvar))
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch((Fmu, Fvar))
        value = variational_expectations(likelihood, X, Fmu, Fvar, Y)
        total = tf.reduce_sum(value)
    d_mean, d_variance = tape.gradient(
        total, (Fmu, Fvar), unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    return ExpectationGradients(value, d_mean, d_variance)


def expected_log_site(
    Fmu: tf.Tensor, Fvar: tf.Tensor, lambda_1: tf.Tensor, lambda_2: tf.Tensor
) -> tf.Tensor:
    """``E_q[log t] = λ₁m − ½λ₂(m² + v)``, ``[N, L]``."""
    return lambda_1 * Fmu - 0.5 * lambda_2 * (Fmu * Fmu + Fvar)
