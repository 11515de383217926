"""HybridGPClassifier beside scikit-learn's GaussianProcessClassifier: log loss, accuracy, time.

    python -m benchmarks.sklearn_compare sonar ionosphere iris wine
    python -m benchmarks.sklearn_compare diabetes banana usps digits
    python -m benchmarks.sklearn_compare --report

Stratified five-fold cross-validation, both with an isotropic Matérn-5/2 kernel with trained variance
and lengthscale, inputs standardised on the training rows. (scikit-learn's default kernel is not trained
at all.) ``laplace`` starts at ℓ = 1, as one writes it, ``laplace_started`` where ours starts, at the median
distance. Fits and predictions of all folds, one after the other, in one process with one thread: seconds of
the processor and, in the records, of the wall. Every fold is a record in ``sklearn.json``; those that are
there are skipped, so that an interrupted run goes on; ``--again`` runs them anew. A fold that takes more
than ``--limit`` seconds of the processor is stopped; the table then has ">", of this fold alone, and the
contender's other folds are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from . import records

RESULTS = Path(__file__).parent / "results"
BUNDLED = ("sonar", "ionosphere", "diabetes", "banana", "usps")
LOADED = ("iris", "wine", "digits")
CONTENDERS = ("hybrid", "laplace", "laplace_started")
BANANA_ROWS = 2000
FEW, MANY = 300, 600
"""Training rows below which three times the time is allowed, and from which none."""


def load(dataset: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows and labels."""
    if dataset in LOADED:
        import sklearn.datasets

        return getattr(sklearn.datasets, f"load_{dataset}")(return_X_y=True)
    import gpflow_hybrid as gh

    X, Y = gh.datasets.load(dataset)
    if dataset == "banana":
        rows = np.random.RandomState(0).permutation(len(X))[:BANANA_ROWS]
        X, Y = X[rows], Y[rows]
    return X, Y[:, 0].astype(int)


def contender(name: str, X: np.ndarray) -> Any:
    """An estimator for these training rows."""
    if name == "hybrid":
        from gpflow_hybrid.sklearn import HybridGPClassifier

        return HybridGPClassifier("matern52")
    from sklearn.gaussian_process import GaussianProcessClassifier
    from sklearn.gaussian_process.kernels import Matern
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    start = 1.0
    if name == "laplace_started":
        from gpflow_hybrid.training.starts import lengthscales

        start = float(lengthscales(StandardScaler().fit_transform(X), 0))
    return make_pipeline(StandardScaler(), GaussianProcessClassifier(1.0 * Matern(start, nu=2.5)))


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """TimeoutError after so much time of the processor; no limit if it is zero."""

    def stop(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def run_fold(dataset: str, name: str, fold: int, limit: float = 0.0) -> records.Record:
    """One fit and its predictions, as a record."""
    from sklearn.metrics import log_loss
    from sklearn.model_selection import StratifiedKFold

    X, y = load(dataset)
    folds = list(StratifiedKFold(5, shuffle=True, random_state=0).split(X, y))
    train, test = folds[fold]
    estimator = contender(name, X[train])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an optimiser's complaints; the log loss tells
        wall, cpu = time.perf_counter(), time.process_time()
        p = None
        with contextlib.suppress(TimeoutError), at_most(limit):
            estimator.fit(X[train], y[train])
            p = estimator.predict_proba(X[test])
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "dataset": dataset,
        "contender": name,
        "fold": fold,
        "num_data": len(train),
        "num_classes": len(np.unique(y)),
        "log_loss": None if p is None else float(log_loss(y[test], p)),
        "accuracy": None
        if p is None
        else float(np.mean(estimator.classes_[np.argmax(p, axis=1)] == y[test])),
        "seconds": cpu,
        "wall_seconds": wall,
        "processor": records.processor(),
    }


def table(found: dict[records.Key, records.Record]) -> str:
    """Markdown: means over the folds and whole times; sets without all five folds are left out."""
    lines = [
        "| data set | training rows | classes | log loss: ours | GaussianProcessClassifier | "
        "with our start | accuracy: ours | its | with our start | seconds: ours | its | "
        "with our start | its time ÷ ours |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for dataset in (*BUNDLED, *LOADED):
        rows = {
            name: [found[k] for k in ((dataset, name, fold) for fold in range(5)) if k in found]
            for name in CONTENDERS
        }
        stopped = {n: r["seconds"] for n in CONTENDERS for r in rows[n] if r["log_loss"] is None}
        if any(len(rows[name]) < 5 and name not in stopped for name in ("hybrid", "laplace")):
            continue

        def mean(name: str, what: str, rows: Any = rows) -> float:
            is_whole = len(rows[name]) == 5 and all(r["log_loss"] is not None for r in rows[name])
            return float(np.mean([r[what] for r in rows[name]])) if is_whole else np.nan

        def each(
            what: str,
            form: str,
            scale: float = 1.0,
            mean: Any = mean,
            stopped: dict[str, float] = stopped,
        ) -> list[str]:
            values = [scale * mean(name, what) for name in CONTENDERS]
            cells = ["–" if np.isnan(x) else format(x, form) for x in values]
            if what == "seconds":
                cells = [
                    f"> {stopped[name]:.0f}" if name in stopped else cell
                    for name, cell in zip(CONTENDERS, cells, strict=True)
                ]
            return cells

        first = rows["hybrid"][0]
        ours, its = (5.0 * mean(name, "seconds") for name in ("hybrid", "laplace"))
        ratio = (
            f"> {stopped['laplace'] / ours:.2f}" if "laplace" in stopped else f"{its / ours:.2f}"
        )
        cells = [
            dataset,
            str(first["num_data"]),
            str(first["num_classes"]),
            *each("log_loss", ".3f"),
            *each("accuracy", ".3f"),
            *each("seconds", ".2f", 5.0),
            ratio,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None, say: Callable[[str], Any] = print) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("datasets", nargs="*", metavar="data set")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=0.0, help="processor seconds of one fold")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--report", action="store_true", help="only the table, of what is there")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    unknown = set(options.datasets) - {*BUNDLED, *LOADED}
    if unknown:
        parser.error(f"unknown data sets {sorted(unknown)}; known are {[*BUNDLED, *LOADED]}")
    path = options.output / "sklearn.json"
    for dataset in () if options.report else options.datasets:
        for fold in range(options.folds):
            for name in options.contenders:
                there = records.load(path)
                if (dataset, name, fold) in there and not options.again:
                    continue
                if any(
                    there.get((dataset, name, i), {}).get("log_loss", 0) is None
                    for i in range(fold)
                ):
                    continue
                record = run_fold(dataset, name, fold, options.limit)
                found = records.load(path)  # another command may have added to it
                found[records.key(record)] = record
                records.save(path, found.values())
                is_whole = record["log_loss"] is not None
                said = f"log loss {record['log_loss']:.4f}, " if is_whole else "stopped, "
                say(f"{dataset} {fold} {name}: {said}{record['seconds']:.2f} s")
    text = table(records.load(path))
    (options.output / "sklearn.md").write_text(text)
    say(text)


if __name__ == "__main__":
    limit = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    if any(os.environ.get(name) != value for name, value in limit.items()):
        # Libraries read these when they are loaded.
        os.environ.update(limit, TF_CPP_MIN_LOG_LEVEL="3")
        os.execv(
            sys.executable, [sys.executable, "-m", "benchmarks.sklearn_compare", *sys.argv[1:]]
        )
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    main()
