"""A model that is moved from one setting of its hyperparameters to another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from gpflow.models import GPModel

from ..sites import SiteValues
from .coordinates import Coordinate

Array = npt.NDArray[np.float64]


class Node(NamedTuple):
    """A setting of the hyperparameters that has been looked at."""

    x: Array
    """``[d]``, in the coordinates."""
    log_density: float
    """``log p(y|θ) + log p(x)``."""
    log_predictive: Array
    """Log predictive densities of some of the data, ``[R]``."""
    sites: tuple[Array, ...]
    """λ₁ and λ₂, of a model that has them."""


class MovableModel:
    """A model with the coordinates of the hyperparameters that are integrated over; it can be pickled."""

    def __init__(self, model: GPModel, coordinates: Sequence[Coordinate]) -> None:
        self.model = model
        self.coordinates = tuple(coordinates)

    @property
    def dimension(self) -> int:
        """The number of free scalars."""
        return sum(c.size for c in self.coordinates)

    @property
    def dtype(self) -> tf.DType:
        """Of the coordinates."""
        return self.coordinates[0].parameter.dtype

    def position(self) -> Array:
        """Where the model is."""
        return np.concatenate([c.position() for c in self.coordinates]).astype(np.float64)

    def values(self, x: Array) -> dict[str, Array]:
        """Every parameter at ``x`` ``[..., d]``, by its path."""
        parts = np.split(x, np.cumsum([c.size for c in self.coordinates])[:-1], axis=-1)
        return {c.path: c.value(part) for c, part in zip(self.coordinates, parts, strict=True)}

    def restore(self, x: Array, sites: Sequence[Array]) -> None:
        """Put the model where a node was found, with its sites."""
        self._assign(tf.constant(x, self.dtype))
        self.restore_sites(sites)

    def move(self, x: tf.Tensor, sites: Sequence[tf.Tensor]) -> None:
        """The same as a part of a graph, for predictions: the sites do not know which x they belong to."""
        self._assign(tf.cast(x, self.dtype))
        if sites:
            model: Any = self.model
            model.sites.assign(SiteValues(*sites))

    def _assign(self, x: tf.Tensor) -> None:
        for c, value in zip(self.coordinates, self.unconstrained(x), strict=True):
            c.parameter.unconstrained_variable.assign(value)

    def restore_sites(self, sites: Sequence[Array]) -> None:
        """Sites that were found for the present hyperparameters; nothing to do if there are none."""
        if sites:
            model: Any = self.model
            model.restore_sites(SiteValues(*(tf.constant(s) for s in sites)))

    def sites(self) -> tuple[Array, ...]:
        """λ₁ and λ₂ as arrays; nothing of a model that has no sites."""
        if not hasattr(self.model, "sites"):
            return ()
        return tuple(np.asarray(x) for x in self.model.sites.values)

    def unconstrained(self, x: tf.Tensor) -> list[tf.Tensor]:
        """GPflow's unconstrained variables at ``x`` ``[d]``."""
        parts = tf.split(x, [c.size for c in self.coordinates])
        return [
            c.unconstrained(tf.reshape(part, c.shape))
            for c, part in zip(self.coordinates, parts, strict=True)
        ]
