"""Squared distances between the rows of a matrix, by BLAS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from . import lapack
from .host import call_on_host


def squared_distances(X: tf.Tensor) -> tf.Tensor:
    """``‖xᵢ − xⱼ‖²``, ``[N, N]``, of a constant."""

    def on_host(X: Any) -> tuple[Any]:
        return (lapack.squared_distances(np.ascontiguousarray(X)),)

    (found,) = call_on_host(on_host, [tf.stop_gradient(X)], [[X.shape[0], X.shape[0]]])
    return found


def pull_back(X: tf.Tensor, D_bar: tf.Tensor) -> tf.Tensor:
    """``X̄`` from the distances' cotangent: ``d‖xᵢ − xⱼ‖² = 2 (xᵢ − xⱼ)ᵀ(dxᵢ − dxⱼ)``."""
    G = D_bar + tf.transpose(D_bar)
    return 2.0 * (tf.reduce_sum(G, axis=1)[:, None] * X - tf.matmul(G, X))


@tf.custom_gradient
def differentiable(
    X: tf.Tensor, distances: tf.Tensor
) -> tuple[tf.Tensor, Callable[..., tuple[tf.Tensor, None]]]:
    """The distances of X as they are, with their derivative."""
    return tf.identity(distances), lambda upstream: (pull_back(X, upstream), None)
