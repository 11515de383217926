"""scikit-learn, for scale: what a linear model and boosted trees reach on the same rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import stats
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression

from .sparse_outcome import Clock, SparseFit, classified, regressed

DEGREES_OF_FREEDOM = 3.0
HELD_OUT = 0.1
"""Part of the training rows that a regressor's scale is estimated from and that it is not trained on."""


def fit(
    X_train: np.ndarray,
    Y_train: np.ndarray,
    X_test: np.ndarray,
    Y_test: np.ndarray,
    *,
    regression: bool,
    limit: float,
    model: str,
    **_: Any,
) -> SparseFit:
    """With scikit-learn's own settings."""
    clock, y = Clock(limit), np.ravel(Y_train)
    if regression:
        return _regression(X_train, y, X_test, Y_test, clock)
    chosen = {"linear": LogisticRegression, "boosting": HistGradientBoostingClassifier}[model]()
    chosen.fit(X_train, y)
    ended = clock.report()
    scores = classified(chosen.predict_proba(X_test)[:, 1], Y_test)
    return SparseFit(
        **ended, **scores, evaluations=int(np.ravel(chosen.n_iter_)[0]), converged=True
    )


def _regression(
    X: np.ndarray, y: np.ndarray, X_test: np.ndarray, Y_test: np.ndarray, clock: Clock
) -> SparseFit:
    """Trees predict a value; the density around it is Student-t as that of the others."""
    held_out = np.random.default_rng(0).random(len(X)) < HELD_OUT
    model = HistGradientBoostingRegressor().fit(X[~held_out], y[~held_out])
    errors = y[held_out] - model.predict(X[held_out])
    _, _, scale = stats.t.fit(errors, f0=DEGREES_OF_FREEDOM, floc=0.0)
    ended = clock.report()
    mean = model.predict(X_test)
    densities = stats.t.logpdf(np.ravel(Y_test), DEGREES_OF_FREEDOM, mean, scale)
    return SparseFit(
        **ended,
        **regressed(densities, mean, Y_test),
        evaluations=int(model.n_iter_),
        converged=True,
    )
