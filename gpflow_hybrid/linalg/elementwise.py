"""Functions of the elements of a symmetric matrix of distances, without whole intermediate matrices.

Done one operation after the other, every intermediate result is a matrix of its own: written to fresh
memory, and kept for the gradient. XLA makes one loop over the elements of it all; where it cannot, blocks
of rows stay in a core's cache. The gradient evaluates the function again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from .. import tuning
from .distances import pull_back
from .host import without_derivative

Elementwise = Callable[..., tf.Tensor]
"""A function of a matrix, acting on every element alike, and of parameters."""


def of_distances(
    function: Elementwise,
    distances: Callable[[], tf.Tensor],
    X: tf.Tensor,
    parameters: Sequence[tf.Tensor],
) -> tf.Tensor:
    """``f(D; θ)`` with ``D`` the squared distances of the rows of X, differentiable once in θ and X.

    :param distances: gives D, ``[N, N]``; called again for the gradient, so that it need not be kept.
    """
    constants = [tf.stop_gradient(p) for p in parameters]  # no tape keeps intermediate results

    @tf.custom_gradient
    def attach(
        result: tf.Tensor, X: tf.Tensor, *parameters: tf.Tensor
    ) -> tuple[tf.Tensor, Callable[..., Any]]:
        def grad(upstream: tf.Tensor) -> tuple[Any, ...]:
            with tf.control_dependencies([upstream]):  # not before it is needed
                D = distances()
            in_distances = _evaluate(_slope(function), D, constants, upstream)
            bars = (
                pull_back(X, in_distances),
                *_differentiate(function, D, constants, upstream),
            )
            return None, *without_derivative(bars, (upstream, X, *parameters))

        return tf.identity(result), grad

    return attach(_evaluate(function, distances(), constants), X, *parameters)


def _slope(function: Elementwise) -> Elementwise:
    """``U ∘ ∂f(D)/∂D``, from ``(D, U, *θ)``."""

    def slope(D: tf.Tensor, upstream: tf.Tensor, *parameters: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(D)
            result = function(D, *parameters)
        return tape.gradient(result, D, output_gradients=upstream)

    return slope


def _compiled(function: Callable[..., Any]) -> Any:
    return tf.function(function, autograph=False, jit_compile=True)


def _evaluate(
    function: Elementwise, matrix: tf.Tensor, parameters: Sequence[tf.Tensor], *more: tf.Tensor
) -> tf.Tensor:
    """Inside a graph by XLA, which makes one loop over the elements of the whole function.

    :param more: further matrices, which the function takes after the first.
    """
    if tf.executing_eagerly() or not _can_compile():
        return _evaluate_blocks(function, (matrix, *more), parameters)
    return _compiled(function)(matrix, *more, *parameters)


def _differentiate(
    function: Elementwise,
    matrix: tf.Tensor,
    parameters: Sequence[tf.Tensor],
    upstream: tf.Tensor,
) -> list[tf.Tensor]:
    """``Σᵢⱼ Uᵢⱼ ∂f(Aᵢⱼ)/∂θ``, inside a graph by XLA as well, unless memory is dear."""

    def gradients(matrix: tf.Tensor, upstream: tf.Tensor, *parameters: tf.Tensor) -> Any:
        return _weighted_gradients(function, matrix, parameters, upstream)

    is_large = matrix.shape[0] > tuning.LARGE_MATRIX
    if tf.executing_eagerly() or is_large or not _can_compile():
        return _differentiate_blocks(function, matrix, parameters, upstream)
    return list(_compiled(gradients)(matrix, upstream, *parameters))


def _weighted_gradients(
    function: Elementwise, matrix: tf.Tensor, parameters: Sequence[tf.Tensor], weights: tf.Tensor
) -> list[tf.Tensor]:
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(parameters)
        result = function(matrix, *parameters)
    return tape.gradient(
        result,
        list(parameters),
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
    return max(1, min(size, tuning.CACHED_ELEMENTS // size))


def _evaluate_blocks(
    function: Elementwise, matrices: tuple[tf.Tensor, ...], parameters: Sequence[tf.Tensor]
) -> tf.Tensor:
    like = matrices[0]
    size = like.shape[0]
    rows = _rows_of_block(size)
    count = -(-size // rows)
    blocks = tf.TensorArray(like.dtype, count, infer_shape=False, element_shape=[None, size])

    def body(i: tf.Tensor, blocks: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
        parts = (A[i * rows : (i + 1) * rows] for A in matrices)
        return i + 1, blocks.write(i, function(*parts, *parameters))

    _, blocks = tf.while_loop(
        lambda i, _: i < count,
        body,
        (tf.constant(0), blocks),
        parallel_iterations=tuning.PARALLEL_BLOCKS,
    )
    return tf.ensure_shape(blocks.concat(), like.shape)


def _differentiate_blocks(
    function: Elementwise,
    matrix: tf.Tensor,
    parameters: Sequence[tf.Tensor],
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
        found = _weighted_gradients(function, matrix[rows, start:], parameters, weights)
        return start + step, *(s + f for s, f in zip(sums, found, strict=True))

    zeros = [tf.zeros_like(p) for p in parameters]
    _, *sums = tf.while_loop(
        lambda start, *_: start < size,
        body,
        (tf.constant(0), *zeros),
        parallel_iterations=tuning.PARALLEL_BLOCKS,
    )
    return sums
