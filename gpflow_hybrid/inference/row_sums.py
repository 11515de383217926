"""Sums over the rows of the data, block by block: all that a sparse model needs of them.

With ``T = C⁻¹A`` of a block, ``P = C Cᵀ`` the precision of q(w), the marginals of the projections are
``Tᵀh`` and ``diag TᵀT``. Changes of q are pairs ``(a, B)`` that move them by ``Tᵀa`` and ``−diag TᵀBT``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from gpflow.likelihoods import Likelihood

from ..likelihoods.expectations import expected_log_site
from ..likelihoods.first_sites import first_sites_on_arrays
from ..likelihoods.projected import Maker, Moments, SiteWeights
from ..likelihoods.ratios import cavity
from ..linalg.products import combine, product, solve_lower, weighted_gram
from ..priors.inducing import InducingPrior, ProjectionBar
from ..priors.protocol import Array
from ..rows import DataRows
from .blocks import Block, total
from .inducing import ExpectationSums, InducingPosterior, Pair, SummedSites
from .newton import per_datum
from .projected_rows import ProjectedRows


class ObjectiveSums(NamedTuple):
    """Over all rows, at the fixed point."""

    value: float
    """``Σ φ``, with ``φ = ℓ_α + E_q[log t]`` at the sites that q says."""
    slope: Pair
    """What ``φ − E`` changes with q: the ELBO is stationary."""
    num_parts: int
    """Data whose sites are taken out of q in part."""
    num_data: int


class SiteSummary(NamedTuple):
    """Of the sites of all data."""

    smallest_cavity: float
    num_negative: int
    inner_error: float
    """Of the logarithm of a likelihood of projections, where it is a sum over nodes."""


class MissingCavities(NamedTuple):
    """The first datum without a cavity, its ``1/v − αλ₂``, and how many there are."""

    n: int
    latent: int
    precision: float
    number: int


class GradientSums(NamedTuple):
    """Derivatives of the objective at constant q: what
    :meth:`~gpflow_hybrid.priors.inducing.InducingPrior.in_variables` takes, and in the likelihood's
    parameters."""

    rows: list[Array]
    factor_products: list[Array]
    parameters: list[Array]


class RowSums:
    """The rows in blocks, at one setting of the hyperparameters.

    :param rows: read again for every sum if their projections are too large to keep.
    :param alpha: the power of the objective.
    :param in_parts: whether slopes and gradients are those of an objective that takes sites out of q in
        part where need be, see :mod:`~gpflow_hybrid.inference.removal`.
    :param most_kept: bytes of projections that are kept; ``tuning.KEPT_PROJECTIONS`` by default.
    :param most_threads: that take blocks, each with one of BLAS'; as many as there are cores by default.
    """

    def __init__(
        self,
        prior: InducingPrior,
        make: Maker,
        rows: DataRows,
        alpha: float,
        in_parts: bool = False,
        most_kept: int | None = None,
        most_threads: int | None = None,
    ) -> None:
        self.prior, self.rows, self.alpha = prior, rows, alpha
        self.power_of_parts = alpha if in_parts else None
        self.blocks = ProjectedRows(prior, make, rows, most_kept, most_threads)

    def _sum(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Over all blocks, of tuples that add up."""
        with contextlib.closing(self.blocks.each(function, *arguments)) as parts:
            return total(parts)

    def expectations(
        self, q: InducingPosterior, largest_variance: float = np.inf
    ) -> ExpectationSums:
        """``Σ E`` and the natural-gradient map."""
        return self._sum(self._expectations, q, largest_variance)

    def _expectations(self, block: Block, q: InducingPosterior, largest: float) -> ExpectationSums:
        if np.isfinite(largest):
            _, m, v = block.marginals(q)
            E = block.likelihood.expectations(m, v, largest)
        else:
            m, _, E, *_ = block.at(q).moments
        lambda_2 = -2.0 * E.variance
        lambda_1 = E.mean + lambda_2 * (m - block.mean)
        A = [block.projection(i) for i in range(len(q.h))]
        return ExpectationSums(
            np.sum(E.value),
            SummedSites(
                np.stack([combine(each, x) for each, x in zip(A, lambda_1.T, strict=True)]),
                np.stack([weighted_gram(each, x) for each, x in zip(A, lambda_2.T, strict=True)]),
            ),
        )

    def suggested(self, likelihood: Likelihood) -> SummedSites:
        """Sites of f that a likelihood suggests for every datum, as they say it of its projection:
        ``(∫ N(f; a, k̃) t(f)^α df)^{1/α}`` has ``λ/(1 + αλ₂k̃)``."""
        return self._sum(self._suggested, likelihood)

    def _suggested(self, block: Block, likelihood: Likelihood) -> SummedSites:
        lambda_1, lambda_2 = first_sites_on_arrays(likelihood, block.Y, block.mean)
        residual = np.stack([p.residual for p in block.projections], 1)
        weight = 1.0 / (1.0 + self.alpha * lambda_2 * residual)
        A = [block.projection(i) for i in range(lambda_1.shape[1])]
        x = (weight * (lambda_1 - lambda_2 * block.mean)).T
        y = (weight * lambda_2).T
        return SummedSites(
            np.stack([combine(*each) for each in zip(A, x, strict=True)]),
            np.stack([weighted_gram(*each) for each in zip(A, y, strict=True)]),
        )

    def values(self, q: InducingPosterior) -> float:
        """``Σ φ``, or ``Σ E`` for α = 0; NaN where a cavity does not exist."""
        return float(self._sum(self._value, q))

    def _value(self, block: Block, q: InducingPosterior) -> float:
        at = block.at(q).moments
        if self.alpha == 0.0:
            return float(np.sum(at.E.value))
        return float(block.likelihood.ratios(at).value + _expected_log_sites(at))

    def loo_log_predictive_density(self, q: InducingPosterior) -> float:
        """``Σ log ∫ q₋ₙ(a) p̃(yₙ|a) da`` from the cavities; α = 1, NaN where one does not exist."""
        return float(self._sum(self._loo_log_predictive_density, q))

    @staticmethod
    def _loo_log_predictive_density(block: Block, q: InducingPosterior) -> float:
        at = block.at(q).moments
        # E_q[p̃/t] = E_q[1/t] ∫ q₋ₙ p̃
        scale = cavity(at.m, at.v, *at.sites, 1.0).log_scale_over_alpha
        return float(block.likelihood.ratios(at).value - np.sum(scale))

    def sites(self, q: InducingPosterior) -> SiteSummary:
        """Of the sites that q says of every datum."""
        return summarised(list(self.blocks.each(self._sites, q)))

    @staticmethod
    def _sites(block: Block, q: InducingPosterior) -> SiteSummary:
        at = block.at(q).moments
        lambda_2 = at.sites.lambda_2
        error = block.likelihood.inner_error(at.m)
        return SiteSummary(float(np.min(1.0 / at.v - lambda_2)), int(np.sum(lambda_2 < 0)), error)

    def missing_cavities(self, q: InducingPosterior) -> MissingCavities | None:
        """Where ``1/v − αλ₂`` is not positive at the sites that q says, if anywhere."""
        found, start = [], 0
        for num_rows, missing in self.blocks.each(self._missing_cavities, q):
            if missing is not None:
                found.append(missing._replace(n=start + missing.n))
            start += num_rows
        return found[0]._replace(number=sum(x.number for x in found)) if found else None

    def _missing_cavities(
        self, block: Block, q: InducingPosterior
    ) -> tuple[int, MissingCavities | None]:
        """The rows of a block, and those without a cavity."""
        at = block.at(q).moments
        precision = 1.0 / at.v - self.alpha * at.sites.lambda_2
        bad = np.argwhere(~(precision > 0.0))
        if not len(bad):
            return len(at.v), None
        n, latent = map(int, bad[0])
        return len(at.v), MissingCavities(n, latent, float(precision[n, latent]), len(bad))

    def product(self, q: InducingPosterior, x: Pair) -> Pair:
        """``(∂G/∂q) x``."""
        return self._sum(self._product, q, x)

    @staticmethod
    def _product(block: Block, q: InducingPosterior, x: Pair) -> Pair:
        at = block.at(q, curvature=True)
        dm, squares = at.of_rows(x)
        dv = -squares
        mm, mv, vm, vv = at.moments.curvature
        into_a = per_datum(mm, dm) + at.moments.sites.lambda_2.T * dm + per_datum(mv, dv)
        return at.summed(into_a, -2.0 * (per_datum(vm, dm) + per_datum(vv, dv)))

    def transpose_product(self, q: InducingPosterior, w: Pair) -> Pair:
        """``(∂G/∂q)ᵀ w``."""
        return self._sum(self._transpose_product, q, w)

    @staticmethod
    def _transpose_product(block: Block, q: InducingPosterior, w: Pair) -> Pair:
        at = block.at(q, curvature=True)
        wa, wb = at.of_rows(w)
        mm, mv, vm, vv = at.moments.curvature
        into_m = per_datum(mm, wa, True) + at.moments.sites.lambda_2.T * wa
        into_m -= 2.0 * per_datum(vm, wb, True)
        return at.summed(into_m, 2.0 * per_datum(vv, wb, True) - per_datum(mv, wa, True))

    def linearise(self, q: InducingPosterior) -> ObjectiveSums:
        """The objective and how it changes with q; α > 0."""
        return self._sum(self._linearise, q)

    def _linearise(self, block: Block, q: InducingPosterior) -> ObjectiveSums:
        slopes, at = block.slopes_at(q, self.power_of_parts), block.at(q)
        E = at.moments.E
        m_bar, v_bar = slopes.in_marginals(slopes.weights)
        slope = at.summed((m_bar - E.mean).T, (E.variance - v_bar).T)
        value = slopes.ratios.value + _expected_log_sites(at.moments)
        return ObjectiveSums(value, slope, slopes.num_parts, len(block.X))

    def pull_back(self, q: InducingPosterior, w: Pair | None) -> GradientSums:
        """Of ``Σ φ + wᵀG``, or of ``Σ E`` where there are no weights."""
        return self._sum(self._pull_back, q, w)

    def _pull_back(self, block: Block, q: InducingPosterior, w: Pair | None) -> GradientSums:
        k_bar = None
        if w is None:
            at = block.at(q)
            m_bar, v_bar = at.moments.E.mean, at.moments.E.variance
            pulled = block.likelihood.pull_back(at.moments, None)
        else:
            slopes, at = block.slopes_at(q, self.power_of_parts), block.at(q)
            k_bar = slopes.prior_variance_bar
            wa, wb = at.of_rows(w)
            weights = SiteWeights(slopes.weights.a + wa.T, slopes.weights.b + wb.T)
            m_bar, v_bar = slopes.in_marginals(weights)
            pulled = block.likelihood.pull_back(slopes.moments, weights)
        num_parts = len(block.projections)
        A_bars: list[Any] = [0.0] * num_parts
        for i, (t, C) in enumerate(zip(at.T, q.chol, strict=True)):
            t_bar = 2.0 * t * v_bar[:, i]
            t_bar += np.outer(q.h[i], m_bar[:, i])
            if w is not None:
                t_bar += np.outer(w.a[i], at.moments.E.mean[:, i])
                t_bar += product(w.B[i], t * (2.0 * at.moments.sites.lambda_2[:, i]))
            part = 0 if num_parts == 1 else i
            A_bars[part] = A_bars[part] + solve_lower(C, t_bar, transpose=True)
            if k_bar is not None:
                A_bars[part] += 2.0 * block.projection(i) * k_bar[:, i]
        residual = pulled.variance.T
        residual = np.sum(residual, 0, keepdims=True) if num_parts == 1 else residual
        bars = [ProjectionBar(*x) for x in zip(A_bars, residual, strict=True)]
        A = [p.A for p in block.projections]
        found, products = self.prior.pull_back_rows(block.X, A, bars, m_bar)
        return GradientSums(found, products, pulled.parameters)


def _expected_log_sites(at: Moments) -> float:
    return float(np.sum(expected_log_site(at.m, at.v, *at.sites)))


def summarised(found: Sequence[SiteSummary]) -> SiteSummary:
    """Of all data from that of parts."""
    return SiteSummary(
        min(x.smallest_cavity for x in found),
        sum(x.num_negative for x in found),
        max(x.inner_error for x in found),
    )
