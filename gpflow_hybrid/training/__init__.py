"""Variational EM as in the paper, monitored, resumable, honest about convergence."""

from .fit_results import FitResult
from .fitting import fit
from .history import History, IterationRecord, TrainingResult
from .minimisation import FitStep
from .steps import GradientSteps, InferToConvergence, LBFGSSteps, NaturalGradientSteps
from .stopping import (
    AllOf,
    AnyOf,
    Drift,
    HeldOutDensity,
    HyperparameterTolerance,
    ObjectiveTolerance,
    Patience,
    StoppingRule,
    TimeBudget,
)
from .trainer import VEMTrainer

__all__ = [
    "AllOf",
    "AnyOf",
    "Drift",
    "FitResult",
    "FitStep",
    "GradientSteps",
    "HeldOutDensity",
    "History",
    "HyperparameterTolerance",
    "InferToConvergence",
    "IterationRecord",
    "LBFGSSteps",
    "NaturalGradientSteps",
    "ObjectiveTolerance",
    "Patience",
    "StoppingRule",
    "TimeBudget",
    "TrainingResult",
    "VEMTrainer",
    "fit",
]
