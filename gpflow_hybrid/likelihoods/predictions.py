"""Predictions of y from those of f: the likelihood's own, or a fixed rule where that is random."""

from __future__ import annotations

import tensorflow as tf
from gpflow.base import MeanAndVariance, TensorType
from gpflow.likelihoods import Likelihood, MonteCarloLikelihood, ScalarLikelihood

from .nodes import (
    NUM_NODES,
    covering_nodes,
    fixed_nodes,
    log_prob_at,
    log_sum_exp,
    weighted_mean,
)
from .ratios import covering_size


def predict_mean_and_var(
    likelihood: Likelihood, X: TensorType, Fmu: tf.Tensor, Fvar: tf.Tensor
) -> MeanAndVariance:
    """``E[y]`` and ``V[y] = E[V[y|f]] + V[E[y|f]]``, ``[batch..., N, P]``, the same for the same q(f)."""
    if not isinstance(likelihood, MonteCarloLikelihood):
        return likelihood.predict_mean_and_var(X, Fmu, Fvar)
    batch = tf.shape(Fmu)[:-1]
    X, Fmu, Fvar = (_rows(x) for x in (tf.convert_to_tensor(X), Fmu, Fvar))
    nodes, log_weights = _nodes(likelihood, Fmu, Fvar)
    Q, N, L = tf.unstack(tf.shape(nodes))
    X_rows = tf.tile(X, [Q, 1])
    at = tf.reshape(nodes, [Q * N, L])
    mean = tf.reshape(likelihood.conditional_mean(X_rows, at), [Q, N, -1])
    variance = tf.reshape(likelihood.conditional_variance(X_rows, at), [Q, N, -1])
    if log_weights.shape.rank < 3:
        log_weights = log_weights[..., None]
    first = weighted_mean(log_weights, mean)
    second = weighted_mean(log_weights, variance + tf.square(mean - first))
    shape = tf.concat([batch, [-1]], 0)
    return tf.reshape(first, shape), tf.reshape(second, shape)


def predict_log_density(
    likelihood: Likelihood, X: TensorType, Fmu: tf.Tensor, Fvar: tf.Tensor, Y: TensorType
) -> tf.Tensor:
    """``log ∫ p(y|f) q(f) df``, ``[batch..., N]``, the same for the same q(f)."""
    if not isinstance(likelihood, MonteCarloLikelihood):
        return likelihood.predict_log_density(X, Fmu, Fvar, Y)
    batch = tf.shape(Fmu)[:-1]
    X, Y = tf.convert_to_tensor(X), tf.convert_to_tensor(Y)
    X, Fmu, Fvar, Y = (_rows(x) for x in (X, Fmu, Fvar, Y))
    nodes, log_weights = _nodes(likelihood, Fmu, Fvar)
    value = log_sum_exp(log_weights + log_prob_at(likelihood, nodes, X, Y))
    if isinstance(likelihood, ScalarLikelihood):
        value = tf.reduce_sum(value, -1)
    return tf.reshape(value, batch)


def num_nodes(likelihood: Likelihood, num_latent: int) -> int:
    """How many values of f a prediction of one y takes."""
    return covering_size(type(likelihood), num_latent)


def _nodes(likelihood: Likelihood, Fmu: tf.Tensor, Fvar: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    if isinstance(likelihood, ScalarLikelihood):
        return covering_nodes(Fmu, Fvar, Fmu, Fvar, NUM_NODES[1])
    return fixed_nodes(Fmu, Fvar)


def _rows(x: tf.Tensor) -> tf.Tensor:
    """``[batch..., N, D]`` as one list of rows."""
    return tf.reshape(x, [-1, x.shape[-1]])
