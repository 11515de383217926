"""The posterior density of the hyperparameters, in their coordinates, with its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from gpflow.models import GPModel

from ..compilation import subgraph
from ..sites import SiteValues
from ..training.minimisation import FAILURES
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


class Target:
    """``log p(y|θ) + log p(x)`` of a model whose priors are :class:`CoordinatePrior` s.

    One compiled function, traced once. Inference starts at the sites of the last evaluation where the
    likelihood is log-concave, as in every training loss.
    """

    def __init__(
        self,
        model: GPModel,
        closure: Callable[[], tf.Tensor],
        coordinates: Sequence[Coordinate],
        rows: tuple[Array, Array],
    ) -> None:
        self.model = model
        self.coordinates = tuple(coordinates)
        self.num_evaluations = 0
        self.num_failures = 0
        variables = [c.parameter.unconstrained_variable for c in self.coordinates]

        def evaluate(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            with tf.GradientTape() as outer:
                outer.watch(x)
                unconstrained = self._unconstrained(x)
            for variable, value in zip(variables, unconstrained, strict=True):
                variable.assign(value)
            with tf.GradientTape() as tape:
                loss = closure()
            zero = tf.UnconnectedGradients.ZERO
            slopes = tape.gradient(loss, variables, unconnected_gradients=zero)
            slopes = [-tf.convert_to_tensor(g) for g in slopes]
            return -loss, outer.gradient(unconstrained, x, slopes, zero)

        self._evaluate = subgraph(evaluate)
        held = tuple(tf.constant(d) for d in rows)
        self._predict = tf.function(lambda: model.predict_log_density(held), autograph=False)

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

    def graph(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Log density and gradient, in or outside of graphs; the model moves there."""
        return self._evaluate(x)

    def density(self, x: Array) -> tuple[float, Array]:
        """Log density and gradient; minus infinity and NaN where there is none."""
        self.num_evaluations += 1
        try:
            value, gradient = self._evaluate(tf.constant(x, self.dtype))
        except FAILURES:
            self.num_failures += 1
            return -np.inf, np.full(self.dimension, np.nan)
        if not np.isfinite(value):
            self.num_failures += 1
            return -np.inf, np.full(self.dimension, np.nan)
        return float(value), np.asarray(gradient, np.float64)

    def node(self, x: Array) -> Node:
        """Density, predictions and sites at a setting."""
        value, _ = self.density(x)
        if value == -np.inf:
            return Node(x, value, np.array([]), ())
        try:
            predictive = np.asarray(self._predict(), np.float64)
        except FAILURES:
            self.num_failures += 1
            return Node(x, -np.inf, np.array([]), ())
        return Node(x, value, predictive, sites_of(self.model))

    def values(self, x: Array) -> dict[str, Array]:
        """Every parameter at ``x`` ``[..., d]``, by its path."""
        return {
            c.path: c.value(part) for c, part in zip(self.coordinates, self._split(x), strict=True)
        }

    def restore(self, x: Array, sites: tuple[Array, ...]) -> None:
        """Put the model where a node was found, with its sites."""
        parts = self._unconstrained(tf.constant(x, self.dtype))
        for c, value in zip(self.coordinates, parts, strict=True):
            c.parameter.unconstrained_variable.assign(value)
        if sites:
            model: Any = self.model
            model.restore_sites(SiteValues(*(tf.constant(s) for s in sites)))

    def _split(self, x: Any) -> list[Any]:
        return np.split(x, np.cumsum([c.size for c in self.coordinates])[:-1], axis=-1)

    def _unconstrained(self, x: tf.Tensor) -> list[tf.Tensor]:
        parts = tf.split(x, [c.size for c in self.coordinates])
        return [
            c.unconstrained(tf.reshape(part, c.shape))
            for c, part in zip(self.coordinates, parts, strict=True)
        ]


def sites_of(model: Any) -> tuple[Array, ...]:
    """λ₁ and λ₂ as arrays; nothing of a model that has no sites."""
    if not hasattr(model, "sites"):
        return ()
    return tuple(np.asarray(x) for x in model.sites.values)
