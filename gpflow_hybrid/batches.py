"""Functions of rows, a batch at a time."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from . import tuning


def in_batches(
    function: Callable[..., tuple[tf.Tensor, ...]],
    arguments: tuple[tf.Tensor, ...],
    width: int,
    rank: int = 2,
) -> tuple[tf.Tensor, ...]:
    """A function of rows, so many at a time that ``width`` numbers for each are not too many.

    Inside a graph, whose sizes are not known while it is traced, and of inputs with leading dimensions, all
    at once.

    :param rank: of its results.
    """
    size = max(1, tuning.PREDICTED_ELEMENTS // max(width, 1))
    first = arguments[0]
    if not tf.executing_eagerly() or len(first.shape) != 2 or first.shape[0] <= size:
        return tuple(function(*arguments))
    parts = [
        function(*(x[i : i + size] for x in arguments)) for i in range(0, first.shape[0], size)
    ]
    return tuple(tf.concat(part, -rank) for part in zip(*parts, strict=True))
