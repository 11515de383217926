"""Axes of a posterior around its mode: from the curvature there, scaled to each side's width."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Density = Callable[[Array], tuple[float, Array]]

STEP = 1e-2
"""Of the differences of gradients, in coordinates: logarithms, of which a hundredth is little."""

WIDEST = 3.0
"""Standard deviation of an axis along which the density hardly curves at the mode."""

PROBE = np.sqrt(2.0)
"""Where widths are looked at: the log density of a Gaussian has fallen by one there."""

ROUNDING = 1.5
"""Over how many standard deviations one side's width turns into the other's; smooth, because sums over a
lattice converge as fast as the integrand is smooth."""

MOST_SKEWED = 0.85
"""Limit of the relative difference of the two sides' slopes."""


class Axes(NamedTuple):
    """``x = mode + directions · t(z)``, with standard normal z for a posterior that is a split normal.

    t(z) = c z + δ (√(z² + r²) − r),   slopes c − δ and c + δ far from zero
    """

    mode: Array  # [d]
    directions: Array  # [d, d]
    centre: Array  # c, [d]
    skew: Array  # δ, [d]

    def position(self, z: Array) -> Array:
        """x, ``[..., d]``."""
        bend = np.sqrt(z**2 + ROUNDING**2)
        return self.mode + (self.centre * z + self.skew * (bend - ROUNDING)) @ self.directions.T

    def log_volume(self, z: Array) -> Array:
        """``log |dx/dz|``, ``[...]``."""
        slopes = self.centre + self.skew * z / np.sqrt(z**2 + ROUNDING**2)
        return np.sum(np.log(slopes), -1) + np.linalg.slogdet(self.directions)[1]


def axes_at(
    mode: Array, density: Density, log_density: Callable[[Array], float] | None = None
) -> Axes:
    """The curvature's eigenvectors, from differences of exact gradients, with a width to each side.

    :param density: with its gradient,
    :param log_density: and without, where that is cheaper.
    """
    look = log_density or (lambda x: density(x)[0])
    top = look(mode)
    directions = _principal_axes(_curvature(mode, density))
    widths = np.array(
        [[_width(mode, sign * column, top, look) for sign in (-1, 1)] for column in directions.T]
    )
    below, above = widths.T
    centre = 0.5 * (below + above)
    # t(±√2) = ±√2 · width
    skew = 0.5 * (above - below) * PROBE / (np.sqrt(PROBE**2 + ROUNDING**2) - ROUNDING)
    return Axes(
        mode, directions, centre, np.clip(skew, -MOST_SKEWED * centre, MOST_SKEWED * centre)
    )


def _curvature(mode: Array, density: Density) -> Array:
    """Minus the Hessian of the log density."""
    columns = []
    for step in STEP * np.eye(len(mode)):
        ahead, behind = density(mode + step)[1], density(mode - step)[1]
        columns.append((behind - ahead) / (2.0 * STEP))
    found = np.nan_to_num(np.stack(columns))
    return 0.5 * (found + found.T)


def _principal_axes(curvature: Array) -> Array:
    """Eigenvectors, each as long as its standard deviation."""
    eigenvalues, vectors = np.linalg.eigh(curvature)
    return vectors / np.sqrt(np.maximum(eigenvalues, WIDEST**-2))


def _width(
    mode: Array, direction: Array, top: float, log_density: Callable[[Array], float]
) -> float:
    """By how much the axis is to be stretched so that the log density falls by one at ``√2``."""
    width = 1.0
    for _ in range(4):
        fall = top - log_density(mode + PROBE * width * direction)
        factor = np.clip(1.0 / np.sqrt(max(fall, 1e-3)), 0.4, 2.5)
        width *= factor
        if 0.7 < factor < 1.4:
            break
    return float(np.clip(width, 0.1, 10.0))
