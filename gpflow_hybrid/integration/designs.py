"""Integration over four to six hyperparameters: a central composite design, then quasi-random points."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy.special import logsumexp
from scipy.stats import norm, qmc

from .axes import Axes
from .lattices import Quadrature, largest_change, predictive
from .movable import Node

Array = npt.NDArray[np.float64]
Look = Callable[[Array], Node]

RADII = (1.1, 1.4)
"""Of two designs, in units of √d: the first is that of INLA, the second tells how far to believe it."""

PROPOSAL_WIDTH = 1.2
"""Standard deviation of quasi-random z: wider than the posterior, so that no weight is large."""

FIRST_POINTS = 64
"""Quasi-random points of a first estimate; each further one doubles them."""


def composite_design(d: int) -> Array:
    """Points on the unit sphere, ``[2d + 2^(d−k), d]``: both ends of the axes, and the corners of a cube or
    half of them, so that no two products of two coordinates are confounded."""
    ends = np.concatenate([np.eye(d), -np.eye(d)])
    free = d if d < 5 else d - 1
    corners = np.array(list(itertools.product((-1.0, 1.0), repeat=free)))
    if free < d:
        corners = np.concatenate([corners, np.prod(corners, 1, keepdims=True)], 1)
    return np.concatenate([ends, corners / np.sqrt(d)])


def design_weights(d: int, radius: float, num_points: int) -> tuple[float, float]:
    """What the density at the centre and at each point of a sphere is multiplied by, over ``(2π)^{d/2}``.

    With ``r² = d·radius²``, for a standard normal the weights sum to one and give ``E zᵀz = d``:

        centre = 1 − 1/radius²,    point = exp(r²/2) / (num_points · radius²)
    """
    squared = d * radius**2
    return 1.0 - radius**-2, np.exp(0.5 * squared) / (num_points * radius**2)


def fewest_points(d: int) -> int:
    """Of both designs and a first estimate by quasi-random points."""
    return 1 + len(RADII) * len(composite_design(d)) + FIRST_POINTS


def integrate_by_design(
    look: Look, axes: Axes, tolerance: float, max_evaluations: int, seed: int
) -> Quadrature:
    """A central composite design, or quasi-random points as many as it takes.

    :param tolerance: on every log predictive density of the data.
    """
    found = _by_composite_design(look, axes, tolerance)
    if found.has_converged:
        return found
    left = max_evaluations - (fewest_points(len(axes.mode)) - FIRST_POINTS)
    return _by_points(look, axes, tolerance, left, seed)


def _by_composite_design(look: Look, axes: Axes, tolerance: float) -> Quadrature:
    d = len(axes.mode)
    sphere = composite_design(d)
    centre = look(axes.position(np.zeros(d)))
    estimates = []
    for radius in RADII:
        z = np.concatenate([np.zeros((1, d)), radius * np.sqrt(d) * sphere])
        nodes = [centre, *(look(axes.position(row)) for row in z[1:])]
        at_centre, elsewhere = np.log(design_weights(d, radius, len(sphere)))
        factors = np.concatenate([[at_centre], np.full(len(sphere), elsewhere)])
        masses = _log_masses(nodes, axes, z) + factors
        total = logsumexp(masses)
        evidence = float(total) + 0.5 * d * np.log(2.0 * np.pi)
        estimates.append((nodes, z, masses - total, evidence))
    one, other = (predictive(nodes, weights) for nodes, _, weights, _ in estimates)
    change = largest_change(one, other)
    words = f"a central composite design of {1 + len(sphere)} settings"
    return Quadrature(*estimates[0], change, change <= tolerance, words)


def _by_points(
    look: Look, axes: Axes, tolerance: float, max_evaluations: int, seed: int
) -> Quadrature:
    d = len(axes.mode)
    points = qmc.Sobol(d, scramble=True, seed=np.random.default_rng(seed))
    z, nodes = np.empty((0, d)), []
    while True:
        uniform = points.random(len(z) or FIRST_POINTS)
        new = PROPOSAL_WIDTH * norm.ppf(np.clip(uniform, 1e-12, 1.0 - 1e-12))
        nodes += [look(axes.position(row)) for row in new]
        z = np.concatenate([z, new])
        proposal = np.sum(norm.logpdf(z, scale=PROPOSAL_WIDTH), 1)
        masses = _log_masses(nodes, axes, z) - proposal
        total = logsumexp(masses)
        weights = masses - total
        now = predictive(nodes, weights)
        half = len(z) // 2
        # Either half is an estimate of its own.
        halves = [
            predictive(nodes[part], weights[part] - logsumexp(weights[part]))
            for part in (slice(half), slice(half, None))
        ]
        change = max(largest_change(now, other) for other in halves)
        if change <= tolerance or 2 * len(z) > max_evaluations:
            evidence = float(total) - np.log(len(z))
            one, other = (logsumexp(part) for part in (masses[:half], masses[half:]))
            return Quadrature(
                nodes,
                z,
                weights,
                evidence,
                change,
                change <= tolerance,
                f"{len(z)} quasi-random settings",
                0.5 * abs(float(one - other)),
            )


def _log_masses(nodes: list[Node], axes: Axes, z: Array) -> Array:
    return np.array([node.log_density for node in nodes]) + axes.log_volume(z)
