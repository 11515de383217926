"""Gaussian integrals of ``log Φ`` to near machine precision; those of ``Φᵅ`` are in ``probit_powers``.

Gauss–Hermite quadrature misses the bend of ``log Φ`` at 0 once the marginal variance is large (20
points are 3.4 nats off at ``m = 3, v = 2·10⁴``), so that a bound and its gradient disagree. The
line is cut at the bend, each side is integrated over the window its integrand lives in, and
derivatives are integrals of derivatives: with ``gₖ = (log Φ)⁽ᵏ⁾`` and ``f ~ N(m, v)``,

    ∂E[gₖ]/∂m = E[gₖ₊₁],     ∂E[gₖ]/∂v = ½ E[gₖ₊₂].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from gpflow.base import AnyNDArray

from .. import tuning
from ..compilation import subgraph
from ..namespaces import functions_of, is_array
from .log_cdf import (
    DEGREE,
    SQRT_2PI,
    excesses,
    negative_low,
    positive_high,
    positive_low,
)
from .probit_narrow import NARROW, narrow_high, narrow_low


class Rule(NamedTuple):
    """Gauss–Legendre nodes per panel, a window's half-width in standard deviations, and the degree of the
    polynomials behind g₃ and g₄."""

    num_nodes: int
    reach: float
    degree: int = DEGREE
    num_positive: int | None = None
    """Nodes for f > 0, if not as many."""
    panels: int = 2
    """For f < 0."""
    moderate: Rule | None = None
    """On arrays, for variances up to :data:`MODERATE`."""


MODERATE = 100.0
"""Variance up to which half a line needs no panel of its own next to the bend, which is then no narrow part
of the window: fewer nodes have the same digits."""

FINE = Rule(40, 9.5, moderate=Rule(44, 9.5, num_positive=30, panels=1))
"""For Φᵅ and for g₃ and g₄: small for f < 0, so that a bend seven deviations away still counts."""

COARSE = Rule(30, 7.7, moderate=Rule(36, 7.7, num_positive=22, panels=1))
"""For g₀, g₁ and g₂, which do not vanish for f < 0; 1e-10 at three quarters of the price."""

ROUGH = Rule(16, 8.0, 12, moderate=Rule(20, 5.5, 12, num_positive=10, panels=1))
"""For g₃ and g₄ to three digits, which is enough for a Newton step; a third of FINE's price."""

VARIANCE_FLOOR = 1e-16
"""Added to v where nodes are placed: v = 0 then gives the pointwise value instead of 0/0."""


@functools.cache
def _legendre_rule(num_nodes: int) -> tuple[AnyNDArray, AnyNDArray]:
    x, w = np.polynomial.legendre.leggauss(num_nodes)
    return (1 + x[:, None]) / 2, w[:, None] / 2


def _legendre(num_nodes: int, like: Any) -> tuple[Any, ...]:
    """Gauss–Legendre nodes and weights on [0, 1], ``[n, 1]`` each."""
    return tuple(functions_of(like).asarray(a, like.dtype) for a in _legendre_rule(num_nodes))


def _extent(edge: Any, reach: float) -> Any:
    """How far below ``edge`` a standard Gaussian is worth integrating.

    To −reach from an edge above the mean; from an edge below it, to where the density has fallen
    by ``exp(−½ reach²)`` from its value at the edge.
    """
    xp = functions_of(edge)
    below = xp.minimum(edge, 0)
    # √(e² + R²) − |e| without the cancellation
    return xp.maximum(edge, 0) + reach**2 / (xp.sqrt(below * below + reach**2) - below)


def side(m: Any, v: Any, damping: Any, rule: Rule) -> tuple[Any, Any]:
    """Nodes z and weights dz for the half-line ``m + √v z < 0``, two panels, ``[2n, B]``.

    The window is that of ``N(f; m, v) exp(−½ damping f²)``. The eighth of it next to ``f = 0`` has
    its nodes in ``log(1 + |f|)``, because log Φ and Φᵅ bend there on the scale 1, whatever v is.
    """
    xp = functions_of(m)
    x, w = _legendre(rule.num_nodes, m)
    s = xp.sqrt(v)
    q2 = 1 + damping * v
    q = xp.sqrt(q2)
    # t = q (z − centre) is standard normal under the damped Gaussian, and f = 0 at t₀
    t0 = -m / (s * q)
    edge = xp.minimum(t0, rule.reach)
    width = _extent(edge, rule.reach)
    scale = s / q  # df/dt
    offset = 1 + (t0 - edge) * scale  # 1 + |f| at the edge
    span = xp.log1p(scale * width / (8 * offset))
    near = offset / scale * xp.expm1(span * x)
    near_w = span * w * (near + offset / scale)
    far = width * (1 / 8 + 7 / 8 * x)
    far_w = width * (7 / 8 * w)
    z = -damping * m * s / q2 + (edge - xp.concatenate([near, far], 0)) / q
    return xp.stop_gradient(z), xp.stop_gradient(xp.concatenate([near_w, far_w], 0) / q)


def _damped_side(m: Any, v: Any, rule: Rule) -> tuple[Any, Any]:
    """Nodes z and weights dz for ``m + √v z > 0`` and an integrand like ``exp(−½f²)``, ``[n, B]``.

    One panel is enough: the window of ``N(f; m, v) exp(−½f²)`` is never wider than the bend.
    """
    xp = functions_of(m)
    x, w = _legendre(rule.num_positive or rule.num_nodes, m)
    s = xp.sqrt(v)
    q = xp.sqrt(1 + v)
    edge = xp.maximum(-m / (s * q), -rule.reach)
    width = _extent(-edge, rule.reach)
    z = -m * s / (1 + v) + (edge + width * x) / q
    return xp.stop_gradient(z), xp.stop_gradient(width * w / q)


def _one_panel(m: AnyNDArray, v: AnyNDArray, rule: Rule) -> tuple[AnyNDArray, AnyNDArray]:
    """Nodes z and weights dz for the half-line ``m + √v z < 0``, ``[n, B]``, of a moderate v."""
    x, w = _legendre(rule.num_nodes, m)
    edge = np.minimum(-m / np.sqrt(v), rule.reach)
    width = _extent(edge, rule.reach)
    return edge - width * x, width * w


def _gaussian(z: Any) -> Any:
    return functions_of(z).exp(-0.5 * z * z) / SQRT_2PI


class _Side(NamedTuple):
    """Nodes z on one side of ``f = 0``, ``|f|`` there, and weights under N(z; 0, 1), ``[n, B]``."""

    z: Any
    x: Any
    w: Any

    def integrate(self, values: Any) -> Any:
        """The integral over this side of a function of f, ``[B]``."""
        return functions_of(self.w).sum(self.w * values, 0)


def _sides(m: Any, v: Any, rule: Rule) -> tuple[_Side, _Side]:
    """The negative and the positive side of f."""
    xp = functions_of(m)
    s = xp.sqrt(v)
    z_neg, dz_neg = side(m, v, 0.0, rule) if rule.panels == 2 else _one_panel(m, v, rule)
    z_pos, dz_pos = _damped_side(m, v, rule)
    return (
        _Side(z_neg, xp.maximum(-(m + s * z_neg), 0), dz_neg * _gaussian(z_neg)),
        _Side(z_pos, xp.maximum(m + s * z_pos, 0), dz_pos * _gaussian(z_pos)),
    )


def _low_quadrature(m: Any, v: Any, rule: Rule) -> tuple[Any, ...]:
    """``E[g₀]``, ``E[g₁]`` and ``E[g₂]`` under ``f ~ N(m, v)``, for m and v of shape ``[B]``."""
    neg, pos = _sides(m, v + VARIANCE_FLOOR, rule)
    # One polynomial for both sides: of few marginals it is its operations that take time.
    count = rule.num_nodes * rule.panels
    excess = excesses((0,), functions_of(m).concatenate([neg.x, pos.x], 0))[0]
    below, above = negative_low(neg.x, excess[:count]), positive_low(pos.x, excess[count:])
    values = zip(below, above, strict=True)
    return tuple(neg.integrate(below) + pos.integrate(above) for below, above in values)


def _high_quadrature(m: Any, v: Any, rule: Rule) -> tuple[Any, Any]:
    """``E[g₃]`` and ``E[g₄]`` under ``f ~ N(m, v)``.

    At large v, g₄ integrates to almost nothing over its own support. There Stein's identity is
    used, ``v E[g₄] = E[(g₂ + 1)(z² − 1)]``, with ``g₂ + 1 = −δ'`` on the negative side and
    ``∫_{z₀}^∞ (z² − 1) N(z) dz = z₀ N(z₀)`` for the 1 on the positive one.
    """
    xp = functions_of(m)
    spread = v + VARIANCE_FLOOR
    s = xp.sqrt(spread)
    neg, pos = _sides(m, spread, rule)
    g2, g3, g4 = positive_high(pos.x)
    d1, d2, d3 = excesses((1, 2, 3), neg.x, rule.degree)
    direct = neg.integrate(-d3) + pos.integrate(g4)
    z0 = -m / s
    both = neg.integrate(-d1 * (neg.z * neg.z - 1)) + pos.integrate(g2 * (pos.z * pos.z - 1))
    stein = z0 * _gaussian(z0) + both
    fourth = xp.where((s > 3) & (z0 < 5), stein / spread, direct)
    return neg.integrate(d2) + pos.integrate(g3), fourth


@functools.cache
def _compiled(quadrature: Callable[..., Any], rule: Rule, dtype: tf.DType) -> Any:
    """A quadrature as one graph per process: every model's graph calls it, eager code too."""
    spec = tf.TensorSpec([None], dtype)
    return subgraph(lambda m, v: quadrature(m, v, rule), input_signature=[spec, spec])


def _integrals(quadrature: Callable[..., Any], m: Any, v: Any, rule: Rule) -> Any:
    """A quadrature of three panels a marginal; on arrays by fewer nodes where a marginal is not wide."""
    if not is_array(m):
        return _compiled(quadrature, rule, m.dtype)(m, v)
    is_low = quadrature is _low_quadrature
    narrow = functools.partial(narrow_low if is_low else narrow_high, degree=rule.degree)
    ways = [(narrow, NARROW[-1].variance, NARROW[-1].high)]
    if rule.moderate is not None:
        ways.append((functools.partial(quadrature, rule=rule.moderate), MODERATE, rule.num_nodes))
    ways.append((functools.partial(quadrature, rule=rule), np.inf, 3 * rule.num_nodes))
    kinds = np.searchsorted([variance for _, variance, _ in ways[:-1]], v)
    found = tuple(np.empty_like(m) for _ in range(3 if is_low else 2))
    for kind, (of, _, num_nodes) in enumerate(ways):
        rows = np.flatnonzero(kinds == kind)
        # Some marginals at a time, whose nodes stay in a core's cache.
        size = max(1, tuning.QUADRATURE_ELEMENTS // num_nodes)
        for some in (rows[i : i + size] for i in range(0, len(rows), size)):
            for integral, part in zip(found, of(m[some], v[some]), strict=True):
                integral[some] = part
    return found


def high_moments(m: Any, v: Any, rough: bool = False) -> tuple[Any, Any]:
    """``E[g₃]`` and ``E[g₄]``. Automatic differentiation goes through the quadrature, nodes held fixed.

    :param m: ``[B]``, a tensor or an array, as v.
    :param rough: to three digits.
    """
    return _integrals(_high_quadrature, m, v, ROUGH if rough else FINE)


def low_moments(m: Any, v: Any) -> tuple[Any, Any, Any]:
    """``E[g₀]``, ``E[g₁]``, ``E[g₂]``; of tensors once differentiable, ``∂E[gₖ] = E[gₖ₊₁], ½ E[gₖ₊₂]``."""
    return _low_values(m, v) if is_array(m) else _low_moments(m, v)


def _low_values(m: Any, v: Any) -> tuple[Any, Any, Any]:
    # The inputs carry no gradient: a tape would differentiate the quadrature for nothing.
    constant = functions_of(m).stop_gradient
    return _integrals(_low_quadrature, constant(m), constant(v), COARSE)


@tf.custom_gradient
def _low_moments(m: tf.Tensor, v: tf.Tensor) -> Any:
    E0, E1, E2 = _low_values(m, v)

    def grad(u0: tf.Tensor, u1: tf.Tensor, u2: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        E3, E4 = high_moments(m, v)
        return u0 * E1 + u1 * E2 + u2 * E3, 0.5 * (u0 * E2 + u1 * E3 + u2 * E4)

    return (E0, E1, E2), grad


@tf.custom_gradient
def expected_log_cdf(m: tf.Tensor, v: tf.Tensor) -> Any:
    """``E[log Φ(f)]`` under ``f ~ N(m, v)``, for m and v of shape ``[B]``."""

    def grad(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        _, E1, E2 = low_moments(m, v)
        return upstream * E1, 0.5 * upstream * E2

    return _low_values(m, v)[0], grad
