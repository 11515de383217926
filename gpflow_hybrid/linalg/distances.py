"""Squared distances between the rows of a matrix, computed once for data that do not change."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from . import lapack
from .backends import call_on_host

KEPT = 4000
"""Number of data up to which distances are kept: beyond, computing them is little beside all else, and
their memory is not."""

_KNOWN: dict[int, tuple[weakref.ref[Any], tf.Tensor]] = {}


def squared_distances(X: tf.Tensor) -> tf.Tensor:
    """``‖xᵢ − xⱼ‖²``, ``[N, N]``, by BLAS; differentiable in X.

    Those of a constant with up to ``KEPT`` rows are kept as long as the constant lives.
    """
    if isinstance(X, tf.Tensor) and hasattr(X, "numpy") and len(X) <= KEPT:
        constant = _known(X)
        return _attach(X, constant)
    return _attach(X, _compute(tf.stop_gradient(X)))


def _known(X: tf.Tensor) -> tf.Tensor:
    key = id(X)
    entry = _KNOWN.get(key)
    if entry is None or entry[0]() is not X:
        with tf.init_scope():
            found = _compute(X)
        entry = weakref.ref(X, lambda _: _KNOWN.pop(key, None)), found
        _KNOWN[key] = entry
    return entry[1]


def _compute(X: tf.Tensor) -> tf.Tensor:
    def on_host(X: Any) -> tuple[Any]:
        return (lapack.squared_distances(np.ascontiguousarray(X)),)

    (found,) = call_on_host(on_host, [X], [[X.shape[0], X.shape[0]]])
    return found


@tf.custom_gradient
def _attach(X: tf.Tensor, distances: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
    def grad(upstream: tf.Tensor) -> tuple[tf.Tensor, None]:
        # d‖xᵢ − xⱼ‖² = 2 (xᵢ − xⱼ)ᵀ(dxᵢ − dxⱼ)
        G = upstream + tf.transpose(upstream)
        return 2.0 * (tf.reduce_sum(G, axis=1)[:, None] * X - tf.matmul(G, X)), None

    return tf.identity(distances), grad
