"""Ratios of likelihood and site under q(fₙ): what the power-EP family needs.

For sites ``t(f) = exp(λ₁f − ½λ₂f²)`` and ``0 < α ≤ 1``,

    ℓ_α(q, t) = (1/α) log E_q[(p(y|f) / t(f))^α],     ℓ_0 = E_q[log p − log t].

Three roads lead there, the first that fits is taken:

1. a closed form of ``(1/α) log E_N[p^α]`` under the cavity ``q/t^α`` (:func:`log_expected_power`);
2. a quadrature that covers q and the cavity at once, for likelihoods with one or two latents:
   ``(1/α) log E_q[exp(αh)]``, ``h = log p − log t``, near ``E_q h`` as that plus a Jensen gap, which is
   well conditioned as α → 0. ``ℓ_0`` is the likelihood's own, which may use a coarser rule; its
   difference from ``E_q h`` enters with weight 1 − α, so that ``ℓ_α`` is continuous at α = 0, where it is
   the ELBO of GPflow, and exact at α = 1;
3. the same with a fixed set of points, for likelihoods with more latents.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from gpflow.base import TensorType
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

from ..namespaces import functions_of
from .expectations import expected_log_site, variational_expectations
from .nodes import (
    NUM_NODES,
    covering_nodes,
    fixed_nodes,
    log_prob_and_weights,
    mean_and_power_mean,
    normalised,
    product_rule,
    standard_normal_points,
)
from .ordinal import Ordinal


class Cavity(NamedTuple):
    """``q(f)/t(f)^α = exp(log_scale) N(f; mean, variance)``, ``[N, L]`` each."""

    mean: Any
    variance: Any
    log_scale_over_alpha: Any  # (1/α) log E_q[t^−α]


def has_cavity(Fvar: Any, lambda_2: Any, alpha: float) -> Any:
    """Whether ``1/v − αλ₂ > 0``, for every site: ``q/t^α`` is a Gaussian."""
    return alpha * lambda_2 * Fvar < 1.0


def cavity(Fmu: Any, Fvar: Any, lambda_1: Any, lambda_2: Any, alpha: float) -> Cavity:
    """The cavity of every datum; NaN where it does not exist.

    ``log E_q[t^−α] = −α log t(m) − ½ log(1 − αλ₂v) + ½ α² (λ₁ − λ₂m)² v / (1 − αλ₂v)``
    """
    xp = functions_of(Fmu)
    slope = lambda_1 - lambda_2 * Fmu
    shrinkage = 1.0 - alpha * lambda_2 * Fvar  # v / v₋ₙ
    variance = Fvar / shrinkage
    return Cavity(
        Fmu - alpha * slope * variance,
        xp.where(has_cavity(Fvar, lambda_2, alpha), variance, np.nan),
        -(lambda_1 - 0.5 * lambda_2 * Fmu) * Fmu
        - 0.5 * xp.log1p(-alpha * lambda_2 * Fvar) / alpha
        + 0.5 * alpha * slope * slope * variance,
    )


def log_expected_ratio(
    likelihood: Likelihood,
    X: TensorType,
    Fmu: tf.Tensor,
    Fvar: tf.Tensor,
    Y: TensorType,
    lambda_1: tf.Tensor,
    lambda_2: tf.Tensor,
    alpha: float,
    blend: bool = True,
) -> tf.Tensor:
    """``ℓ_α = (1/α) log E_q[(p/t)^α]``, and ``E_q[log p − log t]`` at α = 0; ``[N]``.

    NaN where the cavity ``1/v − αλ₂`` is not positive: there the integral diverges.

    :param blend: whether the likelihood's own ``ℓ_0`` has a part for α < 1. Without it the value is as
        accurate as its nodes: enough where q is near the tilted distribution, as at EP's fixed point.
    """
    if alpha > 0.0:
        cav = cavity(Fmu, Fvar, lambda_1, lambda_2, alpha)
        closed_form = log_expected_power(likelihood, X, cav.mean, cav.variance, Y, alpha)
        if closed_form is not None:
            return closed_form + tf.reduce_sum(cav.log_scale_over_alpha, -1)

    def expected() -> tf.Tensor:
        log_site = expected_log_site(Fmu, Fvar, lambda_1, lambda_2)
        return variational_expectations(likelihood, X, Fmu, Fvar, Y) - tf.reduce_sum(log_site, -1)

    if alpha == 0.0:
        return expected()

    nodes, log_weights = covering_rule(type(likelihood), Fmu, Fvar, cav)
    nodes, log_p, log_weights = log_prob_and_weights(likelihood, nodes, log_weights, X, Y, Fmu)
    tilted = tilting(nodes, log_weights, log_p, lambda_1, lambda_2, alpha)
    is_blended = blend and alpha < 1.0
    value = tilted.value - (1.0 - alpha) * tilted.mean if is_blended else tilted.value
    value = tf.reduce_sum(value, -1) if isinstance(likelihood, ScalarLikelihood) else value
    # A cavity that does not exist is NaN; say so also where the nodes did not depend on it.
    value = value + 0.0 * tf.reduce_sum(cav.variance, -1)
    return value + (1.0 - alpha) * expected() if is_blended else value


class Tilting(NamedTuple):
    """``ℓ_α`` by nodes: weights with which derivatives of ``h = log p − log t`` enter, and values."""

    weights: Any  # [Q, N, L] for a scalar likelihood, else [Q, N]
    value: Any  # (1/α) log Σ w exp(αh)
    mean: Any  # Σ w h; nothing for α = 1, where it has no part
    finite: Any  # whether a node has a part at all


def tilting(
    nodes: Any,
    log_weights: Any,
    log_prob: Any,
    lambda_1: Any,
    lambda_2: Any,
    alpha: float,
    blend: bool = True,
) -> Tilting:
    """``π ∝ w exp(αh)``, less ``(1 − α)w`` where the likelihood's own ``ℓ_0`` is blended in."""
    xp = functions_of(nodes)
    # A node so far out that log p overflows has p = 0, and no part in any sum.
    finite = xp.isfinite(log_prob)
    log_weights = xp.where(finite, log_weights, -np.inf)
    log_t = (lambda_1 - 0.5 * lambda_2 * nodes) * nodes
    log_t = log_t if len(log_prob.shape) == 3 else xp.sum(log_t, -1)
    h = xp.where(finite, log_prob, 0.0) - log_t
    weights, value = normalised(log_weights + alpha * h)
    if alpha == 1.0:
        return Tilting(weights, value, 0.0, finite)
    mean, value = mean_and_power_mean(log_weights, h, alpha)
    if blend:
        weights = weights - (1.0 - alpha) * xp.exp(log_weights)
    return Tilting(weights, value, mean, finite)


def covering_rule(kind: type[Likelihood], Fmu: Any, Fvar: Any, cav: Cavity) -> tuple[Any, Any]:
    """Nodes ``[Q, N, L]`` and log weights of q, ``[Q, N, L]`` for a scalar likelihood, else ``[Q, N]``."""
    num_latent = Fmu.shape[-1]
    if issubclass(kind, ScalarLikelihood):
        # The latents are independent given y: a one-dimensional rule for each.
        return covering_nodes(Fmu, Fvar, cav.mean, cav.variance, NUM_NODES[1])
    if num_latent in NUM_NODES and not issubclass(kind, MonteCarloLikelihood):
        return product_rule(
            *covering_nodes(Fmu, Fvar, cav.mean, cav.variance, NUM_NODES[num_latent])
        )
    return fixed_nodes(Fmu, Fvar)


def covering_size(kind: type[Likelihood], num_latent: int) -> int:
    """How many nodes :func:`covering_rule` has."""
    if issubclass(kind, ScalarLikelihood):
        return NUM_NODES[1]
    if num_latent in NUM_NODES and not issubclass(kind, MonteCarloLikelihood):
        return int(NUM_NODES[num_latent] ** num_latent)
    return len(standard_normal_points(num_latent)[0])


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
    if _has_density_of(likelihood, Ordinal) and alpha == 1.0:
        return tf.reduce_sum(likelihood.log_expected_density(Fmu, Fvar, Y), -1)
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
