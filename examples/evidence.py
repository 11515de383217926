"""Who is right about the marginal likelihood? Every estimate of log p(y) on one fold of Sonar.

    python -m examples.evidence --output evidence.png

Prints the table of :func:`gpflow_hybrid.compare_evidence` at log ℓ = 2.3, log σ = 1.7 and saves it as a
picture.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import gpflow
import matplotlib

matplotlib.use("Agg")
import numpy as np

import gpflow_hybrid as gh


def sonar_model(log_lengthscale: float, log_sigma: float) -> gh.CVIModel:
    """The first training fold, standardised, at these hyperparameters."""
    X, Y = gh.datasets.load("sonar")
    train, _ = next(iter(gh.datasets.folds(len(X))))
    (X_train,) = gh.datasets.standardise(X[train])
    kernel = gpflow.kernels.Matern52(
        variance=np.exp(2.0 * log_sigma), lengthscales=np.exp(log_lengthscale)
    )
    return gh.CVIModel((X_train, Y[train]), kernel, gh.likelihoods.ProbitBernoulli())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="evidence.png", help="where to save the picture")
    arguments = parser.parse_args()
    comparison = gh.compare_evidence(sonar_model(2.3, 1.7))
    print(comparison)
    comparison.plot().figure.savefig(arguments.output, dpi=150, bbox_inches="tight")
    print(f"\nSaved {arguments.output}.")
