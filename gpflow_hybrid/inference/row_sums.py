"""Sums over the rows of the data, block by block: all that a sparse model needs of them.

With ``T = C⁻¹A`` of a block, ``P = C Cᵀ`` the precision of q(w), the marginals of the projections are
``Tᵀh`` and ``diag TᵀT``. Changes of q are pairs ``(a, B)`` that move them by ``Tᵀa`` and ``−diag TᵀBT``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from .. import tuning
from ..likelihoods.expectations import expected_log_site
from ..likelihoods.projected import Maker, SiteWeights
from ..linalg.threads import blas_threads_for
from ..priors.inducing import InducingPrior, ProjectionBar, solve_lower
from ..priors.protocol import Array
from ..rows import DataRows
from .blocks import Block, Local, Slopes, total, weighted_gram
from .inducing import ExpectationSums, InducingPosterior, Pair, SummedSites
from .newton import per_datum


class ObjectiveSums(NamedTuple):
    """Over all rows, at the fixed point."""

    value: float
    """``Σ φ``, with ``φ = ℓ_α + E_q[log t]`` at the sites that q says."""
    slope: Pair
    """What ``φ − E`` changes with q: the ELBO is stationary."""


class SiteSummary(NamedTuple):
    """Of the sites of all data."""

    smallest_cavity: float
    num_negative: int
    inner_error: float
    """Of the logarithm of a likelihood of projections, where it is a sum over nodes."""


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
    """

    def __init__(self, prior: InducingPrior, make: Maker, rows: DataRows, alpha: float) -> None:
        self.prior, self.make, self.rows, self.alpha = prior, make, rows, alpha
        self.rows_of_block = max(256, tuning.PROJECTED_ELEMENTS // len(prior.chol[0]))
        self._kept: list[Block] | None = None

    def _sum(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Over all blocks, of tuples that add up."""
        size = min(self.rows.num_rows, self.rows_of_block) * len(self.prior.chol[0])
        with blas_threads_for(size):
            return total(function(block, *arguments) for block in self._blocks())

    def _blocks(self) -> Iterator[Block]:
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[Block] = []
        size = 0
        for X, Y in self.rows.blocks(self.rows_of_block):
            projections, mean = self.prior.project(X)
            residual = np.stack([p.residual for p in projections], 1)
            residual = np.ascontiguousarray(np.broadcast_to(residual, mean.shape))
            block = Block(X, projections, mean, self.make(X, Y, residual))
            # With T, one for every latent, which is kept as well.
            size += X.nbytes + sum(p.A.nbytes for p in projections)
            size += mean.shape[1] * projections[0].A.nbytes
            if size <= tuning.KEPT_PROJECTIONS:
                kept.append(block)
            else:
                kept.clear()
            yield block
        if size <= tuning.KEPT_PROJECTIONS:
            self._kept = kept

    @staticmethod
    def _marginals(block: Block, q: InducingPosterior) -> tuple[list[Array], Array, Array]:
        """``T`` of every latent; mean, without ``μ₀``, and variance of every projection, ``[N, L]``."""
        T = [solve_lower(C, block.projection(i)) for i, C in enumerate(q.chol)]
        mean = np.stack([t.T @ h for t, h in zip(T, q.h, strict=True)], 1)
        return T, mean, np.stack([np.einsum("mn,mn->n", t, t) for t in T], 1)

    def expectations(
        self, q: InducingPosterior, largest_variance: float = np.inf
    ) -> ExpectationSums:
        """``Σ E`` and the natural-gradient map."""
        return self._sum(self._expectations, q, largest_variance)

    def _expectations(self, block: Block, q: InducingPosterior, largest: float) -> ExpectationSums:
        _, a, v = self._marginals(block, q)
        E = block.likelihood.expectations(a + block.mean, v, largest)
        lambda_2 = -2.0 * E.variance
        lambda_1 = E.mean + lambda_2 * a
        A = [block.projection(i) for i in range(len(q.h))]
        return ExpectationSums(
            np.sum(E.value),
            SummedSites(
                np.stack([each @ x for each, x in zip(A, lambda_1.T, strict=True)]),
                np.stack([weighted_gram(each, x) for each, x in zip(A, lambda_2.T, strict=True)]),
            ),
        )

    def values(self, q: InducingPosterior) -> float:
        """``Σ φ``, or ``Σ E`` for α = 0; NaN where a cavity does not exist."""
        return float(self._sum(self._value, q))

    def _value(self, block: Block, q: InducingPosterior) -> float:
        _, a, v = self._marginals(block, q)
        m = a + block.mean
        E = block.likelihood.expectations(m, v)
        if self.alpha == 0.0:
            return float(np.sum(E.value))
        lambda_2 = -2.0 * E.variance
        sites = (E.mean + lambda_2 * m, lambda_2)
        log_t = np.sum(expected_log_site(m, v, *sites))
        return float(block.likelihood.ratios(m, v, *sites).value + log_t)

    def sites(self, q: InducingPosterior) -> SiteSummary:
        """Of the sites that q says of every datum."""
        cavities, negative, errors = zip(*(self._sites(b, q) for b in self._blocks()), strict=True)
        return SiteSummary(min(cavities), sum(negative), max(errors))

    def _sites(self, block: Block, q: InducingPosterior) -> SiteSummary:
        _, a, v = self._marginals(block, q)
        m = a + block.mean
        lambda_2 = -2.0 * block.likelihood.expectations(m, v).variance
        error = block.likelihood.inner_error(m)
        return SiteSummary(float(np.min(1.0 / v - lambda_2)), int(np.sum(lambda_2 < 0.0)), error)

    def _local(self, block: Block, q: InducingPosterior) -> Local:
        """What was kept with the block, or found now."""
        if block.local is None or block.local.q is not q:
            T, a, v = self._marginals(block, q)
            m = a + block.mean
            E, curvature = block.likelihood.expectations(m, v), block.likelihood.curvature(m, v)
            block.local, block.slopes = Local(q, T, m, v, E, curvature), None
        return block.local

    def _slopes(self, block: Block, local: Local) -> Slopes:
        if block.slopes is None:
            ratios = block.likelihood.ratios(local.m, local.v, *local.sites)
            block.slopes = Slopes.at(local, ratios)
        return block.slopes

    def product(self, q: InducingPosterior, x: Pair) -> Pair:
        """``(∂G/∂q) x``."""
        return self._sum(self._product, q, x)

    def _product(self, block: Block, q: InducingPosterior, x: Pair) -> Pair:
        at = self._local(block, q)
        dm, squares = at.of_rows(x)
        dv = -squares
        mm, mv, vm, vv = at.curvature
        into_a = per_datum(mm, dm) + at.sites.lambda_2.T * dm + per_datum(mv, dv)
        return at.summed(into_a, -2.0 * (per_datum(vm, dm) + per_datum(vv, dv)))

    def transpose_product(self, q: InducingPosterior, w: Pair) -> Pair:
        """``(∂G/∂q)ᵀ w``."""
        return self._sum(self._transpose_product, q, w)

    def _transpose_product(self, block: Block, q: InducingPosterior, w: Pair) -> Pair:
        at = self._local(block, q)
        wa, wb = at.of_rows(w)
        mm, mv, vm, vv = at.curvature
        into_m = per_datum(mm, wa, True) + at.sites.lambda_2.T * wa - 2.0 * per_datum(vm, wb, True)
        return at.summed(into_m, 2.0 * per_datum(vv, wb, True) - per_datum(mv, wa, True))

    def linearise(self, q: InducingPosterior) -> ObjectiveSums:
        """The objective and how it changes with q; α > 0."""
        return self._sum(self._linearise, q)

    def _linearise(self, block: Block, q: InducingPosterior) -> ObjectiveSums:
        at = self._local(block, q)
        slopes = self._slopes(block, at)
        m_bar, v_bar = slopes.in_marginals(at, slopes.weights)
        slope = at.summed((m_bar - at.E.mean).T, (at.E.variance - v_bar).T)
        log_t = np.sum(expected_log_site(at.m, at.v, *at.sites))
        return ObjectiveSums(slopes.ratios.value + log_t, slope)

    def pull_back(self, q: InducingPosterior, w: Pair | None) -> GradientSums:
        """Of ``Σ φ + wᵀG``, or of ``Σ E`` where there are no weights."""
        return self._sum(self._pull_back, q, w)

    def _pull_back(self, block: Block, q: InducingPosterior, w: Pair | None) -> GradientSums:
        if w is None:
            T, a, v = self._marginals(block, q)
            m = a + block.mean
            E = block.likelihood.expectations(m, v)
            m_bar, v_bar = E.mean, E.variance
            pulled = block.likelihood.pull_back(m, v, (m, v), None)
        else:
            at = self._local(block, q)
            T, slopes = at.T, self._slopes(block, at)
            wa, wb = at.of_rows(w)
            weights = SiteWeights(slopes.weights.a + wa.T, slopes.weights.b + wb.T)
            m_bar, v_bar = slopes.in_marginals(at, weights)
            pulled = block.likelihood.pull_back(at.m, at.v, at.sites, weights)
        num_parts = len(block.projections)
        A_bars: list[Any] = [0.0] * num_parts
        for i, (t, C) in enumerate(zip(T, q.chol, strict=True)):
            t_bar = np.outer(q.h[i], m_bar[:, i]) + 2.0 * t * v_bar[:, i]
            if w is not None:
                t_bar += np.outer(w.a[i], at.E.mean[:, i])
                t_bar += (w.B[i] @ t) * (2.0 * at.sites.lambda_2[:, i])
            part = 0 if num_parts == 1 else i
            A_bars[part] = A_bars[part] + solve_lower(C, t_bar, transpose=True)
        residual = pulled.variance.T
        residual = np.sum(residual, 0, keepdims=True) if num_parts == 1 else residual
        bars = [ProjectionBar(*x) for x in zip(A_bars, residual, strict=True)]
        A = [p.A for p in block.projections]
        found, products = self.prior.pull_back_rows(block.X, A, bars, m_bar)
        return GradientSums(found, products, pulled.parameters)
