"""Derivatives of a quadrature, from derivatives of ``log p(y|f)`` at its nodes.

Nodes follow q, ``f = m + √v z`` with constant z and weights w. So the derivatives of ``E = Σ w log p(f)``
are sums over nodes of ``g = ∂log p/∂f`` and ``H = ∂²log p/∂f²``, with ``s = √v``:

    E_m = Σ w g,     E_v = Σ w g z/2s,     E_mm = Σ w H,     E_mv = Σ w H z/2s,
    E_vv = Σ w zᵀHz/4s² − Σ w g z/4s³  (the last on the diagonal)

A likelihood is asked for its density alone: no tape differentiates the quadrature or its derivative.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf
from gpflow.likelihoods import Likelihood, MonteCarloLikelihood, ScalarLikelihood
from gpflow.likelihoods.base import QuadratureLikelihood
from gpflow.quadrature import NDiagGHQuadrature

from .nodes import NUM_NODES, covering_nodes, fixed_nodes, log_prob_at

_OWN_QUADRATURE = ("_variational_expectations", "_quadrature_log_prob", "_quadrature_reduction")


class NodeRule(NamedTuple):
    """Nodes ``z [Q, L]`` of N(0, I) and weights ``[Q]``; one of a scalar likelihood serves every latent."""

    z: tf.Tensor
    weights: tf.Tensor


class PointDerivatives(NamedTuple):
    """At nodes: ``g [Q, N, L]``, and H's row for each latent, ``[Q, N, L]``; if scalar its diagonal."""

    log_prob: tf.Tensor  # [Q, N, L] for a scalar likelihood, else [Q, N]
    first: tf.Tensor
    second: list[tf.Tensor]


def own_rule(likelihood: Likelihood, num_latent: int, dtype: tf.DType) -> NodeRule | None:
    """The rule by which a likelihood's ``E_q[log p]`` is computed; None where it is not by nodes."""
    one = tf.ones([1, num_latent], dtype)
    if isinstance(likelihood, MonteCarloLikelihood):
        if isinstance(likelihood, ScalarLikelihood):
            z, log_weights = covering_nodes(
                0.0 * one[:, :1], one[:, :1], 0.0 * one[:, :1], one[:, :1], NUM_NODES[1]
            )
        else:
            z, log_weights = fixed_nodes(0.0 * one, one)
        return NodeRule(z[:, 0], tf.exp(tf.reshape(log_weights, [-1])))
    if not isinstance(likelihood, QuadratureLikelihood):
        return None
    base = ScalarLikelihood if isinstance(likelihood, ScalarLikelihood) else QuadratureLikelihood
    is_own = all(getattr(type(likelihood), n) is getattr(base, n) for n in _OWN_QUADRATURE)
    if not is_own or type(likelihood.quadrature) is not NDiagGHQuadrature:
        return None
    Z, dZ = likelihood.quadrature.Z, likelihood.quadrature.dZ
    return NodeRule(tf.cast(Z, dtype), tf.cast(dZ[:, 0], dtype))


def point_derivatives(
    likelihood: Likelihood, X: Any, Y: Any, nodes: tf.Tensor, *, second: bool
) -> PointDerivatives:
    """``log p`` and its derivatives at nodes ``[Q, N, L]``.

    :param second: whether H is wanted.
    """
    zero = tf.UnconnectedGradients.ZERO
    is_scalar = isinstance(likelihood, ScalarLikelihood)
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as outer:
        outer.watch(nodes)
        with tf.GradientTape(watch_accessed_variables=False) as inner:
            inner.watch(nodes)
            log_prob = log_prob_at(likelihood, nodes, X, Y)
        first = inner.gradient(log_prob, nodes, unconnected_gradients=zero)
        # Every datum's density at a node depends on that node alone.
        rows = [first] if is_scalar else tf.unstack(first, axis=-1)
    if not second:
        return PointDerivatives(log_prob, first, [])
    found = [outer.gradient(row, nodes, unconnected_gradients=zero) for row in rows]
    return PointDerivatives(log_prob, first, found)


def expectation_gradients_by(
    rule: NodeRule, likelihood: Likelihood, X: Any, Y: Any, m: tf.Tensor, v: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """``E [N]``, ``E_m`` and ``E_v`` ``[N, L]``; an outer tape may differentiate once more."""
    z, s = rule.z[:, None, :], tf.sqrt(v)
    at = point_derivatives(likelihood, X, Y, m + s * z, second=False)
    value = _sum(rule.weights, at.log_prob)
    value = tf.reduce_sum(value, -1) if isinstance(likelihood, ScalarLikelihood) else value
    return value, _sum(rule.weights, at.first), _sum(rule.weights, at.first * z) / (2.0 * s)


def curvature_by(
    rule: NodeRule, likelihood: Likelihood, X: Any, Y: Any, m: tf.Tensor, v: tf.Tensor
) -> tuple[tf.Tensor, ...]:
    """``E_mm``, ``E_mv``, ``E_vm`` and ``E_vv``, ``[N, L, L]``."""
    z, s = rule.z[:, None, :], tf.sqrt(v)
    at = point_derivatives(likelihood, X, Y, m + s * z, second=True)
    own = -_sum(rule.weights, at.first * z) / (4.0 * s * v)
    if isinstance(likelihood, ScalarLikelihood):
        (H,) = at.second
        mv = tf.linalg.diag(_sum(rule.weights, H * z) / (2.0 * s))
        vv = _sum(rule.weights, H * tf.square(z)) / (4.0 * v) + own
        return tf.linalg.diag(_sum(rule.weights, H)), mv, mv, tf.linalg.diag(vv)
    mm, mv, vv = [], [], []
    for k, row in enumerate(at.second):  # [Q, N, L]
        scaled = row * z
        mm.append(_sum(rule.weights, row))
        mv.append(_sum(rule.weights, scaled) / (2.0 * s))
        vv.append(_sum(rule.weights * rule.z[:, k], scaled) / (4.0 * s[:, k : k + 1] * s))
    E_mm, E_mv, E_vv = (tf.stack(rows, axis=1) for rows in (mm, mv, vv))
    return E_mm, E_mv, tf.linalg.matrix_transpose(E_mv), E_vv + tf.linalg.diag(own)


def _sum(weights: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """``Σ_q w_q x_q`` over the leading axis."""
    return tf.tensordot(weights, values, 1)
