"""A block of rows of a sparse model, and what is known of it at one q; how such things add up."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from ..likelihoods.projected import Moments, ProjectedLikelihood, SiteWeights
from ..likelihoods.ratio_gradients import RatioGradients
from ..linalg.products import (
    combine,
    project,
    quadratic_forms,
    solve_lower,
    squared_norms,
    weighted_gram,
)
from ..priors.inducing import Projection
from ..priors.protocol import Array
from .inducing import InducingPosterior, Pair
from .newton import per_datum
from .removal import removable


@dataclasses.dataclass
class Block:
    """Some rows, projected."""

    X: Array
    Y: Array
    projections: list[Projection]
    mean: Array  # μ₀ [N, L]
    likelihood: ProjectedLikelihood
    local: Local | None = None
    """At the last q that was asked for."""
    slopes: Slopes | None = None
    """The same."""

    def projection(self, latent: int) -> Array:
        """``A`` of a latent."""
        return self.projections[0 if len(self.projections) == 1 else latent].A

    def at(self, q: InducingPosterior, *, curvature: bool = False) -> Local:
        """What was found of q before, or is found now."""
        if self.local is None or self.local.q is not q:
            T, m, v = self.marginals(q)
            moments = Moments(m, v, self.likelihood.expectations(m, v))
            self.local, self.slopes = Local(q, T, moments), None
        if curvature and not self.local.moments.curvature:
            moments = self.local.moments
            moments = moments._replace(curvature=self.likelihood.curvature(moments))
            self.local = self.local._replace(moments=moments)
        return self.local

    def marginals(self, q: InducingPosterior) -> tuple[list[Array], Array, Array]:
        """``T`` of every latent; mean, with ``μ₀``, and variance of every projection, ``[N, L]``."""
        T = [solve_lower(C, self.projection(i)) for i, C in enumerate(q.chol)]
        mean = np.stack([project(t, h) for t, h in zip(T, q.h, strict=True)], 1)
        return T, mean + self.mean, np.stack([squared_norms(t) for t in T], 1)

    def slopes_at(self, q: InducingPosterior, alpha: float | None) -> Slopes:
        """The same of the objective.

        :param alpha: its power, if sites may be taken out of q in part.
        """
        moments = self.at(q, curvature=True).moments
        if self.slopes is not None:
            return self.slopes
        if alpha is None:
            self.slopes = Slopes.at(moments, self.likelihood.ratios(moments))
        else:
            m, v, sites = moments.m, moments.v, moments.sites
            removal = removable(alpha, sites.lambda_2, v, self.prior_variance)
            if removal.num_parts:
                moments = moments._replace(part=removal.part)
            ratios, bar = removal.pull_back(self.likelihood.ratios(moments), m, v, sites)
            found = Slopes.at(moments, ratios)
            self.slopes = found._replace(prior_variance_bar=bar, num_parts=removal.num_parts)
        return self.slopes

    @functools.cached_property
    def prior_variance(self) -> Array:
        """``diag AᵀA``, ``[N, L]``."""
        found = np.stack([squared_norms(p.A) for p in self.projections], 1)
        return np.broadcast_to(found, self.mean.shape)


class Local(NamedTuple):
    """A block at one q."""

    q: InducingPosterior
    T: list[Array]
    """``C⁻¹A`` of every latent."""
    moments: Moments

    def of_rows(self, w: Pair) -> tuple[Array, Array]:
        """``Tᵀa`` and ``diag TᵀBT``, ``[L, N]`` each."""
        a = [project(t, x) for t, x in zip(self.T, w.a, strict=True)]
        squares = [quadratic_forms(t, B) for t, B in zip(self.T, w.B, strict=True)]
        return np.stack(a), np.stack(squares)

    def summed(self, x: Array, y: Array) -> Pair:
        """``Σ T x`` and ``Σ y T Tᵀ`` from ``[L, N]``."""
        return Pair(
            np.stack([combine(t, each) for t, each in zip(self.T, x, strict=True)]),
            np.stack([weighted_gram(t, each) for t, each in zip(self.T, y, strict=True)]),
        )


class Slopes(NamedTuple):
    """What ``φ = ℓ_α + E_q[log t]`` changes with the marginals, also by way of the sites."""

    ratios: RatioGradients
    weights: SiteWeights
    """Of ``∂E/∂m`` and ``−2 ∂E/∂v``."""
    moments: Moments
    prior_variance_bar: Array | None = None
    """What φ changes with the prior's variances but by way of q, where it does."""
    num_parts: int = 0
    """Data whose sites are not taken out of q as a whole."""

    @classmethod
    def at(cls, moments: Moments, ratios: RatioGradients) -> Slopes:
        """``c₁ = d₁`` and ``c₂ = d₂ + m d₁``, with d the derivatives in λ₁ and λ₂."""
        m, v = moments.m, moments.v
        d1, d2 = ratios.lambda_1 + m, ratios.lambda_2 - 0.5 * (m * m + v)
        return cls(ratios, SiteWeights(d1, d2 + m * d1), moments)

    def in_marginals(self, weights: SiteWeights) -> tuple[Array, Array]:
        """Derivatives of φ in m and v ``[N, L]``, with such weights on ``∂E/∂m`` and ``∂E/∂v``."""
        moments = self.moments
        mm, mv, vm, vv = moments.curvature
        a, b = (x.T for x in weights)
        own = moments.sites.lambda_2 * (self.ratios.lambda_1 + moments.m)
        into_m = per_datum(mm, a, True) - 2.0 * per_datum(vm, b, True)
        into_v = per_datum(mv, a, True) - 2.0 * per_datum(vv, b, True)
        return (
            self.ratios.m + moments.E.mean + own + into_m.T,
            self.ratios.v + moments.E.variance + into_v.T,
        )


def total(parts: Iterable[Any]) -> Any:
    """The sum of tuples of numbers, arrays, lists and further such tuples."""
    found = None
    for part in parts:
        found = part if found is None else _add(found, part)
    return found


def _add(x: Any, y: Any) -> Any:
    if isinstance(x, tuple):
        return type(x)(*(_add(a, b) for a, b in zip(x, y, strict=True)))
    if isinstance(x, list):
        return [_add(a, b) for a, b in zip(x, y, strict=True)]
    return x + y
