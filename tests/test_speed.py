"""Ratios of times within one run; never times themselves."""

from __future__ import annotations

from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf

import gpflow_hybrid as gh
from benchmarks.floor import in_turn, measure, timed
from benchmarks.peers.floor import floor_of
from gpflow_hybrid.linalg import marginals
from gpflow_hybrid.priors import DensePrior
from gpflow_hybrid.sites import SiteValues

N = 1600


def test_a_posterior_costs_little_more_than_its_factorisation() -> None:
    rng = np.random.default_rng(0)
    K = gpflow.kernels.Matern52(lengthscales=4.0)(rng.normal(size=(N, 10)))[None]
    sites = SiteValues(rng.normal(size=(N, 1)), rng.uniform(0.1, 1.0, size=(N, 1)))
    prior = DensePrior(K.numpy(), np.zeros((N, 1)))
    graph = tf.function(lambda: marginals(K, tf.zeros([N, 1], K.dtype), *sites), autograph=False)
    graph()  # by TensorFlow alone
    # The shortest times: what other processes do can only lengthen them.
    calls = [
        floor_of(N),
        lambda: timed(lambda: prior.posterior(sites)),
        lambda: timed(lambda: [x.numpy() for x in graph()]),
    ]
    floor, lapack, tensorflow = in_turn(calls, 9, np.min)
    assert lapack < 2.0 * floor  # asked for: 2; 1.1 is seen
    assert lapack < 0.7 * tensorflow


def nodes(n: int, likelihood: gpflow.likelihoods.Likelihood) -> int:
    """Of the graph of a training loss with its gradient."""
    X = np.random.default_rng(1).normal(size=(n, 2))
    data = (X, (X[:, :1] > 0.0).astype(float))
    model = gh.CVIModel(data, gpflow.kernels.RBF(), likelihood)

    def loss_and_gradient() -> Any:
        with tf.GradientTape() as tape:
            loss = model.training_loss()
        return tape.gradient(loss, model.trainable_variables)

    graph = tf.function(loss_and_gradient, autograph=False).get_concrete_function().graph
    library = graph.as_graph_def().library.function
    return len(graph.as_graph_def().node) + sum(len(f.node_def) for f in library)


@pytest.mark.parametrize(
    ("likelihood", "limit"),
    # 456 and 1190 when this was written: what tracing and optimising take goes with it.
    [(gh.likelihoods.ProbitBernoulli(), 500), (gpflow.likelihoods.Bernoulli(), 1300)],
)
def test_tracing_does_not_grow_with_the_data(
    likelihood: gpflow.likelihoods.Likelihood, limit: int
) -> None:
    # TensorFlow embeds a constant of a few elements and captures a larger one: none is small here.
    small, large = nodes(150, likelihood), nodes(600, likelihood)
    assert nodes(300, likelihood) == small
    assert nodes(1200, likelihood) == large
    assert max(small, large) < limit


def test_losses_and_gradients_cost_few_factorisations() -> None:
    """What is asked for, 6 and 15, by half again: other tests have the other core."""
    found = measure(614, repetitions=7, statistic=np.min)
    assert found.m_step < 1.5 * 6.0
    assert found.training_loss < 1.5 * 15.0
    assert found.evaluations == 3
