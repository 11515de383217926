"""Marginals of single hyperparameters, from nodes or from samples."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.interpolate import RBFInterpolator
from scipy.spatial import KDTree
from scipy.special import logsumexp
from scipy.stats import norm, qmc

from .axes import Axes

Array = npt.NDArray[np.float64]

LEVELS = (0.025, 0.25, 0.5, 0.75, 0.975)
"""Of the quantiles."""

NUM_DRAWS = 2**12
"""Quasi-random draws from a smooth density through the nodes."""

DRAW_WIDTH = 1.3
"""Of the proposal of every second one, in standard deviations: it is around the mode."""

NODE_WIDTH = 0.7
"""Of that of the others, in steps of the lattice: around nodes, as often as they have weight. A long arm is
further out than any draw around the mode."""


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


def smooth_draws(z: Array, log_masses: Array, axes: Axes, step: float | None = None) -> Draws:
    """Draws from a smooth density through the nodes, a Gaussian in z but for what is interpolated.

    :param log_masses: ``log p(x) |dx/dz|`` at the nodes.
    :param step: of the lattice that they are of, if they are: beyond it the density falls.
    """
    d = z.shape[1]
    log_masses = log_masses - log_masses.max()
    excess = log_masses + 0.5 * np.sum(z**2, 1)
    excess -= excess[np.argmax(log_masses)]
    # SciPy calls the argument rng from 1.15 on, and goes on to take this name.
    uniform = qmc.Sobol(d + 1, scramble=True, seed=np.random.default_rng(0)).random(NUM_DRAWS)
    noise = norm.ppf(np.clip(uniform[:, :d], 1e-9, 1.0 - 1e-9))
    weights, width = np.exp(log_masses - logsumexp(log_masses)), NODE_WIDTH * (step or 1.0)
    chosen = np.searchsorted(np.cumsum(weights), np.abs(2.0 * uniform[:, d] - 1.0))
    around_node = z[np.minimum(chosen, len(z) - 1)] + width * noise
    new = np.where(uniform[:, d:] < 0.5, DRAW_WIDTH * noise, around_node)
    # Not to be believed beyond the nodes.
    fitted = np.clip(_through(z, excess, new), excess.min(), excess.max())
    log_density = fitted - 0.5 * np.sum(new**2, 1)
    if step is not None:
        distance, nearest = KDTree(z).query(new, p=np.inf)
        beyond = distance > 0.5 * step * (1.0 + 1e-9)
        falling = np.minimum(log_density, log_masses[nearest])
        log_density = np.where(beyond, falling, log_density)
    log_weights = log_density - _log_proposal(new, z, weights, width)
    weights = np.exp(log_weights - log_weights.max())
    return Draws(axes.position(new), weights / weights.sum())


def _log_proposal(new: Array, z: Array, weights: Array, width: float) -> Array:
    """Half a Gaussian around the mode, half one around every node."""
    around_mode = np.sum(norm.logpdf(new, scale=DRAW_WIDTH), 1)
    squares = np.sum((new[:, None] - z) ** 2, 2) / width**2  # [S, K]
    constant = new.shape[1] * np.log(width * np.sqrt(2.0 * np.pi))
    around_nodes = logsumexp(-0.5 * squares, axis=1, b=weights) - constant
    return np.asarray(np.logaddexp(around_mode, around_nodes))


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
