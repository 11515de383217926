"""Posterior evaluations that ``infer()`` needs on the paper's 21×21 grid, from a cold start.

    python -m benchmarks.inference_grid sonar ionosphere
    python -m benchmarks.inference_grid sonar ionosphere --method ep

ProbitBernoulli, Matérn-5/2, log ℓ and log σ in [−1, 5], the first of five training folds
unless another is named. The first folds are those the iteration was developed on.
"""

from __future__ import annotations

import argparse
import time

import gpflow
import numpy as np

import gpflow_hybrid as gh

MODELS = {"cvi": gh.CVIModel, "ep": gh.EPModel, "laplace": gh.LaplaceModel}


def run(
    name: str, num: int, tolerance: float, fold: int = 0, method: str = "cvi"
) -> list[gh.InferenceResult]:
    """One inference per grid point; prints the counts of evaluations as a table."""
    X, Y = gh.datasets.load(name)
    train, _ = list(gh.datasets.folds(len(X)))[fold]
    (X,) = gh.datasets.standardise(X[train])
    kernel = gpflow.kernels.Matern52()
    model = MODELS[method]((X, Y[train]), kernel, gh.likelihoods.ProbitBernoulli())
    grid = np.exp(np.linspace(-1.0, 5.0, num))
    results = []
    start = time.perf_counter()
    for lengthscale in grid:
        for sigma in grid:
            kernel.lengthscales.assign(lengthscale)
            kernel.variance.assign(sigma**2)
            model.sites.reset(len(X))
            results.append(model.infer(tolerance=tolerance))
        row = [r.num_evaluations for r in results[-num:]]
        print(f"log ℓ = {np.log(lengthscale):5.2f}:", *(f"{n:3d}" for n in row), flush=True)
    counts = np.array([r.num_evaluations for r in results])
    print(
        f"{name}, {method}: {sum(r.converged for r in results)} of {len(results)} converged; evaluations: "
        f"median {np.median(counts):.0f}, 95 % {np.percentile(counts, 95):.0f}, max {counts.max()}; "
        f"largest residual {max(r.residual for r in results):.1e}; "
        f"{time.perf_counter() - start:.0f} s"
    )
    for result in results:
        if not result.converged:
            print(result)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("datasets", nargs="*", default=["sonar", "ionosphere"])
    parser.add_argument("--num", type=int, default=21, help="grid points per axis")
    parser.add_argument("--tolerance", type=float, default=1e-6)
    parser.add_argument("--fold", type=int, default=0, choices=range(5), help="training fold")
    parser.add_argument("--method", default="cvi", choices=MODELS, help="how sites are found")
    arguments = parser.parse_args()
    for name in arguments.datasets:
        run(name, arguments.num, arguments.tolerance, arguments.fold, arguments.method)
