"""SparseCVIModel, collapsed, with L-BFGS on all rows."""

from __future__ import annotations

import gpflow
import numpy as np

import gpflow_hybrid as gh

from .sparse_gpflow import kernel_for, lbfgs, report, scorer
from .sparse_outcome import Clock, SparseFit


def fit(
    X_train: np.ndarray,
    Y_train: np.ndarray,
    X_test: np.ndarray,
    Y_test: np.ndarray,
    Z: np.ndarray,
    *,
    train_Z: bool,
    regression: bool,
    limit: float,
    objective: str,
) -> SparseFit:
    """Train with one call to L-BFGS."""
    clock, data = Clock(limit), (X_train, Y_train)
    likelihood = gpflow.likelihoods.StudentT() if regression else gh.likelihoods.ProbitBernoulli()
    model = gh.SparseCVIModel(kernel_for(X_train), likelihood, Z.copy(), objective=objective)
    gpflow.set_trainable(model.inducing_variable, bool(train_Z))
    scores = scorer(model, X_test, Y_test, regression)
    return report(model, data, clock, scores, lbfgs(model, data, clock, scores))
