"""Which default prior of a classifier's kernel? Test densities of a mixture over a grid, prior by prior.

    python -m benchmarks.integration_priors --seeds 4

Training sets of 50 and 100 random rows of the bundled data, with seeds that ``benchmarks.integration`` does
not use; the rows are of the same data sets, so that this is a choice made on them, not a test of it. Gains
are over the best setting of the grid, in nats per test datum, with their standard error over training sets.
"""

from __future__ import annotations

import argparse
import itertools
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import gpflow
import numpy as np
import tensorflow as tf
from scipy.special import logsumexp

import gpflow_hybrid as gh
from gpflow_hybrid.training.starts import lengthscales

FIRST_SEED = 100
SIZES = (50, 100)
MAX_TEST = 300
LOG_LENGTHSCALES = np.linspace(-3.0, 3.0, 13)
"""Less that of the median distance."""
LOG_DEVIATIONS = np.linspace(-3.0, 5.0, 17)


def surface(dataset: str, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """EP-like values ``[13, 17]`` and test log densities ``[13, 17, N*]``."""
    X, Y = gh.datasets.load(dataset)
    order = np.random.default_rng(seed).permutation(len(X))
    train, test = order[:size], order[size:][:MAX_TEST]
    X_train, X_test = gh.datasets.standardise(X[train], X[test])
    scale = lengthscales(X_train, 0)
    likelihood = gh.likelihoods.ProbitBernoulli()
    model = gh.CVIModel((X_train, Y[train]), gpflow.kernels.Matern52(), likelihood)

    @tf.function(autograph=False)
    def evidence(lengthscale: tf.Tensor, variance: tf.Tensor) -> tf.Tensor:
        model.kernel.lengthscales.assign(lengthscale)
        model.kernel.variance.assign(variance)
        return model.maximum_log_likelihood_objective()

    predict = tf.function(lambda: model.predict_log_density((X_test, Y[test])), autograph=False)
    found = [
        (
            evidence(tf.constant(scale * np.exp(a)), tf.constant(np.exp(2.0 * b))).numpy(),
            predict().numpy(),
        )
        for a, b in itertools.product(LOG_LENGTHSCALES, LOG_DEVIATIONS)
    ]
    values, densities = (np.stack(x) for x in zip(*found, strict=True))
    shape = len(LOG_LENGTHSCALES), len(LOG_DEVIATIONS)
    return values.reshape(shape), densities.reshape(*shape, -1)


def gain(values: np.ndarray, densities: np.ndarray, log_prior: np.ndarray) -> float:
    """Of the mixture over the best setting without a prior."""
    best = densities[np.unravel_index(np.argmax(values), values.shape)]
    joint = values + log_prior
    weights = joint - logsumexp(joint)
    return float(np.mean(logsumexp(weights[..., None] + densities, axis=(0, 1))) - np.mean(best))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=4)
    seeds = range(FIRST_SEED, FIRST_SEED + parser.parse_args().seeds)
    surfaces = {
        size: [surface(d, size, seed) for seed in seeds for d in gh.datasets.names()]
        for size in SIZES
    }
    priors = {"flat on the grid": np.zeros((len(LOG_LENGTHSCALES), len(LOG_DEVIATIONS)))}
    for s_l, median, s in itertools.product((1.0, 1.5), (1.0, 2.0, 3.0, 5.0, 8.0), (1.0, 1.5)):
        name = f"log ℓ ± {s_l:g}, σ around {median:g}, log σ ± {s:g}"
        first = -0.5 * (LOG_LENGTHSCALES / s_l) ** 2
        priors[name] = np.add.outer(first, -0.5 * ((LOG_DEVIATIONS - np.log(median)) / s) ** 2)
    for name, prior in priors.items():
        cells = []
        for size in SIZES:
            gains = [gain(*found, prior) for found in surfaces[size]]
            error = np.std(gains, ddof=1) / np.sqrt(len(gains))
            cells.append(f"n = {size}: {np.mean(gains):+.4f} ± {error:.4f}")
        print(f"{name:<42}{'   '.join(cells)}")


if __name__ == "__main__":
    main()
