"""The marginal likelihood by sampling: a gold standard for every approximation of it."""

from .annealing import annealed_importance_sampling
from .results import AnnealingResult
from .settings import grid

__all__ = ["AnnealingResult", "annealed_importance_sampling", "grid"]
