"""The probit likelihood, with its Gaussian integrals to near machine precision.

Gauss–Hermite quadrature misses the bend of ``log Φ`` at 0 once the marginal variance is large (20
points are 3.4 nats off at ``m = 3, v = 2·10⁴``), so that a bound and its gradient disagree. The
line is cut at the bend, each side is integrated over the window its integrand lives in, and
derivatives are integrals of derivatives: with ``gₖ = (log Φ)⁽ᵏ⁾`` and ``f ~ N(m, v)``,

    ∂E[gₖ]/∂m = E[gₖ₊₁],     ∂E[gₖ]/∂v = ½ E[gₖ₊₂].
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from check_shapes import check_shapes, inherit_check_shapes
from gpflow.base import AnyNDArray, MeanAndVariance, TensorType
from gpflow.likelihoods import ScalarLikelihood
from numpy.polynomial import chebyshev
from scipy.special import erfcx

from ..compilation import subgraph


class Rule(NamedTuple):
    """Gauss–Legendre nodes per panel, and a window's half-width in standard deviations."""

    num_nodes: int
    reach: float


FINE = Rule(40, 9.5)
"""For Φᵅ and for g₃ and g₄: small for f < 0, so that a bend seven deviations away still counts."""

COARSE = Rule(30, 7.7)
"""For g₀, g₁ and g₂, which do not vanish for f < 0; 1e-10 at three quarters of the price."""

VARIANCE_FLOOR = 1e-16
"""Added to v where nodes are placed: v = 0 then gives the pointwise value instead of 0/0."""

FOLD = 3.5
"""``t = (x − FOLD)/(x + FOLD)`` maps ``[0, ∞)`` to ``[−1, 1)`` for polynomial approximation."""

BLOCK = 5
"""Length of the polynomials that a long one is made of."""

SQRT_2PI = math.sqrt(2.0 * math.pi)


def _excess_reference(order: int, x: AnyNDArray) -> AnyNDArray:
    """``δ(x) = φ(x)/Φ(−x) − x`` for x ≥ 0, or its first, second or third derivative.

        δ(x) = 1/(x + 2/(x + 3/(x + …))) = Σᵢ wᵢ Re 1/(x + i tᵢ)

    with tᵢ, wᵢ the Gauss rule of the Jacobi matrix with off-diagonals √2, √3, …. Differentiating
    the sum costs no digits; differentiating φ/Φ costs x⁴ of them. Near 0 the sum converges slowly
    and the elementary formulas are harmless.
    """
    off_diagonal = np.sqrt(np.arange(2.0, 301.0))
    t, vectors = np.linalg.eigh(np.diag(off_diagonal, 1) + np.diag(off_diagonal, -1))
    poles = np.maximum(x, 1.5)[:, None] + 1j * t
    sign_factorial = (-1.0) ** order * math.factorial(order)
    large = sign_factorial * (poles ** -(order + 1)).real @ vectors[0] ** 2

    # With h = x + δ and f = −x: δ' = −1 − g₂(f), δ'' = g₃(f), δ''' = −g₄(f).
    near = np.minimum(x, 1.5)
    h = math.sqrt(2.0 / math.pi) / erfcx(near / math.sqrt(2.0))
    d = h - near
    e = d * (d + h) - 1
    small = {
        0: d,
        1: h * d - 1,
        2: h * e,
        3: h * d * e - h * ((1 - h * d) * (d + h) + d * (1 - 2 * h * d)),
    }[order]
    return np.where(x < 1.5, small, large)


@functools.cache
def _excess_coefficients(order: int) -> tuple[float, ...]:
    """Coefficients in t, highest power first, of ``δ⁽ᵏ⁾(x) (x + FOLD)ᵏ⁺¹``.

    Relative error of the polynomial: 1e-14 for δ, below 3e-13 for its derivatives.
    """

    def scaled(t: AnyNDArray) -> AnyNDArray:
        x = FOLD * (1 + t) / (1 - t)
        return _excess_reference(order, x) * (x + FOLD) ** (order + 1)

    degree = 22 if order == 0 else 26
    series = chebyshev.cheb2poly(chebyshev.chebinterpolate(scaled, degree))
    return tuple(float(c) for c in series[::-1])


@functools.cache
def _excess_blocks(orders: tuple[int, ...]) -> AnyNDArray:
    """The same for several orders, lowest power first, in blocks: ``[blocks, orders, BLOCK]``."""
    longest = max(len(_excess_coefficients(k)) for k in orders)
    size = -(-longest // BLOCK) * BLOCK
    rows = [np.pad(c[::-1], (0, size - len(c))) for c in map(_excess_coefficients, orders)]
    return np.stack(rows).reshape(len(orders), -1, BLOCK).transpose(1, 0, 2)


def _excesses(orders: tuple[int, ...], x: tf.Tensor) -> list[tf.Tensor]:
    """``δ⁽ᵏ⁾(x)`` for x ≥ 0 and each of the orders k = 0, …, 3.

    A polynomial ``Σⱼ tᴮʲ pⱼ(t)`` with all the short ``pⱼ`` by one product of matrices: few operations on
    large arrays, where Horner's rule would be many.
    """
    r = 1 / (tf.reshape(x, [-1]) + FOLD)
    t = 1 - 2 * FOLD * r
    powers = [tf.ones_like(t), t]
    while len(powers) <= BLOCK:
        powers.append(powers[-1] * t)
    *powers, step = powers
    blocks = _excess_blocks(orders)
    short = tf.matmul(tf.constant(blocks.reshape(-1, BLOCK), x.dtype), tf.stack(powers))
    short = tf.unstack(tf.reshape(short, tf.stack([len(blocks), len(orders), -1])))
    total = short[-1]
    for part in short[-2::-1]:
        total = total * step + part
    found = []
    for k, value in zip(orders, tf.unstack(total), strict=True):
        for _ in range(k + 1):
            value = value * r
        found.append(tf.reshape(value, tf.shape(x)))
    return found


def _excess(order: int, x: tf.Tensor) -> tf.Tensor:
    """``δ⁽ᵏ⁾(x)`` for x ≥ 0 and k = 0, …, 3."""
    (found,) = _excesses((order,), x)
    return found


def _negative_low(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """``g₀``, ``g₁`` and ``g₂`` at ``−x`` for x ≥ 0."""
    d = _excess(0, x)
    h = x + d  # φ(x)/Φ(−x)
    return -0.5 * x * x - tf.math.log(SQRT_2PI * h), h, -h * d


def _positive_low(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """``g₀``, ``g₁`` and ``g₂`` at x ≥ 0."""
    density = tf.exp(-0.5 * x * x) / SQRT_2PI
    tail = density / (x + _excess(0, x))  # Φ(−x)
    h = density / (1 - tail)
    return tf.math.log1p(-tail), h, -h * (x + h)


def _positive_high(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """``g₂``, ``g₃`` and ``g₄`` at x ≥ 0."""
    _, h, g2 = _positive_low(x)
    d = x + h
    e = d * (d + h) - 1
    # g₄ = (h e)' with h' = −h d, d' = 1 − h d
    return g2, h * e, -h * d * e + h * ((1 - h * d) * (d + h) + d * (1 - 2 * h * d))


def _log_cdf_negative(order: int, x: tf.Tensor) -> tf.Tensor:
    """``gₖ(−x)`` for x ≥ 0 and k = 0, …, 4."""
    if order < 3:
        return _negative_low(x)[order]
    return _excess(2, x) if order == 3 else -_excess(3, x)


def _log_cdf_positive(order: int, x: tf.Tensor) -> tf.Tensor:
    """``gₖ(x)`` for x ≥ 0 and k = 0, …, 4."""
    return _positive_low(x)[order] if order < 3 else _positive_high(x)[order - 2]


def log_cdf(f: tf.Tensor, order: int = 0) -> tf.Tensor:
    """``gₖ(f) = dᵏ log Φ(f)/dfᵏ``, elementwise, whose gradient is ``gₖ₊₁``.

    Relative error below 1e-12 on both tails. From k = 4 on, automatic differentiation goes through
    the approximation.
    """

    def value(f: tf.Tensor) -> tf.Tensor:
        # Both sides are finite wherever f is: the one not selected leaves no NaN in a gradient.
        x = tf.abs(f)
        return tf.where(f < 0, _log_cdf_negative(order, x), _log_cdf_positive(order, x))

    @tf.custom_gradient
    def differentiable(f: tf.Tensor) -> Any:
        return value(f), lambda upstream: upstream * log_cdf(f, order + 1)

    return differentiable(f) if order < 4 else value(f)


def _legendre(rule: Rule, dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
    """Gauss–Legendre nodes and weights on [0, 1], ``[n, 1]`` each."""
    x, w = np.polynomial.legendre.leggauss(rule.num_nodes)
    return tf.constant((1 + x[:, None]) / 2, dtype), tf.constant(w[:, None] / 2, dtype)


def _extent(edge: tf.Tensor, reach: float) -> tf.Tensor:
    """How far below ``edge`` a standard Gaussian is worth integrating.

    To −reach from an edge above the mean; from an edge below it, to where the density has fallen
    by ``exp(−½ reach²)`` from its value at the edge.
    """
    below = tf.minimum(edge, 0)
    # √(e² + R²) − |e| without the cancellation
    return tf.maximum(edge, 0) + reach**2 / (tf.sqrt(below * below + reach**2) - below)


def _side(
    m: tf.Tensor, v: tf.Tensor, damping: TensorType, rule: Rule
) -> tuple[tf.Tensor, tf.Tensor]:
    """Nodes z and weights dz for the half-line ``m + √v z < 0``, two panels, ``[2n, B]``.

    The window is that of ``N(f; m, v) exp(−½ damping f²)``. The eighth of it next to ``f = 0`` has
    its nodes in ``log(1 + |f|)``, because log Φ and Φᵅ bend there on the scale 1, whatever v is.
    """
    x, w = _legendre(rule, m.dtype)
    s = tf.sqrt(v)
    q2 = 1 + damping * v
    q = tf.sqrt(q2)
    # t = q (z − centre) is standard normal under the damped Gaussian, and f = 0 at t₀
    t0 = -m / (s * q)
    edge = tf.minimum(t0, rule.reach)
    width = _extent(edge, rule.reach)
    scale = s / q  # df/dt
    offset = 1 + (t0 - edge) * scale  # 1 + |f| at the edge
    span = tf.math.log1p(scale * width / (8 * offset))
    near = offset / scale * tf.math.expm1(span * x)
    near_w = span * w * (near + offset / scale)
    far = width * (1 / 8 + 7 / 8 * x)
    far_w = width * (7 / 8 * w)
    z = -damping * m * s / q2 + (edge - tf.concat([near, far], 0)) / q
    return tf.stop_gradient(z), tf.stop_gradient(tf.concat([near_w, far_w], 0) / q)


def _damped_side(m: tf.Tensor, v: tf.Tensor, rule: Rule) -> tuple[tf.Tensor, tf.Tensor]:
    """Nodes z and weights dz for ``m + √v z > 0`` and an integrand like ``exp(−½f²)``, ``[n, B]``.

    One panel is enough: the window of ``N(f; m, v) exp(−½f²)`` is never wider than the bend.
    """
    x, w = _legendre(rule, m.dtype)
    s = tf.sqrt(v)
    q = tf.sqrt(1 + v)
    edge = tf.maximum(-m / (s * q), -rule.reach)
    width = _extent(-edge, rule.reach)
    z = -m * s / (1 + v) + (edge + width * x) / q
    return tf.stop_gradient(z), tf.stop_gradient(width * w / q)


def _gaussian(z: tf.Tensor) -> tf.Tensor:
    return tf.exp(-0.5 * z * z) / SQRT_2PI


class _Nodes(NamedTuple):
    """Nodes z on either side of ``f = 0``, ``|f|`` there, and weights under N(z; 0, 1), ``[n, B]``."""

    z_neg: tf.Tensor
    x_neg: tf.Tensor
    w_neg: tf.Tensor
    z_pos: tf.Tensor
    x_pos: tf.Tensor
    w_pos: tf.Tensor

    def integrate(self, negative: tf.Tensor, positive: tf.Tensor) -> tf.Tensor:
        """The integral of a function of f from its values on either side, ``[B]``."""
        return tf.reduce_sum(self.w_neg * negative, 0) + tf.reduce_sum(self.w_pos * positive, 0)


def _nodes(m: tf.Tensor, v: tf.Tensor, rule: Rule) -> _Nodes:
    s = tf.sqrt(v)
    z_neg, w_neg = _side(m, v, 0.0, rule)
    z_pos, w_pos = _damped_side(m, v, rule)
    return _Nodes(
        z_neg,
        tf.maximum(-(m + s * z_neg), 0),
        w_neg * _gaussian(z_neg),
        z_pos,
        tf.maximum(m + s * z_pos, 0),
        w_pos * _gaussian(z_pos),
    )


def _low_quadrature(m: tf.Tensor, v: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """``E[g₀]``, ``E[g₁]`` and ``E[g₂]`` under ``f ~ N(m, v)``, for m and v of shape ``[B]``."""
    at = _nodes(m, v + VARIANCE_FLOOR, COARSE)
    sides = zip(_negative_low(at.x_neg), _positive_low(at.x_pos), strict=True)
    return tuple(at.integrate(*pair) for pair in sides)


def _high_quadrature(m: tf.Tensor, v: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """``E[g₃]`` and ``E[g₄]`` under ``f ~ N(m, v)``.

    At large v, g₄ integrates to almost nothing over its own support. There Stein's identity is
    used, ``v E[g₄] = E[(g₂ + 1)(z² − 1)]``, with ``g₂ + 1 = −δ'`` on the negative side and
    ``∫_{z₀}^∞ (z² − 1) N(z) dz = z₀ N(z₀)`` for the 1 on the positive one.
    """
    spread = v + VARIANCE_FLOOR
    s = tf.sqrt(spread)
    at = _nodes(m, spread, FINE)
    g2, g3, g4 = _positive_high(at.x_pos)
    d1, d2, d3 = _excesses((1, 2, 3), at.x_neg)
    direct = at.integrate(-d3, g4)
    z0 = -m / s
    stein = z0 * _gaussian(z0) + at.integrate(
        -d1 * (at.z_neg * at.z_neg - 1), g2 * (at.z_pos * at.z_pos - 1)
    )
    fourth = tf.where((s > 3) & (z0 < 5), stein / spread, direct)
    return at.integrate(d2, g3), fourth


@functools.cache
def _compiled(quadrature: Callable[..., Any], dtype: tf.DType) -> Any:
    """A quadrature as one graph per process: every model's graph calls it, eager code too."""
    spec = tf.TensorSpec([None], dtype)
    return subgraph(quadrature, input_signature=[spec, spec])


@tf.custom_gradient
def _low_moments(m: tf.Tensor, v: tf.Tensor) -> Any:
    """``E[g₀]``, ``E[g₁]`` and ``E[g₂]``, differentiable once: ``∂E[gₖ] = (E[gₖ₊₁], ½ E[gₖ₊₂])``."""
    # The inputs carry no gradient: a tape would differentiate the quadrature for nothing.
    E0, E1, E2 = _compiled(_low_quadrature, m.dtype)(tf.stop_gradient(m), tf.stop_gradient(v))

    def grad(u0: tf.Tensor, u1: tf.Tensor, u2: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        # Automatic differentiation of third derivatives goes through the quadrature, nodes held fixed.
        E3, E4 = _compiled(_high_quadrature, m.dtype)(m, v)
        return u0 * E1 + u1 * E2 + u2 * E3, 0.5 * (u0 * E2 + u1 * E3 + u2 * E4)

    return (E0, E1, E2), grad


@tf.custom_gradient
def _expectation(m: tf.Tensor, v: tf.Tensor) -> Any:
    """``E[log Φ(f)]`` under ``f ~ N(m, v)``, for m and v of shape ``[B]``."""

    def grad(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        _, E1, E2 = _low_moments(m, v)
        return upstream * E1, 0.5 * upstream * E2

    value, *_ = _compiled(_low_quadrature, m.dtype)(tf.stop_gradient(m), tf.stop_gradient(v))
    return value, grad


def _power_nodes(
    m: tf.Tensor, v: tf.Tensor, damping_negative: TensorType, damping_positive: TensorType
) -> tuple[tf.Tensor, tf.Tensor]:
    """Nodes z and log weights of N(z; 0, 1) that resolve the bend of ``Φᵅ``, ``[4n, B]`` each.

    The first half lies on the negative side of f, the second on the positive one.
    """
    z_neg, w_neg = _side(m, v, damping_negative, FINE)
    z_pos, w_pos = _side(-m, v, damping_positive, FINE)
    z = tf.concat([z_neg, -z_pos], 0)
    return z, tf.math.log(tf.concat([w_neg, w_pos], 0)) - 0.5 * z * z - math.log(SQRT_2PI)


def _log_cdf_at_power_nodes(order: int, f: tf.Tensor) -> tf.Tensor:
    """``gₖ(f)`` for f in the order of `_power_nodes`, each formula on its own half."""
    negative, positive = tf.split(f, 2)
    return tf.concat(
        [
            _log_cdf_negative(order, tf.maximum(-negative, 0)),
            _log_cdf_positive(order, tf.maximum(positive, 0)),
        ],
        0,
    )


def _power_value(m: tf.Tensor, v: tf.Tensor, alpha: tf.Tensor) -> tf.Tensor:
    """``(1/α) log E[Φᵅ]`` by quadrature.

    Where ``E[Φᵅ]`` is not small, it is ``1 + E[expm1(α log Φ)]``, which keeps its digits as α → 0;
    this integrand is damped by ``exp(−½f²)`` for f > 0. Elsewhere it is the sum of positive terms
    itself, in logarithms; Φᵅ is damped by ``exp(−½αf²)`` for f < 0.
    """
    # E[exp(−½αf²)] stands in for the f < 0 part of E[Φᵅ]; with m ≥ 0, E[Φᵅ] ≥ E[Φ] ≥ ½.
    q2 = 1 + alpha * v
    large = (m >= 0) | (tf.exp(-0.5 * alpha * m * m / q2) > 0.5 * tf.sqrt(q2))
    z, log_w = _power_nodes(m, v, tf.where(large, tf.zeros_like(m), alpha), tf.cast(large, m.dtype))
    exponent = alpha * _log_cdf_at_power_nodes(0, m + tf.sqrt(v) * z)
    deficit = tf.reduce_sum(tf.exp(log_w) * tf.math.expm1(exponent), 0)
    deficit = tf.where(large, deficit, tf.zeros_like(deficit))
    log_power = tf.reduce_logsumexp(log_w + exponent, 0)
    return tf.where(large, tf.math.log1p(deficit), log_power) / alpha


@tf.custom_gradient
def _log_expected_power(m: tf.Tensor, v: tf.Tensor, alpha: tf.Tensor) -> Any:
    """``ℓ = (1/α) log E[Φᵅ]`` under ``f ~ N(m, v)``, for m and v of shape ``[B]``.

        ∂ℓ/∂m = Ẽ[g₁],     ∂ℓ/∂v = ½ Ẽ[g₂ + αg₁²] = ½ Ẽ[g₁z]/√v,     Ẽ over N(f; m, v) Φᵅ/E[Φᵅ]

    The last form (Stein's) is the one without cancellation at large v. α counts as a constant: it
    has no gradient. Second derivatives go through the quadrature of the first.
    """

    def grad(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, None]:
        spread = v + VARIANCE_FLOOR
        s = tf.sqrt(spread)
        # (Φᵅ)' is damped on both sides.
        z, log_w = _power_nodes(m, spread, alpha, 1.0)
        f = m + s * z
        g0, g1, g2 = (_log_cdf_at_power_nodes(order, f) for order in range(3))
        tilted = tf.exp(log_w + alpha * (g0 - _log_expected_power(m, v, alpha)))
        d_mean = tf.reduce_sum(tilted * g1, 0)
        d_variance = tf.where(
            s > 3,
            tf.reduce_sum(tilted * g1 * z, 0) / s,
            tf.reduce_sum(tilted * (g2 + alpha * g1 * g1), 0),
        )
        return upstream * d_mean, 0.5 * upstream * d_variance, None

    return _power_value(m, v + VARIANCE_FLOOR, alpha), grad


class ProbitBernoulli(ScalarLikelihood):
    """Bernoulli likelihood with the probit link, exact where GPflow's ``Bernoulli`` squeezes. ::

        p(y = 1 | f) = Φ(f),     p(y = 0 | f) = Φ(−f),     y ∈ {0, 1}

    ``log p`` is concave in f, so that sites have ``λ₂ ≥ 0``; GPflow's probabilities stop at 1e-3
    and 1 − 1e-3, which makes theirs convex in places. Labels are not checked here: any y acts as
    the sign ``2y − 1``.
    """

    @inherit_check_shapes
    def _scalar_log_prob(self, X: TensorType, F: TensorType, Y: TensorType) -> tf.Tensor:
        return log_cdf(_signed(F, Y))

    @inherit_check_shapes
    def _conditional_mean(self, X: TensorType, F: TensorType) -> tf.Tensor:
        return tf.exp(log_cdf(tf.convert_to_tensor(F)))

    @inherit_check_shapes
    def _conditional_variance(self, X: TensorType, F: TensorType) -> tf.Tensor:
        # Φ(f) Φ(−f): p − p² would lose the upper tail.
        F = tf.convert_to_tensor(F)
        return tf.exp(log_cdf(F) + log_cdf(-F))

    @inherit_check_shapes
    def _predict_mean_and_var(
        self, X: TensorType, Fmu: TensorType, Fvar: TensorType
    ) -> MeanAndVariance:
        # E[Φ(f)] = Φ(m/√(1 + v))
        a = Fmu / tf.sqrt(1 + Fvar)
        return self._conditional_mean(X, a), self._conditional_variance(X, a)

    @inherit_check_shapes
    def _predict_log_density(
        self, X: TensorType, Fmu: TensorType, Fvar: TensorType, Y: TensorType
    ) -> tf.Tensor:
        return tf.reduce_sum(log_cdf(_signed(Fmu, Y) / tf.sqrt(1 + Fvar)), axis=-1)

    @inherit_check_shapes
    def _variational_expectations(
        self, X: TensorType, Fmu: TensorType, Fvar: TensorType, Y: TensorType
    ) -> tf.Tensor:
        m, v, shape = _flatten(_signed(Fmu, Y), Fvar)
        return tf.reduce_sum(tf.reshape(_expectation(m, v), shape), axis=-1)

    def expectation_derivatives(
        self, X: TensorType, Fmu: TensorType, Fvar: TensorType, Y: TensorType
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """``E_q[log p]`` ``[N]`` and its derivatives in mean and variance ``[N, P]``, in one go."""
        m, v, shape = _flatten(_signed(Fmu, Y), Fvar)
        E0, E1, E2 = (_as_before(x, shape, Fmu) for x in _low_moments(m, v))
        return tf.reduce_sum(E0, axis=-1), _signed(E1, Y), 0.5 * E2

    def expectation_curvature(
        self, X: TensorType, Fmu: TensorType, Fvar: TensorType, Y: TensorType
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """``∂²E/∂m∂v`` and ``∂²E/∂v²``, ``[N, P]`` each; exact expectations have ``∂²E/∂m² = 2 ∂E/∂v``."""
        m, v, shape = _flatten(_signed(Fmu, Y), Fvar)
        high = _compiled(_high_quadrature, m.dtype)(m, v)
        E3, E4 = (_as_before(x, shape, Fmu) for x in high)
        return 0.5 * _signed(E3, Y), 0.25 * E4

    @check_shapes(
        "X: [broadcast batch..., input_dim]",
        "Fmu: [broadcast batch..., latent_dim]",
        "Fvar: [broadcast batch..., latent_dim]",
        "Y: [broadcast batch..., observation_dim]",
        "return: [batch..., latent_dim]",
    )
    def log_expected_power(
        self, X: TensorType, Fmu: TensorType, Fvar: TensorType, Y: TensorType, alpha: TensorType
    ) -> tf.Tensor:
        """``(1/α) log E[p(y|f)^α]`` under ``f ~ N(Fmu, Fvar)``, one value per latent. ::

            α → 0: E[log p(y|f)],     α = 1: log Φ((2y − 1) Fmu/√(1 + Fvar))

        It is non-decreasing in α. α is a scalar in (0, 1] and is not differentiated.
        """
        m = _signed(Fmu, Y)
        if tf.get_static_value(alpha) == 1:
            return log_cdf(m / tf.sqrt(1 + Fvar))
        m, v, shape = _flatten(m, Fvar)
        if not tf.is_tensor(alpha):
            alpha = tf.constant(alpha, m.dtype)  # tf.cast would pass through float32
        return tf.reshape(_log_expected_power(m, v, tf.cast(alpha, m.dtype)), shape)


def _signed(F: TensorType, Y: TensorType) -> tf.Tensor:
    """``(2y − 1) f``: p(y|f) = Φ of it."""
    F = tf.convert_to_tensor(F)
    return (2 * tf.cast(Y, F.dtype) - 1) * F


def _as_before(x: tf.Tensor, shape: tf.Tensor, like: TensorType) -> tf.Tensor:
    """Undo `_flatten`; the number of columns is known."""
    x = tf.reshape(x, shape)
    x.set_shape([None] * (len(like.shape) - 1) + [like.shape[-1]])
    return x


def _flatten(m: tf.Tensor, v: TensorType) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """m and v broadcast against each other and flattened to ``[B]``, and the shape they had."""
    v = tf.cast(v, m.dtype)
    shape = tf.broadcast_dynamic_shape(tf.shape(m), tf.shape(v))
    m, v = (tf.reshape(tf.broadcast_to(a, shape), [-1]) for a in (m, v))
    return m, v, shape
