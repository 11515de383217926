"""The learning objectives, as pure functions of the marginals of q.

    L_α(λ, θ) = log Z(λ, θ) + (1/α) Σₙ log E_q(fₙ)[(p(yₙ|fₙ) / tₙ(fₙ))^α]

α → 0 is the evidence lower bound (the paper's L_VI), α = 1 the EP-like log marginal likelihood (the
paper's L_EP with the sites of variational inference).
"""

from __future__ import annotations

import numbers

import tensorflow as tf
from gpflow.base import RegressionData
from gpflow.likelihoods import Likelihood

from .errors import InvalidDataError
from .likelihoods.ratios import cavity, log_expected_ratio
from .linalg import Marginals
from .sites import SiteValues

Objective = str | float
"""``"elbo"``, ``"ep_like"``, or a power α in [0, 1]."""

NAMED_POWERS = {"elbo": 0.0, "ep_like": 1.0}


def power_of(objective: Objective) -> float:
    """The power α that an objective stands for."""
    if isinstance(objective, str):
        if objective in NAMED_POWERS:
            return NAMED_POWERS[objective]
    elif _is_number(objective):
        return check_power(float(objective), "objective")
    raise InvalidDataError(
        f'objective must be "elbo", "ep_like" or a power alpha in [0, 1]; found {objective!r}.'
    )


def check_power(alpha: float, name: str = "alpha") -> float:
    """``alpha`` as a float, refused outside [0, 1]."""
    if not _is_number(alpha) or not 0.0 <= float(alpha) <= 1.0:
        raise InvalidDataError(
            f"{name} must be a number in [0, 1] (0 is the ELBO, 1 the EP-like value); "
            f"found {alpha!r}."
        )
    return float(alpha)


def check_positive_power(alpha: float, name: str = "alpha") -> float:
    """``alpha`` as a float, refused outside (0, 1]."""
    if _is_number(alpha) and float(alpha) == 0.0:
        raise InvalidDataError(
            f"{name} must be a number in (0, 1]; found 0, at which power EP is variational inference: "
            "use CVIModel."
        )
    if not _is_number(alpha) or not 0.0 < float(alpha) <= 1.0:
        raise InvalidDataError(f"{name} must be a number in (0, 1]; found {alpha!r}. EP has 1.")
    return float(alpha)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def power_ep(
    q: Marginals, sites: SiteValues, likelihood: Likelihood, data: RegressionData, alpha: float
) -> tf.Tensor:
    """``L_α``, shape ``[]``; NaN where a cavity ``1/v − αλ₂`` is not positive."""
    X, Y = data
    ratio = log_expected_ratio(
        likelihood, X, q.mean, q.variance, Y, sites.lambda_1, sites.lambda_2, alpha
    )
    return q.log_normaliser + tf.reduce_sum(ratio)


def elbo(
    q: Marginals, sites: SiteValues, likelihood: Likelihood, data: RegressionData
) -> tf.Tensor:
    """``L_0 = log Z + Σ E_q[log p − log t]``, shape ``[]``."""
    return power_ep(q, sites, likelihood, data, 0.0)


def loo_log_predictive_density(
    q: Marginals, sites: SiteValues, likelihood: Likelihood, data: RegressionData
) -> tf.Tensor:
    """``log ∫ q₋ₙ(f) p(yₙ|f) df`` from the cavities, ``[N]``; NaN where a cavity does not exist."""
    X, Y = data
    lambda_1, lambda_2 = sites
    ratio = log_expected_ratio(likelihood, X, q.mean, q.variance, Y, lambda_1, lambda_2, 1.0)
    # E_q[p/t] = E_q[1/t] ∫ q₋ₙ p
    scale = cavity(q.mean, q.variance, lambda_1, lambda_2, 1.0).log_scale_over_alpha
    return ratio - tf.reduce_sum(scale, -1)
