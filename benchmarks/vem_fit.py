"""How VEMTrainer's default settings and stopping rules end on the first fold of each data set.

    python -m benchmarks.vem_fit sonar ionosphere diabetes

Matérn-5/2 from ℓ = σ = 1, ProbitBernoulli, both objectives.
"""

from __future__ import annotations

import argparse

import gpflow
import numpy as np

import gpflow_hybrid as gh


def run(name: str, objective: str) -> gh.TrainingResult:
    """One run; prints how it ended."""
    X, Y = gh.datasets.load(name)
    train, test = next(iter(gh.datasets.folds(len(X))))
    X_train, X_test = gh.datasets.standardise(X[train], X[test])
    kernel = gpflow.kernels.Matern52()
    model = gh.CVIModel((X_train, Y[train]), kernel, gh.likelihoods.ProbitBernoulli())
    result = gh.VEMTrainer(model, objective).fit()
    density = np.mean(model.predict_log_density((X_test, Y[test])))
    print(
        f"{name}, {objective}: {result.status} after {result.num_iterations} iterations, kept "
        f"{result.best_iteration}; log ℓ = {np.log(kernel.lengthscales.numpy()):.2f}, log σ = "
        f"{0.5 * np.log(kernel.variance.numpy()):.2f}, test log density {density:.4f}, "
        f"{result.seconds:.0f} s",
        flush=True,
    )
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("datasets", nargs="*", default=["sonar", "ionosphere", "diabetes"])
    for dataset in parser.parse_args().datasets:
        for objective in ("elbo", "ep_like"):
            run(dataset, objective)
