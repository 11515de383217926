"""scikit-learn's own checks of estimators, in full."""

from __future__ import annotations

from typing import Any

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from gpflow_hybrid.sklearn import HybridGPClassifier, HybridGPRegressor


# Some checks have labels without a signal, which a fit says; some count on warnings being none.
@pytest.mark.filterwarnings("ignore:Not a fit:gpflow_hybrid.ConvergenceWarning")
@parametrize_with_checks([HybridGPClassifier(), HybridGPRegressor()])
def test_scikit_learns_checks(estimator: Any, check: Any) -> None:
    check(estimator)
