"""Run by ``make dist`` where nothing but the wheel is installed: files, import, data, demo, estimators."""

from __future__ import annotations

import runpy
import sys
import tempfile
from pathlib import Path

import gpflow
import numpy as np
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import Matern, WhiteKernel
from sklearn.preprocessing import StandardScaler

import gpflow_hybrid as gh
from gpflow_hybrid.sklearn import HybridGPClassifier, HybridGPRegressor

CHECKOUT = Path(__file__).parents[1]


def check_files() -> None:
    """All of the checkout's modules and data are in the package, and nothing else is."""
    here, there = (
        {str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in suffixes}
        for suffixes in [{".py", ".typed", ".csv", ".npz", ".md"}]
        for folder in (Path(gh.__file__).parent, CHECKOUT / "gpflow_hybrid")
    )
    assert here == there, here ^ there


def check_demo(folder: Path) -> None:
    """The demo as a user runs it, with the installed package."""
    sys.argv = ["demo.py", "--output", str(folder / "demo.png")]
    runpy.run_path(str(CHECKOUT / "examples" / "demo.py"), run_name="__main__")
    assert (folder / "demo.png").stat().st_size > 10_000


def check_regressor(X: np.ndarray, y: np.ndarray, train: np.ndarray, test: np.ndarray) -> None:
    """The marginal likelihood and predictions of scikit-learn's own, which has the same model."""
    ours = HybridGPRegressor().fit(X[train], y[train])
    scaler = StandardScaler().fit(X[train])
    kernel = 1.0 * Matern(np.sqrt(X.shape[1]), nu=2.5) + WhiteKernel(0.1)
    theirs = GaussianProcessRegressor(kernel, normalize_y=True)
    theirs.fit(scaler.transform(X[train]), y[train])
    value = theirs.log_marginal_likelihood_value_ - len(train) * np.log(np.std(y[train]))
    assert abs(ours.log_marginal_likelihood_value_ - value) < 1e-4
    expected = theirs.predict(scaler.transform(X[test]))
    np.testing.assert_allclose(ours.predict(X[test]), expected, atol=1e-4 * np.std(y[train]))


def main() -> None:
    """Everything once, from the installed package and not from the checkout."""
    assert "site-packages" in gh.__file__, gh.__file__
    check_files()
    for name in gh.datasets.names():
        X, Y = gh.datasets.load(name)
        assert len(X) == len(Y) > 100, name
    X, Y = gh.datasets.load("sonar")
    train, test = next(gh.datasets.folds(len(X)))
    X_train, X_test = gh.datasets.standardise(X[train], X[test])
    results = {}
    for objective in ("elbo", "ep_like"):
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
    mixture = HybridGPClassifier(integrate_hyperparameters=True).fit(X[train], Y[train, 0])
    assert mixture.score(X[test], Y[test, 0]) > 0.75
    check_regressor(X[:, 1:], X[:, 0], train, test)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        gh.VEMTrainer(model).fit(1, checkpoint_dir=str(path), progress=False)
        check_demo(Path(folder))
    print(f"gpflow_hybrid {gh.__version__}: {gh.__file__} works")


if __name__ == "__main__":
    main()
