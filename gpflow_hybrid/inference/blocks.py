"""A block of rows of a sparse model, and what is known of it at one q; how such things add up."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from ..likelihoods.expectations import ExpectationGradients
from ..likelihoods.projected import ProjectedLikelihood, SiteWeights
from ..likelihoods.ratio_gradients import RatioGradients
from ..priors.inducing import Projection
from ..priors.protocol import Array
from ..sites import SiteValues
from .inducing import InducingPosterior, Pair
from .newton import per_datum


@dataclasses.dataclass
class Block:
    """Some rows, projected."""

    X: Array
    projections: list[Projection]
    mean: Array  # μ₀ [N, L]
    likelihood: ProjectedLikelihood
    local: Local | None = None
    """At the last q that was asked for more than expectations."""
    slopes: Slopes | None = None

    def projection(self, latent: int) -> Array:
        """``A`` of a latent."""
        return self.projections[0 if len(self.projections) == 1 else latent].A


class Local(NamedTuple):
    """The marginals of a block's projections and the expectations there, with their curvature."""

    q: InducingPosterior
    T: list[Array]
    """``C⁻¹A`` of every latent."""
    m: Array
    v: Array
    E: ExpectationGradients
    curvature: tuple[Array, ...]

    @property
    def sites(self) -> SiteValues:
        """``λ₁`` and ``λ₂`` that q says of every datum, ``[N, L]``."""
        lambda_2 = -2.0 * self.E.variance
        return SiteValues(self.E.mean + lambda_2 * self.m, lambda_2)

    def of_rows(self, w: Pair) -> tuple[Array, Array]:
        """``Tᵀa`` and ``diag TᵀBT``, ``[L, N]`` each."""
        a = np.stack([t.T @ x for t, x in zip(self.T, w.a, strict=True)])
        squares = (np.einsum("mn,mn->n", t, B @ t) for t, B in zip(self.T, w.B, strict=True))
        return a, np.stack(list(squares))

    def summed(self, x: Array, y: Array) -> Pair:
        """``Σ T x`` and ``Σ y T Tᵀ`` from ``[L, N]``."""
        return Pair(
            np.stack([t @ each for t, each in zip(self.T, x, strict=True)]),
            np.stack([weighted_gram(t, each) for t, each in zip(self.T, y, strict=True)]),
        )


class Slopes(NamedTuple):
    """What ``φ = ℓ_α + E_q[log t]`` changes with the marginals, also by way of the sites."""

    ratios: RatioGradients
    weights: SiteWeights
    """Of ``∂E/∂m`` and ``−2 ∂E/∂v``."""

    @classmethod
    def at(cls, local: Local, ratios: RatioGradients) -> Slopes:
        """``c₁ = d₁`` and ``c₂ = d₂ + m d₁``, with d the derivatives in λ₁ and λ₂."""
        m, v = local.m, local.v
        d1, d2 = ratios.lambda_1 + m, ratios.lambda_2 - 0.5 * (m * m + v)
        return cls(ratios, SiteWeights(d1, d2 + m * d1))

    def in_marginals(self, local: Local, weights: SiteWeights) -> tuple[Array, Array]:
        """Derivatives of φ in m and v ``[N, L]``, with such weights on ``∂E/∂m`` and ``∂E/∂v``."""
        mm, mv, vm, vv = local.curvature
        a, b = (x.T for x in weights)
        own = local.sites.lambda_2 * (self.ratios.lambda_1 + local.m)
        into_m = per_datum(mm, a, True) - 2.0 * per_datum(vm, b, True)
        into_v = per_datum(mv, a, True) - 2.0 * per_datum(vv, b, True)
        return (
            self.ratios.m + local.E.mean + own + into_m.T,
            self.ratios.v + local.E.variance + into_v.T,
        )


def weighted_gram(A: Array, weights: Array) -> Array:
    """``A diag(x) Aᵀ`` for weights of either sign, by symmetric products."""
    negative = weights < 0.0
    if not negative.any():
        B = A * np.sqrt(weights)
        return B @ B.T
    B, C = (A[:, s] * np.sqrt(np.abs(weights[s])) for s in (~negative, negative))
    return B @ B.T - C @ C.T


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
