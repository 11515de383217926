"""Where temperatures go, and which settings deserve more of them.

A step from τ to τ + Δτ multiplies the weights by ``exp(Δτ φ)``; the variance of its logarithm, and what it
takes from the effective sample size, is ``Δτ² Var φ``. For a given number of steps all of them together
take least if each takes the same, ``Δτ sd(φ) = constant``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .chains import NUM_KNOTS
from .plans import Plan
from .results import FloatArray, is_poor

NO_WARP = np.linspace(0.0, 1.0, NUM_KNOTS + 1)

KEPT = 0.25
"""Part of the temperatures that stay where they were: spreads are estimates of few chains."""

AIM = 0.8
"""Variance of the log weights that a setting is given temperatures for; about ``exp(−0.8)`` of the chains
are effective then."""

LARGEST_FACTOR = 4
"""By how much the number of temperatures rises at once, at most: the variance falls with it in the long run
only."""


def evened(warp: FloatArray, lengths: FloatArray) -> FloatArray:
    """A warp under which every step of a path has about the same part of ``Σ Δτ sd(φ)``.

    :param lengths: that sum between the knots, under the given warp.
    """
    total = np.sum(lengths)
    if not 0.0 < total < np.inf:
        return warp
    shares = (1.0 - KEPT) * lengths / total + KEPT / len(lengths)
    so_far = np.concatenate([[0.0], np.cumsum(shares)])
    return np.interp(NO_WARP, so_far / so_far[-1], warp)


def needed(outputs: Mapping[int, Any]) -> dict[int, int]:
    """Numbers of temperatures for the settings whose weights are too uneven.

    :param outputs: of every setting, with ``log_weights [C]`` and ``num_temperatures``.
    """
    found = {}
    for i, output in outputs.items():
        weights = output.log_weights
        if not is_poor(weights):
            continue
        spread = float(np.var(weights)) if np.isfinite(weights).all() else math.inf
        factor = min(max(spread / AIM, 2.0), LARGEST_FACTOR)
        # Few sizes: settings of one run together.
        found[i] = output.num_temperatures * 2 ** round(math.log2(factor))
    return found


def affordable(plan: Plan, budget: float, wanted: Mapping[int, int]) -> dict[int, int]:
    """As many of the settings as so many sweeps allow, those that want least first."""
    chosen = {}
    for i, number in sorted(wanted.items(), key=lambda item: (item[1], item[0])):
        budget -= dataclasses.replace(plan, num_temperatures=number).num_sweeps
        if budget < 0.0:
            break
        chosen[i] = number
    return chosen
