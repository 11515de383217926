"""Inference of q(u) from a cold start over a grid of hyperparameters: evaluations of the posterior.

    python -m benchmarks.sparse_grid magic --inducing 100
    python -m benchmarks.sparse_grid magic --objective elbo --size 13

Matérn-5/2 and probit on the training rows of a fold, k-means inducing points, log ℓ and log σ from −1 to 5.
"""

from __future__ import annotations

import argparse

import gpflow
import numpy as np

import gpflow_hybrid as gh


def count(
    name: str, num_inducing: int, objective: str, size: int, rows: int | None
) -> tuple[list[int], int]:
    """Evaluations at every grid point, and how many did not converge."""
    X, Y = gh.datasets.load(name)
    train, test = next(iter(gh.datasets.folds(len(X))))
    X_train, _ = gh.datasets.standardise(X[train], X[test])
    # The rows of some sets are ordered by class.
    chosen = np.random.default_rng(0).permutation(len(train))[:rows]
    X_train, Y_train = X_train[chosen], Y[train][chosen]
    Z = gh.inducing_points(X_train, num_inducing)
    kernel = gpflow.kernels.Matern52()
    model = gh.SparseCVIModel(kernel, gh.likelihoods.ProbitBernoulli(), Z, objective=objective)
    counts, failures = [], 0
    for log_lengthscale in np.linspace(-1.0, 5.0, size):
        for log_sigma in np.linspace(-1.0, 5.0, size):
            kernel.lengthscales.assign(np.exp(log_lengthscale))
            kernel.variance.assign(np.exp(2.0 * log_sigma))
            model.sites.reset()
            found = model.infer((X_train, Y_train))
            counts.append(found.num_evaluations)
            failures += not found.converged
    return counts, failures


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", default="magic")
    parser.add_argument("--inducing", type=int, default=100)
    parser.add_argument("--objective", choices=("ep_like", "elbo"), default="ep_like")
    parser.add_argument("--size", type=int, default=7, help="grid points along each axis")
    parser.add_argument("--rows", type=int, help="training rows, chosen at random")
    a = parser.parse_args()
    counts, failures = count(a.name, a.inducing, a.objective, a.size, a.rows)
    print(
        f"{a.name}, M = {a.inducing}, {a.objective}: evaluations median {np.median(counts):.0f}, 95 % "
        f"{np.percentile(counts, 95):.0f}, largest {max(counts)} of {len(counts)}; "
        f"{failures} did not converge"
    )


if __name__ == "__main__":
    main()
