"""Is the mixture right? Against a plain grid of the model itself, EP's mixture, and one by sampling.

    python -m benchmarks.integration_check sonar:50:0 diabetes:50:0 magic:50:1

For training sets of ``benchmarks.integration`` (data set, rows, seed), the EP-like objective and the
default priors: mean test log density and log evidence of

- *integrated*: ``gh.integrate_hyperparameters``;
- *grid*: sums over a plain grid of log σ² and log ℓ, every value from the model's own training loss, its
  predictions and the priors' formulas;
- *EP*: ``gh.integrate_hyperparameters`` of ``EPModel``;
- *AIS*: the settings of the first, weighed by p(y|θ) from annealed importance sampling and predicting by
  its samples of f: no approximation but the sampling's own error;

and of the *optimum* without priors.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import gpflow
import numpy as np
import tensorflow as tf
from scipy.spatial.distance import pdist
from scipy.special import logsumexp
from scipy.stats import norm

import gpflow_hybrid as gh

from .integration import Case, split

Array = np.ndarray
SPACING = np.array([0.5, 0.25])
"""Of log σ² and log ℓ."""
DEPTH = 10.0
"""Nats below the maximum at which the grid ends."""
ENOUGH = 0.995
"""Share of the mixture that is sampled."""


class Direct:
    """The model's own value and predictions at a setting, without a prior, and the prior's formula."""

    def __init__(self, train: Any, test: Any) -> None:
        parts = train, gpflow.kernels.Matern52(), gh.likelihoods.ProbitBernoulli()
        self.model = model = gh.CVIModel(*parts)
        self.centre = np.log([100.0, np.median(pdist(train[0]))])

        @tf.function(autograph=False)
        def at(x: tf.Tensor) -> tf.Tensor:
            model.kernel.variance.assign(tf.exp(x[0]))
            model.kernel.lengthscales.assign(tf.exp(x[1]))
            return -model.training_loss()

        self._value = at
        self._predict = tf.function(lambda: model.predict_log_density(test), autograph=False)

    def value(self, x: Array) -> float:
        """The EP-like value."""
        return float(self._value(tf.constant(x)))

    def at(self, x: Array) -> tuple[float, Array]:
        """With the log prior of log σ² and log ℓ; and log densities of the test data."""
        prior = np.sum(norm.logpdf(x, self.centre, [6.0, 1.5]))
        return self.value(x) + float(prior), np.asarray(self._predict())

    def grid(self, mode: Array) -> tuple[float, float, int]:
        """Log evidence, mean log density and the number of points; neighbours of what counts, in turn."""
        found: dict[tuple[int, int], tuple[float, Array]] = {}
        front = [(0, 0)]
        while front:
            for key in front:
                found[key] = self.at(mode + SPACING * key)
            top = max(v for v, _ in found.values())
            inside = [key for key in front if found[key][0] > top - DEPTH]
            beyond = {
                (i + a, j + b) for i, j in inside for a, b in ((1, 0), (-1, 0), (0, 1), (0, -1))
            }
            front = sorted(beyond - set(found))
        logs = np.array([v for v, _ in found.values()])
        D = np.stack([d for _, d in found.values()])
        total = logsumexp(logs)
        density = np.mean(logsumexp(D + (logs - total)[:, None], axis=0))
        return float(total + np.log(np.prod(SPACING))), float(density), len(found)


def sampled(result: gh.HyperparameterPosterior, direct: Direct, test: Any) -> tuple[float, float]:
    """Log evidence and mean log density with sampling at the settings of a mixture."""
    order = np.argsort(-result.weights)
    kept = order[np.cumsum(result.weights[order]) - result.weights[order] < ENOUGH]
    settings = [result.settings[i] for i in kept]
    paths = (".kernel.variance", ".kernel.lengthscales")
    values = [direct.value(np.log([float(s[p]) for p in paths])) for s in settings]
    found = gh.annealed_importance_sampling(
        direct.model,
        hyperparameters=settings,
        num_chains=32,
        num_samples=10,
        test_data=test,
        effort=3.0,
        progress=False,
    )
    logs = np.log(result.weights[kept]) + found.log_marginal_likelihood - np.array(values)
    total = logsumexp(logs)
    D = np.asarray(found.test_log_densities)
    density = np.mean(logsumexp(D + (logs - total)[:, None], axis=0))
    return result.log_evidence + float(total), float(density)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="+", help="for example sonar:50:0")
    for name in parser.parse_args().cases:
        dataset, size, seed = name.split(":")
        X, Y, X_test, Y_test = split(Case(dataset, int(size), int(seed), "ep_like"))
        train, test = (X, Y), (X_test, Y_test)

        def tested(model: Any, test: Any = test) -> float:
            return float(np.mean(model.predict_log_density(test)))

        direct = Direct(train, test)
        gh.fit(direct.model, start="data", progress=False)
        print(f"{name}: optimum {tested(direct.model):.4f}", flush=True)
        result = gh.integrate_hyperparameters(direct.model, progress=False)
        best = result.settings[int(np.argmax(result.log_densities))]
        words = f"{len(result.weights)} settings, predictions {tested(result):.4f}"
        print(f"  integrated: {words}, log evidence {result.log_evidence:.4f}", flush=True)
        mode = np.log([float(best[p]) for p in (".kernel.variance", ".kernel.lengthscales")])
        evidence, density, count = direct.grid(mode)
        print(f"  grid: {count} points, {density:.4f}, {evidence:.4f}", flush=True)
        parts = train, gpflow.kernels.Matern52(), gh.likelihoods.ProbitBernoulli()
        ep = gh.EPModel(*parts)
        gh.fit(ep, start="data", progress=False)
        by_ep = gh.integrate_hyperparameters(ep, progress=False)
        print(f"  EP: {tested(by_ep):.4f}, {by_ep.log_evidence:.4f}", flush=True)
        evidence, density = sampled(result, direct, test)
        print(f"  AIS: {density:.4f}, {evidence:.4f}", flush=True)


if __name__ == "__main__":
    main()
