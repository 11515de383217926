"""Estimators for scikit-learn (extra ``sklearn``), trained by :func:`gpflow_hybrid.fit`."""

from importlib.util import find_spec

if find_spec("sklearn") is None:
    raise ImportError(
        "gpflow_hybrid.sklearn needs scikit-learn: pip install 'gpflow-hybrid[sklearn]'."
    )

from .classifier import HybridGPClassifier
from .regressor import HybridGPRegressor

__all__ = ["HybridGPClassifier", "HybridGPRegressor"]
