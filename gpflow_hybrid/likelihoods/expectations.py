"""Expectations of a likelihood under q(fₙ), deterministic for every likelihood.

GPflow's likelihoods give ``E_q[log p]``; the power-EP family also needs, for sites
``t(f) = exp(λ₁f − ½λ₂f²)`` and ``0 < α ≤ 1``,

    ℓ_α(q, t) = (1/α) log E_q[(p(y|f) / t(f))^α],     ℓ_0 = E_q[log p − log t].

Three roads lead there, the first that fits is taken:

1. a closed form of ``(1/α) log E_N[p^α]`` under the cavity ``q/t^α`` (:func:`log_expected_power`);
2. a quadrature that covers q and the cavity at once, for likelihoods with one or two latents:
   ``E_q h + (1/α) log E_q[exp(α(h − E_q h))]``, ``h = log p − log t``. The second term is a Jensen gap,
   well conditioned as α → 0. ``ℓ_0`` is the likelihood's own, which may use a coarser rule; its
   difference from ``E_q h`` enters with weight 1 − α, so that ``ℓ_α`` is continuous at α = 0, where it is
   the ELBO of GPflow, and exact at α = 1;
3. the same with a fixed set of points, for likelihoods with more latents. Monte-Carlo likelihoods
   take such points for ``E_q[log p]`` as well: nothing here is random.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import scipy.stats
import tensorflow as tf
from gpflow.base import AnyNDArray, TensorType
from gpflow.likelihoods import (
    Bernoulli,
    Gaussian,
    Likelihood,
    MonteCarloLikelihood,
    MultiClass,
    ScalarLikelihood,
)
from gpflow.likelihoods.utils import inv_probit
from gpflow.quadrature import hermgauss

NUM_NODES = {1: 121, 2: 41}
"""Nodes per latent of the quadrature that covers q and cavity."""

NUM_HERMITE_POINTS = {1: 40, 2: 20, 3: 12}
"""Gauss–Hermite points per latent that replace Monte Carlo."""

NUM_SOBOL_POINTS = 1024
"""Points that replace Monte Carlo where a product rule would be too large."""

WINDOW = 9.0
"""Half-width of the quadrature's window, in standard deviations of q and of the cavity."""


def variational_expectations(
    likelihood: Likelihood, X: TensorType, Fmu: TensorType, Fvar: TensorType, Y: TensorType
) -> tf.Tensor:
    """``E_q[log p(yₙ|fₙ)]``, ``[N]``: the likelihood's own, or fixed points where that is random."""
    if not isinstance(likelihood, MonteCarloLikelihood):
        return likelihood.variational_expectations(X, Fmu, Fvar, Y)
    if isinstance(likelihood, ScalarLikelihood):
        return _scalar_expectations(likelihood, X, Fmu, Fvar, Y)
    nodes, log_weights = _fixed_nodes(Fmu, Fvar)
    return _weighted_mean(log_weights, _log_prob_at(likelihood, nodes, X, Y))


def independent_expectations(
    likelihood: Likelihood, X: TensorType, Fmu: tf.Tensor, Fvar: tf.Tensor, Y: TensorType
) -> tf.Tensor | None:
    """``E_q[log p]`` by a rule of this module where the likelihood uses its own quadrature, else None."""
    if not isinstance(likelihood, ScalarLikelihood):
        return None
    if type(likelihood)._variational_expectations is not ScalarLikelihood._variational_expectations:
        return None
    return _scalar_expectations(likelihood, X, Fmu, Fvar, Y)


def _scalar_expectations(
    likelihood: ScalarLikelihood, X: TensorType, Fmu: tf.Tensor, Fvar: tf.Tensor, Y: TensorType
) -> tf.Tensor:
    q = Cavity(Fmu, Fvar, tf.zeros_like(Fmu))
    nodes, log_weights = _covering_nodes(Fmu, Fvar, q, NUM_NODES[1])
    return tf.reduce_sum(_weighted_mean(log_weights, _log_prob_at(likelihood, nodes, X, Y)), -1)


class ExpectationGradients(NamedTuple):
    """``E_q[log p]`` ``[N]`` and its derivatives in the marginal mean and variance ``[N, L]``."""

    value: tf.Tensor
    mean: tf.Tensor
    variance: tf.Tensor


def expectation_gradients(
    likelihood: Likelihood, X: TensorType, Fmu: TensorType, Fvar: TensorType, Y: TensorType
) -> ExpectationGradients:
    """``E``, ``∂E/∂m`` and ``∂E/∂v``; an outer tape may differentiate all three once more."""
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch((Fmu, Fvar))
        value = variational_expectations(likelihood, X, Fmu, Fvar, Y)
        total = tf.reduce_sum(value)
    d_mean, d_variance = tape.gradient(
        total, (Fmu, Fvar), unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    return ExpectationGradients(value, d_mean, d_variance)


class Cavity(NamedTuple):
    """``q(f)/t(f)^α = exp(log_scale) N(f; mean, variance)``, ``[N, L]`` each."""

    mean: tf.Tensor
    variance: tf.Tensor
    log_scale_over_alpha: tf.Tensor  # (1/α) log E_q[t^−α]


def cavity(
    Fmu: tf.Tensor, Fvar: tf.Tensor, lambda_1: tf.Tensor, lambda_2: tf.Tensor, alpha: float
) -> Cavity:
    """The cavity of every datum; it exists where ``1/v − αλ₂ > 0`` and is NaN elsewhere.

    ``log E_q[t^−α] = −α log t(m) − ½ log(1 − αλ₂v) + ½ α² (λ₁ − λ₂m)² v / (1 − αλ₂v)``
    """
    slope = lambda_1 - lambda_2 * Fmu
    kept = 1.0 - alpha * lambda_2 * Fvar  # v / v₋ₙ
    variance = Fvar / kept
    return Cavity(
        Fmu - alpha * slope * variance,
        tf.where(kept > 0.0, variance, tf.constant(np.nan, Fvar.dtype)),
        -(lambda_1 - 0.5 * lambda_2 * Fmu) * Fmu
        - 0.5 * tf.math.log1p(-alpha * lambda_2 * Fvar) / alpha
        + 0.5 * alpha * tf.square(slope) * variance,
    )


def expected_log_site(
    Fmu: tf.Tensor, Fvar: tf.Tensor, lambda_1: tf.Tensor, lambda_2: tf.Tensor
) -> tf.Tensor:
    """``E_q[log t] = λ₁m − ½λ₂(m² + v)``, ``[N, L]``."""
    return lambda_1 * Fmu - 0.5 * lambda_2 * (tf.square(Fmu) + Fvar)


def log_expected_ratio(
    likelihood: Likelihood,
    X: TensorType,
    Fmu: tf.Tensor,
    Fvar: tf.Tensor,
    Y: TensorType,
    lambda_1: tf.Tensor,
    lambda_2: tf.Tensor,
    alpha: float,
) -> tf.Tensor:
    """``ℓ_α = (1/α) log E_q[(p/t)^α]``, and ``E_q[log p − log t]`` at α = 0; ``[N]``.

    NaN where the cavity ``1/v − αλ₂`` is not positive: there the integral diverges.
    """
    if alpha > 0.0:
        cav = cavity(Fmu, Fvar, lambda_1, lambda_2, alpha)
        closed_form = log_expected_power(likelihood, X, cav.mean, cav.variance, Y, alpha)
        if closed_form is not None:
            return closed_form + tf.reduce_sum(cav.log_scale_over_alpha, -1)

    expected = variational_expectations(likelihood, X, Fmu, Fvar, Y) - tf.reduce_sum(
        expected_log_site(Fmu, Fvar, lambda_1, lambda_2), -1
    )
    if alpha == 0.0:
        return expected

    num_latent = Fmu.shape[-1]
    scalar = isinstance(likelihood, ScalarLikelihood)
    if scalar:
        # The latents are independent given y: a one-dimensional rule for each.
        nodes, log_weights = _covering_nodes(Fmu, Fvar, cav, NUM_NODES[1])
    elif num_latent in NUM_NODES and not isinstance(likelihood, MonteCarloLikelihood):
        nodes, log_weights = _product(*_covering_nodes(Fmu, Fvar, cav, NUM_NODES[num_latent]))
    else:
        nodes, log_weights = _fixed_nodes(Fmu, Fvar)
    nodes, log_p, log_weights = _log_prob_and_weights(likelihood, nodes, log_weights, X, Y, Fmu)
    log_t = (lambda_1 - 0.5 * lambda_2 * nodes) * nodes  # [Q, N, L]
    if scalar:
        terms = _mean_and_jensen_gap(log_weights, log_p - log_t, alpha)
        mean, gap = (tf.reduce_sum(x, -1) for x in terms)
    else:
        mean, gap = _mean_and_jensen_gap(log_weights, log_p - tf.reduce_sum(log_t, -1), alpha)
    # A cavity that does not exist is NaN; say so also where the nodes did not depend on it.
    return mean + (1.0 - alpha) * (expected - mean) + gap + 0.0 * tf.reduce_sum(cav.variance, -1)


def log_expected_power(
    likelihood: Likelihood,
    X: TensorType,
    Fmu: tf.Tensor,
    Fvar: tf.Tensor,
    Y: TensorType,
    alpha: float,
) -> tf.Tensor | None:
    """``(1/α) log E_N(f; Fmu, Fvar)[p(y|f)^α]`` in closed form, ``[N]``; None where there is none.

    A likelihood of the user's own joins by defining a method ``log_expected_power(X, Fmu, Fvar, Y,
    alpha)`` that returns one value per latent, ``[N, L]``.
    """
    method = getattr(likelihood, "log_expected_power", None)
    if method is not None:
        return tf.reduce_sum(method(X, Fmu, Fvar, Y, alpha), -1)
    if _has_density_of(likelihood, Gaussian):
        return _gaussian_power(likelihood, X, Fmu, Fvar, Y, alpha)
    if isinstance(likelihood, MultiClass):
        return _robust_max_power(likelihood, Fmu, Fvar, Y, alpha)
    if _has_density_of(likelihood, Bernoulli) and likelihood.invlink is inv_probit and alpha == 1.0:
        return likelihood.predict_log_density(X, Fmu, Fvar, Y)
    return None


def _has_density_of(likelihood: Likelihood, kind: type[ScalarLikelihood]) -> bool:
    """Whether p(y|f) is that of ``kind``: a subclass may have changed it."""
    return isinstance(likelihood, kind) and (
        type(likelihood)._scalar_log_prob is kind._scalar_log_prob
    )


def _gaussian_power(
    likelihood: Gaussian, X: Any, Fmu: Any, Fvar: Any, Y: Any, alpha: float
) -> tf.Tensor:
    # E[N(y; f, s)^α]^(1/α) = (2πs)^−½ (1 + αv/s)^(−1/2α) exp(−½ (y − m)² / (s + αv))
    noise = likelihood._variance(X)  # broadcasts against [N, L]
    return -0.5 * tf.reduce_sum(
        tf.math.log(2.0 * np.pi * noise)
        + tf.math.log1p(alpha * Fvar / noise) / alpha
        + tf.square(Y - Fmu) / (noise + alpha * Fvar),
        -1,
    )


def _robust_max_power(
    likelihood: MultiClass, Fmu: Any, Fvar: Any, Y: Any, alpha: float
) -> tf.Tensor:
    # p takes two values: 1 − ε where y's latent is the largest, ε/(C − 1) elsewhere.
    link = likelihood.invlink
    prob = link.prob_is_largest(Y, Fmu, Fvar, *hermgauss(likelihood.num_gauss_hermite_points))
    hit = tf.math.expm1(alpha * tf.math.log(1.0 - link.epsilon))
    miss = tf.math.expm1(alpha * tf.math.log(link.eps_k1))
    return tf.reduce_sum(tf.math.log1p(prob * hit + (1.0 - prob) * miss), -1) / alpha


def _log_prob_at(
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


def _log_prob_and_weights(
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
    overflow = ~tf.math.is_finite(_log_prob_at(likelihood, tf.stop_gradient(nodes), X, Y))
    node_overflow = overflow if len(overflow.shape) == 3 else overflow[..., None]
    nodes = tf.where(node_overflow, tf.broadcast_to(Fmu, tf.shape(nodes)), nodes)
    log_weights = tf.where(
        overflow,
        tf.constant(-np.inf, nodes.dtype),
        log_weights + tf.zeros_like(overflow, nodes.dtype),
    )
    return nodes, _log_prob_at(likelihood, nodes, X, Y), log_weights


def _covering_nodes(
    Fmu: tf.Tensor, Fvar: tf.Tensor, cav: Cavity, num: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Nodes ``[num, N, L]`` and log weights of q that also resolve the cavity, which may be much wider.

    ``f = m + √v sinh(u)`` with the trapezoidal rule in u: spacing grows from q's scale to the
    cavity's, and the rule converges exponentially for integrands that decay at both ends.
    """
    s = tf.sqrt(Fvar)
    reach = (tf.abs(cav.mean - Fmu) + WINDOW * tf.sqrt(cav.variance)) / s
    end = tf.asinh(tf.maximum(reach, WINDOW))
    u = tf.reshape(tf.linspace(-tf.ones((), s.dtype), 1.0, num), [num, 1, 1]) * end
    u = tf.stop_gradient(u)
    z = tf.sinh(u)
    log_weights = -0.5 * tf.square(z) + tf.math.log(tf.cosh(u))
    return Fmu + s * z, log_weights - tf.reduce_logsumexp(log_weights, 0, keepdims=True)


def _product(nodes: tf.Tensor, log_weights: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The product rule of two one-dimensional ones, ``[Q, N, 2] → [Q², N, 2], [Q², N]``."""
    Q = nodes.shape[0]
    i, j = (np.ravel(a) for a in np.meshgrid(np.arange(Q), np.arange(Q), indexing="ij"))
    pair = [tf.gather(nodes[..., 0], i), tf.gather(nodes[..., 1], j)]
    weight = tf.gather(log_weights[..., 0], i) + tf.gather(log_weights[..., 1], j)
    return tf.stack(pair, -1), weight


@functools.cache
def _standard_normal_points(num_latent: int) -> tuple[AnyNDArray, AnyNDArray]:
    """Points ``[Q, L]`` and log weights ``[Q]`` for N(0, I): a Gauss–Hermite product, or Sobol points."""
    if num_latent in NUM_HERMITE_POINTS:
        x, w = np.polynomial.hermite_e.hermegauss(NUM_HERMITE_POINTS[num_latent])
        points = np.stack(np.meshgrid(*[x] * num_latent, indexing="ij"), -1)
        weights = functools.reduce(np.multiply.outer, [w / w.sum()] * num_latent)
        return points.reshape(-1, num_latent), np.log(weights.ravel())
    half = scipy.stats.qmc.MultivariateNormalQMC(
        np.zeros(num_latent), seed=np.random.default_rng(0)
    ).random(NUM_SOBOL_POINTS // 2)
    # Points and their mirror images: odd moments are exact.
    points = np.concatenate([half, -half])
    points = points / np.sqrt(np.mean(points**2, axis=0))
    return points, np.full(len(points), -np.log(len(points)))


def _fixed_nodes(Fmu: tf.Tensor, Fvar: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """A fixed rule for q: nodes ``[Q, N, L]`` and log weights ``[Q, 1]``."""
    points, log_weights = _standard_normal_points(int(Fmu.shape[-1]))
    z = tf.constant(points[:, None, :], Fmu.dtype)
    return Fmu + tf.sqrt(Fvar) * z, tf.constant(log_weights[:, None], Fmu.dtype)


def _weighted_mean(log_weights: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """``Σ_j w_j values_j`` over the leading axis."""
    return tf.reduce_sum(tf.exp(log_weights) * values, 0)


def _mean_and_jensen_gap(
    log_weights: tf.Tensor, h: tf.Tensor, alpha: float
) -> tuple[tf.Tensor, tf.Tensor]:
    """``h̄ = Σ_j w_j h_j`` and ``(1/α) log Σ_j w_j exp(α(h_j − h̄)) ≥ 0``, well conditioned as α → 0."""
    weights = tf.exp(log_weights)
    h_bar = tf.reduce_sum(weights * h, 0)
    u = alpha * (h - h_bar)
    gap = tf.reduce_logsumexp(log_weights + u, 0)
    # Near zero: log1p of Σ w (eᵘ − 1), each term without cancellation.
    small = tf.abs(u) < 1.0
    terms = tf.where(
        small,
        weights * tf.math.expm1(tf.where(small, u, tf.zeros_like(u))),
        tf.exp(tf.minimum(log_weights + u, 1.0)) - weights,
    )
    near_zero = tf.abs(gap) < 0.5
    total = tf.where(near_zero, tf.reduce_sum(terms, 0), tf.zeros_like(gap))
    return h_bar, tf.where(near_zero, tf.math.log1p(total), gap) / alpha
