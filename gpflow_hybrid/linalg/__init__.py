"""From a kernel matrix and Gaussian sites to the posterior's marginals, and back to gradients."""

from .backends import (
    Evaluated,
    EvaluatedCovariance,
    Known,
    backend,
    linear_algebra,
    set_linear_algebra,
)
from .distances import squared_distances
from .elementwise import by_rows
from .factors import (
    LatentPosterior,
    covariance_from_factors,
    factorise,
    matvec,
    posterior_from_factors,
)
from .posterior import (
    Marginals,
    add_prior_mean,
    evaluate,
    marginals,
    offset_sites,
    site_posterior,
)

__all__ = [
    "Evaluated",
    "EvaluatedCovariance",
    "Known",
    "LatentPosterior",
    "Marginals",
    "add_prior_mean",
    "backend",
    "by_rows",
    "covariance_from_factors",
    "evaluate",
    "factorise",
    "linear_algebra",
    "marginals",
    "matvec",
    "offset_sites",
    "posterior_from_factors",
    "set_linear_algebra",
    "site_posterior",
    "squared_distances",
]
