"""Quantiles of a predictive distribution ``P(t) = ∫ p(y ≤ t | f) q(f) df``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import gpflow
import numpy as np
import numpy.typing as npt
from gpflow.likelihoods import Likelihood
from scipy import stats

from .. import tuning
from ..errors import InvalidDataError
from ..integration import HyperparameterPosterior
from ..likelihoods.densities import density_of
from .parts import has_log_link, moments_of

Array = npt.NDArray[Any]
Distribution = Callable[[Array, Array], Callable[[Array], Array]]

NUM_NODES = 64
"""Gauss–Hermite nodes for f; their number squared for two latents."""

MAX_DOUBLINGS = 60
"""Of the interval in which a quantile is sought,"""
NUM_BISECTIONS = 60
"""and halvings of it: to the last digit."""


class _Setting(NamedTuple):
    """A model's part of a mixture."""

    weight: float
    mean: Array
    variance: Array
    distribution: Distribution


def predictive_quantiles(model: Any, X: Array, quantiles: Any) -> Array:
    """``[N, Q]``, in the units of the model, or of the mixture of models that was integrated."""
    q = np.atleast_1d(np.asarray(quantiles, np.float64))
    if q.ndim != 1 or not ((q > 0.0) & (q < 1.0)).all():
        raise InvalidDataError(
            f"quantiles must be numbers between 0 and 1, both excluded; found {quantiles!r}."
        )
    if isinstance(model, HyperparameterPosterior):
        models = zip(model.weights, model.mixture.models(), strict=True)
        # The models are one object, moved from setting to setting.
        settings = [_setting(m, X, float(w)) for w, m in models]
        likelihood = model.mixture.likelihood
    else:
        settings, likelihood = [_setting(model, X)], model.likelihood
        if _is_gaussian(likelihood):
            _, mean, variance, _ = settings[0]
            return stats.norm.ppf(q, mean, np.sqrt(variance + np.asarray(likelihood.variance)))
    is_discrete = isinstance(likelihood, gpflow.likelihoods.Poisson)
    num_nodes = 1 if _is_gaussian(likelihood) else NUM_NODES ** settings[0].mean.shape[1]
    # Nodes of so many rows at a time: memory does not grow with N.
    size = max(1, tuning.PREDICTED_ELEMENTS // (num_nodes * len(q) * len(settings)))
    found = []
    for start in range(0, len(X), size):
        rows = slice(start, start + size)
        parts = [(s.weight, s.distribution(s.mean[rows], s.variance[rows])) for s in settings]

        def probability(t: Array, parts: list[Any] = parts) -> Array:
            """``P(t)`` for ``[N, Q]``."""
            return sum(weight * distribution(t) for weight, distribution in parts)

        found.append(_solve(probability, q, len(X[rows]), is_discrete))
    return np.concatenate(found)


def _setting(model: Any, X: Array, weight: float = 1.0) -> _Setting:
    mean, variance = moments_of(model, X)
    return _Setting(weight, mean, variance, _distribution_of(model.likelihood))


def _is_gaussian(likelihood: Likelihood) -> bool:
    return type(likelihood) is gpflow.likelihoods.Gaussian and density_of(likelihood) is not None


def _distribution_of(likelihood: Likelihood) -> Distribution:
    """From moments of f at some rows to ``P(t)`` there, with the likelihood's present parameters."""
    if _is_gaussian(likelihood):
        noise = np.asarray(likelihood.variance)
        return lambda mean, variance: functools.partial(
            stats.norm.cdf, loc=mean, scale=np.sqrt(variance + noise)
        )
    conditional = _conditional(likelihood)

    def at(mean: Array, variance: Array) -> Callable[[Array], Array]:
        F, weights = _nodes(mean, np.sqrt(variance))  # [N, K, L], [K]
        return lambda t: np.einsum(
            "k,nkq->nq", weights, conditional(F[..., None, :], t[:, None, :])
        )

    return at


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


def _conditional(likelihood: Likelihood) -> Callable[[Array, Array], Array]:
    """``p(y ≤ t | f)`` from f ``[…, L]`` and t ``[…]``."""
    L = gpflow.likelihoods
    if density_of(likelihood) is not None:
        if type(likelihood) is L.StudentT:
            df, scale = float(likelihood.df), float(likelihood.scale.numpy())
            return lambda f, t: stats.t.cdf((t - f[..., 0]) / scale, df)
        if type(likelihood) is L.HeteroskedasticTFPConditional:
            return lambda f, t: stats.norm.cdf((t - f[..., 0]) * np.exp(-f[..., 1]))
        if has_log_link(likelihood):
            if type(likelihood) is L.Poisson:
                size = float(likelihood.binsize)
                return lambda f, t: stats.poisson.cdf(t, size * np.exp(f[..., 0]))
            if type(likelihood) is L.Gamma:
                shape = float(likelihood.shape.numpy())
                return lambda f, t: stats.gamma.cdf(t * np.exp(-f[..., 0]), shape)
            if type(likelihood) is L.Exponential:
                return lambda f, t: stats.expon.cdf(t * np.exp(-f[..., 0]))
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
