"""Whole fits of ours and of other libraries, side by side, with test log predictive densities.

    python -m benchmarks.compare sonar ionosphere diabetes usps --peers
    python -m benchmarks.compare --quick

The same model, start and stopping tolerance for all, one process at a time with two threads. Writes
``fits.json``, ``fits.md`` and ``fits.png`` to the output directory after each fit and skips fits
that are there, so that an interrupted run goes on; ``--again`` runs them anew. ``--peers`` installs
the peers that need an environment of their own. A peer that does not install, raises or exceeds
the limit becomes a row that says so.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from pathlib import Path

import numpy as np

import gpflow_hybrid as gh

from . import records, report
from .peers.contenders import CONTENDERS
from .peers.launch import launch
from .peers.run import THREADS

RESULTS = Path(__file__).parent / "results"
DATASETS = ("sonar", "ionosphere", "diabetes", "usps")
QUICK = ("cvi_ep_like", "cvi_elbo", "vgp_lbfgs")


def write_fold(dataset: str, fold: int, path: Path) -> int:
    """Write a standardised fold as npz for a contender; its number of training data."""
    X, Y = gh.datasets.load(dataset)
    train, test = list(gh.datasets.folds(len(X)))[fold]
    X_train, X_test = gh.datasets.standardise(X[train], X[test])
    np.savez(path, X_train=X_train, Y_train=Y[train], X_test=X_test, Y_test=Y[test])
    return len(train)


def run(
    contender: str, dataset: str, fold: int, limit: float, threads: int = THREADS, **how: bool
) -> records.Record:
    """One fit in a process of its own, as a record.

    :param how: for :func:`.peers.launch.launch`.
    """
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory) / "fold.npz"
        num_data = write_fold(dataset, fold, data)
        outcome = launch(contender, data, limit, threads, **how)
    return {
        "contender": contender,
        "dataset": dataset,
        "fold": fold,
        "num_data": num_data,
        "processor": records.processor(),
        "threads": threads,
        "python": platform.python_version(),
        **outcome,
    }


def describe(record: records.Record) -> str:
    """A record in one line."""
    start = f"{record['dataset']}, fold {record['fold']}, {record['contender']}:"
    if "failure" in record:
        return f"{start} {record['failure']}"
    density = f", test log density {record['log_density']:.4f}" if "log_density" in record else ""
    return f"{start} {record['seconds']:.4g} s{density}"


def quick_ratios(
    dataset: str = "sonar", limit: float = 600.0, threads: int = THREADS
) -> dict[str, float]:
    """Seconds of GPflow's VGP with L-BFGS as multiples of those of our collapsed fits, by objective.

    First fits, each in a fresh process; a fit that fails raises.
    """
    seconds = {}
    for name in QUICK:
        record = run(name, dataset, 0, limit, threads, once=True)
        print(describe(record), flush=True)
        if "failure" in record:
            raise RuntimeError(describe(record))
        seconds[name] = record["seconds"]
    return {name: seconds["vgp_lbfgs"] / seconds[name] for name in ("cvi_ep_like", "cvi_elbo")}


def write_report(output: Path, found: dict[records.Key, records.Record]) -> None:
    """The three files."""
    rows = list(found.values())
    records.save(output / "fits.json", rows)
    (output / "fits.md").write_text(report.markdown(rows))
    report.plot(rows, output / "fits.png")


def compare(
    datasets: list[str],
    contenders: list[str],
    folds: int,
    limit: float,
    output: Path,
    *,
    peers: bool,
    again: bool,
) -> None:
    """Run what is missing, one after the other, and write the report after each."""
    found = records.load(output / "fits.json")
    for dataset in datasets:
        for fold in range(folds):
            for contender in ["floor", *contenders]:
                known = found.get((dataset, contender, fold))
                if known is not None and known.get("installed", True) and not again:
                    continue
                record = run(contender, dataset, fold, limit, may_create=peers)
                print(describe(record), flush=True)
                found[records.key(record)] = record
                write_report(output, found)
    for dataset in datasets:
        rows = report.on_shared_folds([r for r in found.values() if r["dataset"] == dataset])
        print(f"\n{dataset}\n\n{report.table(rows, dataset)}\n\n{report.verdicts(rows, dataset)}")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("datasets", nargs="*", default=list(DATASETS), help="names of data sets")
    parser.add_argument(
        "--folds", type=int, default=1, choices=range(1, 6), help="how many of the five folds"
    )
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument(
        "--limit", type=float, default=1800.0, help="seconds for a contender's fold"
    )
    parser.add_argument("--peers", action="store_true", help="install the peers that are missing")
    parser.add_argument("--again", action="store_true", help="also run fits that have a result")
    parser.add_argument("--output", type=Path, default=RESULTS, help="directory of the results")
    parser.add_argument(
        "--quick", action="store_true", help="print ratios of our fits to VGP's on Sonar and exit"
    )
    arguments = parser.parse_args()
    if arguments.quick:
        for name, ratio in quick_ratios().items():
            print(f"GPflow VGP takes {ratio:.1f} times as long as {CONTENDERS[name].label}.")
        return
    compare(
        arguments.datasets,
        arguments.contenders,
        arguments.folds,
        arguments.limit,
        arguments.output,
        peers=arguments.peers,
        again=arguments.again,
    )


if __name__ == "__main__":
    main()
