"""Estimators for scikit-learn (extra ``sklearn``), trained by :func:`gpflow_hybrid.fit`."""

try:
    import sklearn as _
except ImportError as error:
    raise ImportError(
        "gpflow_hybrid.sklearn needs scikit-learn: pip install 'gpflow-hybrid[sklearn]'."
    ) from error

from .classifier import HybridGPClassifier
from .regressor import HybridGPRegressor

__all__ = ["HybridGPClassifier", "HybridGPRegressor"]
