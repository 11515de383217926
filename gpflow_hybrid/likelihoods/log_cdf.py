"""``log Φ`` and its derivatives ``gₖ = (log Φ)⁽ᵏ⁾`` to near machine precision, on both tails."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np
import tensorflow as tf
from gpflow.base import AnyNDArray
from numpy.polynomial import chebyshev
from scipy.linalg import eigh_tridiagonal
from scipy.special import erfcx

from ..namespaces import functions_of, is_array

FOLD = 3.5
"""``t = (x − FOLD)/(x + FOLD)`` maps ``[0, ∞)`` to ``[−1, 1)`` for polynomial approximation."""

DEGREE = 26
"""Of the polynomials for the derivatives of δ: the relative error is 4e-13, and 2e-5 at degree 12."""

BLOCK = 5
"""Length of the polynomials that a long one is made of."""

CACHED = 8192
"""Values of such polynomials at a time, on arrays: a product that BLAS does not divide among threads."""

SQRT_2PI = math.sqrt(2.0 * math.pi)


@functools.cache
def _excess_rule() -> tuple[AnyNDArray, AnyNDArray]:
    """Nodes and weights of the Gauss rule of the Jacobi matrix with off-diagonals √2, √3, …."""
    t, vectors = eigh_tridiagonal(np.zeros(300), np.sqrt(np.arange(2.0, 301.0)))
    return t, vectors[0] ** 2


def _excess_reference(order: int, x: AnyNDArray) -> AnyNDArray:
    """``δ(x) = φ(x)/Φ(−x) − x`` for x ≥ 0, or its first, second or third derivative.

        δ(x) = 1/(x + 2/(x + 3/(x + …))) = Σᵢ wᵢ Re 1/(x + i tᵢ)

    with tᵢ, wᵢ of :func:`_excess_rule`. Differentiating the sum costs no digits; differentiating φ/Φ
    costs x⁴ of them. Near 0 the sum converges slowly and the elementary formulas are harmless.
    """
    t, weights = _excess_rule()
    poles = np.maximum(x, 1.5)[:, None] + 1j * t
    sign_factorial = (-1.0) ** order * math.factorial(order)
    large = sign_factorial * (poles ** -(order + 1)).real @ weights

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
def _excess_coefficients(order: int, degree: int) -> tuple[float, ...]:
    """Coefficients in t, highest power first, of ``δ⁽ᵏ⁾(x) (x + FOLD)ᵏ⁺¹``.

    δ itself needs no more than degree 22 for a relative error of 1e-14.
    """

    def scaled(t: AnyNDArray) -> AnyNDArray:
        x = FOLD * (1 + t) / (1 - t)
        return _excess_reference(order, x) * (x + FOLD) ** (order + 1)

    degree = min(degree, 22) if order == 0 else degree
    series = chebyshev.cheb2poly(chebyshev.chebinterpolate(scaled, degree))
    return tuple(float(c) for c in series[::-1])


@functools.cache
def _excess_blocks(orders: tuple[int, ...], degree: int) -> AnyNDArray:
    """The same for several orders, lowest power first, in blocks: ``[blocks, orders, BLOCK]``."""
    series = [_excess_coefficients(k, degree) for k in orders]
    size = -(-max(map(len, series)) // BLOCK) * BLOCK
    rows = [np.pad(c[::-1], (0, size - len(c))) for c in series]
    return np.stack(rows).reshape(len(orders), -1, BLOCK).transpose(1, 0, 2)


def excesses(orders: tuple[int, ...], x: Any, degree: int = DEGREE) -> list[Any]:
    """``δ⁽ᵏ⁾(x)`` for x ≥ 0, a tensor or an array, and each of the orders k = 0, …, 3."""
    return (_excesses_of_array if is_array(x) else _excesses_of_tensor)(orders, x, degree)


def _excesses_of_array(orders: tuple[int, ...], x: AnyNDArray, degree: int) -> list[AnyNDArray]:
    """As of tensors, so many numbers at a time that all powers of t stay in a core's cache."""
    found = np.empty((len(orders), x.size), x.dtype)
    row, blocks = x.ravel(), _excess_blocks(orders, degree)
    size = CACHED // len(orders)
    for part in (slice(i, i + size) for i in range(0, x.size, size)):
        r = 1 / (row[part] + FOLD)
        t = 1 - 2 * FOLD * r
        powers = np.ones((BLOCK, t.size))
        for below, power in itertools.pairwise(powers):
            np.multiply(below, t, out=power)
        short = np.matmul(blocks.reshape(-1, BLOCK), powers).reshape(*blocks.shape[:2], -1)
        step, total = powers[-1] * t, short[-1]
        for block in short[-2::-1]:
            total *= step
            total += block
        for k, value in zip(orders, total, strict=True):
            for _ in range(k + 1):
                value *= r
        found[:, part] = total
    return list(found.reshape(-1, *x.shape))


def _excesses_of_tensor(orders: tuple[int, ...], x: tf.Tensor, degree: int) -> list[tf.Tensor]:
    """A polynomial ``Σⱼ tᴮʲ pⱼ(t)`` with all the short ``pⱼ`` by one product of matrices: few operations on
    large arrays, where Horner's rule would be many."""
    r = 1 / (tf.reshape(x, [-1]) + FOLD)
    t = 1 - 2 * FOLD * r
    powers = [tf.ones_like(t), t]
    while len(powers) <= BLOCK:
        powers.append(powers[-1] * t)
    *powers, step = powers
    blocks = _excess_blocks(orders, degree)
    short = tf.matmul(tf.constant(blocks.reshape(-1, BLOCK), x.dtype), tf.stack(powers))
    short = tf.unstack(tf.reshape(short, tf.stack([len(blocks), len(orders), -1])))
    total = short[-1]
    for part in short[-2::-1]:
        total = total * step + part
    derivatives = []
    for k, value in zip(orders, tf.unstack(total), strict=True):
        for _ in range(k + 1):
            value = value * r
        derivatives.append(tf.reshape(value, tf.shape(x)))
    return derivatives


def _excess(order: int, x: Any) -> Any:
    """``δ⁽ᵏ⁾(x)`` for x ≥ 0 and k = 0, …, 3."""
    return excesses((order,), x)[0]


def negative_low(x: Any, excess: Any = None) -> tuple[Any, Any, Any]:
    """``g₀``, ``g₁`` and ``g₂`` at ``−x`` for x ≥ 0.

    :param excess: ``δ(x)``, if it is known.
    """
    d = _excess(0, x) if excess is None else excess
    h = x + d  # φ(x)/Φ(−x)
    return -0.5 * x * x - functions_of(x).log(SQRT_2PI * h), h, -h * d


def positive_low(x: Any, excess: Any = None) -> tuple[Any, Any, Any]:
    """``g₀``, ``g₁`` and ``g₂`` at x ≥ 0; ``excess`` as above."""
    xp = functions_of(x)
    density = xp.exp(-0.5 * x * x) / SQRT_2PI
    tail = density / (x + (_excess(0, x) if excess is None else excess))  # Φ(−x)
    h = density / (1 - tail)
    return xp.log1p(-tail), h, -h * (x + h)


def positive_high(x: Any) -> tuple[Any, Any, Any]:
    """``g₂``, ``g₃`` and ``g₄`` at x ≥ 0."""
    _, h, g2 = positive_low(x)
    d = x + h
    e = d * (d + h) - 1
    # g₄ = (h e)' with h' = −h d, d' = 1 − h d
    return g2, h * e, -h * d * e + h * ((1 - h * d) * (d + h) + d * (1 - 2 * h * d))


def low_derivatives(f: AnyNDArray) -> tuple[AnyNDArray, AnyNDArray, AnyNDArray]:
    """``g₀``, ``g₁`` and ``g₂`` at f of either sign, with one polynomial for both."""
    x, below = np.abs(f), f < 0.0
    excess = _excess(0, x)
    ratio = x + excess  # φ(x)/Φ(−x)
    density = np.exp(-0.5 * x * x) / SQRT_2PI
    tail = density / ratio
    h = np.where(below, ratio, density / (1.0 - tail))
    value = np.where(below, -0.5 * x * x - np.log(SQRT_2PI * ratio), np.log1p(-tail))
    return value, h, -h * np.where(below, excess, x + h)


def high_derivatives(f: AnyNDArray, degree: int = DEGREE) -> tuple[AnyNDArray, AnyNDArray]:
    """``g₃`` and ``g₄`` at f of either sign."""
    x, below = np.abs(f), f < 0.0
    d2, d3 = excesses((2, 3), x, degree)
    _, g3, g4 = positive_high(x)
    return np.where(below, d2, g3), np.where(below, -d3, g4)


def log_cdf_negative(order: int, x: Any) -> Any:
    """``gₖ(−x)`` for x ≥ 0 and k = 0, …, 4."""
    if order < 3:
        return negative_low(x)[order]
    return _excess(2, x) if order == 3 else -_excess(3, x)


def log_cdf_positive(order: int, x: Any) -> Any:
    """``gₖ(x)`` for x ≥ 0 and k = 0, …, 4."""
    return positive_low(x)[order] if order < 3 else positive_high(x)[order - 2]


def log_cdf(f: Any, order: int = 0) -> Any:
    """``gₖ(f) = dᵏ log Φ(f)/dfᵏ``, elementwise, whose gradient is ``gₖ₊₁``.

    Relative error below 1e-12 on both tails. From k = 4 on, automatic differentiation goes through
    the approximation.
    """

    def value(f: Any) -> Any:
        # Both sides are finite wherever f is: the one not selected leaves no NaN in a gradient.
        xp = functions_of(f)
        x = xp.abs(f)
        return xp.where(f < 0, log_cdf_negative(order, x), log_cdf_positive(order, x))

    @tf.custom_gradient
    def differentiable(f: Any) -> Any:
        return value(f), lambda upstream: upstream * log_cdf(f, order + 1)

    return value(f) if order == 4 or is_array(f) else differentiable(f)
