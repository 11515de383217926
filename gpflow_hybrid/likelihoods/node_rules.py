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
    z, s = rule.z[:, None, :], xp.sqrt(v)
    at = at_nodes(m + s * z, False)
    value = xp.tensordot(rule.weights, at.log_prob, 1)
    value = xp.sum(value, -1) if len(at.log_prob.shape) == 3 else value
    d_variance = xp.tensordot(rule.weights, at.first * z, 1) / (2.0 * s)
    return value, xp.tensordot(rule.weights, at.first, 1), d_variance


def curvature_by(rule: NodeRule, at_nodes: AtNodes, m: Any, v: Any) -> tuple[Any, ...]:
    """``E_mm``, ``E_mv``, ``E_vm`` and ``E_vv``, ``[N, L, L]``."""
    xp = functions_of(m)

    def total(weights: Any, values: Any) -> Any:
        return xp.tensordot(weights, values, 1)

    w, z, s = rule.weights, rule.z[:, None, :], xp.sqrt(v)
    at = at_nodes(m + s * z, True)
    own = -total(w, at.first * z) / (4.0 * s * v)
    if len(at.log_prob.shape) == 3:
        (H,) = at.second
        mv = diagonal(total(w, H * z) / (2.0 * s))
        vv = total(w, H * z * z) / (4.0 * v) + own
        return diagonal(total(w, H)), mv, mv, diagonal(vv)
    mm, mv, vv = [], [], []
    for k, row in enumerate(at.second):  # [Q, N, L]
        scaled = row * z
        mm.append(total(w, row))
        mv.append(total(w, scaled) / (2.0 * s))
        vv.append(total(w * rule.z[:, k], scaled) / (4.0 * s[:, k : k + 1] * s))
    E_mm, E_mv, E_vv = (xp.stack(rows, axis=1) for rows in (mm, mv, vv))
    return E_mm, E_mv, xp.swapped(E_mv), E_vv + diagonal(own)


def diagonal(x: Any) -> Any:
    """``[N, L]`` as diagonal matrices ``[N, L, L]``."""
    return functions_of(x).diagonal_matrix(x)
