"""What an integration costs, in fits: whole runs of both on one fold, alternately, processor seconds.

python -m benchmarks.integration_cost sonar ionosphere diabetes
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import gpflow

import gpflow_hybrid as gh


def build(dataset: str) -> gh.CVIModel:
    """The first fold, standardised, EP-like, from ℓ = σ = 1."""
    X, Y = gh.datasets.load(dataset)
    train, _ = next(iter(gh.datasets.folds(len(X))))
    (X_train,) = gh.datasets.standardise(X[train])
    return gh.CVIModel(
        (X_train, Y[train]), gpflow.kernels.Matern52(), gh.likelihoods.ProbitBernoulli()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("datasets", nargs="+", choices=gh.datasets.names())
    gh.fit(build("sonar"), progress=False)  # what TensorFlow does once
    for dataset in parser.parse_args().datasets:
        began = time.process_time()
        fit = gh.fit(build(dataset), progress=False)
        between = time.process_time()
        model = build(dataset)
        result = gh.integrate_hyperparameters(model, progress=False)
        seconds = between - began, time.process_time() - between
        print(
            f"{dataset}, n = {len(model.data[0])}: fit {seconds[0]:.1f} s, {fit.num_evaluations} "
            f"evaluations; integration {seconds[1]:.1f} s, {result.num_evaluations} evaluations"
            f"{'' if result.converged else ', not converged'}: {seconds[1] / seconds[0]:.1f} times"
        )


if __name__ == "__main__":
    main()
