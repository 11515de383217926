"""Kernel matrices with the latent GP as an axis, for one kernel or one kernel per latent."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
from gpflow.base import Parameter, TensorType
from gpflow.kernels import (
    IsotropicStationary,
    Kernel,
    MultioutputKernel,
    Product,
    SeparateIndependent,
    SharedIndependent,
    Sum,
)
from gpflow.mean_functions import MeanFunction
from tensorflow.python.eager import record

from .errors import InvalidDataError
from .linalg import backend, by_rows, squared_distances

MANY_DATA = 300
"""Number of data above which a matrix is evaluated and differentiated without whole intermediate ones."""


def latent_kernels(kernel: Kernel) -> Sequence[Kernel]:
    """The kernels of the latents: one if they share it."""
    if isinstance(kernel, SharedIndependent):
        return (kernel.kernel,)
    if isinstance(kernel, SeparateIndependent):
        return tuple(kernel.kernels)
    if isinstance(kernel, MultioutputKernel):
        raise InvalidDataError(
            f"kernel must keep the latent GPs independent; found {type(kernel).__name__}. Use a "
            "plain kernel, SharedIndependent or SeparateIndependent; for coregionalised outputs "
            "multiply by gpflow.kernels.Coregion and give the output index as an input column."
        )
    return (kernel,)


def covariance(kernel: Kernel, X: TensorType, X2: TensorType | None = None) -> tf.Tensor:
    """``k(X, X2)`` per latent: ``[..., L, N, N2]``, with 1 for L if the latents share a kernel.

    The diagonal of ``k(X, X)`` is the kernel's own: from differences of large numbers, as inputs far
    from zero in units of a lengthscale are, it can come out as anything.
    """
    K = tf.stack([k(X, X2) for k in latent_kernels(kernel)], axis=-3)
    if X2 is not None:
        return K
    diagonal = tf.stack([k(X, full_cov=False) for k in latent_kernels(kernel)], axis=-2)
    return tf.linalg.set_diag(K, diagonal)


def data_covariance(kernel: Kernel, X: tf.Tensor) -> tf.Tensor:
    """:func:`covariance` of the data, ``[L or 1, N, N]``, with the linear algebra of the moment."""
    if backend().name != "lapack":
        return covariance(kernel, X)
    matrices = [_matrix(k, X) for k in latent_kernels(kernel)]
    # The gradient of an index would be another matrix.
    return tf.expand_dims(matrices[0], 0) if len(matrices) == 1 else tf.stack(matrices)


def _matrix(kernel: Kernel, X: tf.Tensor) -> tf.Tensor:
    """``k(X, X)`` with the kernel's own function of the distance, and distances by BLAS."""
    if _is_constant(X) and len(X) > MANY_DATA and _is_function_of_distance(kernel):
        return by_rows(
            lambda D: _from_distances(kernel, D),
            lambda: squared_distances(X),
            [v for v in kernel.variables if v.dtype.is_floating],
        )
    return _whole_matrix(kernel, X)


def _is_constant(X: tf.Tensor) -> bool:
    """Whether nobody differentiates in X."""
    is_eager = isinstance(X, tf.Tensor) and hasattr(X, "numpy")
    return is_eager and not record.should_record_backprop([X])


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


def _whole_matrix(kernel: Kernel, X: tf.Tensor) -> tf.Tensor:
    if isinstance(kernel, (Sum, Product)):
        return kernel._reduce([_whole_matrix(k, X) for k in kernel.kernels])
    if not isinstance(kernel, IsotropicStationary) or _has_own_distance(kernel):
        return tf.linalg.set_diag(kernel(X), kernel(X, full_cov=False))
    if not _takes_all_columns(kernel):
        X, _ = kernel.slice(X, None)
    if kernel.ard:
        return kernel.K_r2(squared_distances(kernel.scale(X)))
    return _from_distances(kernel, squared_distances(X))


def _has_own_distance(kernel: IsotropicStationary) -> bool:
    """Whether a subclass has changed how a stationary kernel is made of its distance."""
    return any(
        getattr(type(kernel), name) is not getattr(IsotropicStationary, name)
        for name in ("__call__", "K", "scaled_squared_euclid_dist", "scale", "K_diag")
    )


def variance(kernel: Kernel, X: TensorType) -> tf.Tensor:
    """``diag k(X, X)`` per latent: ``[..., N, L]``, with 1 for L if the latents share a kernel."""
    return tf.stack([k(X, full_cov=False) for k in latent_kernels(kernel)], axis=-1)


def prior_mean(mean_function: MeanFunction, X: TensorType, num_latent_gps: int) -> tf.Tensor:
    """``μ₀ = m(X)``, ``[N, L]``."""
    mean = mean_function(X)
    return tf.broadcast_to(mean, tf.stack([tf.shape(mean)[0], num_latent_gps]))
