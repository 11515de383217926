"""Gaussian integrals of ``log Φ`` and its derivatives where a marginal is narrower than its bend.

The singularities of ``log Φ`` next to the line, zeros of Φ at ``1.9 ± 2.8i``, lie many deviations away
if v is small: Gauss–Hermite's rule then has all digits with few nodes. How many depends on a marginal's own
variance alone, so that no datum changes with its neighbours.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from gpflow.base import AnyNDArray

from .log_cdf import DEGREE, high_derivatives, low_derivatives


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


def narrow_low(m: AnyNDArray, v: AnyNDArray, narrow: Narrow, degree: int) -> tuple[AnyNDArray, ...]:
    """``E[g₀]``, ``E[g₁]`` and ``E[g₂]`` of marginals that one rule serves, ``[B]``."""
    z, w = _hermite(narrow.low)
    return _weighted(w, low_derivatives(m + np.sqrt(v) * z))


def narrow_high(
    m: AnyNDArray, v: AnyNDArray, narrow: Narrow, degree: int
) -> tuple[AnyNDArray, ...]:
    """``E[g₃]`` and ``E[g₄]`` of the same.

    :param degree: of the polynomials behind them; where it is lower, fewer nodes will do as well.
    """
    z, w = _hermite(narrow.high if degree == DEGREE else narrow.low // 2 + 2)
    return _weighted(w, high_derivatives(m + np.sqrt(v) * z, degree))


def _weighted(w: AnyNDArray, values: tuple[AnyNDArray, ...]) -> tuple[AnyNDArray, ...]:
    return tuple(np.einsum("q,qb->b", w, x) for x in values)
