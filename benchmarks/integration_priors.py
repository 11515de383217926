"""Which default prior of a classifier's kernel? Test densities of a mixture over a grid, prior by prior.

    python -m benchmarks.integration_priors --seeds 2 --keep surfaces

Training sets of 50, 100 and 200 random rows of the bundled data, with seeds that ``benchmarks.integration``
does not use; the rows are of the same data sets, so that this is a choice made on them, not a test of it.
On a grid of log ℓ and log σ the EP-like value and test log densities are found once; every prior then only
weighs them anew. Gains are over the optimum that ``gh.fit`` finds, in nats per test datum, with their
standard error over training sets.
"""

from __future__ import annotations

import argparse
import itertools
import os
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import gpflow
import numpy as np
import tensorflow as tf
from scipy.special import logsumexp

import gpflow_hybrid as gh
from gpflow_hybrid.sites import SiteValues
from gpflow_hybrid.training.starts import lengthscales

FIRST_SEED = 1000
DATASETS = ("sonar", "ionosphere", "diabetes", "usps", "banana", "magic")
SIZES = (50, 100, 200)
LARGEST = {"sonar": 150}
"""Rows of training sets where there are not enough for 200 and a test."""
MAX_TEST = 500
LOG_LENGTHSCALES = np.arange(-2.5, 6.01, 0.5)
"""Less that of the median distance."""
LOG_DEVIATIONS = np.arange(-2.5, 9.6, 0.75)


class Surface(NamedTuple):
    """One training set."""

    V: np.ndarray
    """EP-like values, ``[18, 17]``."""
    D: np.ndarray
    """Test log densities, ``[18, 17, N*]``."""
    best: float
    """Mean test log density of the optimum."""


def surface(dataset: str, size: int, seed: int) -> Surface:
    """Values and test densities at every setting, and the optimum without a prior."""
    X, Y = gh.datasets.load(dataset)
    size = min(size, LARGEST.get(dataset, size))
    order = np.random.default_rng(seed).permutation(len(X))
    train, test = order[:size], order[size:][:MAX_TEST]
    X_train, X_test = gh.datasets.standardise(X[train], X[test])
    held_out = X_test, Y[test]
    parts = (X_train, Y[train]), gpflow.kernels.Matern52(), gh.likelihoods.ProbitBernoulli()
    model = gh.CVIModel(*parts)
    loss = model.loss_on_arrays()
    assert loss is not None
    scale = lengthscales(X_train, 0)

    @tf.function(autograph=False)
    def predict(*sites: tf.Tensor) -> tf.Tensor:
        model.sites.assign(SiteValues(*sites))
        return model.predict_log_density(held_out)

    V = np.empty((len(LOG_LENGTHSCALES), len(LOG_DEVIATIONS)))
    D = np.empty((*V.shape, len(test)))
    for i, a in enumerate(LOG_LENGTHSCALES):
        # To and fro: inference starts where the last one ended.
        for j in range(len(LOG_DEVIATIONS))[:: 1 if i % 2 == 0 else -1]:
            model.kernel.lengthscales.assign(scale * np.exp(a))
            model.kernel.variance.assign(np.exp(2.0 * LOG_DEVIATIONS[j]))
            x = gpflow.optimizers.Scipy.pack_tensors(model.trainable_variables).numpy()
            V[i, j] = -loss.value(x)
            D[i, j] = predict(*map(tf.constant, loss.sites))
    gh.fit(model, start="data", progress=False)
    return Surface(V, D, float(np.mean(model.predict_log_density(held_out))))


def gain(found: Surface, log_prior: np.ndarray) -> float:
    """Of the mixture over the optimum."""
    joint = found.V + log_prior
    weights = joint - logsumexp(joint)
    return float(np.mean(logsumexp(weights[..., None] + found.D, axis=(0, 1))) - found.best)


def normal(x: np.ndarray, mean: float, deviation: float) -> np.ndarray:
    return -0.5 * ((x - mean) / deviation) ** 2


def priors() -> dict[str, np.ndarray]:
    """Log densities on the grid, up to a constant: independent ones, and such of σ given ℓ."""
    log_l, log_s = np.meshgrid(LOG_LENGTHSCALES, LOG_DEVIATIONS, indexing="ij")
    found = {"flat on the grid": np.zeros_like(log_l)}
    for shift, width, median, spread in itertools.product(
        (0.0, 1.0), (0.75, 1.0, 1.5, 3.0), (3, 10, 30), (1.0, 1.5, 3.0)
    ):
        name = f"log ℓ {shift:+g} ± {width:g}, σ around {median}, log σ ± {spread:g}"
        found[name] = normal(log_l, shift, width) + normal(log_s, np.log(median), spread)
    for power, spread in itertools.product((1.0, 2.5), (1.5, 3.0)):
        name = f"log ℓ ± 1.5, σ/ℓ^{power:g} around 10, its log ± {spread:g}"
        joint = normal(log_s - power * log_l, np.log(10.0), spread)
        found[name] = normal(log_l, 0.0, 1.5) + joint
    return found


def load(keep: Path | None, dataset: str, size: int, seed: int) -> Surface:
    """From a file of an earlier run, or computed and kept there."""
    path = None if keep is None else keep / f"{dataset}_{size}_{seed}.npz"
    if path is not None and path.exists():
        with np.load(path) as file:
            return Surface(file["V"], file["D"].astype(np.float64), float(file["best"]))
    found = surface(dataset, size, seed)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, V=found.V, D=found.D.astype(np.float32), best=found.best)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="a directory for surfaces, to go on another time")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), choices=SIZES)
    chosen = parser.parse_args()
    seeds = range(FIRST_SEED, FIRST_SEED + chosen.seeds)
    surfaces = {
        (dataset, size, seed): load(chosen.keep, dataset, size, seed)
        for seed, size, dataset in itertools.product(seeds, chosen.sizes, DATASETS)
    }
    for name, prior in priors().items():
        gains = {key: gain(found, prior) for key, found in surfaces.items()}
        cells = []
        for size in chosen.sizes:
            some = [g for key, g in gains.items() if key[1] == size]
            error = np.std(some, ddof=1) / np.sqrt(len(some))
            cells.append(f"n = {size}: {np.mean(some):+.4f} ± {error:.4f}")
        for dataset in DATASETS:
            some = [g for key, g in gains.items() if key[0] == dataset]
            cells.append(f"{dataset} {np.mean(some):+.4f}")
        cells.append(f"all {np.mean(list(gains.values())):+.4f}")
        print(f"{name:<50}{'   '.join(cells)}")


if __name__ == "__main__":
    main()
