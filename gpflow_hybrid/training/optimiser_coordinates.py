"""In which numbers an optimiser moves the trainable variables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
import tensorflow_probability as tfp
from gpflow.base import Parameter
from gpflow.models import GPModel
from gpflow.utilities import parameter_dict

Array = npt.NDArray[np.float64]

NEARLY_EXPONENTIAL = 1e-10
"""Where ``softplus(u) = exp(u)`` to the last digit."""

FARTHEST = np.log(1e6)
"""How far from its start a logarithm may be moved: beyond a factor of a million a line search only finds
where arithmetic ends."""


class Coordinates:
    """Variables as they are, or what they are the softplus of by its logarithm, ``softplus(u) = exp(t)``,
    in units ``t = Cz``.

    A softplus is linear far from zero: of a variance that ends at a hundred times where it started L-BFGS
    has to learn the scale, in more steps than of its logarithm.

    :param logarithmic: of which entries of a row; none by default.
    :param units: C, of which an optimiser takes the objective's curvature to be the inverse, ``(CCᵀ)⁻¹``.
    """

    def __init__(self, logarithmic: Any = False, units: Array | None = None) -> None:
        self._logarithmic = logarithmic
        self._units = units

    def bounds(self, start: Array) -> list[tuple[float, float]] | None:
        """Within which an optimiser stays; none where no entry is a logarithm."""
        if not np.any(self._logarithmic):
            return None
        reach = np.where(self._logarithmic, FARTHEST, np.inf)
        if self._units is not None:
            reach = reach / np.diag(self._units)
        return list(zip(start - reach, start + reach, strict=True))

    def inward(self, u: Array) -> Array:
        """``z`` from ``u``."""
        t = np.where(self._logarithmic, _log_softplus(u), u)
        return t if self._units is None else np.linalg.solve(self._units, t)

    def outward(self, z: Array) -> Array:
        """``u`` from ``z``: ``u = e^t + log(1 − exp(−e^t))``."""
        t = self._logarithms(z)
        with np.errstate(all="ignore"):
            value = np.exp(t)
            u = np.where(
                value > NEARLY_EXPONENTIAL, value + np.log(-np.expm1(-value)), t + 0.5 * value
            )
        return np.where(self._logarithmic, u, t)

    def gradient_inward(self, z: Array, gradient: Array) -> Array:
        """Derivatives in z from those in u."""
        in_t = gradient * self._slope(z)
        return in_t if self._units is None else in_t @ self._units

    def gradient_outward(self, z: Array, gradient: Array) -> Array:
        """Derivatives in u from those in z."""
        return self.in_logarithms(gradient) / self._slope(z)

    def in_logarithms(self, gradient: Array) -> Array:
        """Derivatives in t from those in z."""
        return gradient if self._units is None else np.linalg.solve(self._units.T, gradient)

    def covariance(self, in_z: Array | None) -> Array | None:
        """``C H Cᵀ``: an inverse curvature in t from that in z."""
        if in_z is None or self._units is None:
            return in_z
        found: Array = self._units @ in_z @ self._units.T
        return found

    def _logarithms(self, z: Array) -> Array:
        return z if self._units is None else self._units @ z

    def _slope(self, z: Array) -> Array:
        """``du/dt = e^t / (1 − exp(−e^t))``."""
        t = self._logarithms(z)
        with np.errstate(all="ignore"):
            value = np.exp(t)
            slope = np.where(value > NEARLY_EXPONENTIAL, value / -np.expm1(-value), 1.0)
        return np.where(self._logarithmic, slope, 1.0)


def trained_parameters(model: GPModel, variables: Iterable[tf.Variable]) -> dict[str, Any]:
    """Parameters of these variables, by GPflow's path."""
    trained = {id(v) for v in variables}
    return {
        path: parameter
        for path, parameter in parameter_dict(model).items()
        if id(getattr(parameter, "unconstrained_variable", parameter)) in trained
    }


def positive_entries(parameters: Iterable[Any], variables: Sequence[tf.Variable]) -> Array:
    """Which numbers of these variables in a row are positive parameters."""
    positive = {
        id(p.unconstrained_variable)
        for p in parameters
        if isinstance(p, Parameter) and _ends_in_softplus(p.transform)
    }
    return np.concatenate([np.full(int(np.prod(v.shape)), id(v) in positive) for v in variables])


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
