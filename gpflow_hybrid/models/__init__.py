"""GPflow models whose approximate posterior is a prior times Gaussian sites."""

from .base import SiteModel
from .collapsed import CollapsedModel
from .cvi import CVIModel
from .ep import EPModel
from .inferred import InferredModel
from .laplace import LaplaceModel
from .predictive import PredictiveModel
from .sparse_cvi import SparseCVIModel

__all__ = [
    "CVIModel",
    "CollapsedModel",
    "EPModel",
    "InferredModel",
    "LaplaceModel",
    "PredictiveModel",
    "SiteModel",
    "SparseCVIModel",
]
