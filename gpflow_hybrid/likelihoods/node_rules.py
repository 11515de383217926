"""Derivatives of a quadrature, from derivatives of ``log p(y|f)`` at its nodes.

Nodes follow q, ``f = m + √v z`` with constant z and weights w. So the derivatives of ``E = Σ w log p(f)``
are sums over nodes of ``g = ∂log p/∂f`` and ``H = ∂²log p/∂f²``, with ``s = √v``:

    E_m = Σ w g,     E_v = Σ w g z/2s,     E_mm = Σ w H,     E_mv = Σ w H z/2s,
    E_vv = Σ w zᵀHz/4s² − Σ w g z/4s³  (the last on the diagonal)

A likelihood is asked for its density alone: no tape differentiates the quadrature or its derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from gpflow.likelihoods import Likelihood, MonteCarloLikelihood, ScalarLikelihood
from gpflow.likelihoods.base import QuadratureLikelihood
from gpflow.quadrature import NDiagGHQuadrature

from ..namespaces import functions_of
from .nodes import log_prob_at, standard_covering_rule, standard_normal_points

_OWN_QUADRATURE = ("_variational_expectations", "_quadrature_log_prob", "_quadrature_reduction")


class NodeRule(NamedTuple):
    """Nodes ``z [Q, L]`` of N(0, I) and weights ``[Q]``; one of a scalar likelihood serves every latent."""

    z: Any
    weights: Any


class PointDerivatives(NamedTuple):
    """At nodes: ``g [Q, N, L]``, and H's row for each latent, ``[Q, N, L]``; if scalar its diagonal."""

    log_prob: tf.Tensor  # [Q, N, L] for a scalar likelihood, else [Q, N]
    first: tf.Tensor
    second: list[tf.Tensor]


def own_rule(likelihood: Likelihood, num_latent: int, dtype: tf.DType) -> NodeRule | None:
    """The rule by which a likelihood's ``E_q[log p]`` is computed, as arrays; None if not by nodes."""
    kind = dtype.as_numpy_dtype
    if isinstance(likelihood, MonteCarloLikelihood):
        if isinstance(likelihood, ScalarLikelihood):
            return independent_rule(kind)
        z, log_weights = standard_normal_points(num_latent)
        return NodeRule(z.astype(kind), np.exp(log_weights).astype(kind))
    if not isinstance(likelihood, QuadratureLikelihood):
        return None
    base = ScalarLikelihood if isinstance(likelihood, ScalarLikelihood) else QuadratureLikelihood
    is_own = all(getattr(type(likelihood), n) is getattr(base, n) for n in _OWN_QUADRATURE)
    if not is_own or type(likelihood.quadrature) is not NDiagGHQuadrature:
        return None
    Z, dZ = (tf.get_static_value(x) for x in (likelihood.quadrature.Z, likelihood.quadrature.dZ))
    return None if Z is None else NodeRule(Z.astype(kind), dZ[:, 0].astype(kind))


def gauss_hermite_rule(num: int) -> NodeRule:
    """For one latent; exact for polynomials of degree ``2 num − 1``."""
    z, weights = np.polynomial.hermite_e.hermegauss(num)
    return NodeRule(z[:, None], weights / np.sum(weights))


def independent_rule(dtype: Any) -> NodeRule:
    """A fine rule for one latent, whatever the likelihood's own may be."""
    z, weights = standard_covering_rule()
    return NodeRule(z[:, None].astype(dtype), weights.astype(dtype))


def point_derivatives(
    likelihood: Likelihood, X: Any, Y: Any, nodes: tf.Tensor, second: bool
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


AtNodes = Callable[[Any, bool], PointDerivatives]
"""``log p`` and its derivatives at nodes ``[Q, N, L]``, the second ones if they are wanted; of tensors by
:func:`point_derivatives`, of arrays by a :class:`~gpflow_hybrid.likelihoods.densities.Density`."""


def expectation_gradients_by(rule: NodeRule, at_nodes: AtNodes, m: Any, v: Any) -> tuple[Any, ...]:
    """``E [N]``, ``E_m`` and ``E_v`` ``[N, L]``; an outer tape may differentiate once more."""
    xp = functions_of(m)
    w, z, s = rule.weights[:, None], rule.z, xp.sqrt(v)
    at = at_nodes(m + xp.spread(z[:, None], s), False)
    value = xp.tensordot(rule.weights, at.log_prob, 1)
    value = xp.sum(value, -1) if len(at.log_prob.shape) == 3 else value
    E_m, scaled = _sums([w + 0.0 * z, w * z], at.first)
    return value, E_m, scaled / (2.0 * s)


def curvature_by(rule: NodeRule, at_nodes: AtNodes, m: Any, v: Any) -> tuple[Any, ...]:
    """``E_mm``, ``E_mv``, ``E_vm`` and ``E_vv``, ``[N, L, L]``."""
    xp = functions_of(m)
    w, z, s = rule.weights[:, None], rule.z, xp.sqrt(v)
    at = at_nodes(m + xp.spread(z[:, None], s), True)
    own = -_sums([w * z], at.first)[0] / (4.0 * s * v)
    if len(at.log_prob.shape) == 3:
        mm, mv, vv = _sums([w + 0.0 * z, w * z, w * z * z], at.second[0])
        E_mv = diagonal(mv / (2.0 * s))
        return diagonal(mm), E_mv, E_mv, diagonal(vv / (4.0 * v) + own)
    rows = [
        _sums([w + 0.0 * z, w * z, w * z * z[:, k : k + 1]], row) for k, row in enumerate(at.second)
    ]
    mm, mv, vv = (xp.stack(x, axis=1) for x in zip(*rows, strict=True))
    E_mv = mv / (2.0 * s[:, None, :])
    E_vv = vv / (4.0 * s[:, :, None] * s[:, None, :])
    return mm, E_mv, xp.swapped(E_mv), E_vv + diagonal(own)


def _sums(weights: list[Any], x: Any) -> list[Any]:
    """``Σ_q w_q x_q``, ``[N, L]``, for each of several w ``[Q, L]`` or ``[Q, 1]`` and x ``[Q, N, L]``.

    Arrays as they come from their nodes are not copied for it.
    """
    xp = functions_of(x)
    by_latent = np.stack([w.T for w in weights], 1)  # [L, R, Q]
    found = xp.matmul(by_latent, xp.transpose(x, (2, 0, 1)))  # [L, R, N]
    return [xp.transpose(found[:, r]) for r in range(len(weights))]


def diagonal(x: Any) -> Any:
    """``[N, L]`` as diagonal matrices ``[N, L, L]``."""
    return functions_of(x).diagonal_matrix(x)
