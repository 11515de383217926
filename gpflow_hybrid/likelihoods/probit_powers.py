"""Gaussian integrals of ``Φᵅ`` to near machine precision."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from ..namespaces import functions_of
from .log_cdf import SQRT_2PI, log_cdf_negative, log_cdf_positive
from .nodes import log_sum_exp
from .probit_integrals import FINE, VARIANCE_FLOOR, side


def _power_nodes(m: Any, v: Any, damping_neg: Any, damping_pos: Any) -> tuple[Any, Any]:
    """Nodes z and log weights of N(z; 0, 1) that resolve the bend of ``Φᵅ``, ``[4n, B]`` each.

    The first half lies on the negative side of f, the second on the positive one.
    """
    xp = functions_of(m)
    z_neg, w_neg = side(m, v, damping_neg, FINE)
    z_pos, w_pos = side(-m, v, damping_pos, FINE)
    z = xp.concatenate([z_neg, -z_pos], 0)
    return z, xp.log(xp.concatenate([w_neg, w_pos], 0)) - 0.5 * z * z - math.log(SQRT_2PI)


def _log_cdf_at_power_nodes(order: int, f: Any) -> Any:
    """``gₖ(f)`` for f in the order of `_power_nodes`, each formula on its own half."""
    xp = functions_of(f)
    half = f.shape[0] // 2
    below = log_cdf_negative(order, xp.maximum(-f[:half], 0))
    above = log_cdf_positive(order, xp.maximum(f[half:], 0))
    return xp.concatenate([below, above], 0)


def _power_value(m: Any, v: Any, alpha: Any) -> Any:
    """``(1/α) log E[Φᵅ]`` by quadrature.

    Where ``E[Φᵅ]`` is not small, it is ``1 + E[expm1(α log Φ)]``, which keeps its digits as α → 0;
    this integrand is damped by ``exp(−½f²)`` for f > 0. Elsewhere it is the sum of positive terms
    itself, in logarithms; Φᵅ is damped by ``exp(−½αf²)`` for f < 0.
    """
    xp = functions_of(m)
    # E[exp(−½αf²)] stands in for the f < 0 part of E[Φᵅ]; with m ≥ 0, E[Φᵅ] ≥ E[Φ] ≥ ½.
    q2 = 1 + alpha * v
    large = (m >= 0) | (xp.exp(-0.5 * alpha * m * m / q2) > 0.5 * xp.sqrt(q2))
    nothing = 0.0 * m
    z, log_w = _power_nodes(
        m, v, xp.where(large, nothing, nothing + alpha), xp.where(large, nothing + 1.0, nothing)
    )
    exponent = alpha * _log_cdf_at_power_nodes(0, m + xp.sqrt(v) * z)
    deficit = xp.sum(xp.exp(log_w) * xp.expm1(exponent), 0)
    return (
        xp.where(large, xp.log1p(xp.where(large, deficit, nothing)), log_sum_exp(log_w + exponent))
        / alpha
    )


def expected_cdf_power(m: Any, v: Any, alpha: Any) -> tuple[Any, Any, Any]:
    """``ℓ = (1/α) log E[Φᵅ]`` under ``f ~ N(m, v)`` and its derivatives, for m and v of shape ``[B]``.

        ∂ℓ/∂m = Ẽ[g₁],     ∂ℓ/∂v = ½ Ẽ[g₂ + αg₁²] = ½ Ẽ[g₁z]/√v,     Ẽ over N(f; m, v) Φᵅ/E[Φᵅ]

    The last form (Stein's) is the one without cancellation at large v.
    """
    xp = functions_of(m)
    spread = v + VARIANCE_FLOOR
    s = xp.sqrt(spread)
    value = _power_value(m, spread, alpha)
    # (Φᵅ)' is damped on both sides.
    z, log_w = _power_nodes(m, spread, alpha, 1.0)
    f = m + s * z
    g0, g1, g2 = (_log_cdf_at_power_nodes(order, f) for order in range(3))
    tilted = xp.exp(log_w + alpha * (g0 - value))
    d_mean = xp.sum(tilted * g1, 0)
    stein = xp.sum(tilted * g1 * z, 0) / s
    direct = xp.sum(tilted * (g2 + alpha * g1 * g1), 0)
    return value, d_mean, 0.5 * xp.where(s > 3, stein, direct)


@tf.custom_gradient
def log_expected_cdf_power(m: tf.Tensor, v: tf.Tensor, alpha: tf.Tensor) -> Any:
    """``(1/α) log E[Φᵅ]``; α counts as a constant: it has no gradient. Second derivatives go through the
    quadrature of the first."""

    def grad(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, None]:
        _, d_mean, d_variance = expected_cdf_power(m, v, alpha)
        return upstream * d_mean, upstream * d_variance, None

    return _power_value(m, v + VARIANCE_FLOOR, alpha), grad
