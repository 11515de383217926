"""More points for a likelihood's own quadrature, where it can have them."""

from __future__ import annotations

from gpflow.likelihoods import Likelihood
from gpflow.quadrature import NDiagGHQuadrature

from .expectations import has_independent_rule

MOST_POINTS = 160
"""Of Gauss–Hermite; with more, the outermost weights are too small to count."""

FACTOR = 4
"""By which points are multiplied: what 20 miss by far, 40 still miss."""


def refined(likelihood: Likelihood) -> int | None:
    """Give a scalar likelihood a finer Gauss–Hermite rule; how many points it has now, None if it stays."""
    rule = getattr(likelihood, "quadrature", None)
    if not has_independent_rule(likelihood) or type(rule) is not NDiagGHQuadrature:
        return None
    points = min(FACTOR * int(rule.n_gh), MOST_POINTS)
    if points <= int(rule.n_gh):
        return None
    likelihood.quadrature = NDiagGHQuadrature(1, points)
    return points
