"""Kernel matrices at the data for training: evaluated once, with distances that are computed once.

The kernel's own function of the distance, and distances by BLAS. Where a kernel is not known to be made of
distances, GPflow's matrix.
"""

from __future__ import annotations

import copy
from typing import Any

import tensorflow as tf
from gpflow.base import Parameter, TensorType
from gpflow.kernels import IsotropicStationary, Kernel, Product, Sum
from gpflow.utilities import is_variable

from .. import tuning
from ..covariances import latent_kernels
from ..linalg.distances import differentiable, squared_distances
from ..linalg.elementwise import of_distances
from ..stand_ins import parameters_of, with_values


class KernelMatrix:
    """``kernel ↦ k(X, X)`` at inputs X, whose distances it owns."""

    def __init__(self, X: TensorType) -> None:
        self.X = X
        self._distances: tf.Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> KernelMatrix:
        return KernelMatrix(copy.deepcopy(self.X, memo))

    def __call__(self, kernel: Kernel) -> tf.Tensor:
        """``[L or 1, N, N]``, differentiable once in the kernel's parameters and in X."""
        matrices = [self._matrix(k) for k in latent_kernels(kernel)]
        # The gradient of an index would be another matrix.
        return tf.expand_dims(matrices[0], 0) if len(matrices) == 1 else tf.stack(matrices)

    def _matrix(self, kernel: Kernel) -> tf.Tensor:
        if self._is_constant and len(self.X) > tuning.FEW_DATA and _is_function_of_distance(kernel):

            def function(D: tf.Tensor, *values: tf.Tensor) -> tf.Tensor:
                return _from_distances(with_values(kernel, values), D)

            values = [tf.convert_to_tensor(p) for p in parameters_of(kernel)]
            return of_distances(function, self._constant_distances, self.X, values)
        return self._whole_matrix(kernel)

    @property
    def _is_constant(self) -> bool:
        return isinstance(self.X, tf.Tensor) and hasattr(self.X, "numpy")

    def _constant_distances(self) -> tf.Tensor:
        """Of all columns; kept, unless there are too many data."""
        if not self._is_constant or len(self.X) > tuning.KEPT_DISTANCES:
            return squared_distances(tf.convert_to_tensor(self.X))
        if self._distances is None:
            with tf.init_scope():
                self._distances = squared_distances(self.X)
        return self._distances

    def _whole_matrix(self, kernel: Kernel) -> tf.Tensor:
        X = tf.convert_to_tensor(self.X) if is_variable(self.X) else self.X
        if isinstance(kernel, (Sum, Product)):
            return kernel._reduce([self._whole_matrix(k) for k in kernel.kernels])
        if not isinstance(kernel, IsotropicStationary) or _has_own_distance(kernel):
            return tf.linalg.set_diag(kernel(X), kernel(X, full_cov=False))
        if _takes_all_columns(kernel) and not kernel.ard:
            D = differentiable(X, self._constant_distances())
            return _from_distances(kernel, D)
        X, _ = kernel.slice(X, None)
        if kernel.ard:
            scaled = kernel.scale(X)
            return kernel.K_r2(differentiable(scaled, squared_distances(scaled)))
        return _from_distances(kernel, differentiable(X, squared_distances(X)))


def _is_function_of_distance(kernel: Kernel) -> bool:
    """Whether the kernel is made of functions of ``‖x − x'‖`` alone, all columns with one lengthscale."""
    if isinstance(kernel, (Sum, Product)):
        return all(_is_function_of_distance(k) for k in kernel.kernels)
    return (
        isinstance(kernel, IsotropicStationary)
        and not _has_own_distance(kernel)
        and _is_gpflows(kernel)
        and not kernel.ard
        and _takes_all_columns(kernel)
    )


def _is_gpflows(kernel: IsotropicStationary) -> bool:
    """Whether the function of the distance is GPflow's own, of parameters: known to act on every element
    alike, and to compile."""
    functions = (getattr(type(kernel), name, None) for name in ("K_r", "K_r2"))
    parameters = (kernel.variance, kernel.lengthscales)
    return all(isinstance(p, Parameter) for p in parameters) and all(
        f is None or f.__module__.startswith("gpflow.") for f in functions
    )


def _from_distances(kernel: Kernel, D: tf.Tensor) -> tf.Tensor:
    """The kernel as a function of squared distances, element by element."""
    if isinstance(kernel, (Sum, Product)):
        return kernel._reduce([_from_distances(k, D) for k in kernel.kernels])
    return kernel.K_r2(D / tf.square(kernel.lengthscales))


def _takes_all_columns(kernel: Kernel) -> bool:
    return isinstance(kernel.active_dims, slice) and kernel.active_dims == slice(None)


def _has_own_distance(kernel: IsotropicStationary) -> bool:
    """Whether a subclass has changed how a stationary kernel is made of its distance."""
    return any(
        getattr(type(kernel), name) is not getattr(IsotropicStationary, name)
        for name in ("__call__", "K", "scaled_squared_euclid_dist", "scale", "K_diag")
    )
