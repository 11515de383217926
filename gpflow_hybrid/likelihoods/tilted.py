"""Moments of the tilted distributions ``q(f) (p(y|f)/t(f))^α``, which expectation propagation matches.

With ``z(m₋, v₋) = E[p^α]`` under the cavity ``q/t^α = N(m₋, v₋)``, ``d₁ = ∂log z/∂m₋`` and
``d₂ = −∂²log z/∂m₋²`` the site whose α-th power takes the cavity to the tilted moments is

    λ₂ = (1/α) d₂ / (1 − v₋d₂),     λ₁ = (1/α) (d₁ + m₋d₂) / (1 − v₋d₂).

Where z has no closed form the moments are sums over nodes that cover q and the cavity. For scalar
likelihoods only: there each latent of a datum has a factor of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf
from gpflow.base import TensorType
from gpflow.likelihoods import ScalarLikelihood

from .nodes import NUM_NODES, covering_nodes, log_prob_and_weights, mean_and_power_mean
from .ratios import cavity, log_expected_power

SMALLEST_SHRINKAGE = 1e-2
"""Smallest tilted variance, as part of q's, that nodes placed for q can resolve."""


class TiltedSites(NamedTuple):
    """What a tilted distribution says about its site, seen from q; ``[N, L]`` but for the first."""

    log_ratio: tf.Tensor  # (1/α) log E_q[(p/t)^α]   [N]
    slope: tf.Tensor  # λ₁ − λ₂m of the matching site
    precision: tf.Tensor  # λ₂ of the matching site


def tilted_sites(
    likelihood: ScalarLikelihood,
    X: TensorType,
    Fmu: tf.Tensor,
    Fvar: tf.Tensor,
    Y: TensorType,
    lambda_1: tf.Tensor,
    lambda_2: tf.Tensor,
    alpha: float,
    num_nodes: int = NUM_NODES[1],
) -> TiltedSites:
    """The sites that match the tilted moments, and the normalisers of the tilted distributions."""
    cav = cavity(Fmu, Fvar, lambda_1, lambda_2, alpha)
    with tf.GradientTape(watch_accessed_variables=False) as outer:
        outer.watch(cav.mean)
        with tf.GradientTape(watch_accessed_variables=False) as inner:
            inner.watch(cav.mean)
            closed_form = log_expected_power(likelihood, X, cav.mean, cav.variance, Y, alpha)
        if closed_form is not None:
            first = inner.gradient(closed_form, cav.mean)  # d₁/α
    if closed_form is not None:
        d1, d2 = alpha * first, -alpha * outer.gradient(first, cav.mean)
        tilted_part = 1.0 - cav.variance * d2  # tilted variance / v₋
        return TiltedSites(
            closed_form + tf.reduce_sum(cav.log_scale_over_alpha, -1),
            (d1 + (cav.mean - Fmu) * d2) / (alpha * tilted_part),
            d2 / (alpha * tilted_part),
        )

    nodes, log_weights = covering_nodes(Fmu, Fvar, cav.mean, cav.variance, num_nodes)
    nodes, log_p, log_weights = log_prob_and_weights(likelihood, nodes, log_weights, X, Y, Fmu)
    h = log_p - (lambda_1 - 0.5 * lambda_2 * nodes) * nodes  # log p − log t, [Q, N, L]
    value = mean_and_power_mean(log_weights, h, alpha)[1]
    weights = tf.nn.softmax(log_weights + alpha * h, axis=0)
    shift = tf.reduce_sum(weights * (nodes - Fmu), 0)
    variance = tf.reduce_sum(weights * tf.square(nodes - Fmu - shift), 0)
    variance = tf.maximum(variance, SMALLEST_SHRINKAGE * Fvar)
    # t^α moves by the difference of natural parameters of the tilted distribution and of q.
    return TiltedSites(
        tf.reduce_sum(value + 0.0 * cav.variance, -1),
        lambda_1 - lambda_2 * Fmu + shift / (alpha * variance),
        lambda_2 + (1.0 / variance - 1.0 / Fvar) / alpha,
    )


def mismatch_under_finer_rule(
    alpha: float, likelihood: ScalarLikelihood, X: TensorType, Y: TensorType, *at: tf.Tensor
) -> tf.Tensor:
    """How far the sites that match at m, v, λ₁ and λ₂ move under a finer rule, in the posterior's units."""
    m, v, lambda_1, lambda_2 = at
    coarse, fine = (
        tilted_sites(likelihood, X, m, v, Y, lambda_1, lambda_2, alpha, num_nodes)
        for num_nodes in (NUM_NODES[1], 4 * NUM_NODES[1] + 1)
    )
    return tf.maximum(
        tf.reduce_max(tf.abs(coarse.precision - fine.precision) * v),
        tf.reduce_max(tf.abs(coarse.slope - fine.slope) * tf.sqrt(v)),
    )
