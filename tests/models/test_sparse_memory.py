"""What a sparse loss keeps in memory is set by the block of rows, not by their number."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import gpflow
import pytest
import tensorflow as tf

import gpflow_hybrid as gh
from gpflow_hybrid import tuning

NUM_INDUCING = 20
BLOCK = 256


def stream(num_rows: int) -> tf.data.Dataset:
    """Rows that are nowhere until they are read."""

    def block(index: Any) -> Any:
        X = tf.random.stateless_uniform([BLOCK, 2], [index, 0], -2.0, 2.0, tf.float64)
        noise = tf.random.stateless_normal([BLOCK, 1], [index, 1], dtype=tf.float64)
        return X, tf.cast(tf.sin(2.0 * X[:, :1]) + X[:, 1:] + noise > 0.0, tf.float64)

    return tf.data.Dataset.range(num_rows // BLOCK).map(block)


def peak(num_rows: int) -> float:
    """Bytes that NumPy and Python have at most in one of the sums that a loss is made of."""
    data = stream(num_rows)
    model = gh.SparseCVIModel(
        gpflow.kernels.Matern52(),
        gh.likelihoods.ProbitBernoulli(),
        next(iter(data))[0].numpy()[:NUM_INDUCING],
    )
    rows = model.all_rows(data)
    model.training_loss(rows)
    sums, q = model._sums(rows, 1.0), model._q()
    found = []

    def traced(sum_over_rows: Any, *arguments: Any) -> Any:
        gc.collect()  # GPflow's checks of shapes leave cycles behind
        tracemalloc.start()
        result = sum_over_rows(*arguments)
        found.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        return result

    traced(sums.expectations, q)
    slope = traced(sums.linearise, q).slope
    traced(sums.transpose_product, q, slope)
    traced(sums.pull_back, q, slope)
    return max(found)


def test_peak_memory_is_set_by_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "PROJECTED_ELEMENTS", BLOCK * NUM_INDUCING)
    monkeypatch.setattr(tuning, "KEPT_PROJECTIONS", 0)
    few, many = peak(8 * BLOCK), peak(40 * BLOCK)
    projections = 8 * NUM_INDUCING * 32 * BLOCK  # what the further rows would need, once
    assert many - few < 0.25 * projections
    monkeypatch.setattr(tuning, "KEPT_PROJECTIONS", 2**30)
    assert peak(40 * BLOCK) - few > projections  # the measure sees it
