"""From a kernel matrix and Gaussian sites to the posterior's marginals, and back to gradients."""

from .backends import linear_algebra, set_linear_algebra, uses_lapack
from .factors import (
    LatentPosterior,
    covariance_from_factors,
    factorise,
    matvec,
    posterior_from_factors,
    weights_from_factors,
)
from .posterior import Marginals, marginals, offset_sites, site_posterior

__all__ = [
    "LatentPosterior",
    "Marginals",
    "covariance_from_factors",
    "factorise",
    "linear_algebra",
    "marginals",
    "matvec",
    "offset_sites",
    "posterior_from_factors",
    "set_linear_algebra",
    "site_posterior",
    "uses_lapack",
    "weights_from_factors",
]
