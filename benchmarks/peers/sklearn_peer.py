"""scikit-learn's GaussianProcessClassifier: Laplace with a logistic likelihood, the only one it has."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.optimize import OptimizeResult, minimize
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import ConstantKernel, Matern

from .outcome import Fit, hyperparameters, score


def fit(X_train: np.ndarray, Y_train: np.ndarray, X_test: np.ndarray, Y_test: np.ndarray) -> Fit:
    """Train with L-BFGS as scikit-learn calls it, keeping what it reports."""
    found: list[OptimizeResult] = []

    def optimiser(loss: Callable[..., Any], start: np.ndarray, bounds: Any) -> tuple[Any, float]:
        found.append(minimize(loss, start, method="L-BFGS-B", jac=True, bounds=bounds))
        return found[-1].x, found[-1].fun

    start = time.perf_counter()
    model = GaussianProcessClassifier(
        ConstantKernel(1.0) * Matern(1.0, nu=2.5), optimizer=optimiser
    )
    model.fit(X_train, np.ravel(Y_train))
    seconds = time.perf_counter() - start
    kernel, result = model.kernel_, found[-1]
    return Fit(
        seconds=seconds,
        evaluations=int(result.nfev),
        objective=-float(result.fun),
        converged=bool(result.success),
        note="" if result.success else str(result.message),
        **score(model.predict_proba(X_test)[:, 1], Y_test),
        **hyperparameters(kernel.k2.length_scale, kernel.k1.constant_value),
    )
