"""Whole fits of sparse models, ours and others', side by side, with test log predictive densities.

    python -m benchmarks.sparse magic banana usps protein --m 100 200 500 --limit 600 --peers

The same Matérn-5/2 from ``ℓ = √D``, ``σ = 1``, the same inducing inputs from k-means (fixed, or trained
by all with ``--train-z``), the first of five folds, inputs standardised; one process at a time with two
threads. Labels have a probit likelihood; Protein, standardised too, a Student-t with three degrees
of freedom. Who has not converged at the limit is scored as it is then.

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
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

import gpflow_hybrid as gh
from examples.data import load_protein

from . import records
from .peers.launch import launch
from .peers.run import THREADS
from .peers.sparse_contenders import ONLY_LABELS, SPARSE, WITHOUT_INDUCING

RESULTS = Path(__file__).parent / "results" / "sparse"
DATASETS = ("magic", "banana", "usps", "protein")
REGRESSION = ("protein",)
NUM_INDUCING = (100, 200, 500)
NEAR = 0.002
"""A density this much below its final value has arrived."""
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


def arrival(record: Record) -> float | None:
    """Seconds until the final test log density, less 0.002, was first seen; None without a trace.

    As fine as the trace: the fit's own seconds are its last entry.
    """
    if not record.get("trace"):
        return None
    final = record["log_density"] - NEAR
    seen = (seconds for seconds, density in record["trace"] if density >= final)
    return float(next(seen, record["seconds"]))


def describe(record: Record) -> str:
    """A record in one line."""
    size = f", M = {record['num_inducing']}" if record["num_inducing"] else ""
    start = f"{record['dataset']}{size}, {record['contender']}:"
    if "failure" in record:
        return f"{start} {record['failure']}"
    ended = f" ({record['note']})" if record["note"] else ""
    return f"{start} {record['seconds']:.4g} s, test log density {record['log_density']:.4f}{ended}"


def _number(value: float | None, digits: str) -> str:
    return "–" if value is None else format(value, digits)


def _row(record: Record, third: str) -> str:
    name = SPARSE[record["contender"]].label
    if "failure" in record:
        cells = [record["failure"], "", "", "", "", ""]
    else:
        cells = [
            _number(record["seconds"], ".3g"),
            _number(arrival(record), ".3g"),
            _number(record["log_density"], ".4f"),
            _number(record[third], ".4f"),
            _number(record["elbo"], ".1f"),
            record["note"],
        ]
    return f"| {' | '.join([name, *cells])} |"


def table(found: Iterable[Record]) -> str:
    """Fits on one data set, with one M, as a table; those without inducing inputs stand in each."""
    rows = sorted(found, key=lambda record: list(SPARSE).index(record["contender"]))
    regression = rows[0]["dataset"] in REGRESSION
    third = "rmse" if regression else "accuracy"
    heads = [
        "",
        "seconds",
        "to its density",
        "test log density",
        "RMSE" if regression else "accuracy",
        "ELBO",
        "remark",
    ]
    lines = [f"| {' | '.join(heads)} |", "|---|" + 5 * "---:|" + "---|"]
    return "\n".join(lines + [_row(record, third) for record in rows])


def markdown(found: Iterable[Record]) -> str:
    """All tables, and the versions."""
    found = list(found)
    settings = sorted(
        {
            (r["dataset"], r["num_inducing"], r["train_z"], r["rows"])
            for r in found
            if r["num_inducing"]
        },
        key=lambda s: (s[0], s[2], s[3] or 0, s[1]),
    )
    parts = [
        "# Sparse models: whole fits\n",
        "Seconds from building the model until it is trained; *to its density*: until its own final test "
        f"log density, less {NEAR:g}, was first seen. The first of five folds; "
        "`python -m benchmarks.sparse --help` says what is the same for all.\n",
    ]
    for dataset, num_inducing, train_z, rows in settings:
        here = [
            r
            for r in found
            if (r["dataset"], r["rows"]) == (dataset, rows)
            and (r["num_inducing"], r["train_z"]) in ((num_inducing, train_z), (None, False))
        ]
        trained = "trained" if train_z else "fixed"
        title = (
            f"{dataset}, N = {here[0]['num_data']}, M = {num_inducing}, inducing inputs {trained}"
        )
        parts.append(f"## {title}\n\n{table(here)}\n")
    versions = sorted(
        {f"{name} {v}" for r in found for name, v in r.get("versions", {}).items()}
        | {f"Python {r['python']}" for r in found}
    )
    machines = sorted({f"{r['processor']}, {r['threads']} threads" for r in found})
    parts.append(f"{'; '.join(machines)}. {', '.join(versions)}.\n")
    return "\n".join(parts)


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
