"""Second derivatives of ``E_q[log p(yₙ|fₙ)]``: what Newton's method on the sites needs of a likelihood."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import tensorflow as tf
from gpflow.likelihoods import Likelihood, ScalarLikelihood

from .expectations import expectation_gradients
from .node_rules import curvature_by, diagonal, own_rule, point_derivatives


class Curvature(NamedTuple):
    """Second derivatives of ``E(m, v)`` per datum, ``[N, L, L]`` each, first index as named first."""

    mm: Any
    mv: Any
    vm: Any
    vv: Any


def curvature(
    likelihood: Likelihood, X: Any, Y: Any, m: Any, v: Any, g2: Any, *, rough: bool = False
) -> Curvature:
    """The Hessian of every datum's ``E_q[log p]`` in its marginal means and variances.

    A likelihood with exact expectations may have it as ``expectation_curvature``, and a cheaper one, good
    enough for a step, with ``rough=True``; exact ones have ``E_mm = 2 E_v``.

    :param g2: ``−2 ∂E/∂v`` at ``(m, v)``, ``[N, L]``.
    """
    if hasattr(likelihood, "expectation_curvature"):
        cheaper = {"rough": True} if rough else {}
        mean_variance, variance_variance = likelihood.expectation_curvature(X, m, v, Y, **cheaper)
        cross = diagonal(mean_variance)
        return Curvature(diagonal(-g2), cross, cross, diagonal(variance_variance))
    rule = own_rule(likelihood, m.shape[-1], m.dtype)
    if rule is not None:
        at_nodes = functools.partial(point_derivatives, likelihood, X, Y)
        return Curvature(*curvature_by(rule, at_nodes, m, v))
    zero = tf.UnconnectedGradients.ZERO
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch((m, v))
        E = expectation_gradients(likelihood, X, m, v, Y)
        if isinstance(likelihood, ScalarLikelihood):  # each latent's derivatives are its own
            sums = [tf.reduce_sum(g) for g in (E.mean, E.variance)]
        else:
            sums = [tf.reduce_sum(g[:, k]) for g in (E.mean, E.variance) for k in range(m.shape[1])]
    rows = [tape.gradient(total, (m, v), unconnected_gradients=zero) for total in sums]
    if isinstance(likelihood, ScalarLikelihood):
        return Curvature(*(tf.linalg.diag(g) for row in rows for g in row))
    L = m.shape[1]
    mm, mv = (tf.stack([r[i] for r in rows[:L]], axis=1) for i in (0, 1))
    vm, vv = (tf.stack([r[i] for r in rows[L:]], axis=1) for i in (0, 1))
    return Curvature(mm, mv, vm, vv)
