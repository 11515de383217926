"""Functions of the elements of a symmetric matrix, without whole intermediate ones.

Done one operation after the other, every intermediate result is a matrix of its own: written to fresh
memory, and kept for the gradient. XLA makes one loop over the elements of it all; where it cannot, blocks
of rows stay in a core's cache. The gradient evaluates the function again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record

ELEMENTS = 160_000
"""Of a block, about: so many stay in a core's cache."""

PARALLEL = 2
"""Blocks that may be under way at the same time."""

LARGE = 3000
"""Size above which XLA does not differentiate a whole matrix: it keeps some intermediate ones."""

Elementwise = Callable[[tf.Tensor], tf.Tensor]


def by_rows(
    function: Elementwise, matrix: Callable[[], tf.Tensor], variables: Sequence[tf.Variable]
) -> tf.Tensor:
    """``function(matrix())``, differentiable once in variables, at the values that they have when the
    gradient is taken.

    :param function: acts on every element alike.
    :param matrix: gives a constant symmetric matrix, ``[N, N]``; called again for the gradient, so that a
        matrix need not be kept.
    :param variables: that the function reads.
    """
    values = [tf.convert_to_tensor(v) for v in variables]  # what a tape connects with the variables

    @tf.custom_gradient
    def attach(result: tf.Tensor, *values: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        def grad(upstream: tf.Tensor) -> tuple[Any, ...]:
            with tf.control_dependencies([upstream]):  # not before it is needed
                again = matrix()
            return None, *_differentiate(function, again, variables, upstream)

        return tf.identity(result), grad

    with record.stop_recording():  # a tape would keep every block's intermediate results
        result = _evaluate(function, matrix())
    return attach(result, *values)


def _evaluate(function: Elementwise, matrix: tf.Tensor) -> tf.Tensor:
    """Inside a graph by XLA, which makes one loop over the elements of the whole function."""
    if tf.executing_eagerly() or not _can_compile():
        return _evaluate_blocks(function, matrix)
    return tf.function(function, autograph=False, jit_compile=True)(matrix)


def _differentiate(
    function: Elementwise,
    matrix: tf.Tensor,
    variables: Sequence[tf.Variable],
    upstream: tf.Tensor,
) -> list[tf.Tensor]:
    """``Σᵢⱼ Uᵢⱼ ∂f(Aᵢⱼ)/∂θ``, inside a graph by XLA as well, unless memory is dear."""

    def gradients(matrix: tf.Tensor, upstream: tf.Tensor) -> list[tf.Tensor]:
        return _weighted_gradients(function, matrix, variables, upstream)

    if tf.executing_eagerly() or matrix.shape[0] > LARGE or not _can_compile():
        return _differentiate_blocks(function, matrix, variables, upstream)
    return tf.function(gradients, autograph=False, jit_compile=True)(matrix, upstream)


def _weighted_gradients(
    function: Elementwise, matrix: tf.Tensor, variables: Sequence[tf.Variable], weights: tf.Tensor
) -> list[tf.Tensor]:
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(variables)
        result = function(matrix)
    return tape.gradient(
        result,
        variables,
        output_gradients=weights,
        unconnected_gradients=tf.UnconnectedGradients.ZERO,
    )


@functools.cache
def _can_compile() -> bool:
    """Whether this TensorFlow has XLA for the CPU."""
    with tf.init_scope():
        try:
            tf.function(tf.square, autograph=False, jit_compile=True)(tf.ones([2]))
        except (tf.errors.OpError, RuntimeError):
            return False
    return True


def _rows_of_block(size: int) -> int:
    return max(1, min(size, ELEMENTS // size))


def _evaluate_blocks(function: Elementwise, matrix: tf.Tensor) -> tf.Tensor:
    size = matrix.shape[0]
    rows = _rows_of_block(size)
    count = -(-size // rows)
    blocks = tf.TensorArray(matrix.dtype, count, infer_shape=False, element_shape=[None, size])

    def body(i: tf.Tensor, blocks: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
        return i + 1, blocks.write(i, function(matrix[i * rows : (i + 1) * rows]))

    _, blocks = tf.while_loop(
        lambda i, _: i < count, body, (tf.constant(0), blocks), parallel_iterations=PARALLEL
    )
    return tf.ensure_shape(blocks.concat(), matrix.shape)


def _differentiate_blocks(
    function: Elementwise,
    matrix: tf.Tensor,
    variables: Sequence[tf.Variable],
    upstream: tf.Tensor,
) -> list[tf.Tensor]:
    """The same from the blocks on and right of the diagonal: A is symmetric."""
    size = matrix.shape[0]
    step = _rows_of_block(size)

    def body(start: tf.Tensor, *sums: tf.Tensor) -> tuple[tf.Tensor, ...]:
        rows = slice(start, start + step)
        weights = upstream[rows, start:] + tf.transpose(upstream[start:, rows])
        in_block = tf.range(size - start) < step  # where U and Uᵀ have both been counted
        weights *= 1.0 - 0.5 * tf.cast(in_block, weights.dtype)
        found = _weighted_gradients(function, matrix[rows, start:], variables, weights)
        return start + step, *(s + f for s, f in zip(sums, found, strict=True))

    zeros = [tf.zeros_like(v) for v in variables]
    _, *sums = tf.while_loop(
        lambda start, *_: start < size,
        body,
        (tf.constant(0), *zeros),
        parallel_iterations=PARALLEL,
    )
    return sums
