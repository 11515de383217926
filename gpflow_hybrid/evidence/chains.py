"""Annealing chains from a Gaussian base to the posterior, as compiled graphs.

    π_τ(f) ∝ base(f) exp(τ φ(f)),   φ(f) = Σₙ log p(yₙ|fₙ) − log tₙ(fₙ)

A sweep is one elliptical slice move of all the data, then one of each block of data given the rest.
The first moves far under smooth kernels, where the data have few degrees of freedom; the second
where each datum pulls for itself, so that a move of all of them at once is short.

The settings share their random numbers: every setting has the value that it would have alone, and
neighbouring settings have similar errors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf
from gpflow.likelihoods import Likelihood, ScalarLikelihood

from ..compilation import call_compiled
from ..likelihoods.nodes import log_prob_at
from .bases import Base, Blocks
from .slice_sampling import SliceState, elliptical_slice, last_nan

NUM_KNOTS = 40
"""Intervals between the knots of a path."""

_SHRINKS = 128  # random streams kept apart for one slice move
_MOVES = 1 << 20  # and for the moves of one sweep


class Problem(NamedTuple):
    """What the chains run on: data, base and its conditionals, for G settings."""

    X: tf.Tensor  # [N, D]
    Y: tf.Tensor  # [N, P]
    base: Base
    blocks: Blocks


class Chains(NamedTuple):
    """C chains for each of G settings."""

    x: tf.Tensor  # f − m, [G, L, C, N]
    values: tf.Tensor  # φ of each datum, [G, C, N]
    log_weights: tf.Tensor  # [G, C]
    lengths: tf.Tensor  # Σ Δτ sd(φ) over the steps up to each knot of a path, [G, K]
    nan_datum: tf.Tensor  # the last datum at which φ was NaN, or −1; []


class Path(NamedTuple):
    """A way from one temperature to another: ``τ_t = w(begin + (end − begin) t / num_steps)^power``.

    :param warp: a rising w from 0 to 1 for every setting, linear between equidistant knots, ``[G, K + 1]``.
    """

    begin: Any
    end: Any
    num_steps: Any
    power: Any
    warp: Any


def begin(likelihood: Likelihood, problem: Problem, num_chains: int, key: int) -> Chains:
    """Exact draws from the base, with ``log Z`` as their weight."""
    scalars = tf.constant(num_chains), tf.constant(key, tf.int64)
    return _call(likelihood, _begin, problem, *scalars)


def advance(
    likelihood: Likelihood,
    problem: Problem,
    chains: Chains,
    path: Path,
    first: int,
    last: int,
    key: int,
) -> Chains:
    """Steps ``first, …, last − 1`` of a path.

    Upwards, the weight takes ``(τ_{t+1} − τ_t) φ(f)`` and then f moves at ``τ_{t+1}``: the sample that
    is weighted is from the tth distribution, before the transition. Downwards is the same backwards:
    f moves at ``τ_t``, then the weight takes ``(τ_t − τ_{t+1}) φ(f)``. A level path leaves it alone.
    """
    path = Path(*(tf.constant(x, chains.x.dtype) for x in path))
    scalars = tf.constant(first), tf.constant(last), tf.constant(key, tf.int64)
    return _call(likelihood, _advance, problem, chains, path, *scalars)


def _call(likelihood: Likelihood, function: Any, *args: Any) -> Chains:
    """``function`` compiled once for each likelihood and shape of its arguments."""
    structure = tf.nest.map_structure(lambda _: None, args)

    def flat(likelihood: Likelihood, *tensors: tf.Tensor) -> Any:
        return function(likelihood, *tf.nest.pack_sequence_as(structure, tensors))

    name = ("evidence", function.__name__)
    return call_compiled(likelihood, name, flat, *tf.nest.flatten(args))


class _Target:
    """``φ`` for some chains and consecutive data."""

    def __init__(self, likelihood: Likelihood, problem: Problem, num_chains: tf.Tensor) -> None:
        self.problem = problem
        self.num_chains = num_chains
        self.num_latents = problem.base.mean.shape[1]

        def log_prob(f: tf.Tensor, X: tf.Tensor, Y: tf.Tensor) -> tf.Tensor:
            value = log_prob_at(likelihood, f, X, Y)
            return tf.reduce_sum(value, -1) if isinstance(likelihood, ScalarLikelihood) else value

        # Used in four places of the graph and traced once.
        f_spec = tf.TensorSpec([None, None, self.num_latents], problem.base.mean.dtype)
        data_specs = [tf.TensorSpec([None, *d.shape[1:]], d.dtype) for d in (problem.X, problem.Y)]
        signature = [f_spec, *data_specs]
        self._log_prob = tf.function(log_prob, input_signature=signature, autograph=False)

    def values(self, f: tf.Tensor, start: tf.Tensor | int, chain: tf.Tensor | None) -> tf.Tensor:
        """``φ`` per datum at ``f [A, n, L]`` for data ``start, …, start + n − 1``; ``[A, n]``."""
        end = start + tf.shape(f)[1]
        X, Y = (d[start:end] for d in (self.problem.X, self.problem.Y))
        log_p = self._log_prob(tf.ensure_shape(f, [None, None, self.num_latents]), X, Y)

        def per_chain(site: tf.Tensor) -> tf.Tensor:  # [G, L, N] → [A, n, L]
            site = tf.transpose(site[..., start:end], [0, 2, 1])
            if chain is None:
                return tf.repeat(site, self.num_chains, axis=0)
            return tf.gather(site, chain // tf.cast(self.num_chains, chain.dtype))

        lambda_1 = per_chain(self.problem.base.lambda_1)
        lambda_2 = per_chain(self.problem.base.lambda_2)
        return log_p - tf.reduce_sum((lambda_1 - 0.5 * lambda_2 * f) * f, -1)


def _rows(x: tf.Tensor) -> tf.Tensor:
    """``[G, L, C, n] → [GC, n, L]``."""
    G, L, C, n = tf.unstack(tf.shape(x))
    rows = tf.reshape(tf.transpose(x, [0, 2, 3, 1]), tf.stack([G * C, n, L]))
    rows.set_shape([None, x.shape[3], x.shape[1]])
    return rows


def _unrows(rows: tf.Tensor, num_settings: tf.Tensor) -> tf.Tensor:
    """``[GC, n, L] → [G, L, C, n]``."""
    _, n, L = tf.unstack(tf.shape(rows))
    x = tf.transpose(tf.reshape(rows, tf.stack([num_settings, -1, n, L])), [0, 3, 1, 2])
    x.set_shape([None, rows.shape[2], None, rows.shape[1]])
    return x


def _replace_last(x: tf.Tensor, start: tf.Tensor, end: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
    """``x`` with ``x[..., start:end] = new``, in place where TensorFlow allows it."""
    num_others = x.shape.rank - 1
    all_of_others = 2**num_others - 1  # a bit for each axis
    updated = tf.raw_ops.TensorStridedSliceUpdate(
        input=x,
        begin=tf.stack([0] * num_others + [start]),
        end=tf.stack([0] * num_others + [end]),
        strides=[1] * x.shape.rank,
        value=new,
        begin_mask=all_of_others,
        end_mask=all_of_others,
    )
    return tf.ensure_shape(updated, x.shape)


def _begin(
    likelihood: Likelihood, problem: Problem, num_chains: tf.Tensor, key: tf.Tensor
) -> Chains:
    base = problem.base
    G, L, N = tf.unstack(tf.shape(base.mean))
    noise = tf.random.stateless_normal(
        tf.stack([L, num_chains, N]), tf.stack([key, key]), dtype=base.mean.dtype
    )
    x = tf.matmul(noise, base.factor_t)  # [G, L, C, N]
    target = _Target(likelihood, problem, num_chains)
    values = target.values(_rows(x + base.mean[:, :, None]), 0, None)
    return Chains(
        x,
        tf.reshape(values, tf.stack([G, num_chains, N])),
        tf.repeat(base.log_normaliser[:, None], num_chains, axis=1),
        tf.zeros(tf.stack([G, NUM_KNOTS]), x.dtype),
        last_nan(values),
    )


def _advance(
    likelihood: Likelihood,
    problem: Problem,
    chains: Chains,
    path: Path,
    first: tf.Tensor,
    last: tf.Tensor,
    key: tf.Tensor,
) -> Chains:
    def knot(t: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The interval of the warp that a step is in, and how far."""
        part = path.begin + (path.end - path.begin) * tf.cast(t, chains.x.dtype) / path.num_steps
        index = tf.clip_by_value(tf.cast(part * NUM_KNOTS, tf.int32), 0, NUM_KNOTS - 1)
        return index, part * NUM_KNOTS - tf.cast(index, part.dtype)

    def temperature(t: tf.Tensor) -> tf.Tensor:  # [G]
        index, rest = knot(t)
        low, high = path.warp[:, index], path.warp[:, index + 1]
        return (low + (high - low) * rest) ** path.power

    target = _Target(likelihood, problem, tf.shape(chains.x)[2])

    def body(t: tf.Tensor, chains: Chains) -> tuple[tf.Tensor, Chains]:
        here, there = temperature(t), temperature(t + 1)
        chains = _add_length(chains, tf.abs(there - here), knot(t)[0])
        chains = _add_weight(chains, tf.maximum(there - here, 0.0))
        chains = _sweep(target, chains, tf.maximum(here, there), t, key)
        return t + 1, _add_weight(chains, tf.maximum(here - there, 0.0))

    return tf.while_loop(lambda t, _: t < last, body, (first, chains))[1]


def _add_weight(chains: Chains, difference: tf.Tensor) -> Chains:
    # 0 × −∞ is 0 here: a level path does not look at φ.
    added = tf.math.multiply_no_nan(tf.reduce_sum(chains.values, -1), difference[:, None])
    return chains._replace(log_weights=chains.log_weights + added)


def _add_length(chains: Chains, difference: tf.Tensor, index: tf.Tensor) -> Chains:
    spread = difference * tf.math.reduce_std(tf.reduce_sum(chains.values, -1), -1)
    spread = tf.where(tf.math.is_finite(spread), spread, tf.zeros_like(spread))
    here = tf.one_hot(index, NUM_KNOTS, dtype=spread.dtype)
    return chains._replace(lengths=chains.lengths + spread[:, None] * here)


def _sweep(
    target: _Target, chains: Chains, temperature: tf.Tensor, step: tf.Tensor, key: tf.Tensor
) -> Chains:
    """A slice move of all the data at once, then of each block given the others."""
    base, blocks = target.problem.base, target.problem.blocks
    G, L, C, _ = tf.unstack(tf.shape(chains.x))
    dtype = chains.x.dtype
    mean = base.mean[:, :, None]  # [G, L, 1, N]
    sweep_counter = tf.cast(step, tf.int64) * _MOVES

    def seed(move: tf.Tensor, stream: Any) -> tf.Tensor:
        counter = (sweep_counter + tf.cast(move, tf.int64)) * _SHRINKS
        return tf.stack([key, counter + tf.cast(stream, tf.int64)])

    def move(
        number: tf.Tensor,
        x: tf.Tensor,
        centre: tf.Tensor,
        factor_t: tf.Tensor,
        values: tf.Tensor,
        start: tf.Tensor | int,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Slice move of ``x [G, L, C, n]``, which is ``N(0, factor factorᵀ)`` around ``centre``."""
        n = tf.shape(x)[-1]
        noise = tf.random.stateless_normal(tf.stack([L, C, n]), seed(number, 0), dtype=dtype)
        centre_rows = _rows(tf.broadcast_to(centre, tf.shape(x)))

        def potential(x: tf.Tensor, chain: tf.Tensor | None) -> tf.Tensor:
            around = centre_rows if chain is None else tf.gather(centre_rows, chain)
            return target.values(around + x, start, chain)

        def uniforms(shrink: tf.Tensor | int) -> tf.Tensor:
            u = tf.random.stateless_uniform(C[None], seed(number, shrink + 3), dtype=dtype)
            return tf.tile(u, [G])

        state = elliptical_slice(
            SliceState(_rows(x), tf.reshape(values, tf.stack([G * C, n])), tf.constant(-1)),
            _rows(tf.matmul(noise, factor_t)),
            tf.repeat(temperature, C),
            potential,
            uniforms,
        )
        return _unrows(state.x, G), tf.reshape(state.values, tf.stack([G, C, n])), state.nan_datum

    x, values, nan_datum = move(tf.constant(0), chains.x, mean, base.factor_t, chains.values, 0)

    def body(
        i: tf.Tensor, x: tf.Tensor, values: tf.Tensor, nan_datum: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        start = blocks.start[i]
        end = start + tf.shape(blocks.weights)[-1]
        shift = tf.matmul(x, blocks.weights[i])  # E[x_b | x_rest], [G, L, C, b]
        rest, centre = x[..., start:end] - shift, shift + mean[..., start:end]
        block_values = values[..., start:end]
        new_x, new_values, nan_in_block = move(
            i + 1, rest, centre, blocks.factor_t[i], block_values, start
        )
        nan_datum = tf.maximum(nan_datum, tf.where(nan_in_block >= 0, nan_in_block + start, -1))
        x = _replace_last(x, start, end, new_x + shift)
        values = _replace_last(values, start, end, new_values)
        return i + 1, x, values, nan_datum

    num_blocks = tf.shape(blocks.start)[0]
    x, values = tf.ensure_shape(x, chains.x.shape), tf.ensure_shape(values, chains.values.shape)
    _, x, values, nan_datum = tf.while_loop(
        lambda i, *_: i < num_blocks, body, (tf.constant(0), x, values, nan_datum)
    )
    return chains._replace(x=x, values=values, nan_datum=tf.maximum(chains.nan_datum, nan_datum))
