"""Do integrated hyperparameters predict better than optimised ones?

    python -m benchmarks.integration run       # goes on where it stopped; every result is a line of JSON
    python -m benchmarks.integration report    # the tables

Binary classification with ProbitBernoulli and a Matérn-5/2 kernel, inputs standardised: five folds of whole
data sets, and training sets of 50, 100 and 200 random rows tested on up to 500 of the others. Each is
trained by ``gh.fit`` from the scale of the data, and integrated by ``gh.integrate_hyperparameters`` with
its default priors. Seconds are of the processor: set ``OMP_NUM_THREADS=1``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

RESULTS = Path(__file__).parent / "results" / "integration.jsonl"
DATASETS = ("sonar", "ionosphere", "diabetes", "usps", "banana", "magic")
WHOLE = ("sonar", "ionosphere", "diabetes", "usps")
SIZES = (50, 100, 200)
METHODS = ("elbo", "ep_like", "ep")
NUM_SEEDS = 20
NUM_FOLDS = 5
MAX_TEST = 500


class Case(NamedTuple):
    """One training set and one objective; ``size`` 0 is all rows but a fold."""

    dataset: str
    size: int
    index: int
    method: str


def cases() -> list[Case]:
    """All of them, cheap and first ones first: whenever the run is stopped, what is there is balanced."""
    subsets = [
        Case(dataset, size, seed, method)
        for seed in range(NUM_SEEDS)
        for size in SIZES
        for dataset in DATASETS
        for method in METHODS
    ]
    folds = [
        Case(dataset, 0, fold, method)
        for fold in range(NUM_FOLDS)
        for dataset in WHOLE
        for method in METHODS
    ]
    return sorted(subsets + folds, key=lambda case: _cost(case) * (case.index + 1))


def _cost(case: Case) -> float:
    """Roughly, in units of 50 rows: small ones are all tracing."""
    sizes = {"sonar": 166, "ionosphere": 280, "diabetes": 614, "usps": 1232}
    return 1.0 + ((case.size or sizes[case.dataset]) / 150.0) ** 2.5


def split(case: Case) -> tuple[Any, Any, Any, Any]:
    """Training and test rows, standardised by the former."""
    import numpy as np

    import gpflow_hybrid as gh

    X, Y = gh.datasets.load(case.dataset)
    if case.size == 0:
        train, test = list(gh.datasets.folds(len(X), NUM_FOLDS))[case.index]
    else:
        order = np.random.default_rng(case.index).permutation(len(X))
        train, test = order[: case.size], order[case.size :][:MAX_TEST]
    X_train, X_test = gh.datasets.standardise(X[train], X[test])
    return X_train, Y[train], X_test, Y[test]


def compute(case: Case) -> dict[str, Any]:
    """Fit, integrate, and test both; the mode under the default priors beside them."""
    import gpflow
    import numpy as np

    import gpflow_hybrid as gh
    from gpflow_hybrid.training.starts import start_from_data

    X, Y, X_test, Y_test = split(case)

    def build() -> Any:
        parts = (X, Y), gpflow.kernels.Matern52(), gh.likelihoods.ProbitBernoulli()
        if case.method == "ep":
            return gh.EPModel(*parts)
        return gh.CVIModel(*parts, objective=case.method)

    def tested(predictor: Any) -> dict[str, float]:
        density = np.asarray(predictor.predict_log_density((X_test, Y_test)))
        p = np.asarray(predictor.predict_y(X_test)[0])
        return {
            "log_density": float(np.mean(density)),
            "accuracy": float(np.mean((p > 0.5) == (Y_test > 0.5))),
        }

    began = time.process_time()
    fitted = build()
    fit = gh.fit(fitted, start="data", progress=False)
    fit_seconds = time.process_time() - began
    began = time.process_time()
    model = build()
    start_from_data(model, X, Y)
    result = gh.integrate_hyperparameters(model, progress=False)
    seconds = time.process_time() - began
    gpflow.utilities.multiple_assign(model, result.settings[int(np.argmax(result.log_densities))])
    model.training_loss()
    return {
        **case._asdict(),
        "num_rows": len(X),
        "optimised": {
            **tested(fitted),
            "seconds": fit_seconds,
            "evaluations": fit.num_evaluations,
            "status": fit.status,
        },
        "mode": tested(model),
        "integrated": {
            **tested(result),
            "seconds": seconds,
            "evaluations": result.num_evaluations,
            "converged": result.converged,
            "settings": len(result.weights),
            "log_evidence": result.log_evidence,
        },
    }


def load(path: Path) -> list[dict[str, Any]]:
    """The results in a file; a line that a kill has left unfinished is none."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def case_of(record: dict[str, Any]) -> Case:
    return Case(*(record[name] for name in Case._fields))


def run(
    path: Path, minutes: float, datasets: list[str], sizes: list[int], methods: list[str]
) -> None:
    """Everything that is not in the file yet, until the time is over."""
    end = time.monotonic() + 60.0 * minutes
    done = {case_of(record) for record in load(path)}
    path.parent.mkdir(parents=True, exist_ok=True)
    for case in cases():
        wanted = case.dataset in datasets and case.size in sizes and case.method in methods
        if case in done or not wanted:
            continue
        if time.monotonic() > end:
            print("The time is over; run again to go on.")
            return
        began = time.perf_counter()
        record = compute(case)
        gc.collect()  # models and their graphs refer to each other
        with open(path, "a") as file:
            file.write(json.dumps(record) + "\n")
        gain = record["integrated"]["log_density"] - record["optimised"]["log_density"]
        print(f"{case} gain {gain:+.4f}, {time.perf_counter() - began:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after so many")
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS), choices=DATASETS)
    parser.add_argument("--sizes", nargs="+", type=int, default=[0, *SIZES], choices=(0, *SIZES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    chosen = parser.parse_args()
    if chosen.what == "run":
        compute(Case("sonar", SIZES[0], NUM_SEEDS, "ep_like"))  # what TensorFlow does once
        run(chosen.results, chosen.minutes, chosen.datasets, chosen.sizes, chosen.methods)
    else:
        from .integration_report import report

        text = report(load(chosen.results))
        chosen.results.with_suffix(".md").write_text(text)
        print(text)


if __name__ == "__main__":
    main()
