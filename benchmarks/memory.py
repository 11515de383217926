"""Peak memory of one training loss with its gradient, in matrices of n×n.

    python -m benchmarks.memory 5000

What the process had in use before, with TensorFlow loaded and every graph traced on little data, is
subtracted. The problem is that of ``benchmarks.floor``.
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any

import gpflow
import tensorflow as tf

import gpflow_hybrid as gh
from benchmarks.floor import problem


def peak_bytes() -> int:
    """The most memory that this process has ever had in use."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def loss_and_gradient(n: int) -> tuple[float, float]:
    """Train on n data for one evaluation; the loss and the seconds it took."""
    X, Y, lengthscale, sigma = problem(n)
    kernel = gpflow.kernels.Matern52(variance=sigma**2, lengthscales=lengthscale)
    model = gh.CVIModel((X, Y), kernel, gh.likelihoods.ProbitBernoulli())

    @tf.function(autograph=False)
    def evaluate() -> Any:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(model.trainable_variables)
            loss = model.training_loss()
        return loss, tape.gradient(loss, model.trainable_variables)

    began = time.perf_counter()
    loss, _ = evaluate()
    return float(loss), time.perf_counter() - began


def measure(n: int) -> float:
    """Matrices of n×n doubles at the peak."""
    loss_and_gradient(100)
    before = peak_bytes()
    loss, seconds = loss_and_gradient(n)
    matrices = (peak_bytes() - before) / (8 * n * n)
    print(
        f"n = {n}: {matrices:.1f} matrices of n×n at the peak, {peak_bytes() / 2**30:.1f} GiB in all; "
        f"loss {loss:.3f}, {seconds:.0f} s from zero sites",
        flush=True,
    )
    return matrices


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("size", nargs="?", type=int, default=5000)
    measure(parser.parse_args().size)
