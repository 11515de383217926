"""Elliptical slice sampling of many chains at once.

Murray, Adams and MacKay (2010): for a target ``N(x; 0, Σ) exp(h(x))`` draw ``ν ~ N(0, Σ)`` and a
level ``h(x) + log u``, then move along the ellipse ``x cos θ + ν sin θ``, shrinking the bracket of
θ towards 0 until the level is met. There is no step size, and a move is always made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

MAX_SHRINKS = 100
"""The bracket is of width 1e-40 by then: the chain stays where it is."""

Potential = Callable[[tf.Tensor, tf.Tensor | None], tf.Tensor]
"""``(x [A, n, L], which of the Q chains [A]) → h per datum [A, n]``; None stands for all chains."""

Uniforms = Callable[[tf.Tensor], tf.Tensor]
"""Uniform numbers in [0, 1), one for each of the Q chains, for the given shrink."""


class SliceState(NamedTuple):
    """Chains, the potential of each datum there, and the last datum at which it was NaN (or −1)."""

    x: tf.Tensor  # [Q, n, L]
    values: tf.Tensor  # [Q, n]
    nan_datum: tf.Tensor  # []


def elliptical_slice(
    state: SliceState,
    direction: tf.Tensor,
    temperature: tf.Tensor,
    potential: Potential,
    uniforms: Uniforms,
) -> SliceState:
    """One update of every chain that leaves ``N(x; 0, Σ) exp(τ Σₙ hₙ(x))`` invariant.

    Later proposals are made only for the chains that still need one: the cost is that of the number
    of proposals, not of the worst chain's.

    :param direction: ``ν``, a draw from the Gaussian for each chain, ``[Q, n, L]``.
    :param temperature: ``τ``, ``[]`` or ``[Q]``.
    """
    temperature = tf.broadcast_to(temperature, tf.shape(state.values)[:1])
    level = temperature * tf.reduce_sum(state.values, -1) + tf.math.log(1.0 - uniforms(-2))
    theta = 2.0 * np.pi * uniforms(-1)

    def propose(x: tf.Tensor, nu: tf.Tensor, theta: tf.Tensor) -> tf.Tensor:
        theta = theta[:, None, None]
        return x * tf.cos(theta) + nu * tf.sin(theta)

    def accepts(values: tf.Tensor, temperature: tf.Tensor, level: tf.Tensor) -> tf.Tensor:
        # Neither −∞ nor NaN is above a level.
        return temperature * tf.reduce_sum(values, -1) > level

    values = potential(propose(state.x, direction, theta), None)
    accepted = accepts(values, temperature, level)
    nan_datum = tf.maximum(state.nan_datum, last_nan(values))
    # A chain that no proposal satisfies keeps θ = 0, which is where it is.
    theta_found = tf.where(accepted, theta, tf.zeros_like(theta))
    values = tf.where(accepted[:, None], values, state.values)
    active = tf.where(~accepted)[:, 0]
    low, high, theta = (tf.gather(t, active) for t in (theta - 2.0 * np.pi, theta, theta))

    def unfinished(shrink: tf.Tensor, active: tf.Tensor, *_: tf.Tensor) -> tf.Tensor:
        return (tf.size(active) > 0) & (shrink < MAX_SHRINKS)

    def body(
        shrink: tf.Tensor,
        active: tf.Tensor,
        low: tf.Tensor,
        high: tf.Tensor,
        theta: tf.Tensor,
        nan_datum: tf.Tensor,
        arrivals: tuple[tf.TensorArray, ...],
    ) -> tuple[tf.Tensor, ...]:
        # The angle just rejected becomes the end of the bracket on its side of 0.
        low, high = tf.where(theta < 0.0, theta, low), tf.where(theta < 0.0, high, theta)
        theta = low + tf.gather(uniforms(shrink), active) * (high - low)
        proposal = propose(tf.gather(state.x, active), tf.gather(direction, active), theta)
        values = potential(proposal, active)
        accepted = accepts(values, *(tf.gather(t, active) for t in (temperature, level)))
        done, left = tf.where(accepted)[:, 0], tf.where(~accepted)[:, 0]
        new = (tf.gather(x, done) for x in (active, theta, values))
        return (
            shrink + 1,
            *(tf.gather(x, left) for x in (active, low, high, theta)),
            tf.maximum(nan_datum, last_nan(values)),
            tuple(array.write(shrink + 1, x) for array, x in zip(arrivals, new, strict=True)),
        )

    # What each round accepts is put in its place once, at the end; there may be no round at all.
    def rounds(like: tf.Tensor) -> tf.TensorArray:
        shape = tf.TensorShape([None]).concatenate(like.shape[1:])
        array = tf.TensorArray(
            like.dtype, 1, dynamic_size=True, element_shape=shape, infer_shape=False
        )
        return array.write(0, like[:0])

    vector, scalar = tf.TensorShape([None]), tf.TensorShape([])
    arrivals = tuple(rounds(x) for x in (active, theta, values))
    *_, nan_datum, arrivals = tf.while_loop(
        unfinished,
        body,
        (tf.constant(0), active, low, high, theta, nan_datum, arrivals),
        shape_invariants=(scalar, *[vector] * 4, scalar, (scalar, scalar, scalar)),
    )
    index, theta, new_values = (array.concat() for array in arrivals)
    theta_found = tf.tensor_scatter_nd_update(theta_found, index[:, None], theta)
    values = tf.tensor_scatter_nd_update(values, index[:, None], new_values)
    return SliceState(propose(state.x, direction, theta_found), values, nan_datum)


def last_nan(values: tf.Tensor) -> tf.Tensor:
    """The largest index on the last axis at which ``values [Q, n]`` has a NaN, or −1; ``[]``."""
    index = tf.range(tf.shape(values)[-1])
    return tf.reduce_max(tf.where(tf.math.is_nan(values), index, -1))
