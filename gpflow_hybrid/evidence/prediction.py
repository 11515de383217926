"""Predictive densities from samples of the posterior."""

from __future__ import annotations

import tensorflow as tf
from gpflow.likelihoods import Likelihood

from .. import tuning
from ..compilation import call_compiled
from ..likelihoods.ratios import log_expected_ratio
from .bases import rows
from .settings import PriorAndTest


def predictive_log_densities(
    likelihood: Likelihood,
    X: tf.Tensor,
    Y: tf.Tensor,
    conditional: PriorAndTest,
    f: tf.Tensor,
) -> tf.Tensor:
    """``log p(y*|f) = log ∫ N(f*; μ* + k*ᵀK⁻¹(f − μ₀), v*) p(y*|f*) df*``, ``[G, C, N*]``.

    :param f: samples at the data, ``[G, L, C, N]``.
    """
    mean = conditional.test_mean[:, :, None] + tf.matmul(
        f - conditional.prior.mean[:, :, None], conditional.weights
    )
    variance = tf.broadcast_to(conditional.variance[:, :, None], tf.shape(mean))
    G, _, C, N = mean.shape
    size = max(1, tuning.PREDICTED_INTEGRALS // (G * N))
    parts = []
    for first in range(0, C, size):
        moments = (x[:, :, first : first + size] for x in (mean, variance))
        key = ("evidence", "test")
        parts.append(call_compiled(likelihood, key, _log_densities, X, Y, *moments))
    return tf.concat(parts, axis=1)


def _log_densities(
    likelihood: Likelihood, X: tf.Tensor, Y: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor
) -> tf.Tensor:
    G, _, C, N = tf.unstack(tf.shape(mean))
    X_rows, Y_rows = (tf.tile(d, tf.stack([G * C, 1])) for d in (X, Y))
    Fmu, Fvar = rows(mean), rows(variance)  # [GCN*, L]
    no_sites = tf.zeros_like(Fmu)
    value = log_expected_ratio(likelihood, X_rows, Fmu, Fvar, Y_rows, no_sites, no_sites, 1.0)
    return tf.reshape(value, tf.stack([G, C, N]))
