"""The coordinates in which hyperparameters are integrated, and densities in them.

A positive parameter is integrated in its logarithm, whatever bijector GPflow was given for it, so that
neither the result nor its accuracy depends on that choice; every other one in its unconstrained variable.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf
import tensorflow_probability as tfp
from gpflow.base import Parameter, PriorOn

from ..training.starts import is_positive
from .scales import Flat, LogDensity, log_prior_on_arrays, scale_of

Array = npt.NDArray[np.float64]


class Coordinate(NamedTuple):
    """One parameter, scalars of it in a row: ``x = log(θ − lowest)`` where it is positive, else GPflow's
    unconstrained variable."""

    path: str
    parameter: Parameter

    @property
    def is_log(self) -> bool:
        """Whether it is a logarithm."""
        return is_positive(self.parameter.transform)

    @property
    def shape(self) -> tf.TensorShape:
        """Of the unconstrained variable."""
        return self.parameter.unconstrained_variable.shape

    @property
    def size(self) -> int:
        """The number of scalars."""
        return int(self.shape.num_elements())

    def unconstrained(self, x: tf.Tensor) -> tf.Tensor:
        """GPflow's unconstrained variable, from x in its shape."""
        return _innermost(self.parameter.transform).inverse(tf.exp(x)) if self.is_log else x

    def value(self, x: Any) -> Array:
        """θ, from its scalars in a row ``[..., size]``."""
        x = np.reshape(x, (*np.shape(x)[:-1], *self.shape))
        u = self.unconstrained(tf.constant(x, self.parameter.dtype))
        transform = self.parameter.transform
        return np.asarray(u if transform is None else transform.forward(u))

    def position(self) -> Array:
        """Where the parameter is, in a row."""
        return np.ravel(self._x())

    def log_prior(self, prior: Any, prior_on: PriorOn) -> tf.Tensor:
        """``log p(x) = log p(θ) + log |dθ/dx|`` at the parameter's present value."""
        if isinstance(prior, Flat):
            return tf.zeros((), self.parameter.dtype)
        u, transform = self.parameter.unconstrained_variable, self.parameter.transform
        # log |dθ/du|; and log |dθ/dx|, where θ − lowest = exp(x)
        if transform is None:
            log_slope = tf.zeros((), u.dtype)
        else:
            log_slope = transform.forward_log_det_jacobian(u, len(self.shape))
        total = tf.reduce_sum(self._x()) if self.is_log else log_slope
        if prior_on == PriorOn.CONSTRAINED:
            return tf.reduce_sum(prior.log_prob(tf.convert_to_tensor(self.parameter))) + total
        return tf.reduce_sum(prior.log_prob(tf.convert_to_tensor(u))) + total - log_slope

    def _x(self) -> tf.Tensor:
        u = self.parameter.unconstrained_variable
        if not self.is_log:
            return tf.convert_to_tensor(u)
        return tf.math.log(_innermost(self.parameter.transform).forward(u))


class CoordinatePrior:
    """In the place of a parameter's prior: its density in the coordinate.

    GPflow adds ``prior.log_prob(parameter)`` to every training loss, which is then minus the log density of
    the posterior in the coordinates, up to its normaliser.
    """

    def __init__(self, prior: Any, prior_on: PriorOn) -> None:
        self.prior, self.prior_on = prior, prior_on

    def log_prob(self, parameter: Parameter) -> tf.Tensor:
        """In the coordinate of this parameter."""
        return Coordinate("", parameter).log_prior(self.prior, self.prior_on)

    def on_arrays(self, parameter: Parameter) -> LogDensity | None:
        """The same and its gradient, from the parameter's unconstrained numbers in a row; None where it is
        not known on arrays."""
        scale = scale_of(parameter)
        if scale is None:
            return None
        size = int(parameter.unconstrained_variable.shape.num_elements())
        density = log_prior_on_arrays(self.prior, self.prior_on, scale, size)
        if density is None:
            return None

        def log_prob(u: Array) -> tuple[float, Array]:
            x, slope = scale.inward(u)
            value, in_x = density(x)
            return value, in_x * slope

        return log_prob


def _innermost(transform: Any) -> Any:
    """Without the shifts that keep a positive parameter above a small number."""
    return transform.bijectors[-1] if isinstance(transform, tfp.bijectors.Chain) else transform
