"""Elliptical slice sampling of many chains at once.

Murray, Adams and MacKay (2010): for a target ``N(x; 0, Σ) exp(h(x))`` draw ``ν ~ N(0, Σ)`` and a
level ``h(x) + log u``, then move along the ellipse ``x cos θ + ν sin θ``, shrinking the bracket of
θ towards 0 until the level is met. There is no step size, and a move is always made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .results import FloatArray

MAX_SHRINKS = 100
"""The bracket is of width 1e-40 by then: the chain stays where it is."""

AHEAD, MOST_AHEAD = 2000, 6
"""Numbers in the proposals of one round, and proposals of a chain. Which angles follow if all are rejected
is known beforehand: where few chains are left, several of their proposals are evaluated at once."""

Potential = Callable[[FloatArray, npt.NDArray[np.intp] | None], FloatArray]
"""``(x [A, n, L], which of the Q chains [A]) → h per datum [A, n]``; None stands for all chains."""

Uniforms = Callable[[int, npt.NDArray[np.intp] | None], FloatArray]
"""Uniform numbers in [0, 1) for the given shrink and some of the Q chains; None stands for all."""


class SliceState(NamedTuple):
    """Chains, and the potential of each datum there."""

    x: FloatArray  # [Q, n, L]
    values: FloatArray  # [Q, n]


def elliptical_slice(
    state: SliceState,
    direction: FloatArray,
    temperature: FloatArray,
    potential: Potential,
    uniforms: Uniforms,
) -> SliceState:
    """One update of every chain that leaves ``N(x; 0, Σ) exp(τ Σₙ hₙ(x))`` invariant.

    Later proposals are made only for the chains that still need one: the cost is that of the number
    of proposals, not of the worst chain's.

    :param direction: ``ν``, a draw from the Gaussian for each chain, ``[Q, n, L]``.
    :param temperature: ``τ``, ``[Q]``.
    """
    level = temperature * state.values.sum(-1) + np.log1p(-uniforms(-2, None))
    theta = 2.0 * np.pi * uniforms(-1, None)
    x = _on_ellipse(state.x, direction, theta)
    values = potential(x, None)
    # Neither −∞ nor NaN is above a level.
    active = np.flatnonzero(~(temperature * values.sum(-1) > level))
    low, high, theta = theta[active] - 2.0 * np.pi, theta[active], theta[active]
    shrink = 0
    while active.size and shrink < MAX_SHRINKS:
        num = min(max(1, AHEAD // (active.size * x[0].size)), MOST_AHEAD, MAX_SHRINKS - shrink)
        angles = np.empty((num, active.size))
        for k in range(num):
            # The angle just rejected becomes the end of the bracket on its side of 0.
            below = theta < 0.0
            low, high = np.where(below, theta, low), np.where(below, high, theta)
            angles[k] = theta = low + uniforms(shrink + k, active) * (high - low)
        chain = np.tile(active, num)
        proposal = _on_ellipse(state.x[chain], direction[chain], angles.ravel())
        found = potential(proposal, chain)
        accepted = (temperature[chain] * found.sum(-1) > level[chain]).reshape(num, -1)
        done, first = accepted.any(0), accepted.argmax(0)
        here, row = active[done], first[done] * active.size + np.flatnonzero(done)
        x[here], values[here] = proposal[row], found[row]
        active, low, high, theta = (a[~done] for a in (active, low, high, theta))
        shrink += num
    # A chain that no proposal satisfies stays where it is.
    x[active], values[active] = state.x[active], state.values[active]
    return SliceState(x, values)


def _on_ellipse(x: FloatArray, direction: FloatArray, theta: FloatArray) -> FloatArray:
    """``x cos θ + ν sin θ``."""
    there = direction * np.sin(theta)[:, None, None]
    there += x * np.cos(theta)[:, None, None]
    return there
