"""Sites that give q the posterior's own width, for all settings at once.

Annealing may start at any q, but not every q makes a good start: that of variational inference is
narrower than the posterior, and chains that begin inside do not reach its rim in any reasonable
number of steps. Matching moments (parallel, damped expectation propagation) gives a q that covers
it. Nothing depends on its convergence: the best sites seen are taken.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tensorflow as tf
from gpflow.likelihoods import Likelihood

from ..compilation import call_compiled
from ..likelihoods.ratios import log_expected_ratio
from .bases import Prior, marginal_variance, site_base

MAX_STEPS = 60
TOLERANCE = 1e-3
"""Residual, in units of the posterior, at which a better q is not worth a step."""

SHORTEST_STEP = 0.02
USABLE_RESIDUAL = 1.0
"""Residual above which the sites are not called matched."""


class MatchedSites(NamedTuple):
    """Sites of every setting, ``[G, L, N]``, and whether they are of any use, ``[G]``."""

    lambda_1: tf.Tensor
    lambda_2: tf.Tensor
    usable: tf.Tensor


def match_moments(likelihood: Likelihood, X: tf.Tensor, Y: tf.Tensor, prior: Prior) -> MatchedSites:
    """Sites whose q has the mean and variance of ``q(f) p(yₙ|f) / tₙ(f)`` at every datum."""

    def compiled(
        likelihood: Likelihood, X: tf.Tensor, Y: tf.Tensor, *prior: tf.Tensor
    ) -> MatchedSites:
        return _match(likelihood, X, Y, Prior(*prior))

    return MatchedSites(
        *call_compiled(likelihood, ("evidence", "match_moments"), compiled, X, Y, *prior)
    )


class _Step(NamedTuple):
    """What one evaluation of the sites says, ``[G, L, N]`` and ``[G]``."""

    target_1: tf.Tensor
    target_2: tf.Tensor
    residual: tf.Tensor  # infinite where there is no valid q


def _match(likelihood: Likelihood, X: tf.Tensor, Y: tf.Tensor, prior: Prior) -> MatchedSites:
    dtype = prior.mean.dtype
    zeros = tf.zeros_like(prior.mean)
    ones = tf.ones_like(zeros[:, 0, 0])
    infinity = tf.constant(np.inf, dtype)

    def unfinished(i: tf.Tensor, *state: tf.Tensor) -> tf.Tensor:
        best_residual = state[-1]
        return (i < MAX_STEPS) & tf.reduce_any(best_residual > TOLERANCE)

    def body(i: tf.Tensor, *state: tf.Tensor) -> tuple[tf.Tensor, ...]:
        lambda_1, lambda_2, length, best_1, best_2, best_residual = state
        step = _evaluate(likelihood, X, Y, prior, lambda_1, lambda_2)
        # A setting that has arrived stays: it is what it would be without the others.
        better = (step.residual < best_residual) & (best_residual > TOLERANCE)
        take = better[:, None, None]
        best_1, best_2 = tf.where(take, lambda_1, best_1), tf.where(take, lambda_2, best_2)
        # Steps lengthen while they help; after a bad one, back towards the best with shorter ones.
        length = tf.where(better, tf.minimum(1.1 * length, 1.0), 0.7 * length)
        length = tf.maximum(length, SHORTEST_STEP)
        valid = tf.math.is_finite(step.residual)[:, None, None]
        rho = length[:, None, None]
        new_1 = tf.where(
            valid, lambda_1 + rho * (step.target_1 - lambda_1), 0.5 * (lambda_1 + best_1)
        )
        new_2 = tf.where(
            valid, lambda_2 + rho * (step.target_2 - lambda_2), 0.5 * (lambda_2 + best_2)
        )
        best_residual = tf.where(better, step.residual, best_residual)
        return i + 1, new_1, new_2, length, best_1, best_2, best_residual

    start = (zeros, zeros, ones, zeros, zeros, infinity * ones)
    *_, best_1, best_2, residual = tf.while_loop(unfinished, body, (tf.constant(0), *start))
    return MatchedSites(best_1, best_2, residual < USABLE_RESIDUAL)


def _evaluate(
    likelihood: Likelihood,
    X: tf.Tensor,
    Y: tf.Tensor,
    prior: Prior,
    lambda_1: tf.Tensor,
    lambda_2: tf.Tensor,
) -> _Step:
    base = site_base(prior, lambda_1, lambda_2)
    variance = tf.broadcast_to(marginal_variance(base), tf.shape(base.mean))
    mean, second = tilted_moments(likelihood, X, Y, base.mean, variance, lambda_1, lambda_2)
    tilted_variance = second - tf.square(mean)
    # New site = tilted / cavity, in natural parameters.
    target_2 = 1.0 / tilted_variance - (1.0 / variance - lambda_2)
    target_1 = mean / tilted_variance - (base.mean / variance - lambda_1)
    slope = (target_1 - target_2 * base.mean) - (lambda_1 - lambda_2 * base.mean)
    residual = tf.maximum(tf.abs(target_2 - lambda_2) * variance, tf.abs(slope) * tf.sqrt(variance))
    valid = (tilted_variance > 0.0) & tf.math.is_finite(residual) & (variance > 0.0)
    residual = tf.where(valid, residual, tf.constant(np.inf, residual.dtype))
    return _Step(target_1, target_2, tf.reduce_max(residual, [1, 2]))


def tilted_moments(
    likelihood: Likelihood,
    X: tf.Tensor,
    Y: tf.Tensor,
    mean: tf.Tensor,
    variance: tf.Tensor,
    lambda_1: tf.Tensor,
    lambda_2: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
    """``E[f]`` and ``E[f²]`` under ``q(f) p(y|f) / t(f)``, all arguments ``[G, L, N]``.

    Derivatives of ``log E_q[p/t]`` in the site's parameters: ``∂/∂λ₁ = −E[f]``, ``∂/∂λ₂ = ½E[f²]``.
    """
    G, L, N = tf.unstack(tf.shape(mean))

    def rows(x: tf.Tensor) -> tf.Tensor:  # [GN, L]
        x_rows = tf.reshape(tf.transpose(x, [0, 2, 1]), tf.stack([G * N, L]))
        x_rows.set_shape([None, mean.shape[1]])
        return x_rows

    def back(x: tf.Tensor) -> tf.Tensor:  # [G, L, N]
        return tf.transpose(tf.reshape(x, tf.stack([G, N, L])), [0, 2, 1])

    X_rows, Y_rows = (tf.tile(d, tf.stack([G, 1])) for d in (X, Y))
    sites = rows(lambda_1), rows(lambda_2)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(sites)
        value = log_expected_ratio(
            likelihood, X_rows, rows(mean), rows(variance), Y_rows, *sites, 1.0
        )
        total = tf.reduce_sum(value)
    d_1, d_2 = tape.gradient(total, sites, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return -back(d_1), 2.0 * back(d_2)
