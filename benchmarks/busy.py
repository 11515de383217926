"""Whole fits beside other work: how much longer they take when every core is busy.

    python -m benchmarks.busy [--datasets sonar ionosphere banana] [--repeats 3]

For each core a process counts in a loop while the fits run. A fit that shares the cores takes about twice
as long as on idle ones; threads that wait for each other take many times as long. The best of a few is
compared, and more than three times as long is an error. ``--threads`` shows what happens without the limit.
Banana is fitted with 200 inducing points, for ten iterations.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import gpflow

import gpflow_hybrid as gh
from gpflow_hybrid import tuning

LIMIT = 3.0
"""How many times as long a fit may take beside other work."""


@contextlib.contextmanager
def busy_cores(num: int) -> Iterator[None]:
    """So many processes that do nothing but count."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num)]
    try:
        time.sleep(0.5)
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def fit(X: Any, Y: Any, *, is_sparse: bool) -> None:
    """With GPflow's optimiser."""
    kernel, likelihood = gpflow.kernels.Matern52(), gh.likelihoods.ProbitBernoulli()
    if not is_sparse:
        model: Any = gh.CVIModel((X, Y), kernel, likelihood)
        loss, limit = model.training_loss, 15000
    else:
        model = gh.SparseCVIModel(kernel, likelihood, X[:200].copy())
        gpflow.set_trainable(model.inducing_variable, False)
        loss, limit = model.training_loss_closure((X, Y)), 10
    gpflow.optimizers.Scipy().minimize(loss, model.trainable_variables, options={"maxiter": limit})


def seconds(dataset: str, repeats: int) -> float:
    """Of the best of a few fits to the first fold, tracing included."""
    X, Y = gh.datasets.load(dataset)
    train, _ = next(iter(gh.datasets.folds(len(X))))
    (X_train,) = gh.datasets.standardise(X[train])
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        fit(X_train, Y[train], is_sparse=dataset == "banana")
        found.append(time.perf_counter() - began)
    return min(found)


def ratio(dataset: str, repeats: int) -> float:
    """Busy seconds over idle ones."""
    seconds(dataset, 1)  # what the first fit of a process loads
    idle = seconds(dataset, repeats)
    with busy_cores(os.cpu_count() or 1):
        busy = seconds(dataset, repeats)
    print(f"{dataset:<12} idle {idle:6.2f} s   busy {busy:6.2f} s   ratio {busy / idle:5.2f}")
    return busy / idle


def main() -> None:
    """Print a line for each data set; an error where a ratio is too large."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--datasets", nargs="+", default=["sonar", "ionosphere", "banana"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", action="store_true", help="without the limit")
    arguments = parser.parse_args()
    if arguments.threads:
        tuning.THREADED_ELEMENTS = -1
    ratios = [ratio(dataset, arguments.repeats) for dataset in arguments.datasets]
    if max(ratios) > LIMIT and not arguments.threads:
        raise SystemExit(f"A fit takes {max(ratios):.1f} times as long beside other work.")


if __name__ == "__main__":
    main()
