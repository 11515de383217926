"""What a Dask cluster costs: two workers of one thread on this machine against one process on two threads.

    python -m benchmarks.cluster loss         # N = 200,000, M = 200: one loss with its gradient
    python -m benchmarks.cluster overhead     # per sum over rows, and per loss, as N → 0
    python -m benchmarks.cluster times        # with one and two workers, for the model of the time
    python -m benchmarks.cluster fit          # N = 1,000,000, M = 200, out of core, to its optimum
    python -m benchmarks.cluster report       # tables, and the model's prediction, in docs/cluster.md

Data as in ``benchmarks.sparse_floor``, but for the fit: eight inputs, Matérn-5/2, probit, EP-like. Losses
are taken 1 % from the hyperparameters before, in turn with those of this process. Every part adds its
records to ``benchmarks/results/cluster.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpflow
import numpy as np

import gpflow_hybrid as gh
from benchmarks.cluster_model import Overhead, TimeModel, fitted, tables
from benchmarks.records import processor
from benchmarks.sparse_floor import NUM_INPUTS, problem, timed
from gpflow_hybrid.inference.inducing import InducingPosterior
from gpflow_hybrid.objectives import power_of

RESULTS = Path(__file__).parent / "results" / "cluster.json"
PAGE = Path(__file__).parents[1] / "docs" / "cluster.md"
OBJECTIVE = "ep_like"


@contextlib.contextmanager
def cluster(num_workers: int, memory: str = "3GB") -> Iterator[Any]:
    """A client of so many workers of one thread, processes of this machine."""
    from distributed import Client, LocalCluster

    with (
        LocalCluster(
            n_workers=num_workers,
            threads_per_worker=1,
            processes=True,
            dashboard_address="127.0.0.1:0",
            host="127.0.0.1",
            memory_limit=memory,
        ) as found,
        Client(found) as client,
    ):
        yield client


def new_model(Z: Any) -> gh.SparseCVIModel:
    kernel = gpflow.kernels.Matern52(variance=4.0, lengthscales=3.0)
    likelihood = gh.likelihoods.ProbitBernoulli()
    return gh.SparseCVIModel(kernel, likelihood, Z, objective=OBJECTIVE)


class Contender:
    """A model with its rows, here or on a cluster."""

    def __init__(self, data: Any, Z: Any) -> None:
        self.model = new_model(Z)
        self.rows = self.model._rows(data)
        self.sign = 1.0
        self.loss()

    def loss(self) -> None:
        """With its gradient, 1 % from where it was."""
        self.sign, kernel = -self.sign, self.model.kernel
        kernel.lengthscales.assign(3.0 * (1.0 + 0.005 * self.sign))
        kernel.variance.assign(4.0 * (1.0 + 0.005 * self.sign))
        variables = self.model._hyperparameters()
        with self.model._host_arithmetic():
            self.model._evaluate(self.rows, variables, self.model._remarks)

    def prepare_sum(self) -> None:
        """Projections are known before sums are timed."""
        self.sums = self.model._sums(self.rows, power_of(OBJECTIVE))
        self.q = self.model._q()
        self.sum()

    def sum(self) -> None:
        """One, at a q that nothing is known of."""
        self.sums.expectations(InducingPosterior(self.q.sites))


def measure(client: Any, num_rows: int, num_inducing: int, repetitions: int) -> dict[str, Any]:
    """Medians of a sum and of a loss, here and on the cluster, in turn."""
    X, Y, Z = problem(num_rows, num_inducing)
    rows = gh.distributed.shards(client, X, Y)
    contenders = [Contender((X, Y), Z), Contender(rows, Z)]
    before = rows.num_passes
    losses = np.median([[timed(c.loss) for c in contenders] for _ in range(repetitions)], axis=0)
    passes = (rows.num_passes - before) / repetitions
    for contender in contenders:
        contender.prepare_sum()
    sums = np.median([[timed(c.sum) for c in contenders] for _ in range(repetitions)], axis=0)
    return {
        "rows": num_rows,
        "inducing": num_inducing,
        "workers": len(client.nthreads()),
        "shards": rows.num_shards,
        "passes": passes,
        "loss_here": losses[0],
        "loss_cluster": losses[1],
        "sum_here": sums[0],
        "sum_cluster": sums[1],
    }


def loss(a: argparse.Namespace) -> None:
    """The ratio that a user pays."""
    with cluster(2) as client:
        found = measure(client, a.rows or 200_000, a.inducing, a.repetitions)
    ratio = found["loss_cluster"] / found["loss_here"]
    print(f"{found}\nloss with gradient: {ratio:.2f} times the time of this process", flush=True)
    save("loss", [{**found, "ratio": ratio}])


def overhead(a: argparse.Namespace) -> None:
    """Of sums over hardly any rows: of few and many shards, of small and large messages."""
    found = []
    with cluster(2) as client:
        for num_inducing in (20, a.inducing):
            for num_shards in (2, 8, 32):
                X, Y, Z = problem(4 * num_inducing, num_inducing)
                rows = gh.distributed.shards(client, X, Y, num_shards=num_shards)
                here, there = Contender((X, Y), Z), Contender(rows, Z)
                before = rows.num_passes
                losses = [[timed(c.loss) for c in (here, there)] for _ in range(a.repetitions)]
                passes = (rows.num_passes - before) / a.repetitions
                here.prepare_sum()
                there.prepare_sum()
                sums = [[timed(c.sum) for c in (here, there)] for _ in range(4 * a.repetitions)]
                record = {
                    "inducing": num_inducing,
                    "shards": num_shards,
                    "passes": passes,
                    "sum": float(np.median(np.diff(sums)[:, 0])),
                    "loss": float(np.median(np.diff(losses)[:, 0])),
                }
                print(record, flush=True)
                found.append(record)
    save("overhead", found)


def times(a: argparse.Namespace) -> None:
    """What the model of the time is fitted to; with and without kept projections."""
    found = []
    for num_workers in (1, 2):
        with cluster(num_workers) as client:
            for kept in (True, False):
                if not kept:
                    client.run(keep_nothing)
                for num_rows in a.sizes:
                    record = measure(client, num_rows, a.inducing, a.repetitions)
                    found.append({**record, "kept": kept})
                    print(found[-1], flush=True)
    save("times", found)


def keep_nothing() -> None:
    """Projections are found again for every sum."""
    from gpflow_hybrid import tuning

    tuning.KEPT_PROJECTIONS = 0


def generated(num_rows: int, chunk: int, seed: int = 0) -> tuple[Any, Any]:
    """Dask arrays whose chunks are made where they are needed: probit labels that depend on all inputs."""
    import dask.array as da

    sizes = [min(chunk, num_rows - i) for i in range(0, num_rows, chunk)]
    numbers = da.from_array(np.arange(len(sizes)), chunks=1)
    columns = NUM_INPUTS + 1

    def block(number: Any) -> Any:
        rng = np.random.default_rng([seed, int(number[0])])
        X = rng.normal(size=(sizes[int(number[0])], NUM_INPUTS))
        f = 2.0 * np.sin(X[:, :1]) + X[:, 1:2] * X[:, 2:3] + 0.3 * X[:, 3:].sum(1, keepdims=True)
        return np.hstack([X, f + rng.normal(size=f.shape) > 0.0])

    both = numbers.map_blocks(
        block, chunks=(tuple(sizes), (columns,)), new_axis=1, dtype=np.float64
    )
    return both[:, :NUM_INPUTS], both[:, NUM_INPUTS:]


def peak_memory() -> float:
    """Of a process, GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def fit(a: argparse.Namespace) -> None:
    """On a part of the rows, then on all, by one call; hyperparameters in logarithms."""
    num_rows = a.rows or 1_000_000
    X, Y = generated(num_rows, 50_000)
    with cluster(2) as client:
        rows = gh.distributed.shards(client, X, Y)
        model = new_model(gh.inducing_points(rows.first_rows(a.part_rows)[0], a.inducing))
        gpflow.set_trainable(model.inducing_variable, False)
        model.kernel.lengthscales = gpflow.Parameter(
            np.full(NUM_INPUTS, 3.0), transform=gpflow.utilities.positive()
        )
        before, began, part_seconds = rows.num_passes, time.perf_counter(), 0.0

        def look(step: gh.training.FitStep) -> None:
            nonlocal part_seconds
            if step.num_rows < num_rows:
                part_seconds = time.perf_counter() - began

        result = gh.fit(
            model,
            data=rows,
            first_rows=a.part_rows,
            max_iterations=a.iterations,
            tolerance=a.tolerance,
            log_scale=True,
            callback=look,
        )
        seconds = time.perf_counter() - began - part_seconds
        passes = rows.num_passes - before
        test = generated(100_000, 50_000, seed=1)
        density = gh.distributed.predict_log_density(model, test)
        record = {
            "rows": num_rows,
            "inducing": a.inducing,
            "shards": rows.num_shards,
            "part_seconds": part_seconds,
            "seconds": seconds,
            "losses": result.num_evaluations,
            "part_losses": result.part_evaluations,
            "passes": passes,
            "status": result.status,
            "objective": -result.loss,
            "log_density": float(client.compute(density.mean()).result()),
            "worker_gb": max(client.run(peak_memory).values()),
            "events": [event.message for event in rows.events],
        }
    print(result, record, sep="\n", flush=True)
    save("fit", [record])


def report(a: argparse.Namespace) -> None:
    """Tables of what was measured, and the prediction, between the marks of the page."""
    known = load()
    model: TimeModel | None = None
    if "times" in known and "overhead" in known:
        model = fitted(known["times"], [Overhead.of(x) for x in known["overhead"]])
    text = tables(known, model)
    print(text)
    begin, end = "<!-- measured -->\n", "<!-- end -->\n"
    page = PAGE.read_text()
    head, _, rest = page.partition(begin)
    _, _, tail = rest.partition(end)
    PAGE.write_text(f"{head}{begin}\n{text}\n{end}{tail}")


def load() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def save(name: str, records: list[dict[str, Any]]) -> None:
    """In the place of those of before."""
    versions = {"processor": processor(), "cores": os.cpu_count(), "gpflow_hybrid": gh.__version__}
    known = {**load(), name: records, "machine": versions}
    RESULTS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["loss", "overhead", "times", "fit", "report"])
    parser.add_argument("--rows", type=int, default=None)
    parser.add_argument("--sizes", nargs="+", type=int, default=[50_000, 200_000])
    parser.add_argument("--inducing", type=int, default=200)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=20, help="of L-BFGS, of the fit")
    parser.add_argument("--tolerance", type=float, default=1.0, help="nats for a factor e")
    parser.add_argument("--part-rows", type=int, default=20_000, help="that a fit starts from")
    a = parser.parse_args(arguments)
    {"loss": loss, "overhead": overhead, "times": times, "fit": fit, "report": report}[a.part](a)


if __name__ == "__main__":
    main()
