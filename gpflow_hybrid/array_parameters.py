"""GPflow's parameters as numbers: their transforms on arrays, without TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
import tensorflow_probability as tfp
from gpflow.base import Parameter
from scipy.special import expit

Array = npt.NDArray[Any]
Transform = Callable[[Array], tuple[Array, Array]]
"""The value and its derivative, from unconstrained numbers."""


def transform_of(parameter: Any) -> Transform | None:
    """How a parameter's value follows from its variable; None where it is not known here."""
    bijector = parameter.transform
    if bijector is None or type(bijector) is tfp.bijectors.Identity:
        return identity
    if type(bijector) is tfp.bijectors.Exp:
        return _exp
    if type(bijector) is tfp.bijectors.Softplus and bijector.hinge_softness is None:
        return _softplus(float(_number(bijector.low) or 0.0))
    if type(bijector) is tfp.bijectors.Chain and len(bijector.bijectors) == 2:
        shift, inner = bijector.bijectors
        plain = type(inner) is tfp.bijectors.Softplus and inner.hinge_softness is None
        if type(shift) is tfp.bijectors.Shift and plain and np.ndim(_number(shift.shift)) == 0:
            return _softplus(float(_number(shift.shift)) + float(_number(inner.low) or 0.0))
    return None


def value_of(parameter: Parameter) -> Array:
    """The present value, by the transform on arrays where it is known."""
    transform = transform_of(parameter)
    if transform is None:
        return np.asarray(parameter)
    return transform(np.asarray(parameter.unconstrained_variable))[0]


def _number(x: Any) -> Any:
    return None if x is None else np.asarray(tf.convert_to_tensor(x))


def identity(u: Array) -> tuple[Array, Array]:
    """Of a parameter without a transform."""
    return u, np.ones_like(u)


def _exp(u: Array) -> tuple[Array, Array]:
    value = np.exp(u)
    return value, value


def _softplus(lowest: float) -> Transform:
    def transform(u: Array) -> tuple[Array, Array]:
        return np.logaddexp(0.0, u) + lowest, expit(u)

    return transform


class ParametersInARow:
    """Values of parameters as a function of the trainable variables' numbers in a row."""

    def __init__(self, parameters: Sequence[Parameter], variables: Sequence[tf.Variable]) -> None:
        sizes = np.cumsum([0, *(int(np.prod(v.shape)) for v in variables)])
        places = {
            id(v): slice(int(a), int(b))
            for v, a, b in zip(variables, sizes[:-1], sizes[1:], strict=True)
        }
        self.size = int(sizes[-1])
        self._parts = []
        for parameter in {id(p): p for p in parameters}.values():
            variable = parameter.unconstrained_variable
            constant = np.asarray(variable.numpy(), np.float64)
            transform = transform_of(parameter)
            assert transform is not None
            self._parts.append((id(parameter), places.get(id(variable)), constant, transform))

    def values(self, x: Array) -> dict[int, tuple[Array, Array]]:
        """Every parameter's value and slope, by its identity."""
        return {
            name: transform(constant if place is None else x[place].reshape(constant.shape))
            for name, place, constant, transform in self._parts
        }

    def gradient(self, values: dict[int, tuple[Array, Array]], bars: dict[int, Any]) -> Array:
        """Derivatives in the row, from those in the values."""
        found = np.zeros(self.size)
        for name, place, _, _ in self._parts:
            if place is not None and name in bars:
                found[place] += np.ravel(bars[name] * values[name][1])
        return found
