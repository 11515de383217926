"""Peak memory of one training loss of a sparse model, with its gradient, on generated data.

    python -m benchmarks.sparse_memory                        # N = 1,000,000, M = 500
    python -m benchmarks.sparse_memory --rows 20000 --inducing 100
    python -m benchmarks.sparse_memory --stream               # the rows are made as they are read

The problem is that of ``benchmarks.sparse_floor``, from cold. The peak is the process', TensorFlow and the
data included; it ends with an error above the limit.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import gpflow
import numpy as np
import tensorflow as tf

import gpflow_hybrid as gh
from benchmarks.memory import peak_bytes
from benchmarks.sparse_floor import NUM_INPUTS, problem

STREAMED_ROWS = 10_000
"""Rows that a stream makes at a time."""


def stream(rows: int) -> tf.data.Dataset:
    """Blocks of such data, each from its own seed."""

    def block(index: Any) -> Any:
        X = tf.random.stateless_normal([STREAMED_ROWS, NUM_INPUTS], [index, 0], dtype=tf.float64)
        noise = tf.random.stateless_normal([STREAMED_ROWS, 1], [index, 1], dtype=tf.float64)
        f = tf.sin(X[:, :1]) + 0.5 * X[:, 1:2] * X[:, 2:3] + 0.3 * noise
        return X, tf.cast(f > 0.0, tf.float64)

    return tf.data.Dataset.range(rows // STREAMED_ROWS).map(block)


def measure(rows: int, num_inducing: int, streamed: bool) -> float:
    """GiB at the peak of one loss with its gradient; printed with the time it took."""
    if streamed:
        data: Any = stream(rows)
        Z = next(iter(data))[0].numpy()[:num_inducing]
    else:
        *data, Z = problem(rows, num_inducing)
    model = gh.SparseCVIModel(
        gpflow.kernels.Matern52(variance=4.0, lengthscales=3.0),
        gh.likelihoods.ProbitBernoulli(),
        np.array(Z),
    )
    before, began = peak_bytes(), time.perf_counter()
    with tf.GradientTape() as tape:
        loss = model.training_loss(data if streamed else tuple(data))
    gradients = tape.gradient(loss, model.trainable_variables)
    seconds = time.perf_counter() - began
    assert all(np.isfinite(g).all() for g in gradients)
    peak = peak_bytes() / 2**30
    print(
        f"N = {rows}, M = {num_inducing}: {peak:.2f} GiB at the peak, {before / 2**30:.2f} before; loss "
        f"{float(loss):.3f}, {seconds:.0f} s from cold with its gradient",
        flush=True,
    )
    return peak


def main() -> None:
    """Measure, and say whether it is within the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--inducing", type=int, default=500)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--limit", type=float, default=8.0, help="GiB")
    a = parser.parse_args()
    peak = measure(a.rows, a.inducing, a.stream)
    if peak > a.limit:
        sys.exit(f"{peak:.2f} GiB are more than {a.limit:g}.")


if __name__ == "__main__":
    main()
