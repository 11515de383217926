"""The same functions, under NumPy's names, for TensorFlow's tensors and for NumPy's arrays.

A formula that takes its functions from here is written once and runs in a graph as well as on the host.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorflow as tf

TENSORS = SimpleNamespace(
    abs=tf.abs,
    asarray=tf.constant,
    asinh=tf.asinh,
    concatenate=tf.concat,
    cosh=tf.cosh,
    diagonal_matrix=tf.linalg.diag,
    exp=tf.exp,
    expm1=tf.math.expm1,
    isfinite=tf.math.is_finite,
    latents=lambda parts: tf.stack(parts, -1),
    log=tf.math.log,
    log1p=tf.math.log1p,
    matmul=tf.matmul,
    max=tf.reduce_max,
    maximum=tf.maximum,
    minimum=tf.minimum,
    round=tf.round,
    rows=tf.gather,
    sinh=tf.sinh,
    spread=tf.multiply,
    sqrt=tf.sqrt,
    stack=tf.stack,
    stop_gradient=tf.stop_gradient,
    sum=tf.reduce_sum,
    swapped=tf.linalg.matrix_transpose,
    tensordot=tf.tensordot,
    transpose=tf.transpose,
    where=tf.where,
)

_OWN_NAMES = {
    "asinh": np.arcsinh,
    "diagonal_matrix": lambda x: x[..., None] * np.eye(x.shape[-1], dtype=x.dtype),
    # Arrays over nodes, [Q, N, L] or [Q, N], have the nodes as their fastest axis in memory and the latents
    # as their slowest: arithmetic with arrays [N, L] then runs over long rows.
    "latents": lambda parts: np.stack([x.T for x in parts]).T,
    "rows": lambda x, i: np.take(x.T, i, axis=-1).T,
    "spread": lambda z, x: (x.T[..., None] * z.T).T,
    "stop_gradient": lambda x: x,
    "swapped": lambda x: np.swapaxes(x, -1, -2),
}

ARRAYS = SimpleNamespace(
    **{name: getattr(np, name) for name in vars(TENSORS) if name not in _OWN_NAMES}, **_OWN_NAMES
)


def is_array(x: Any) -> bool:
    """Whether x belongs to NumPy, as an array or as one of its numbers."""
    return isinstance(x, (np.ndarray, np.generic))


def functions_of(x: Any) -> Any:
    """The functions for what x is."""
    return ARRAYS if is_array(x) else TENSORS
