"""Integrals over f by brute force: a dense grid in the whitened prior, for at most three numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp

LogProb = Callable[[np.ndarray], np.ndarray]
"""``log p(y|f)`` at ``f [Q, D]``: ``[Q]``."""


class Posterior(NamedTuple):
    f: np.ndarray  # [Q, D]
    log_weights: np.ndarray  # normalised, [Q]
    log_marginal: float


def integrate(mean: np.ndarray, K: np.ndarray, log_prob: LogProb, num: int = 121) -> Posterior:
    """``log ∫ N(f; mean, K) p(y|f) df`` and the posterior on the grid, D = len(mean) ≤ 3."""
    D = len(mean)
    z = np.linspace(-9.0, 9.0, num)
    nodes = np.stack([a.ravel() for a in np.meshgrid(*[z] * D, indexing="ij")], -1)
    f = mean + nodes @ np.linalg.cholesky(K).T
    log_terms = (
        log_prob(f) - 0.5 * np.sum(nodes**2, -1) + D * np.log((z[1] - z[0]) / np.sqrt(2 * np.pi))
    )
    total = logsumexp(log_terms)
    return Posterior(f, log_terms - total, float(total))
