"""Improper priors under which the integral diverges are refused."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ..errors import InvalidDataError
from .axes import Axes
from .priors import ParameterPrior
from .target import Target

Array = npt.NDArray[np.float64]

FAR = 8.0
"""Coordinates from the mode: a factor of 3000 in a positive parameter."""

LITTLE = 10.0
"""Nats by which a density must have fallen there."""

SHARE = 0.1
"""Of a direction's length that a coordinate must have to be named, or to be looked along."""


def refuse_divergent(target: Target, priors: Mapping[str, ParameterPrior], axes: Axes) -> None:
    """Refuse flat priors of parameters that the data do not bound: where the density does not fall, one of
    them alone or several together, as in a product of kernels with a variance each.

    Data that bound parameters in this sense leave an integral that is finite for all that is summed; the
    plateau far out, at which every objective ends, is not reached.
    """
    flat = np.concatenate(
        [np.full(c.size, priors[c.path].is_flat, np.bool_) for c in target.coordinates]
    )
    if not flat.any():
        return
    paths = np.concatenate([[c.path] * c.size for c in target.coordinates])
    top = target.log_density(axes.mode)
    for direction in _directions(axes, flat):
        for side in (-1.0, 1.0):
            x = axes.mode + side * FAR * direction
            fall = top - target.log_density(x)
            if fall < LITTLE:
                values = target.values(x)
                named = list(dict.fromkeys(paths[np.abs(direction) > SHARE]))
                at = ", ".join(f"{path} = {_in_short(values[path])}" for path in named)
                raise InvalidDataError(
                    f"The integral over {' and '.join(named)} diverges under a flat prior: at {at} the log "
                    f"density is only {fall:.2g} nats below its maximum. Give it a proper prior, or leave "
                    "priors out."
                )
    target.log_density(axes.mode)


def _directions(axes: Axes, flat: npt.NDArray[np.bool_]) -> Array:
    """Of every flat coordinate, and the part of every principal axis that is flat, of length one."""
    parts = np.where(flat, axes.directions.T, 0.0)
    lengths = np.linalg.norm(parts, axis=1, keepdims=True)
    whole = np.linalg.norm(axes.directions, axis=0)[:, None]
    several = parts[(lengths > SHARE * whole)[:, 0]]
    several /= np.linalg.norm(several, axis=1, keepdims=True)
    return np.concatenate([np.eye(len(flat))[flat], several])


def _in_short(values: Array) -> str:
    return ", ".join(f"{x:.3g}" for x in np.ravel(values)[:3])
