"""Gaussian integrals of ``log Φ`` and its derivatives where a marginal is narrower than its bend.

The singularities of ``log Φ`` next to the line, zeros of Φ at ``1.9 ± 2.8i``, lie many deviations away
if v is small: Gauss–Hermite's rule then has all digits with few nodes. How many depends on a marginal's own
variance alone, so that no datum changes with its neighbours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from gpflow.base import AnyNDArray

from .log_cdf import DEGREE, high_derivatives, low_derivatives

Derivatives = Callable[[AnyNDArray], tuple[AnyNDArray, ...]]


class Narrow(NamedTuple):
    """Up to a variance, the number of nodes for g₀, g₁ and g₂, and for g₃ and g₄."""

    variance: float
    low: int
    high: int


NARROW = (
    Narrow(0.001, 5, 6),
    Narrow(0.01, 6, 7),
    Narrow(0.03, 7, 9),
    Narrow(0.1, 10, 12),
    Narrow(0.2, 13, 17),
    Narrow(0.3, 17, 22),
    Narrow(0.5, 23, 30),
    Narrow(1.0, 40, 50),
)
"""For errors below 1e-11, relative to the value or to one: an order below those of the wide rule's use."""


@functools.cache
def _hermite(num_nodes: int) -> tuple[AnyNDArray, AnyNDArray]:
    z, w = np.polynomial.hermite_e.hermegauss(num_nodes)
    return z[:, None], w / np.sum(w)


def class_of(v: AnyNDArray) -> AnyNDArray:
    """Which of :data:`NARROW` serves a variance; their number where none does."""
    return np.searchsorted([narrow.variance for narrow in NARROW], v)


def narrow_low(m: AnyNDArray, v: AnyNDArray, degree: int) -> tuple[AnyNDArray, ...]:
    """``E[g₀]``, ``E[g₁]`` and ``E[g₂]`` of narrow marginals, ``[B]``."""
    return _integrals(m, v, [narrow.low for narrow in NARROW], low_derivatives)


def narrow_high(m: AnyNDArray, v: AnyNDArray, degree: int) -> tuple[AnyNDArray, ...]:
    """``E[g₃]`` and ``E[g₄]`` of the same.

    :param degree: of the polynomials behind them; where it is lower, fewer nodes will do as well.
    """
    sizes = [narrow.high if degree == DEGREE else narrow.low // 2 + 2 for narrow in NARROW]
    return _integrals(m, v, sizes, functools.partial(high_derivatives, degree=degree))


def _integrals(
    m: AnyNDArray, v: AnyNDArray, sizes: Sequence[int], derivatives: Derivatives
) -> tuple[AnyNDArray, ...]:
    """By rules of these sizes, one for each class, whose nodes are all in one row."""
    kinds, s = class_of(v), np.sqrt(v)
    groups = [(np.flatnonzero(kinds == kind), *_hermite(sizes[kind])) for kind in np.unique(kinds)]
    values = derivatives(np.concatenate([(m[i] + s[i] * z).ravel() for i, z, _ in groups]))
    found = tuple(np.empty_like(m) for _ in values)
    end = 0
    for i, z, w in groups:
        begin, end = end, end + len(z) * len(i)
        for integral, value in zip(found, values, strict=True):
            integral[i] = np.einsum("q,qb->b", w, value[begin:end].reshape(len(z), len(i)))
    return found
