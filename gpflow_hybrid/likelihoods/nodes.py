"""Deterministic quadrature under q(fₙ): where to evaluate ``log p(y|f)``, and with which weights."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import scipy.stats
import tensorflow as tf
from gpflow.base import AnyNDArray, TensorType
from gpflow.likelihoods import Likelihood, ScalarLikelihood

from ..namespaces import functions_of

NUM_NODES = {1: 121, 2: 41}
"""Nodes per latent of the quadrature that covers q and cavity."""

NUM_HERMITE_POINTS = {1: 40, 2: 20, 3: 12}
"""Gauss–Hermite points per latent that replace Monte Carlo."""

NUM_SOBOL_POINTS = 1024
"""Points that replace Monte Carlo where a product rule would be too large."""

WINDOW = 9.0
"""Half-width of the quadrature's window, in standard deviations of q and of the cavity."""


def log_prob_at(
    likelihood: Likelihood, nodes: tf.Tensor, X: TensorType, Y: TensorType
) -> tf.Tensor:
    """``log p(y|f)`` at nodes ``[Q, N, L]``: ``[Q, N, L]`` for scalar likelihoods, else ``[Q, N]``.

    Nodes and data become one list of rows, since some likelihoods of GPflow accept nothing else.
    """
    Q, N, L = tf.unstack(tf.shape(nodes))
    rows = tf.reshape(nodes, [Q * N, L])
    X_rows, Y_rows = (tf.tile(tf.convert_to_tensor(a), [Q, 1]) for a in (X, Y))
    if isinstance(likelihood, ScalarLikelihood):
        return tf.reshape(likelihood._scalar_log_prob(X_rows, rows, Y_rows), [Q, N, L])
    return tf.reshape(likelihood.log_prob(X_rows, rows, Y_rows), [Q, N])


def log_prob_and_weights(
    likelihood: Likelihood,
    nodes: tf.Tensor,
    log_weights: tf.Tensor,
    X: TensorType,
    Y: TensorType,
    Fmu: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Nodes, ``log p`` there and weights, without the far nodes where ``log p`` overflows.

    Such a node (``exp(f)`` at f = 1000, say) has p = 0. It moves to the mean with weight zero, so
    that neither the value nor the gradient meets an infinity.
    """
    overflow = ~tf.math.is_finite(log_prob_at(likelihood, tf.stop_gradient(nodes), X, Y))
    node_overflow = overflow if len(overflow.shape) == 3 else overflow[..., None]
    nodes = tf.where(node_overflow, tf.broadcast_to(Fmu, tf.shape(nodes)), nodes)
    log_weights = tf.where(
        overflow,
        tf.constant(-np.inf, nodes.dtype),
        log_weights + tf.zeros_like(overflow, nodes.dtype),
    )
    return nodes, log_prob_at(likelihood, nodes, X, Y), log_weights


def covering_nodes(
    Fmu: Any, Fvar: Any, cavity_mean: Any, cavity_variance: Any, num: int
) -> tuple[Any, Any]:
    """Nodes ``[num, N, L]`` and log weights of q that also resolve the cavity, which may be much wider.

    ``f = m + √v sinh(u)`` with the trapezoidal rule in u: spacing grows from q's scale to the
    cavity's, and the rule converges exponentially for integrands that decay at both ends.
    """
    xp = functions_of(Fmu)
    s = xp.sqrt(Fvar)
    reach = (xp.abs(cavity_mean - Fmu) + WINDOW * xp.sqrt(cavity_variance)) / s
    end = xp.asinh(xp.maximum(reach, WINDOW))
    steps = xp.asarray(np.linspace(-1.0, 1.0, num)[:, None, None], dtype=s.dtype)
    u = xp.stop_gradient(xp.spread(steps, end))
    z = xp.sinh(u)
    log_weights = -0.5 * z * z + xp.log(xp.cosh(u))
    return Fmu + s * z, log_weights - log_sum_exp(log_weights)


@functools.cache
def standard_covering_rule() -> tuple[AnyNDArray, AnyNDArray]:
    """The same for N(0, 1) alone: nodes and weights ``[num]``."""
    zero, one = np.zeros((1, 1)), np.ones((1, 1))
    z, log_weights = covering_nodes(zero, one, zero, one, NUM_NODES[1])
    return z[:, 0, 0], np.exp(log_weights[:, 0, 0])


def product_rule(nodes: Any, log_weights: Any) -> tuple[Any, Any]:
    """The product rule of two one-dimensional ones, ``[Q, N, 2] → [Q², N, 2], [Q², N]``."""
    xp = functions_of(nodes)
    Q = nodes.shape[0]
    i, j = (np.ravel(a) for a in np.meshgrid(np.arange(Q), np.arange(Q), indexing="ij"))
    pair = [xp.rows(nodes[..., 0], i), xp.rows(nodes[..., 1], j)]
    weight = xp.rows(log_weights[..., 0], i) + xp.rows(log_weights[..., 1], j)
    return xp.latents(pair), weight


@functools.cache
def standard_normal_points(num_latent: int) -> tuple[AnyNDArray, AnyNDArray]:
    """Points ``[Q, L]`` and log weights ``[Q]`` for N(0, I): a Gauss–Hermite product, or Sobol points."""
    if num_latent in NUM_HERMITE_POINTS:
        return hermite_product(num_latent, NUM_HERMITE_POINTS[num_latent])
    return mirrored_points(num_latent, NUM_SOBOL_POINTS)


@functools.cache
def mirrored_points(num_latent: int, num: int) -> tuple[AnyNDArray, AnyNDArray]:
    """Sobol points of N(0, I) ``[num, L]`` with their mirror images, and log weights ``[num]``."""
    half = scipy.stats.qmc.MultivariateNormalQMC(
        np.zeros(num_latent), seed=np.random.default_rng(0)
    ).random(num // 2)
    # Odd moments are exact.
    points = np.concatenate([half, -half])
    points = points / np.sqrt(np.mean(points**2, axis=0))
    return np.asfortranarray(points), np.full(len(points), -np.log(len(points)))


def hermite_product(num_latent: int, num: int) -> tuple[AnyNDArray, AnyNDArray]:
    """A Gauss–Hermite product rule for N(0, I): points ``[num^L, L]`` and log weights."""
    x, w = np.polynomial.hermite_e.hermegauss(num)
    points = np.stack(np.meshgrid(*[x] * num_latent, indexing="ij"), -1)
    weights = functools.reduce(np.multiply.outer, [w / w.sum()] * num_latent)
    return np.asfortranarray(points.reshape(-1, num_latent)), np.log(weights.ravel())


def fixed_nodes(Fmu: Any, Fvar: Any) -> tuple[Any, Any]:
    """A fixed rule for q: nodes ``[Q, N, L]`` and log weights ``[Q, 1]``."""
    xp = functions_of(Fmu)
    points, log_weights = standard_normal_points(int(Fmu.shape[-1]))
    z = xp.asarray(points[:, None, :], dtype=Fmu.dtype)
    return Fmu + xp.spread(z, xp.sqrt(Fvar)), xp.asarray(log_weights[:, None], dtype=Fmu.dtype)


def weighted_mean(log_weights: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """``Σ_j w_j values_j`` over the leading axis."""
    return tf.reduce_sum(tf.exp(log_weights) * values, 0)


def log_sum_exp(x: Any) -> Any:
    """``log Σ_j exp x_j`` over the leading axis."""
    return normalised(x)[1]


def normalised(x: Any) -> tuple[Any, Any]:
    """``exp(x_j) / Σ exp x`` over the leading axis, and ``log Σ exp x``."""
    xp = functions_of(x)
    largest = xp.stop_gradient(xp.max(x, 0))
    largest = xp.where(xp.isfinite(largest), largest, 0.0)
    weights = xp.exp(x - largest)
    total = xp.sum(weights, 0)
    return weights / total, xp.log(total) + largest


def mean_and_power_mean(log_weights: Any, h: Any, alpha: float) -> tuple[Any, Any]:
    """``h̄ = Σ_j w_j h_j`` and ``(1/α) log Σ_j w_j exp(αh_j) ≥ h̄``, well conditioned as α → 0."""
    xp = functions_of(h)
    weights = xp.exp(log_weights)
    h_bar = xp.sum(weights * h, 0)
    u = alpha * (h - h_bar)
    direct = log_sum_exp(log_weights + alpha * h) / alpha
    # Near h̄: log1p of Σ w (eᵘ − 1), each term without cancellation. Elsewhere h̄ may be so large that
    # a difference from it has no digits left.
    small = xp.abs(u) < 1.0
    terms = xp.where(
        small,
        weights * xp.expm1(xp.where(small, u, 0.0)),
        xp.exp(xp.minimum(log_weights + u, 1.0)) - weights,
    )
    near = alpha * (direct - h_bar) < 0.5
    total = xp.where(near, xp.sum(terms, 0), 0.0)
    return h_bar, xp.where(near, h_bar + xp.log1p(total) / alpha, direct)
