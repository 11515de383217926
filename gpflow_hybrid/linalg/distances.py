"""Squared distances between the rows of a matrix, by BLAS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from . import lapack
from .host import call_on_host
from .symmetric import clear_above, mirror, row_blocks
from .workspace import empty_matrix


def distances_of_rows(X: Any) -> Any:
    """``‖xᵢ − xⱼ‖² = xᵢᵀxᵢ + xⱼᵀxⱼ − 2 xᵢᵀxⱼ``, never negative, zero on the diagonal."""
    n = len(X)
    D = empty_matrix(n, X.dtype)
    clear_above(D)
    lapack.blas_function("syrk", X)(-2.0, X.T, trans=1, beta=0.0, c=D.T, lower=0, overwrite_c=1)
    squares = -0.5 * D.diagonal()
    for rows in row_blocks(n):
        part = D[rows, : rows.stop]
        part += squares[: rows.stop]
        part += squares[rows, None]
        np.maximum(part, 0.0, out=part)
    D.flat[:: n + 1] = 0.0
    mirror(D)
    return D


def squared_distances(X: tf.Tensor) -> tf.Tensor:
    """``‖xᵢ − xⱼ‖²``, ``[N, N]``, of a constant."""

    def on_host(X: Any) -> tuple[Any]:
        return (distances_of_rows(np.ascontiguousarray(X)),)

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
