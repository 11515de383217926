"""Covariances with inducing variables on arrays, and their adjoints.

Of GPflow's stationary kernels at inducing points without TensorFlow, whose operations one by one take
longer than a small problem does in all; of others by a tape.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from gpflow import covariances
from gpflow.base import Parameter
from gpflow.config import default_jitter
from gpflow.inducing_variables import InducingPoints, InducingVariables
from gpflow.kernels import Kernel

from .protocol import Array
from .stationary import is_stationary
from .stationary_cross import CrossBars, StationaryCross


class InducingKernel(abc.ABC):
    """Kernel and inducing variables of one latent, or of all that share them.

    Derivatives are lists with one array for every source.
    """

    @abc.abstractmethod
    def at_inducing(self) -> Array:
        """``K_uu`` with GPflow's jitter, ``[M, M]``."""

    @abc.abstractmethod
    def at_data(self, X: Array) -> tuple[Array, Array]:
        """``K_uf [M, N]`` and ``diag K_ff [N]``."""

    @abc.abstractmethod
    def pull_back_inducing(self, K_bar: Array) -> list[Array]:
        """From the derivatives in a symmetric ``K_uu``."""

    @abc.abstractmethod
    def pull_back_data(self, X: Array, cross_bar: Array, diagonal_bar: Array) -> list[Array]:
        """From those in ``K_uf`` and in ``diag K_ff``."""


class TapedKernel(InducingKernel):
    """Any kernel and inducing variables, outside of graphs.

    :param sources: tensors or variables that they are made of.
    """

    def __init__(
        self, kernel: Kernel, variables: InducingVariables, sources: Sequence[Any]
    ) -> None:
        self._kernel, self._variables, self._sources = kernel, variables, sources

    def _at_inducing(self) -> tf.Tensor:
        return covariances.Kuu(self._variables, self._kernel, jitter=default_jitter())

    def _at_data(self, X: Array) -> list[tf.Tensor]:
        inputs = tf.constant(X)
        cross = covariances.Kuf(self._variables, self._kernel, inputs)
        return [cross, self._kernel(inputs, full_cov=False)]

    def at_inducing(self) -> Array:
        return self._at_inducing().numpy()

    def at_data(self, X: Array) -> tuple[Array, Array]:
        cross, diagonal = self._at_data(X)
        return cross.numpy(), diagonal.numpy()

    def pull_back_inducing(self, K_bar: Array) -> list[Array]:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self._sources)
            found = [self._at_inducing()]
        return taped_gradients(tape, found, [K_bar], self._sources)

    def pull_back_data(self, X: Array, cross_bar: Array, diagonal_bar: Array) -> list[Array]:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self._sources)
            found = self._at_data(X)
        return taped_gradients(tape, found, [cross_bar, diagonal_bar], self._sources)


class StationaryKernel(InducingKernel):
    """A stationary kernel at inducing points.

    :param parameters: of which the sources are the values.
    """

    def __init__(
        self,
        kernel: Kernel,
        points: InducingPoints,
        parameters: Sequence[Parameter],
        values: Sequence[Array],
    ) -> None:
        places = {id(p): i for i, p in enumerate(parameters)}
        self._places = [places[id(p)] for p in (kernel.variance, kernel.lengthscales, points.Z)]
        self._shapes = [np.shape(x) for x in values]
        self._cross = StationaryCross(kernel, *(values[i] for i in self._places))

    @staticmethod
    def serves(kernel: Kernel, variables: InducingVariables) -> bool:
        """Whether both are as GPflow made them."""
        is_points = type(variables) is InducingPoints and isinstance(variables.Z, Parameter)
        return is_points and is_stationary(kernel)

    def at_inducing(self) -> Array:
        K = self._cross.evaluate_at_Z()
        K.flat[:: len(K) + 1] += default_jitter()
        return K

    def at_data(self, X: Array) -> tuple[Array, Array]:
        return self._cross.evaluate(X), np.full(len(X), float(self._cross.variance))

    def pull_back_inducing(self, K_bar: Array) -> list[Array]:
        return self._in_sources(self._cross.pull_back_at_Z(K_bar))

    def pull_back_data(self, X: Array, cross_bar: Array, diagonal_bar: Array) -> list[Array]:
        found = self._cross.pull_back(X, cross_bar)
        return self._in_sources(found._replace(variance=found.variance + np.sum(diagonal_bar)))

    def _in_sources(self, bars: CrossBars) -> list[Array]:
        total = [np.zeros(shape) for shape in self._shapes]
        for place, bar in zip(self._places, bars, strict=True):
            total[place] = total[place] + bar
        return total


def taped_gradients(
    tape: tf.GradientTape, outputs: list[tf.Tensor], bars: Sequence[Any], sources: Sequence[Any]
) -> list[Array]:
    """As arrays, zero where there is no connection."""
    found = tape.gradient(
        outputs,
        sources,
        output_gradients=[tf.constant(b, x.dtype) for b, x in zip(bars, outputs, strict=True)],
        unconnected_gradients=tf.UnconnectedGradients.ZERO,
    )
    return [tf.convert_to_tensor(g).numpy() for g in found]
