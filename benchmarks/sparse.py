"""Whole fits of sparse models, ours and others', side by side, with test log predictive densities.

    python -m benchmarks.sparse magic banana usps protein --m 100 200 500 --limit 600 --peers

takes hours, most of them the peers'. Forty minutes of two idle cores are enough for ::

    python -m benchmarks.sparse magic --m 100 --limit 90 --peers
    python -m benchmarks.sparse magic --m 200 --limit 75
    python -m benchmarks.sparse banana --m 50 --limit 30
    python -m benchmarks.sparse usps --m 200 --limit 30
    python -m benchmarks.sparse protein --m 200 --limit 75
    python -m benchmarks.sparse magic --m 500 --limit 90

The same Matérn-5/2 from ``ℓ = √D``, ``σ = 1``, trained in logs, the same inducing inputs from k-means
(fixed, or trained by all with ``--train-z``), the first of five folds, inputs standardised; one process at
a time with two threads. Labels have a probit likelihood; Protein, standardised too, a Student-t with
three degrees of freedom. Who has not converged at the limit is scored as it is then.

Appends one line of JSON per fit to ``fits.jsonl`` in the output directory and writes ``fits.md`` after
each. Fits that are there are skipped, so that an interrupted run goes on; ``--again`` runs them anew, and
the last one counts. ``--peers`` installs the peers that need an environment of their own.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import gpflow_hybrid as gh
from examples.data import load_protein

from . import records
from .peers.launch import launch
from .peers.run import THREADS
from .peers.sparse_contenders import ONLY_LABELS, SPARSE, WITHOUT_INDUCING
from .sparse_tables import REGRESSION, describe, markdown

RESULTS = Path(__file__).parent / "results" / "sparse"
DATASETS = ("magic", "banana", "usps", "protein")
NUM_INDUCING = (100, 200, 500)
GRACE = 300.0
"""Seconds beyond the limit for imports, scores and the last step, before a process is ended."""

Record = records.Record
Key = tuple[str, int | None, bool, int | None, str]


def key(record: Record) -> Key:
    """What makes a fit unique."""
    return (
        record["dataset"],
        record["num_inducing"],
        record["train_z"],
        record["rows"],
        record["contender"],
    )


def load(path: Path) -> dict[Key, Record]:
    """The last record of every fit in a file of JSON lines, none if there is no file."""
    if not path.exists():
        return {}
    rows = (json.loads(line) for line in path.read_text().splitlines())
    return {key(record): record for record in rows}


def append(path: Path, record: Record) -> None:
    """One more line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lines:
        lines.write(json.dumps(record, sort_keys=True) + "\n")


def split(dataset: str, rows: int | None = None) -> dict[str, np.ndarray]:
    """Standardised training and test rows of the first fold, of ``rows`` random ones if given."""
    X, Y = load_protein() if dataset in REGRESSION else gh.datasets.load(dataset)
    if rows is not None and rows < len(X):
        chosen = np.random.default_rng(0).choice(len(X), rows, replace=False)
        X, Y = X[chosen], Y[chosen]
    train, test = next(gh.datasets.folds(len(X)))
    X_train, X_test = gh.datasets.standardise(X[train], X[test])
    Y_train, Y_test = Y[train], Y[test]
    if dataset in REGRESSION:
        Y_train, Y_test = gh.datasets.standardise(Y_train, Y_test)
    return {"X_train": X_train, "Y_train": Y_train, "X_test": X_test, "Y_test": Y_test}


def run(
    contender: str,
    dataset: str,
    num_inducing: int | None,
    limit: float,
    *,
    train_z: bool = False,
    rows: int | None = None,
    threads: int = THREADS,
    may_create: bool = False,
) -> Record:
    """One fit in a process of its own, as a record."""
    data = split(dataset, rows)
    began = time.perf_counter()
    Z = gh.inducing_points(data["X_train"], num_inducing) if num_inducing else np.empty((0, 0))
    selection = time.perf_counter() - began
    settings = {"train_Z": train_z, "regression": dataset in REGRESSION, "limit": limit}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "fold.npz"
        np.savez(path, Z=Z, **data, **{name: np.array(value) for name, value in settings.items()})
        outcome = launch(contender, path, limit + GRACE, threads, may_create=may_create, once=True)
    return {
        "contender": contender,
        "dataset": dataset,
        "fold": 0,
        "num_data": len(data["X_train"]),
        "num_inducing": num_inducing,
        "selection_seconds": selection,
        "train_z": train_z,
        "rows": rows,
        "limit": limit,
        "processor": records.processor(),
        "threads": threads,
        "python": platform.python_version(),
        **outcome,
    }


def compare(
    datasets: Sequence[str],
    num_inducing: Sequence[int],
    contenders: Sequence[str],
    limit: float,
    output: Path,
    *,
    train_z: bool,
    rows: int | None,
    peers: bool,
    again: bool,
) -> dict[Key, Record]:
    """Run what is missing, one after the other, and write the tables after each; all records."""
    path = output / "fits.jsonl"
    found = load(path)
    plan = [
        (dataset, contender, M)
        for dataset in datasets
        for contender in contenders
        for M in ([None] if contender in WITHOUT_INDUCING else num_inducing)
        if not (dataset in REGRESSION and contender in ONLY_LABELS)
    ]
    for dataset, contender, M in plan:
        trains_z = train_z and M is not None
        known = found.get((dataset, M, trains_z, rows, contender))
        if known is not None and known.get("installed", True) and not again:
            continue
        record = run(contender, dataset, M, limit, train_z=trains_z, rows=rows, may_create=peers)
        print(describe(record), flush=True)
        append(path, record)
        found[key(record)] = record
        (output / "fits.md").write_text(markdown(found.values()))
    return found


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("datasets", nargs="*", default=list(DATASETS), help="names of data sets")
    parser.add_argument(
        "--m", nargs="+", type=int, default=list(NUM_INDUCING), help="numbers of inducing inputs"
    )
    parser.add_argument("--contenders", nargs="+", default=list(SPARSE), choices=SPARSE)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of training for a fit")
    parser.add_argument("--train-z", action="store_true", help="train the inducing inputs")
    parser.add_argument(
        "--rows", type=int, help="so many random rows of each data set, to try it out"
    )
    parser.add_argument("--peers", action="store_true", help="install the peers that are missing")
    parser.add_argument("--again", action="store_true", help="also run fits that have a result")
    parser.add_argument("--output", type=Path, default=RESULTS, help="directory of the results")
    arguments = parser.parse_args()
    found = compare(
        arguments.datasets,
        arguments.m,
        arguments.contenders,
        arguments.limit,
        arguments.output,
        train_z=arguments.train_z,
        rows=arguments.rows,
        peers=arguments.peers,
        again=arguments.again,
    )
    print(markdown(found.values()))


if __name__ == "__main__":
    main()
