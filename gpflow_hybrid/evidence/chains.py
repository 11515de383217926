"""Annealing chains from a Gaussian base to the posterior.

    π_τ(f) ∝ base(f) exp(τ φ(f)),   φ(f) = Σₙ log p(yₙ|fₙ) − log tₙ(fₙ)

A sweep is one elliptical slice move of all the data, then one of each block of data given the rest.
The first moves far under smooth kernels, where the data have few degrees of freedom; the second
where each datum pulls for itself, so that a move of all of them at once is short.

The settings share their random numbers: every setting has the value that it would have alone, and
neighbouring settings have similar errors.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from gpflow.likelihoods import Likelihood

from .bases import Base, Blocks
from .block_means import BlockMeans
from .potentials import Potential, log_probs
from .results import FloatArray
from .slice_sampling import SliceState, elliptical_slice

NUM_KNOTS = 40
"""Intervals between the knots of a path."""

USUAL_SHRINKS = 24
"""Of a slice move, for which a sweep draws its random numbers at once; others are drawn where needed."""


class Chains(NamedTuple):
    """C chains for each of G settings."""

    x: FloatArray  # f − m, [G, L, C, N]
    values: FloatArray  # φ of each datum, [G, C, N]
    log_weights: FloatArray  # [G, C]
    lengths: FloatArray  # Σ Δτ sd(φ) over the steps up to each knot of a path, [G, K]


class Path(NamedTuple):
    """A way from one temperature to another: ``τ_t = w(begin + (end − begin) t / num_steps)^power``.

    :param warp: a rising w from 0 to 1 for every setting, linear between equidistant knots, ``[G, K + 1]``.
    """

    begin: float
    end: float
    num_steps: int
    power: float
    warp: FloatArray

    def knot(self, t: int) -> tuple[int, float]:
        """The interval of the warp that a step is in, and how far."""
        part = (self.begin + (self.end - self.begin) * t / self.num_steps) * NUM_KNOTS
        index = min(int(part), NUM_KNOTS - 1)
        return index, part - index

    def temperature(self, t: int) -> FloatArray:
        """``τ_t`` of every setting, ``[G]``."""
        index, rest = self.knot(t)
        low, high = self.warp[:, index], self.warp[:, index + 1]
        return np.asarray((low + (high - low) * rest) ** self.power)


class AnnealedTarget:
    """What the chains run on: the base, its conditionals, and φ of all the data and of each block."""

    def __init__(
        self, likelihood: Likelihood, X: tf.Tensor, Y: tf.Tensor, base: Base, blocks: Blocks
    ) -> None:
        self.base = Base(*(np.asarray(x, np.float64) for x in base))
        self.mean = self.base.mean[:, :, None]  # [G, L, 1, N]
        weights, self.factors = (np.asarray(x, np.float64) for x in blocks[1:])
        self.parts = [(int(s), int(s) + weights.shape[-1]) for s in blocks.start]
        self.block_means = BlockMeans(self.parts, weights)
        whole = (0, int(X.shape[0]))
        log_prob, *others = log_probs(likelihood, X, Y, [whole, *self.parts])
        self.potential = Potential(log_prob, self.base, *whole)
        self.block_potentials = [
            Potential(log_prob, self.base, *part)
            for log_prob, part in zip(others, self.parts, strict=True)
        ]

    def begin(self, num_chains: int, key: int) -> Chains:
        """Exact draws from the base, with ``log Z`` as their weight."""
        G, L, N = self.base.mean.shape
        noise = np.random.Generator(np.random.Philox(key=key)).standard_normal((L, num_chains, N))
        x = noise @ self.base.factor_t  # [G, L, C, N]
        setting = np.repeat(np.arange(G), num_chains)
        values = self.potential(_rows(x + self.mean), setting)
        return Chains(
            x,
            values.reshape(G, num_chains, N),
            np.repeat(self.base.log_normaliser[:, None], num_chains, axis=1),
            np.zeros((G, NUM_KNOTS)),
        )

    def sweep(self, chains: Chains, temperature: FloatArray, numbers: _Numbers) -> Chains:
        """A slice move of all the data at once, then of each block given the others.

        :param temperature: of every setting, ``[G]``.
        """
        G, _, C, _ = chains.x.shape
        setting, number_of_chain = np.repeat(np.arange(G), C), np.tile(np.arange(C), G)
        tau = temperature[setting]

        def move(
            number: int,
            x: FloatArray,
            centre: FloatArray,
            factor_t: FloatArray,
            values: FloatArray,
            potential: Potential,
        ) -> tuple[FloatArray, FloatArray]:
            """Slice move of ``x [G, L, C, n]``, which is ``N(0, factor factorᵀ)`` around ``centre``."""
            around = _rows(np.broadcast_to(centre, x.shape))

            def at(x: FloatArray, chain: npt.NDArray[np.intp] | None) -> FloatArray:
                if chain is None:
                    return potential(around + x, setting)
                return potential(around[chain] + x, setting[chain])

            def uniforms(shrink: int, chain: npt.NDArray[np.intp] | None) -> FloatArray:
                shared = numbers.uniform(number, shrink)
                return shared[number_of_chain if chain is None else number_of_chain[chain]]

            state = elliptical_slice(
                SliceState(_rows(x), values.reshape(G * C, -1)),
                _rows(numbers.normal(number, x.shape[-1]) @ factor_t),
                tau,
                at,
                uniforms,
            )
            return _unrows(state.x, G), state.values.reshape(values.shape)

        x, values = move(0, chains.x, self.mean, self.base.factor_t, chains.values, self.potential)
        x, values = x.copy(), values.copy()
        for i, shift in self.block_means.follow(x):
            start, end = self.parts[i]
            new_x, values[..., start:end] = move(
                i + 1,
                x[..., start:end] - shift,
                shift + self.mean[..., start:end],
                self.factors[i],
                values[..., start:end],
                self.block_potentials[i],
            )
            x[..., start:end] = new_x + shift
        return chains._replace(x=x, values=values)


class _Numbers:
    """The random numbers of one sweep, the same for every setting and whatever the others need."""

    def __init__(
        self, key: int, step: int, num_latents: int, num_chains: int, target: AnnealedTarget
    ):
        self.key, self.step, self.shape = key, step, (num_latents, num_chains)
        generator = self._generator(0)
        num_data = target.base.mean.shape[-1]
        sizes = [num_data, *(end - start for start, end in target.parts)]
        self.normals = generator.standard_normal((*self.shape, sum(sizes)))
        self.ends = np.cumsum(sizes)
        self.uniforms = generator.random((len(sizes), USUAL_SHRINKS + 2, num_chains))

    def _generator(self, stream: int) -> np.random.Generator:
        counter = [0, 0, stream, self.step]
        return np.random.Generator(np.random.Philox(key=self.key, counter=counter))

    def normal(self, move: int, num: int) -> FloatArray:
        """``[L, C, n]``."""
        end = self.ends[move]
        return self.normals[..., end - num : end]

    def uniform(self, move: int, shrink: int) -> FloatArray:
        """``[C]``, from the shrink −2 on."""
        if shrink < USUAL_SHRINKS:
            return self.uniforms[move, shrink + 2]
        return self._generator(1 + 128 * move + shrink).random(self.shape[1])


def advance(
    target: AnnealedTarget, chains: Chains, path: Path, first: int, last: int, key: int
) -> Chains:
    """Steps ``first, …, last − 1`` of a path.

    Upwards, the weight takes ``(τ_{t+1} − τ_t) φ(f)`` and then f moves at ``τ_{t+1}``: the sample that
    is weighted is from the tth distribution, before the transition. Downwards is the same backwards:
    f moves at ``τ_t``, then the weight takes ``(τ_t − τ_{t+1}) φ(f)``. A level path leaves it alone.
    """
    _, L, C, _ = chains.x.shape
    with np.errstate(all="ignore"):  # what overflows is −∞ or NaN, and is not accepted
        for t in range(first, last):
            here, there = path.temperature(t), path.temperature(t + 1)
            chains = _add_length(chains, np.abs(there - here), path.knot(t)[0])
            chains = _add_weight(chains, np.maximum(there - here, 0.0))
            numbers = _Numbers(key, t, L, C, target)
            chains = target.sweep(chains, np.maximum(here, there), numbers)
            chains = _add_weight(chains, np.maximum(here - there, 0.0))
    return chains


def _rows(x: FloatArray) -> FloatArray:
    """``[G, L, C, n] → [GC, n, L]``."""
    G, L, C, n = x.shape
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1)).reshape(G * C, n, L)


def _unrows(rows: FloatArray, num_settings: int) -> FloatArray:
    """``[GC, n, L] → [G, L, C, n]``."""
    _, n, L = rows.shape
    return rows.reshape(num_settings, -1, n, L).transpose(0, 3, 1, 2)


def _add_weight(chains: Chains, difference: FloatArray) -> Chains:
    # 0 × −∞ is 0 here: a level path does not look at φ.
    step = difference[:, None]
    added = np.where(step == 0.0, 0.0, step * chains.values.sum(-1))
    return chains._replace(log_weights=chains.log_weights + added)


def _add_length(chains: Chains, difference: FloatArray, index: int) -> Chains:
    spread = difference * chains.values.sum(-1).std(-1)
    lengths = chains.lengths.copy()
    lengths[:, index] += np.where(np.isfinite(spread), spread, 0.0)
    return chains._replace(lengths=lengths)
