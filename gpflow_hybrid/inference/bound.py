"""The ELBO at some sites with everything that is known there, and when a step on it is taken."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ..likelihoods.expectations import ExpectationGradients, expected_log_site
from ..linalg import Marginals
from ..priors import Array, Posterior, Prior
from ..sites import SiteValues
from .common import SitePair, is_valid, relative_norm
from .options import NEWTON
from .questions import EXPECTATIONS, Iteration


class BoundEvaluation(NamedTuple):
    """Everything known at one λ."""

    sites: SiteValues
    q: Marginals
    posterior: Posterior
    """What q is made of; one of sites nearby after a step without factorisation."""
    E: ExpectationGradients
    elbo: float
    """NaN where no valid q exists, or an expectation is not finite."""
    rounding_error: float
    """Of the ELBO."""
    residual: SitePair
    """``g(λ) − λ``: ``a = ∂E/∂m − (λ₁ − λ₂m)``, ``b = −2 ∂E/∂v − λ₂``; zero at the optimum."""
    residual_norm: float
    """In units of the posterior; infinite where there is no valid q."""


def evaluate(
    prior: Prior, sites: SiteValues, keeping: tuple[BoundEvaluation, ...] = ()
) -> Iteration[BoundEvaluation]:
    """Posterior, expectations and ELBO at λ.

    :param keeping: evaluations that are still needed.
    """
    posterior = prior.posterior(sites, tuple(at.posterior for at in keeping))
    q = posterior.marginals
    if is_valid(q):
        E = yield EXPECTATIONS(q.mean, q.variance)
    else:
        nothing = np.full_like(q.mean, np.nan)
        E = ExpectationGradients(nothing[:, 0], nothing, nothing)
    return assess(prior, sites, posterior, q, E)


def assess(
    prior: Prior,
    sites: SiteValues,
    posterior: Posterior,
    q: Marginals,
    E: ExpectationGradients,
) -> BoundEvaluation:
    """The ELBO where posterior and expectations are known."""
    log_t = expected_log_site(q.mean, q.variance, *sites)
    elbo = q.log_normaliser + (np.sum(E.value) - np.sum(log_t))
    is_finite = is_valid(q) and np.isfinite(E.mean).all() and np.isfinite(E.variance).all()
    error = np.finfo(q.mean.dtype).eps * _cancelled(prior, sites, q, E.value, log_t)
    lambda_1, lambda_2 = sites
    target = SitePair(E.mean, -2.0 * E.variance)
    residual = SitePair(target.a - (lambda_1 - lambda_2 * q.mean), target.b - lambda_2)
    is_number = is_finite and np.isfinite(elbo)
    norm = relative_norm(q, residual, target) if is_number else math.inf
    elbo = float(elbo) if is_finite else math.nan
    return BoundEvaluation(sites, q, posterior, E, elbo, float(error), residual, norm)


def _cancelled(
    prior: Prior, sites: SiteValues, q: Marginals, expected: Array, log_t: Array
) -> float:
    """The size of the numbers that the ELBO is a difference of."""
    lambda_1, lambda_2 = sites
    terms = (
        np.abs(q.log_normaliser)
        + np.sum(np.abs(expected))
        + np.sum(np.abs(lambda_1 * q.mean))
        + np.sum(np.abs(log_t))
    )
    # A wide prior: m = μ₀ + Kβ with β = λ₁ − λ₂m is a difference of much larger numbers.
    r, beta = lambda_1 - lambda_2 * prior.mean, lambda_1 - lambda_2 * q.mean
    in_mean = np.sum(np.abs(r)) * np.sum(np.abs(beta)) * prior.largest_variance
    return float(NEWTON.rounding_errors * terms + NEWTON.mean_errors * in_mean)


def is_accepted(new: BoundEvaluation, at: BoundEvaluation) -> bool:
    """Whether a step is taken: the ELBO has risen, and is a number."""
    closer = new.residual_norm < at.residual_norm
    rises = improves(new.elbo - at.elbo, at.rounding_error, closer)
    return rises and has_digits(new, at.elbo, at.rounding_error)


def improves(gain: float, rounding_error: float, closer: bool) -> bool:
    """Whether the ELBO has risen; below its rounding error the residual decides."""
    return gain > rounding_error or (gain >= -rounding_error and closer)


def has_digits(new: BoundEvaluation, elbo: float, rounding_error: float) -> bool:
    """Whether the new ELBO is a number at all, and not what rounding left of one.

    Sites of enormous precision make ``I + KΛ`` singular to working precision.
    """
    return new.rounding_error <= max(rounding_error, 1.0, NEWTON.few_digits * abs(elbo))
