"""Conjugate-computation variational inference with EP-like learning objectives, for GPflow."""

from . import datasets, errors, likelihoods
from .comparison import ObjectiveComparison, ObjectiveFit, compare_objectives
from .errors import GPflowHybridError, InvalidDataError, InvalidPosteriorError, NonFiniteError
from .models import CVIModel, SiteModel
from .posteriors import SitePosterior
from .reports import InferenceResult
from .sites import Sites

__version__ = "0.1.0"

__all__ = [
    "CVIModel",
    "GPflowHybridError",
    "InferenceResult",
    "InvalidDataError",
    "InvalidPosteriorError",
    "NonFiniteError",
    "ObjectiveComparison",
    "ObjectiveFit",
    "SiteModel",
    "SitePosterior",
    "Sites",
    "compare_objectives",
    "datasets",
    "errors",
    "likelihoods",
]
