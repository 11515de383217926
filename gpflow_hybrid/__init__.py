"""Conjugate-computation variational inference with EP-like learning objectives, for GPflow."""

from . import datasets, errors, likelihoods
from .comparison import ObjectiveComparison, ObjectiveFit, compare_objectives
from .errors import GPflowHybridError, InvalidDataError, InvalidPosteriorError, NonFiniteError
from .inference.reports import InferenceResult
from .models import CollapsedModel, CVIModel, EPModel, LaplaceModel, SiteModel
from .posteriors import SitePosterior
from .sites import Sites

__version__ = "0.1.0"

__all__ = [
    "CVIModel",
    "CollapsedModel",
    "EPModel",
    "GPflowHybridError",
    "InferenceResult",
    "InvalidDataError",
    "InvalidPosteriorError",
    "LaplaceModel",
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
