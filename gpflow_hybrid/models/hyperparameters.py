"""What a model's sites were inferred for."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf
from gpflow.base import Module


def floating(variables: Iterable[tf.Variable]) -> list[tf.Variable]:
    """Those that hold floating-point numbers."""
    return [v for v in variables if v.dtype.is_floating]


def mark_of(model: Module, sites_key: str, hyperparameters: Sequence[tf.Variable]) -> tf.Tensor:
    """A mark of the model's parts, and the values of the hyperparameters, trainable or held; float64."""
    names = (type(part).__qualname__ for part in model.submodules)
    parts = " ".join((sites_key, *names))
    if tf.executing_eagerly():
        values = (v.numpy().ravel() for v in hyperparameters)
        return tf.constant(np.concatenate([[zlib.crc32(parts.encode())], *values]), tf.float64)
    return tf.concat(
        [tf.constant([zlib.crc32(parts.encode())], tf.float64)]
        + [tf.cast(tf.reshape(v, [-1]), tf.float64) for v in hyperparameters],
        axis=0,
    )
