"""Kernel matrices with the latent GP as an axis, for one kernel or one kernel per latent."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
from gpflow.base import TensorType
from gpflow.kernels import Kernel, MultioutputKernel, SeparateIndependent, SharedIndependent
from gpflow.mean_functions import MeanFunction

from .errors import InvalidDataError


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


def variance(kernel: Kernel, X: TensorType) -> tf.Tensor:
    """``diag k(X, X)`` per latent: ``[..., N, L]``, with 1 for L if the latents share a kernel."""
    return tf.stack([k(X, full_cov=False) for k in latent_kernels(kernel)], axis=-1)


def prior_mean(mean_function: MeanFunction, X: TensorType, num_latent_gps: int) -> tf.Tensor:
    """``μ₀ = m(X)``, ``[N, L]``."""
    mean = mean_function(X)
    return tf.broadcast_to(mean, tf.stack([tf.shape(mean)[0], num_latent_gps]))
