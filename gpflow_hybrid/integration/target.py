"""The posterior density of the hyperparameters, in their coordinates, with its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from gpflow.models import GPModel

from ..compilation import subgraph
from ..likelihoods.on_arrays import log_densities
from ..models import CollapsedModel
from ..sites import SiteValues
from ..training.minimisation import FAILURES
from .coordinates import Coordinate
from .movable import MovableModel, Node
from .scales import scale_of

Array = npt.NDArray[np.float64]


MAX_ROWS = 256
"""Rows of the data, evenly spread, at which predictions are watched."""


def watched_rows(num_rows: int) -> npt.NDArray[np.int64]:
    """Indices of these rows."""
    return np.linspace(0, num_rows - 1, min(num_rows, MAX_ROWS)).astype(np.int64)


class Target(MovableModel):
    """``log p(y|θ) + log p(x)`` of a model whose priors are :class:`CoordinatePrior` s.

    Evaluated on arrays where the model's loss is known there, else by one compiled function. Where the
    likelihood is log-concave inference starts at sites of before: of the nearest setting on arrays, of the
    last one in a graph.
    """

    def __init__(
        self,
        model: GPModel,
        closure: Callable[[], tf.Tensor],
        coordinates: Sequence[Coordinate],
        rows: tuple[Array, Array],
    ) -> None:
        super().__init__(model, coordinates)
        self.num_evaluations = 0
        self.num_failures = 0
        variables = [c.parameter.unconstrained_variable for c in self.coordinates]

        def evaluate(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            with tf.GradientTape() as outer:
                outer.watch(x)
                unconstrained = self.unconstrained(x)
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
        self._loss = model.loss_on_arrays() if isinstance(model, CollapsedModel) else None
        self._visited: list[tuple[Array, SiteValues]] = []
        scales = [scale_of(c.parameter) for c in self.coordinates]
        self._scales = [s for s in scales if s is not None] if all(scales) else None
        # The loss on arrays has the variables in the model's order.
        places = {id(v): i for i, v in enumerate(model.trainable_variables)}
        owners = [
            np.full(c.size, places[id(v)]) for c, v in zip(coordinates, variables, strict=True)
        ]
        self._order = np.argsort(np.concatenate(owners), kind="stable")
        if self._loss is not None:
            self._rows = watched_rows(len(model.data[0]))
            self._predict_by = log_densities(model.likelihood, *rows)
        on_arrays = self._loss is not None
        self._likelihood_moves = on_arrays and bool(model.likelihood.trainable_variables)
        self._to_variables = tf.function(self._variables_at, autograph=False)

    def graph(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Log density and gradient, in or outside of graphs; the model moves there."""
        return self._evaluate(x)

    def density(self, x: Array) -> tuple[float, Array]:
        """Log density and gradient; minus infinity and NaN where there is none."""
        return self._counted(x, True)

    def log_density(self, x: Array) -> float:
        """Without the gradient."""
        return self._counted(x, False)[0]

    def _counted(self, x: Array, with_gradient: bool) -> tuple[float, Array]:
        self.num_evaluations += 1
        try:
            if self._loss is None:
                value, gradient = self._evaluate(tf.constant(x, self.dtype))
            else:
                value, gradient = self._on_arrays(x, with_gradient)
        except FAILURES:
            return self._failure()
        if not np.isfinite(value):
            return self._failure()
        return float(value), np.asarray(gradient, np.float64)

    def _failure(self) -> tuple[float, Array]:
        self.num_failures += 1
        return -np.inf, np.full(self.dimension, np.nan)

    def _on_arrays(self, x: Array, with_gradient: bool) -> tuple[float, Array]:
        assert self._loss is not None
        u, slope = self._variables_on_arrays(x)
        if self._visited:
            nearest = min(self._visited, key=lambda there: float(np.sum((there[0] - x) ** 2)))
            self._loss.sites = nearest[1]
        if with_gradient:
            loss, in_variables = self._loss(u[self._order])
        else:
            loss, in_variables = self._loss.value(u[self._order]), np.zeros_like(u)
        self._visited.append((x, self._loss.sites))
        gradient = np.empty_like(in_variables)
        gradient[self._order] = -in_variables
        return -loss, gradient * slope

    def _variables_on_arrays(self, x: Array) -> tuple[Array, Array]:
        """The variables' numbers in the order of the coordinates, and ``du/dx`` of each."""
        if self._scales is None:
            u, slope = (np.asarray(a) for a in self._to_variables(tf.constant(x, self.dtype)))
            return u, slope
        parts = np.split(x, np.cumsum([c.size for c in self.coordinates])[:-1])
        pairs = [s.outward(part) for s, part in zip(self._scales, parts, strict=True)]
        us, slopes = zip(*pairs, strict=True)
        return np.concatenate(us), np.concatenate(slopes)

    def _variables_at(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The same of any transforms, as tensors."""
        with tf.GradientTape() as tape:
            tape.watch(x)
            u = tf.concat([tf.reshape(part, [-1]) for part in self.unconstrained(x)], 0)
        return u, tape.gradient(u, x)

    def node(self, x: Array) -> Node:
        """Density, predictions and sites at a setting; without a density where one is not finite."""
        value = self.log_density(x)
        if value == -np.inf:
            return Node(x, value, np.array([]), ())
        if self._likelihood_moves:  # the loss on arrays leaves its variables alone
            self.restore(x, ())
        try:
            predictive = self._log_predictive()
        except FAILURES:
            predictive = np.array([np.nan])
        if not np.isfinite(predictive).all():
            return Node(x, self._failure()[0], np.array([]), ())
        return Node(x, value, predictive, self.sites() if self._loss is None else self._loss.sites)

    def _log_predictive(self) -> Array:
        """Log predictive densities of the rows where the density was asked for last."""
        if self._loss is None:
            return np.asarray(self._predict(), np.float64)
        q = self._loss.marginals
        if q is None:
            return np.array([np.nan])
        return self._predict_by(q.mean[self._rows], q.variance[self._rows])
