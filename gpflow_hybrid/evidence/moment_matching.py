"""Sites that give q the posterior's own width.

Annealing may start at any q, but not every q makes a good start: that of variational inference is
narrower than the posterior, and chains that begin inside do not reach its rim in any reasonable
number of steps. Matching moments (parallel, damped expectation propagation) gives a q that covers
it. Nothing depends on its convergence: the best sites seen are taken.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tensorflow as tf
from gpflow.likelihoods import Likelihood, ScalarLikelihood

from ..compilation import call_compiled
from ..inference.propagation import propagate
from ..inference.servers import run
from ..likelihoods.ratios import log_expected_ratio
from ..priors import DensePrior
from ..sites import SiteValues
from .bases import Base, FactoredPrior, marginal_variance, rows, site_base

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


def match_moments(
    likelihood: Likelihood, X: tf.Tensor, Y: tf.Tensor, prior: FactoredPrior
) -> MatchedSites:
    """Sites whose q has the mean and variance of ``q(f) p(yₙ|f) / tₙ(f)`` at every datum."""
    if isinstance(likelihood, ScalarLikelihood):
        return _propagated(likelihood, X, Y, prior)
    key = ("evidence", "match_moments")
    return call_compiled(likelihood, key, _match, X, Y, *prior)


def _propagated(
    likelihood: Likelihood, X: tf.Tensor, Y: tf.Tensor, prior: FactoredPrior
) -> MatchedSites:
    """By :class:`~gpflow_hybrid.EPModel`'s iteration, one setting after the other."""
    found = []
    for mean, chol in zip(prior.mean.numpy(), prior.chol.numpy(), strict=True):
        host = DensePrior(chol @ chol.swapaxes(-1, -2), np.ascontiguousarray(mean.T))
        start = SiteValues(*np.zeros((2, *host.mean.shape), mean.dtype))
        found.append(run(propagate(1.0, host, start, TOLERANCE, MAX_STEPS), likelihood, (X, Y)))
        host.close()
    lambda_1, lambda_2 = (
        tf.constant(np.stack([x.T for x in part]))
        for part in zip(*(solution.sites for solution in found), strict=True)
    )
    usable = [bool(x.has_started and x.residual < USABLE_RESIDUAL) for x in found]
    return MatchedSites(lambda_1, lambda_2, tf.constant(usable))


class _Step(NamedTuple):
    """What one evaluation of the sites says, ``[G, L, N]`` and ``[G]``."""

    target_1: tf.Tensor
    target_2: tf.Tensor
    residual: tf.Tensor  # infinite where there is no valid q


def _match(
    likelihood: Likelihood, X: tf.Tensor, Y: tf.Tensor, prior_mean: tf.Tensor, chol: tf.Tensor
) -> MatchedSites:
    prior = FactoredPrior(prior_mean, chol)
    zeros = tf.zeros_like(prior_mean)
    ones = tf.ones_like(zeros[:, 0, 0])

    def unfinished(i: tf.Tensor, *state: tf.Tensor) -> tf.Tensor:
        best_residual = state[-1]
        return (i < MAX_STEPS) & tf.reduce_any(best_residual > TOLERANCE)

    def body(i: tf.Tensor, *state: tf.Tensor) -> tuple[tf.Tensor, ...]:
        lambda_1, lambda_2, length, best_1, best_2, best_residual = state
        step = _evaluate(likelihood, X, Y, site_base(prior, lambda_1, lambda_2))
        # A setting that has arrived stays: it is what it would be without the others.
        better = (step.residual < best_residual) & (best_residual > TOLERANCE)
        take = better[:, None, None]
        best_1, best_2 = tf.where(take, lambda_1, best_1), tf.where(take, lambda_2, best_2)
        # Steps lengthen while they help; after a bad one, back towards the best with shorter ones.
        length = tf.where(better, tf.minimum(1.1 * length, 1.0), 0.7 * length)
        length = tf.maximum(length, SHORTEST_STEP)
        valid = tf.math.is_finite(step.residual)[:, None, None]
        rho = length[:, None, None]

        def moved(x: tf.Tensor, target: tf.Tensor, best: tf.Tensor) -> tf.Tensor:
            return tf.where(valid, x + rho * (target - x), 0.5 * (x + best))

        new_1 = moved(lambda_1, step.target_1, best_1)
        new_2 = moved(lambda_2, step.target_2, best_2)
        best_residual = tf.where(better, step.residual, best_residual)
        return i + 1, new_1, new_2, length, best_1, best_2, best_residual

    start = (zeros, zeros, ones, zeros, zeros, np.inf * ones)
    *_, best_1, best_2, residual = tf.while_loop(unfinished, body, (tf.constant(0), *start))
    return MatchedSites(best_1, best_2, residual < USABLE_RESIDUAL)


def _evaluate(likelihood: Likelihood, X: tf.Tensor, Y: tf.Tensor, base: Base) -> _Step:
    lambda_1, lambda_2 = base.lambda_1, base.lambda_2
    variance = tf.broadcast_to(marginal_variance(base), tf.shape(base.mean))
    mean, second = tilted_moments(likelihood, X, Y, base, variance)
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
    likelihood: Likelihood, X: tf.Tensor, Y: tf.Tensor, base: Base, variance: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """``E[f]`` and ``E[f²]`` under ``q(f) p(y|f) / t(f)``, ``[G, L, N]`` as the variance of q.

    Derivatives of ``log E_q[p/t]`` in the site's parameters: ``∂/∂λ₁ = −E[f]``, ``∂/∂λ₂ = ½E[f²]``.
    """
    G, L, N = tf.unstack(tf.shape(variance))
    X_rows, Y_rows = (tf.tile(d, tf.stack([G, 1])) for d in (X, Y))
    sites = rows(base.lambda_1), rows(base.lambda_2)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(sites)
        value = log_expected_ratio(
            likelihood, X_rows, rows(base.mean), rows(variance), Y_rows, *sites, 1.0
        )
        total = tf.reduce_sum(value)
    gradients = tape.gradient(total, sites, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    d_1, d_2 = (tf.transpose(tf.reshape(g, tf.stack([G, N, L])), [0, 2, 1]) for g in gradients)
    return -d_1, 2.0 * d_2
