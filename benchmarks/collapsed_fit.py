"""Cross-validated fits with the collapsed ELBO and the collapsed EP-like objective.

    python -m benchmarks.collapsed_fit sonar ionosphere diabetes usps

Matérn-5/2 from ℓ = σ = 1, ProbitBernoulli, five folds, inputs standardised with the training rows'
statistics, GPflow's ``Scipy().minimize`` as it comes.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import gpflow
import numpy as np

import gpflow_hybrid as gh


class Fit(NamedTuple):
    """One training run and its test results."""

    log_lengthscale: float
    log_sigma: float
    log_density: float
    accuracy: float
    evaluations: int
    seconds: float


def fit(data: gh.datasets.Dataset, train: np.ndarray, test: np.ndarray, objective: str) -> Fit:
    """Train on one fold from ℓ = σ = 1 and test on the rest."""
    X_train, X_test = gh.datasets.standardise(data.X[train], data.X[test])
    Y_train, Y_test = data.Y[train], data.Y[test]
    kernel = gpflow.kernels.Matern52()
    start = time.perf_counter()
    model = gh.CVIModel(
        (X_train, Y_train), kernel, gh.likelihoods.ProbitBernoulli(), objective=objective
    )
    result = gpflow.optimizers.Scipy().minimize(model.training_loss, model.trainable_variables)
    seconds = time.perf_counter() - start
    probability, _ = model.predict_y(X_test)
    return Fit(
        float(np.log(kernel.lengthscales.numpy())),
        0.5 * float(np.log(kernel.variance.numpy())),
        float(np.mean(model.predict_log_density((X_test, Y_test)))),
        float(np.mean((probability.numpy() > 0.5) == (Y_test > 0.5))),
        int(result.nfev),
        seconds,
    )


def main() -> None:
    """Run and print one line per data set and objective."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("datasets", nargs="*", default=["sonar", "ionosphere", "diabetes"])
    parser.add_argument("--folds", type=int, default=5, help="how many of the five folds to run")
    arguments = parser.parse_args()
    print(
        "| data set | objective | log ℓ | log σ | test log density | test accuracy | evaluations | "
        "seconds per fit |\n|---|---|---|---|---|---|---|---|"
    )
    for name in arguments.datasets:
        data = gh.datasets.load(name)
        splits = list(gh.datasets.folds(len(data.X)))[: arguments.folds]
        for objective in ("elbo", "ep_like"):
            fits = [fit(data, train, test, objective) for train, test in splits]
            mean, std = np.mean(fits, axis=0), np.std(fits, axis=0)
            print(
                f"| {name} | {objective} | {mean[0]:.2f} | {mean[1]:.2f} | "
                f"{mean[2]:.4f} ± {std[2]:.4f} | {mean[3]:.3f} ± {std[3]:.3f} | "
                f"{mean[4]:.0f} | {mean[5]:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
