"""Marginals of single hyperparameters, from nodes or from samples."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.interpolate import RBFInterpolator
from scipy.stats import norm, qmc

from .axes import Axes

Array = npt.NDArray[np.float64]

LEVELS = (0.025, 0.25, 0.5, 0.75, 0.975)
"""Of the quantiles."""

NUM_DRAWS = 2**12
"""Quasi-random draws from a smooth density through the nodes."""

DRAW_WIDTH = 1.3
"""Of their proposal, in standard deviations."""


class Draws(NamedTuple):
    """Weighted settings of the hyperparameters."""

    x: Array  # [S, d]
    weights: Array  # [S], they sum to one


@dataclasses.dataclass(frozen=True)
class Marginal:
    """The posterior of one scalar hyperparameter."""

    name: str
    """GPflow's path, with an index where the parameter has several."""
    mean: float
    """Its expectation."""
    deviation: float
    """Its standard deviation."""
    quantiles: dict[float, float]
    """By their level: 0.025, 0.25, 0.5, 0.75 and 0.975."""


def smooth_draws(z: Array, log_masses: Array, axes: Axes) -> Draws:
    """Draws from a smooth density through the nodes, a Gaussian in z but for what is interpolated.

    :param log_masses: ``log p(x) |dx/dz|`` at the nodes.
    """
    d = z.shape[1]
    excess = log_masses + 0.5 * np.sum(z**2, 1)
    excess -= excess[np.argmax(log_masses)]
    # SciPy calls the argument rng from 1.15 on, and goes on to take this name.
    uniform = qmc.Sobol(d, scramble=True, seed=np.random.default_rng(0)).random(NUM_DRAWS)
    new = DRAW_WIDTH * norm.ppf(np.clip(uniform, 1e-9, 1.0 - 1e-9))
    # Not to be believed beyond the nodes.
    fitted = np.clip(_through(z, excess, new), excess.min(), excess.max())
    log_weights = fitted - 0.5 * np.sum(new**2, 1) * (1.0 - DRAW_WIDTH**-2)
    weights = np.exp(log_weights - log_weights.max())
    return Draws(axes.position(new), weights / weights.sum())


def _through(z: Array, excess: Array, new: Array) -> Array:
    """Smooth through every node, quadratic far from them; zero where they are too few for that."""
    try:
        return np.asarray(RBFInterpolator(z, excess, kernel="quintic", degree=2)(new))
    except (ValueError, np.linalg.LinAlgError):
        return np.zeros(len(new))


def marginal(name: str, values: Array, weights: Array) -> Marginal:
    """Of one scalar, from weighted draws of it."""
    mean = float(weights @ values)
    deviation = float(np.sqrt(weights @ (values - mean) ** 2))
    order = np.argsort(values)
    # Each draw in the middle of its share.
    levels = np.cumsum(weights[order]) - 0.5 * weights[order]
    quantiles = np.interp(LEVELS, levels, values[order])
    return Marginal(name, mean, deviation, dict(zip(LEVELS, map(float, quantiles), strict=True)))
