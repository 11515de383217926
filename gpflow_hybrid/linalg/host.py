"""NumPy from inside a TensorFlow graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from .threads import host_arithmetic


def call_on_host(
    function: Callable[..., tuple[Any, ...]],
    arguments: list[tf.Tensor],
    shapes: list[Any],
    dtype: tf.DType | list[tf.DType] | None = None,
    *,
    stateful: bool = False,
) -> list[tf.Tensor]:
    """``function``, which returns a tuple, on arrays from inside a graph that runs in this process.

    :param dtype: of all results, or of each; that of the first argument by default.
    :param stateful: whether it does more than to return results.
    """
    dtype = arguments[0].dtype if dtype is None else dtype
    dtypes = dtype if isinstance(dtype, list) else [dtype] * len(shapes)

    def quietly(*arrays: Any) -> tuple[Any, ...]:
        with host_arithmetic(max((x.shape[-2] for x in arrays if x.ndim > 1), default=0)):
            found = function(*arrays)
        return tuple(np.asarray(x, d.as_numpy_dtype) for x, d in zip(found, dtypes, strict=True))

    found = tf.numpy_function(quietly, arguments, dtypes, stateful=stateful)
    return [
        tf.ensure_shape(x, shape) for x, shape in zip(tf.nest.flatten(found), shapes, strict=True)
    ]


def without_derivative(
    found: Sequence[tf.Tensor], origins: Sequence[tf.Tensor]
) -> tuple[tf.Tensor, ...]:
    """What was found, as it is; to differentiate it, also in what it was made of, says that a hand-written
    adjoint has no derivative. (Calls of the host alone would pass for constants.)"""

    @tf.custom_gradient
    def attach(*tensors: tf.Tensor) -> tuple[tuple[tf.Tensor, ...], Callable[..., Any]]:
        def grad(*_: tf.Tensor) -> Any:
            raise NotImplementedError(
                "Second derivatives through the posterior of the sites are not available: its adjoint "
                "is written by hand. Use first derivatives, or finite differences of them."
            )

        return tuple(tf.identity(x) for x in tensors[: len(found)]), grad

    return attach(*found, *origins)
