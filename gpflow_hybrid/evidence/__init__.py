"""The marginal likelihood by sampling: a gold standard for every approximation of it."""

from .annealing import annealed_importance_sampling
from .estimates import compare_evidence
from .results import AnnealingResult
from .settings import grid
from .table import EvidenceComparison, EvidenceEstimate

__all__ = [
    "AnnealingResult",
    "EvidenceComparison",
    "EvidenceEstimate",
    "annealed_importance_sampling",
    "compare_evidence",
    "grid",
]
