"""Five-fold tables of sparse models: the ELBO against the EP-like objective, with paired t-tests.

    python -m benchmarks.sparse_folds banana usps magic
    python -m benchmarks.sparse_folds magic --m 50 100 --objectives ep_like

Matérn-5/2 from ``ℓ = √D``, ``σ = 1``, trained in logs, a probit likelihood, M inducing inputs from k-means,
fixed and the same for both objectives, inputs standardised with the training rows, ``gh.fit`` on all of
them. Both objectives see the same folds, so that their scores can be tested in pairs. A fit has converged
where the derivatives in log ℓ and 2 log σ are below 1e-5 nats per datum; it is *steep* where L-BFGS gave up
on a slope, again and again: with ℓ in the hundreds K_uu is singular but for rounding, and the loss noisy by
a hundredth of a nat.

Appends one line of JSON per fit to ``folds.jsonl`` in the output directory and writes ``folds.md`` after
each. Fits that are there are skipped: an interrupted run goes on, and several may share a directory.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import gpflow
import numpy as np

import gpflow_hybrid as gh
from examples.paper.fits import tested
from examples.paper.problems import load_problem
from examples.paper.tables import NUM_FOLDS, SIGNIFICANCE, cells, ending_counts, rounded_p

from .peers.sparse_gpflow import kernel_for
from .peers.stopping import TOLERANCE
from .sparse import RESULTS, append

NUM_INDUCING = {"magic": (20, 50, 100), "banana": (10, 20, 50), "usps": (50, 100, 200)}
OBJECTIVES: tuple[Literal["elbo", "ep_like"], ...] = ("elbo", "ep_like")
MAX_ITERATIONS = 100

Record = dict[str, Any]


class Fit(NamedTuple):
    """What makes a record unique."""

    dataset: str
    num_inducing: int
    objective: Literal["elbo", "ep_like"]
    fold: int
    rows: int | None
    """At most so many training and so many test rows; all if None."""
    max_iterations: int


def load(path: Path) -> dict[Fit, Record]:
    """The last record of every fit in a file of JSON lines, none if there is no file."""
    if not path.exists():
        return {}
    records = (json.loads(line) for line in path.read_text().splitlines())
    return {fit_of(record): record for record in records}


def fit_of(record: Record) -> Fit:
    """Which fit a record is of."""
    return Fit(*(record[name] for name in Fit._fields))


def run(fit: Fit) -> Record:
    """Train and test on one fold."""
    problem = load_problem(fit.dataset, fit.fold, fit.rows)
    Z = gh.inducing_points(problem.X_train, fit.num_inducing)
    model = gh.SparseCVIModel(
        kernel_for(problem.X_train),
        gh.likelihoods.ProbitBernoulli(),
        Z,
        objective=fit.objective,
    )
    gpflow.set_trainable(model.inducing_variable, False)
    data = (problem.X_train, problem.Y_train)
    found = gh.fit(
        model,
        data=data,
        max_iterations=fit.max_iterations,
        tolerance=TOLERANCE * len(problem.X_train),
        progress=False,
    )
    if found.status == "interrupted":  # fit() ends in order; this run shall too
        raise KeyboardInterrupt
    return {
        **fit._asdict(),
        "num_data": len(problem.X_train),
        **tested(model, problem),
        "value": -found.loss,
        "gradient": found.gradient_norm,
        "iterations": found.num_iterations,
        "evaluations": found.num_evaluations,
        "seconds": found.seconds,
        "status": found.status,
        "message": found.message,
    }


def plan(
    datasets: Sequence[str],
    num_inducing: Sequence[int] | None,
    objectives: Sequence[Any],
    rows: int | None,
    max_iterations: int,
) -> Iterator[Fit]:
    """All fits of a run, the small M of each data set first."""
    for dataset in datasets:
        for M in num_inducing or NUM_INDUCING[dataset]:
            for fold in range(NUM_FOLDS):
                for objective in objectives:
                    yield Fit(dataset, M, objective, fold, rows, max_iterations)


def carry_out(fits: Iterable[Fit], output: Path) -> None:
    """What is missing, one after the other, with the tables written after each."""
    path = output / "folds.jsonl"
    for fit in fits:
        if fit in load(path):  # also what another process has done meanwhile
            continue
        record = run(fit)
        append(path, record)
        (output / "folds.md").write_text(markdown(load(path).values()))
        print(
            f"{fit.dataset}, M = {fit.num_inducing}, {fit.objective}, fold {fit.fold}: "
            f"test log density {record['test_log_density']:.4f}, accuracy {record['accuracy']:.4f}, "
            f"{record['seconds']:.0f} s, {record['evaluations']} evaluations, {record['status']}",
            flush=True,
        )


class Pair(NamedTuple):
    """The fits of all folds with either objective."""

    dataset: str
    rows: int | None
    num_inducing: int
    max_iterations: int
    elbo: list[Record]
    ep_like: list[Record]

    @property
    def differences(self) -> np.ndarray:
        """Test log densities, EP-like less ELBO."""
        quantity = "test_log_density"
        pairs = zip(self.elbo, self.ep_like, strict=True)
        return np.array([ours[quantity] - bound[quantity] for bound, ours in pairs])


def complete(records: Iterable[Record]) -> Iterator[Pair]:
    """Those of which all five folds are there, with both objectives, in the order of a table."""
    found = {fit_of(record): record for record in records}
    settings = {(f.dataset, f.rows, f.num_inducing, f.max_iterations) for f in found}
    for dataset, rows, M, limit in sorted(settings, key=lambda s: (s[0], s[1] or 0, *s[2:])):
        elbo, ep_like = (
            [
                found[fit]
                for fold in range(NUM_FOLDS)
                if (fit := Fit(dataset, M, objective, fold, rows, limit)) in found
            ]
            for objective in OBJECTIVES
        )
        if len(elbo) == len(ep_like) == NUM_FOLDS:
            yield Pair(dataset, rows, M, limit, elbo, ep_like)


HEADER = (
    "data set",
    "N",
    "M",
    "log density: ELBO",
    "log density: EP-like",
    "difference",
    "p",
    "accuracy: ELBO",
    "accuracy: EP-like",
    "p",
    "log ℓ, log σ: ELBO",
    "log ℓ, log σ: EP-like",
    "evaluations",
    "ended",
)


def markdown(records: Iterable[Record]) -> str:
    """The table of what is complete."""
    parts = [
        "# Sparse models: five folds\n",
        "Test log predictive density and accuracy, mean ± standard deviation over five folds; bold where "
        f"a paired t-test over the folds says so at {SIGNIFICANCE:g}. *Difference*: EP-like less ELBO, "
        "fold by fold. Median log ℓ and log σ; evaluations of the training loss with its gradient, on "
        "average (ELBO / EP-like). *Converged*: derivatives in log ℓ and 2 log σ below "
        f"{TOLERANCE:g} nats per datum; *steep*: L-BFGS gave up on a slope, where ℓ is in the hundreds and "
        "K_uu singular but for rounding. `python -m benchmarks.sparse_folds` makes it.\n",
        f"| {' | '.join(HEADER)} |",
        "|---|" + 12 * "---:|" + "---|",
        *(f"| {' | '.join(_line(pair))} |" for pair in complete(records)),
    ]
    return "\n".join(parts) + "\n"


def _line(pair: Pair) -> list[str]:
    both = (pair.elbo, pair.ep_like)
    density, p_density = cells(both, "test_log_density", digits=4)
    accuracy, p_accuracy = cells(both, "accuracy", digits=4)
    differences = pair.differences
    return [
        pair.dataset if pair.rows is None else f"{pair.dataset}, {pair.rows} rows",
        str(pair.elbo[0]["num_data"]),
        str(pair.num_inducing),
        *map(str, density),
        f"{differences.mean():+.4f} ± {differences.std():.4f}",
        rounded_p(p_density),
        *map(str, accuracy),
        rounded_p(p_accuracy),
        *map(_optimum, both),
        " / ".join(f"{np.mean([r['evaluations'] for r in folds]):.0f}" for folds in both),
        ending_counts([*pair.elbo, *pair.ep_like], pair.max_iterations),
    ]


def _optimum(folds: Sequence[Record]) -> str:
    names = ("log_lengthscale", "log_sigma")
    return ", ".join(f"{np.median([r[name] for r in folds]):.2f}" for name in names)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "datasets", nargs="*", default=list(NUM_INDUCING), help=", ".join(NUM_INDUCING)
    )
    parser.add_argument("--m", nargs="+", type=int, help="instead of three for each data set")
    parser.add_argument("--objectives", nargs="+", default=list(OBJECTIVES), choices=OBJECTIVES)
    parser.add_argument("--rows", type=int, help="at most so many rows of a fold, to try it out")
    parser.add_argument("--max-iterations", type=int, default=MAX_ITERATIONS, help="of L-BFGS")
    parser.add_argument("--output", type=Path, default=RESULTS, help="directory of the results")
    a = parser.parse_args()
    for dataset in a.datasets:
        if dataset not in NUM_INDUCING:
            parser.error(f"data sets are {', '.join(NUM_INDUCING)}; found {dataset}")
    carry_out(plan(a.datasets, a.m, a.objectives, a.rows, a.max_iterations), a.output)
    print(markdown(load(a.output / "folds.jsonl").values()))


if __name__ == "__main__":
    main()
