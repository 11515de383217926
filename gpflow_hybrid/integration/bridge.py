"""The normaliser of a density from samples of it: bridge sampling."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

Array = npt.NDArray[np.float64]

NUM_PROPOSALS = 200
"""Settings at which the density is evaluated beside those of the samples."""


def bridge_sampling(
    x: Array,
    log_density: Array,
    density: Callable[[Array], float],
    effective_size: float,
    rng: np.random.Generator,
) -> tuple[float, float]:
    """``log ∫ p`` and its standard error, by the optimal bridge of Meng and Wong (1996).

    The other end is a Gaussian g with the moments of every second sample; the rest are the bridge's. With
    shares s₁ of samples and s₂ of proposals,

        r = E_g[p / (s₁ p + s₂ r g)] / E_p[g / (s₁ p + s₂ r g)]

    :param x: samples ``[S, d]`` of the density, whose logarithms are ``log_density``.
    :param effective_size: as good as so many independent ones.
    """
    fitted, bridged = x[::2], x[1::2]
    covariance = np.atleast_2d(np.cov(fitted.T))
    # Chains that stand still in a direction leave it no width.
    covariance += (1e-8 * np.mean(np.diag(covariance)) + 1e-10) * np.eye(x.shape[1])
    g = multivariate_normal(fitted.mean(0), covariance)
    proposals = np.atleast_2d(g.rvs(NUM_PROPOSALS, random_state=rng))
    proposals = proposals.reshape(NUM_PROPOSALS, x.shape[1])
    at_samples = log_density[1::2] - g.logpdf(bridged)  # log p/g
    at_proposals = np.array([density(row) for row in proposals]) - g.logpdf(proposals)
    size = max(2.0, min(0.5 * effective_size, len(bridged)))
    share = size / (size + NUM_PROPOSALS)
    log_r = float(np.median(at_samples))
    for _ in range(1000):
        from_g = at_proposals - _mix(at_proposals, log_r, share)
        from_p = -_mix(at_samples, log_r, share)
        new = float(_log_mean(from_g) - _log_mean(from_p))
        if abs(new - log_r) < 1e-10:
            break
        log_r = new
    relative = [
        np.var(np.exp(values - _log_mean(values))) / count
        for values, count in ((from_g, NUM_PROPOSALS), (from_p, size))
    ]
    return log_r, float(np.sqrt(sum(relative)))


def _mix(log_ratio: Array, log_r: float, share: float) -> Array:
    """``log (s₁ p/g + s₂ r)``."""
    return np.logaddexp(np.log(share) + log_ratio, np.log1p(-share) + log_r)


def _log_mean(values: Array) -> float:
    return float(logsumexp(values) - np.log(len(values)))
