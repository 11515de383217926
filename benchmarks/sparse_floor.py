"""How far a sparse model is from BLAS' floor, one ``dsyrk`` and one ``dtrsm`` of ``[M, N]``.

    python -m benchmarks.sparse_floor                     # N = 50,000, M = 500
    python -m benchmarks.sparse_floor --rows 25000 50000 100000 200000 --inducing 200
    python -m benchmarks.sparse_floor --rows 1000000 --inducing 500 --repetitions 1

Generated data with eight inputs, Matérn-5/2, probit, EP-like. The posterior is one sum over the data with
its natural-gradient map, the projections known; the loss is a training loss with its gradient, 1 % from the
hyperparameters before. Medians of repetitions taken in turn with the floor's, in one process. Growth is the
exponent of N between the smallest and the largest size, of the loss per evaluation; the peak of memory is
the process'.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import gpflow
import numpy as np
from scipy.linalg import blas

import gpflow_hybrid as gh
from gpflow_hybrid.inference.inducing import InducingPosterior
from gpflow_hybrid.objectives import power_of

NUM_INPUTS = 8


class Ratios(NamedTuple):
    """Times in floors."""

    posterior: float
    loss: float
    evaluations: int
    """Of the posterior in the loss."""
    floor_seconds: float


def problem(rows: int, num_inducing: int) -> tuple[Any, Any, Any]:
    """Labels of a smooth function, and inducing points among the rows."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(rows, NUM_INPUTS))
    f = np.sin(X[:, :1]) + 0.5 * X[:, 1:2] * X[:, 2:3]
    Y = (f + 0.3 * rng.normal(size=f.shape) > 0.0).astype(float)
    return X, Y, X[:num_inducing].copy()


def timed(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def floor_of(num_inducing: int, rows: int) -> Callable[[], Any]:
    """One ``dsyrk`` and one ``dtrsm``, in blocks where that is too large for memory."""
    rng = np.random.default_rng(1)
    size = min(rows, 50_000)
    A = np.asfortranarray(rng.normal(size=(num_inducing, size)))
    L = np.asfortranarray(np.tril(rng.normal(size=(num_inducing, num_inducing)))) + 30.0 * np.eye(
        num_inducing
    )

    def once() -> None:
        for _ in range(rows // size):
            blas.dsyrk(1.0, A)
            blas.dtrsm(1.0, L, A, lower=1)

    return once


def measure(rows: int, num_inducing: int, repetitions: int, objective: Any) -> Ratios:
    """All ratios for one size."""
    X, Y, Z = problem(rows, num_inducing)
    kernel = gpflow.kernels.Matern52(variance=4.0, lengthscales=3.0)
    model = gh.SparseCVIModel(
        kernel, gh.likelihoods.ProbitBernoulli(), Z, objective=objective, num_data=None
    )
    data = model._rows((X, Y))
    variables = model._hyperparameters()
    model._evaluate(data, variables, model._remarks)
    sums = model._sums(data, power_of(objective))
    q: InducingPosterior = model._q()
    sums.expectations(q)  # the projections
    sign = 1.0

    def loss() -> None:
        nonlocal sign
        sign = -sign
        kernel.lengthscales.assign(3.0 * (1.0 + 0.005 * sign))
        kernel.variance.assign(4.0 * (1.0 + 0.005 * sign))
        with model._host_arithmetic():
            model._evaluate(data, variables, model._remarks)

    def posterior() -> None:
        sums.expectations(InducingPosterior(q.sites))  # another q: nothing is known of it

    calls = [floor_of(num_inducing, rows), posterior, loss]
    times = [[timed(call) for call in calls] for _ in range(repetitions)]
    floor, one, losses = np.median(times, axis=0)
    sign = -sign
    kernel.lengthscales.assign(3.0 * (1.0 + 0.005 * sign))
    kernel.variance.assign(4.0 * (1.0 + 0.005 * sign))
    found = model._collapse(model._sums(data, power_of(objective))).solution.num_evaluations
    return Ratios(one / floor, losses / floor, found, floor)


def main() -> None:
    """Measure and print a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", type=int, default=[50_000])
    parser.add_argument("--inducing", type=int, default=500)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--objective", default="ep_like")
    a = parser.parse_args()
    found = []
    for rows in sorted(a.rows):
        ratios = measure(rows, a.inducing, a.repetitions, a.objective)
        found.append(ratios)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"N = {rows}, M = {a.inducing}: floor {ratios.floor_seconds:.3f} s; posterior "
            f"{ratios.posterior:.2f}, loss and gradient {ratios.loss:.1f} floors "
            f"({ratios.evaluations} evaluations of the posterior); peak {peak:.1f} GiB",
            flush=True,
        )
    if len(found) > 1:
        seconds = [r.loss * r.floor_seconds / r.evaluations for r in found]
        sizes = sorted(a.rows)
        growth = np.log(seconds[-1] / seconds[0]) / np.log(sizes[-1] / sizes[0])
        print(f"growth: N^{growth:.2f}")


if __name__ == "__main__":
    main()
