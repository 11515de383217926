"""In which numbers an optimiser moves the trainable variables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
import tensorflow_probability as tfp
from gpflow.base import Parameter

Array = npt.NDArray[np.float64]

NEARLY_EXPONENTIAL = 1e-10
"""Where ``softplus(u) = exp(u)`` to the last digit."""

FARTHEST = np.log(1e6)
"""How far from its start a logarithm may be moved: beyond a factor of a million a line search only finds
where arithmetic ends."""


class Coordinates:
    """Variables as they are, or what they are the softplus of by its logarithm, ``softplus(u) = exp(t)``.

    A softplus is linear far from zero: of a variance that ends at a hundred times where it started L-BFGS
    has to learn the scale, in more steps than of its logarithm.

    :param logarithmic: of which entries of a row; none by default.
    """

    def __init__(self, logarithmic: Any = False) -> None:
        self._logarithmic = logarithmic

    @classmethod
    def logarithms(cls, parameters: Iterable[Any], variables: Sequence[tf.Variable]) -> Coordinates:
        """Of the entries of these variables in a row that are positive parameters."""
        positive = {
            id(p.unconstrained_variable)
            for p in parameters
            if isinstance(p, Parameter) and _ends_in_softplus(p.transform)
        }
        return cls(
            np.concatenate([np.full(int(np.prod(v.shape)), id(v) in positive) for v in variables])
        )

    def bounds(self, start: Array) -> list[tuple[float, float]] | None:
        """Within which an optimiser stays; none where no entry is a logarithm."""
        if not np.any(self._logarithmic):
            return None
        reach = np.where(self._logarithmic, FARTHEST, np.inf)
        return list(zip(start - reach, start + reach, strict=True))

    def inward(self, u: Array) -> Array:
        """``t`` from ``u``."""
        return np.where(self._logarithmic, _log_softplus(u), u)

    def outward(self, t: Array) -> Array:
        """``u`` from ``t``: ``u = e^t + log(1 − exp(−e^t))``."""
        with np.errstate(all="ignore"):
            value = np.exp(t)
            u = np.where(
                value > NEARLY_EXPONENTIAL, value + np.log(-np.expm1(-value)), t + 0.5 * value
            )
        return np.where(self._logarithmic, u, t)

    def slope(self, t: Array) -> Array:
        """``du/dt = e^t / (1 − exp(−e^t))``."""
        with np.errstate(all="ignore"):
            value = np.exp(t)
            slope = np.where(value > NEARLY_EXPONENTIAL, value / -np.expm1(-value), 1.0)
        return np.where(self._logarithmic, slope, 1.0)


def _log_softplus(u: Array) -> Array:
    value = np.logaddexp(0.0, u)
    with np.errstate(all="ignore"):
        return np.where(value > NEARLY_EXPONENTIAL, np.log(value), u)


def _ends_in_softplus(transform: Any) -> bool:
    if isinstance(transform, tfp.bijectors.Chain):
        *others, transform = transform.bijectors
        if not all(isinstance(x, tfp.bijectors.Shift) for x in others):
            return False
    return type(transform) is tfp.bijectors.Softplus and transform.hinge_softness is None
