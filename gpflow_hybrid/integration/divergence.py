"""Improper priors under which the integral diverges are refused."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ..errors import InvalidDataError
from .priors import ParameterPrior
from .target import Target

Array = npt.NDArray[np.float64]

FAR = 8.0
"""Coordinates from the mode: a factor of 3000 in a positive parameter."""

LITTLE = 10.0
"""Nats by which a density must have fallen there."""


def refuse_divergent(target: Target, priors: Mapping[str, ParameterPrior], mode: Array) -> None:
    """Refuse a flat prior of a parameter that the data do not bound: where the density does not fall.

    Data that bound a parameter in this sense leave an integral that is finite for all that is summed; the
    plateau far out, at which every objective ends, is not reached.
    """
    start = 0
    if not any(priors[c.path].is_flat for c in target.coordinates):
        return
    top = target.log_density(mode)
    for c in target.coordinates:
        places = range(start, start + c.size)
        start += c.size
        if not priors[c.path].is_flat:
            continue
        for place in places:
            for side in (-1.0, 1.0):
                x = mode.copy()
                x[place] += side * FAR
                fall = top - target.log_density(x)
                if fall < LITTLE:
                    value = float(np.ravel(target.values(x)[c.path])[place - places[0]])
                    raise InvalidDataError(
                        f"The integral over {c.path} diverges under a flat prior: at {value:.3g} the log "
                        f"density is only {fall:.2g} nats below its maximum. Give it a proper prior, or "
                        "leave priors out."
                    )
    target.log_density(mode)
