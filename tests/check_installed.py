"""Run by ``make dist`` where nothing but the wheel is installed: import, data, demo, estimator."""

from __future__ import annotations

import tempfile
from pathlib import Path

import gpflow
import numpy as np

import gpflow_hybrid as gh
from gpflow_hybrid.sklearn import HybridGPClassifier, HybridGPRegressor


def main() -> None:
    """Everything once, from the installed package and not from the checkout."""
    assert "site-packages" in gh.__file__, gh.__file__
    for name in gh.datasets.names():
        X, Y = gh.datasets.load(name)
        assert len(X) == len(Y) > 100, name
    X, Y = gh.datasets.load("sonar")
    train, test = next(gh.datasets.folds(len(X)))
    X_train, X_test = gh.datasets.standardise(X[train], X[test])
    results = {}
    for objective in ("elbo", "ep_like"):  # as in the demo
        model = gh.CVIModel(
            (X_train, Y[train]),
            gpflow.kernels.Matern52(),
            gh.likelihoods.ProbitBernoulli(),
            objective=objective,
        )
        result = gh.fit(model)
        assert result.converged, result
        results[objective] = float(np.mean(model.predict_log_density((X_test, Y[test]))))
    assert results["ep_like"] > results["elbo"] > -0.5, results
    estimator = HybridGPClassifier().fit(X[train], Y[train, 0])
    assert estimator.score(X[test], Y[test, 0]) > 0.75
    assert (
        HybridGPRegressor()
        .fit(X[train][:, 1:], X[train][:, 0])
        .score(X[test][:, 1:], X[test][:, 0])
        > 0.3
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        gh.VEMTrainer(model).fit(1, checkpoint_dir=str(path), progress=False)
    print(f"gpflow_hybrid {gh.__version__}: {gh.__file__} works")


if __name__ == "__main__":
    main()
