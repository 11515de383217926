"""Chains of the No-U-Turn sampler over the hyperparameters, in parallel, each with sites of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf
import tensorflow_probability as tfp

from .axes import Axes
from .bridge import bridge_sampling
from .lattices import Quadrature
from .marginals import Draws
from .results import ChainReport
from .target import Target

Array = npt.NDArray[np.float64]

FIRST_STEP = 0.5
"""Of the integrator, in standard deviations; it is adapted."""

ACCEPTANCE = 0.8
"""To which the step is adapted."""

MAX_DEPTH = 6
"""Of the sampler's trees: at most 63 steps for one transition."""

NUM_SETTINGS = 100
"""Draws, evenly thinned, whose mixture predicts."""

MIXED_R_HAT = 1.05
"""Above, chains have not mixed."""

ENOUGH_DRAWS = 50.0
"""Below, an effective sample size is too small to be told."""

MANY_DIVERGENCES = 0.02
"""Share of transitions that may diverge."""


class SampledChains(NamedTuple):
    """What the sampler returns, ``[S, C, ...]``."""

    z: Array
    log_density: Array
    has_diverged: Array
    acceptance: Array


def sample(
    target: Target,
    copies: Sequence[Target],
    axes: Axes,
    num_samples: int,
    num_burnin: int,
    seed: int,
) -> tuple[Quadrature, Draws, ChainReport]:
    """Run chains, and take stock.

    :param copies: the same density, one for each chain: their sites start inference where that chain was.
    """
    mode, root = axes.mode, axes.directions * axes.centre
    chains = _run(copies, mode, root, num_samples, num_burnin, seed)
    for copy in copies:
        target.num_evaluations += copy.num_evaluations
    x = mode + chains.z @ root.T
    flat = x.reshape(-1, x.shape[-1])
    report = _report(x, chains)
    smallest = float(np.min(report.effective_sample_size))
    rng = np.random.default_rng(seed)
    evidence, error = bridge_sampling(
        flat, chains.log_density.reshape(-1), target.log_density, smallest, rng
    )
    # By time, then by chain: an even thinning has all chains.
    rows = np.unique(np.linspace(0, len(flat) - 1, min(len(flat), NUM_SETTINGS)).astype(int))
    nodes = [node for node in map(target.node, flat[rows]) if node.log_density > -np.inf]
    divergent = report.num_divergences / chains.has_diverged.size
    has_mixed = (
        np.max(report.r_hat) <= MIXED_R_HAT
        and smallest >= ENOUGH_DRAWS
        and divergent <= MANY_DIVERGENCES
    )
    found = Quadrature(
        nodes,
        np.array([]),
        np.full(len(nodes), -np.log(len(nodes))),
        evidence,
        np.nan,
        bool(has_mixed),
        f"{x.shape[1]} chains of {x.shape[0]} samples",
        error,
    )
    return found, Draws(flat, np.full(len(flat), 1.0 / len(flat))), report


def _run(
    copies: Sequence[Target], mode: Array, root: Array, num_samples: int, num_burnin: int, seed: int
) -> SampledChains:
    d, dtype = len(mode), copies[0].dtype
    adaptation = max(1, int(0.8 * num_burnin))
    start = np.random.default_rng(seed).normal(size=(len(copies), d))
    kernel = tfp.mcmc.DualAveragingStepSizeAdaptation(
        tfp.mcmc.NoUTurnSampler(
            _log_density(copies, mode, root),
            step_size=tf.fill([len(copies), 1], tf.constant(FIRST_STEP, dtype)),
            max_tree_depth=MAX_DEPTH,
        ),
        num_adaptation_steps=adaptation,
        target_accept_prob=tf.constant(ACCEPTANCE, dtype),
        step_size_setter_fn=lambda results, step: results._replace(step_size=step),
        step_size_getter_fn=lambda results: results.step_size,
        log_accept_prob_getter_fn=lambda results: results.log_accept_ratio,
    )

    def trace(_: tf.Tensor, results: Any) -> tuple[tf.Tensor, ...]:
        inner = results.inner_results
        accepted = tf.exp(tf.minimum(inner.log_accept_ratio, 0.0))
        return inner.target_log_prob, inner.has_divergence, accepted, inner.leapfrogs_taken

    @tf.function(autograph=False)
    def run(state: tf.Tensor) -> Any:
        return tfp.mcmc.sample_chain(
            num_results=num_samples,
            num_burnin_steps=num_burnin,
            current_state=state,
            kernel=kernel,
            trace_fn=trace,
            seed=tf.constant([seed, 0], tf.int32),
        )

    states, (log_density, diverged, accepted, steps) = run(tf.constant(start, dtype))
    taken = int(np.sum(np.max(steps, axis=1))) * (num_samples + num_burnin) // num_samples
    for copy in copies:  # chains keep step: the longest tree counts for all
        copy.num_evaluations += taken
    return SampledChains(*(np.asarray(a) for a in (states, log_density, diverged, accepted)))


def _log_density(copies: Sequence[Target], mode: Array, root: Array) -> Callable[..., tf.Tensor]:
    """Of standardised coordinates ``[C, d]``, every chain by its own model."""

    @tf.custom_gradient
    def log_density(z: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        A = tf.constant(root, z.dtype)
        x = tf.constant(mode, z.dtype) + tf.matmul(z, A, transpose_b=True)
        found = [copy.graph(x[c]) for c, copy in enumerate(copies)]
        value = tf.stack([v for v, _ in found])
        slope = tf.matmul(tf.stack([g for _, g in found]), A)
        fine = tf.math.is_finite(value)
        value = tf.where(fine, value, tf.constant(-np.inf, z.dtype))
        slope = tf.where(fine[:, None], slope, tf.zeros_like(slope))

        def grad(upstream: tf.Tensor, variables: Sequence[tf.Variable] = ()) -> Any:
            # The models' variables are moved by z, and have no derivative of their own.
            return upstream[:, None] * slope, [None] * len(variables)

        return value, grad

    return log_density


def _report(x: Array, chains: SampledChains) -> ChainReport:
    states = tf.constant(x)
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel(
        logging.ERROR
    )  # TensorFlow Probability casts a complex number that has no imaginary part
    size = tfp.mcmc.effective_sample_size(
        states, filter_beyond_positive_pairs=True, cross_chain_dims=1 if x.shape[1] > 1 else None
    )
    logger.setLevel(level)
    r_hat = tfp.mcmc.potential_scale_reduction(states, independent_chain_ndims=1, split_chains=True)
    return ChainReport(
        r_hat=np.asarray(r_hat),
        effective_sample_size=np.asarray(size).reshape(-1, x.shape[-1]).sum(0),
        num_divergences=int(np.sum(chains.has_diverged)),
        acceptance=float(np.mean(chains.acceptance)),
    )
