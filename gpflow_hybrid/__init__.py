"""Conjugate-computation variational inference with EP-like learning objectives, for GPflow."""

from . import (
    config,
    datasets,
    distributed,
    errors,
    evidence,
    likelihoods,
    models,
    posteriors,
    training,
)
from .comparison import ObjectiveComparison, compare_objectives
from .errors import (
    CheckpointError,
    ClusterError,
    ClusterWarning,
    ConvergenceWarning,
    ForkedProcessError,
    GPflowHybridError,
    InvalidDataError,
    InvalidPosteriorError,
    LargeModelWarning,
    NonFiniteError,
)
from .evidence import (
    AnnealingResult,
    EvidenceComparison,
    EvidenceEstimate,
    annealed_importance_sampling,
    compare_evidence,
)
from .inducing_points import inducing_points
from .inference.reports import InferenceResult
from .integration import (
    ChainReport,
    HyperparameterPosterior,
    Marginal,
    MixturePosterior,
    integrate_hyperparameters,
)
from .linalg import linear_algebra, set_linear_algebra
from .models import (
    CollapsedModel,
    CVIModel,
    EPModel,
    InferredModel,
    LaplaceModel,
    PredictiveModel,
    SiteModel,
    SparseCVIModel,
)
from .objective_fits import ObjectiveFit
from .posteriors import SitePosterior
from .sites import InducingSites, Sites
from .training import FitResult, TrainingResult, VEMTrainer, fit
from .version import __version__ as __version__

__all__ = [
    "AnnealingResult",
    "CVIModel",
    "ChainReport",
    "CheckpointError",
    "ClusterError",
    "ClusterWarning",
    "CollapsedModel",
    "ConvergenceWarning",
    "EPModel",
    "EvidenceComparison",
    "EvidenceEstimate",
    "FitResult",
    "ForkedProcessError",
    "GPflowHybridError",
    "HyperparameterPosterior",
    "InducingSites",
    "InferenceResult",
    "InferredModel",
    "InvalidDataError",
    "InvalidPosteriorError",
    "LaplaceModel",
    "LargeModelWarning",
    "Marginal",
    "MixturePosterior",
    "NonFiniteError",
    "ObjectiveComparison",
    "ObjectiveFit",
    "PredictiveModel",
    "SiteModel",
    "SitePosterior",
    "Sites",
    "SparseCVIModel",
    "TrainingResult",
    "VEMTrainer",
    "annealed_importance_sampling",
    "compare_evidence",
    "compare_objectives",
    "config",
    "datasets",
    "distributed",
    "errors",
    "evidence",
    "fit",
    "inducing_points",
    "integrate_hyperparameters",
    "likelihoods",
    "linear_algebra",
    "models",
    "posteriors",
    "set_linear_algebra",
    "training",
]
