"""Quantiles of a predictive distribution ``P(t) = ∫ p(y ≤ t | f) q(f) df``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpflow
import numpy as np
import numpy.typing as npt
from gpflow.likelihoods import Likelihood
from scipy import stats

from .. import tuning
from ..errors import InvalidDataError
from ..likelihoods.densities import density_of
from .parts import has_log_link

Array = npt.NDArray[Any]

NUM_NODES = 64
"""Gauss–Hermite nodes for f; their number squared for two latents."""

MAX_DOUBLINGS = 60
"""Of the interval in which a quantile is sought,"""
NUM_BISECTIONS = 60
"""and halvings of it: to the last digit."""


def predictive_quantiles(model: Any, X: Array, quantiles: Any) -> Array:
    """``[N, Q]``, in the model's units."""
    q = np.atleast_1d(np.asarray(quantiles, np.float64))
    if q.ndim != 1 or not ((q > 0.0) & (q < 1.0)).all():
        raise InvalidDataError(
            f"quantiles must be numbers between 0 and 1, both excluded; found {quantiles!r}."
        )
    mean, variance = (np.asarray(x) for x in model.predict_f(X))
    likelihood = model.likelihood
    if type(likelihood) is gpflow.likelihoods.Gaussian and density_of(likelihood) is not None:
        deviation = np.sqrt(variance + np.asarray(likelihood.variance))
        return stats.norm.ppf(q, loc=mean, scale=deviation)
    distribution, is_discrete = _conditional(likelihood)
    # Nodes of so many rows at a time: memory does not grow with N.
    num_nodes = NUM_NODES ** mean.shape[1] * len(q)
    size = max(1, tuning.PREDICTED_ELEMENTS // num_nodes)
    found = []
    for start in range(0, len(mean), size):
        rows = slice(start, start + size)
        F, weights = _nodes(mean[rows], np.sqrt(variance[rows]))  # [N, K, L], [K]

        def probability(t: Array, F: Array = F, weights: Array = weights) -> Array:
            """``P(t)`` for ``[N, Q]``."""
            return np.einsum("k,nkq->nq", weights, distribution(F[..., None, :], t[:, None, :]))

        found.append(_solve(probability, q, len(F), is_discrete))
    return np.concatenate(found)


def _nodes(mean: Array, deviation: Array) -> tuple[Array, Array]:
    """Values of all latents and their weights."""
    z, w = np.polynomial.hermite_e.hermegauss(NUM_NODES)
    w = w / w.sum()
    L = mean.shape[1]
    grids = np.meshgrid(*[z] * L, indexing="ij")
    weights = np.prod(np.meshgrid(*[w] * L, indexing="ij"), axis=0).ravel()
    kept = weights > 1e-18
    nodes = np.stack([g.ravel() for g in grids], axis=-1)[kept]
    return mean[:, None, :] + deviation[:, None, :] * nodes, weights[kept]


def _conditional(likelihood: Likelihood) -> tuple[Callable[[Array, Array], Array], bool]:
    """``p(y ≤ t | f)`` from f ``[…, L]`` and t ``[…]``, and whether y is a count."""
    L = gpflow.likelihoods
    if density_of(likelihood) is not None:
        if type(likelihood) is L.StudentT:
            df, scale = float(likelihood.df), float(likelihood.scale.numpy())
            return lambda f, t: stats.t.cdf((t - f[..., 0]) / scale, df), False
        if type(likelihood) is L.HeteroskedasticTFPConditional:
            return lambda f, t: stats.norm.cdf((t - f[..., 0]) * np.exp(-f[..., 1])), False
        if has_log_link(likelihood):
            if type(likelihood) is L.Poisson:
                size = float(likelihood.binsize)
                return lambda f, t: stats.poisson.cdf(t, size * np.exp(f[..., 0])), True
            if type(likelihood) is L.Gamma:
                shape = float(likelihood.shape.numpy())
                return lambda f, t: stats.gamma.cdf(t * np.exp(-f[..., 0]), shape), False
            if type(likelihood) is L.Exponential:
                return lambda f, t: stats.expon.cdf(t * np.exp(-f[..., 0])), False
    raise InvalidDataError(
        "likelihood must be GPflow's Gaussian, StudentT, Poisson, Gamma, Exponential or heteroskedastic "
        f"normal for predict_quantiles; found {type(likelihood).__name__}. Sample from model_ instead."
    )


def _solve(probability: Callable[[Array], Array], q: Array, rows: int, is_discrete: bool) -> Array:
    """Where it passes q, by bisection between numbers that enclose it."""
    low, high = -np.ones((rows, len(q))), np.ones((rows, len(q)))
    for _ in range(MAX_DOUBLINGS):
        too_low, too_high = probability(high) < q, probability(low) > q
        if not (too_low.any() or too_high.any()):
            break
        high, low = np.where(too_low, 2.0 * high, high), np.where(too_high, 2.0 * low, low)
    for _ in range(NUM_BISECTIONS):
        middle = 0.5 * (low + high)
        is_above = probability(middle) >= q
        low, high = np.where(is_above, low, middle), np.where(is_above, middle, high)
    # A count is where the distribution jumps.
    return np.round(high) if is_discrete else 0.5 * (low + high)
