"""The paper's surface of log marginal likelihood and predictive density, by annealing.

    python -m benchmarks.evidence_grid sonar --output sonar.npz

ProbitBernoulli, Matérn-5/2, log ℓ and log σ in [−1, 5], 21×21 settings, the first of five training
folds unless another is named; predictive density on its test part.
"""

from __future__ import annotations

import argparse
import os

import gpflow
import numpy as np

import gpflow_hybrid as gh
from gpflow_hybrid.evidence import AnnealingResult, annealed_importance_sampling, grid


def run(
    name: str, num: int, num_temperatures: int, num_chains: int, seed: int, fold: int
) -> AnnealingResult:
    """Anneal on the grid; the leading axis of the result is ``num × num``, log σ running fastest."""
    X, Y = gh.datasets.load(name)
    train, test = list(gh.datasets.folds(len(X)))[fold]
    X_train, X_test = gh.datasets.standardise(X[train], X[test])
    model = gh.CVIModel(
        (X_train, Y[train]), gpflow.kernels.Matern52(), gh.likelihoods.ProbitBernoulli()
    )
    values = np.exp(np.linspace(-1.0, 5.0, num))
    return annealed_importance_sampling(
        model,
        hyperparameters=grid({".kernel.lengthscales": values, ".kernel.variance": values**2}),
        num_chains=num_chains,
        num_temperatures=num_temperatures,
        test_data=(X_test, Y[test]),
        seed=seed,
    )


def summarise(name: str, result: AnnealingResult, num: int, processor_seconds: float) -> None:
    """Print seconds, standard errors, effective sample sizes and the best settings."""
    print(result)
    print(f"{name}: {result.seconds:.0f} s, of the processors {processor_seconds:.0f} s")
    for title, values in (
        ("standard error", result.standard_error),
        ("effective sample size", result.effective_sample_size),
    ):
        quantiles = np.percentile(values, [0, 5, 50, 95, 100])
        print(
            f"{title:<22} min {quantiles[0]:.3f}, 5 % {quantiles[1]:.3f}, median "
            f"{quantiles[2]:.3f}, 95 % {quantiles[3]:.3f}, max {quantiles[4]:.3f}"
        )
    axis = np.linspace(-1.0, 5.0, num)
    for title, values in (
        ("log p(y)", result.log_marginal_likelihood),
        ("test log density", result.test_log_density),
    ):
        i, j = np.unravel_index(np.argmax(values), (num, num))
        print(
            f"largest {title:<17} {values.max():.4f} at log ℓ = {axis[i]:.1f}, log σ = {axis[j]:.1f}"
        )


def save(path: str, result: AnnealingResult, num: int) -> None:
    """Arrays ``[num, num]``, log ℓ on the first axis and log σ on the second."""
    np.savez_compressed(
        path,
        log_values=np.linspace(-1.0, 5.0, num),
        log_marginal_likelihood=result.log_marginal_likelihood.reshape(num, num),
        standard_error=result.standard_error.reshape(num, num),
        effective_sample_size=result.effective_sample_size.reshape(num, num),
        test_log_density=result.test_log_density.reshape(num, num),
        log_weights=result.log_weights.reshape(num, num, -1),
        test_log_densities=result.test_log_densities.reshape(num, num, -1),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("datasets", nargs="*", default=["sonar"])
    parser.add_argument("--num", type=int, default=21, help="grid points per axis")
    parser.add_argument("--temperatures", type=int, default=200)
    parser.add_argument("--chains", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fold", type=int, default=0, choices=range(5), help="training fold")
    parser.add_argument("--output", help="npz file for the arrays; one data set only")
    arguments = parser.parse_args()
    if arguments.output and len(arguments.datasets) != 1:
        parser.error("--output takes one data set")
    for name in arguments.datasets:
        before = os.times()
        result = run(
            name,
            arguments.num,
            arguments.temperatures,
            arguments.chains,
            arguments.seed,
            arguments.fold,
        )
        after = os.times()
        used = after.user - before.user + after.system - before.system
        summarise(name, result, arguments.num, used)
        if arguments.output:
            save(arguments.output, result, arguments.num)
