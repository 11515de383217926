"""Hyperparameters integrated out, instead of optimised."""

from .integrate import integrate_hyperparameters
from .marginals import Marginal
from .mixtures import MixturePosterior
from .results import ChainReport, HyperparameterPosterior

__all__ = [
    "ChainReport",
    "HyperparameterPosterior",
    "Marginal",
    "MixturePosterior",
    "integrate_hyperparameters",
]
