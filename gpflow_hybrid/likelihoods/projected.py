"""What a sparse model asks of a likelihood: the likelihood of the projections of some data.

For data with residual variances ``k̃`` and the marginals ``N(m, v)`` of their projections a,

    E(m, v) = E_q(a)[log p̃(a)],     ℓ_α = (1/α) log E_q(a)[(p̃(a)/t(a))^α]

with ``p̃`` of :mod:`~gpflow_hybrid.likelihoods.marginalised`. As α → 0, ``log p̃ = E_N(f; a, k̃)[log p]`` and
E is the likelihood's own expectation at ``(m, v + k̃)``: SVGP's.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from typing import NamedTuple

from ..sites import SiteValues
from .density import Array
from .expectations import ExpectationGradients
from .marginalised import Pulled
from .ratio_gradients import RatioGradients


class Moments(NamedTuple):
    """The marginals of some projections ``[N, L]``, and the expectations there."""

    m: Array
    v: Array
    E: ExpectationGradients
    curvature: tuple[Array, ...] = ()
    """``E_mm``, ``E_mv``, ``E_vm`` and ``E_vv``, ``[N, L, L]``, where they were asked for."""
    part: Array | None = None
    """``s``, the part of every site that ratios take out of q, if it is not the whole."""

    @property
    def sites(self) -> SiteValues:
        """``λ₁ = E_m + λ₂m`` and ``λ₂ = −2 E_v``: what q says of every datum, ``[N, L]``."""
        lambda_2 = -2.0 * self.E.variance
        return SiteValues(self.E.mean + lambda_2 * self.m, lambda_2)

    @property
    def removed(self) -> SiteValues:
        """``sλ``: what ratios take out of q."""
        return self.sites if self.part is None else SiteValues(*(self.part * x for x in self.sites))


class SiteWeights(NamedTuple):
    """Weights of ``∂E/∂m`` and of ``∂E/∂v`` in a function that is differentiated, ``[N, L]``: that of the
    latter is ``−2 b``."""

    a: Array
    b: Array


class ProjectedLikelihood(abc.ABC):
    """The likelihood of the projections of some data."""

    @abc.abstractmethod
    def expectations(self, m: Array, v: Array, largest: float = math.inf) -> ExpectationGradients:
        """``E [N]``, ``∂E/∂m`` and ``∂E/∂v`` ``[N, L]``.

        :param largest: variances are taken for no more than this.
        """

    @abc.abstractmethod
    def curvature(self, at: Moments) -> tuple[Array, ...]:
        """``E_mm``, ``E_mv``, ``E_vm`` and ``E_vv``, ``[N, L, L]``."""

    @abc.abstractmethod
    def ratios(self, at: Moments) -> RatioGradients:
        """``Σ ℓ_α`` and its derivatives, ``[N, L]``; NaN where a cavity does not exist."""

    @abc.abstractmethod
    def pull_back(self, at: Moments, weights: SiteWeights | None) -> Pulled:
        """Derivatives in ``k̃`` and the parameters of ``Σ ℓ_α + Σ a E_m − 2 b E_v``, or of ``Σ E`` alone
        where there are no weights."""

    def inner_error(self, m: Array) -> float:
        """The largest error of ``log p̃`` at the means, where it is a sum over nodes."""
        return 0.0


Maker = Callable[[Array, Array, Array], ProjectedLikelihood]
"""A projected likelihood from X, Y and ``k̃`` of some data."""
