"""Sums over the rows of the data, block by block: all that a sparse model needs of them.

With ``T = C⁻¹A`` of a block, ``P = C Cᵀ`` the precision of q(w), the marginals of the projections are
``Tᵀh`` and ``diag TᵀT``. Changes of q are pairs ``(a, B)`` that move them by ``Tᵀa`` and ``−diag TᵀBT``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from .. import tuning
from ..likelihoods.expectations import ExpectationGradients
from ..likelihoods.projections import Maker, ProjectedLikelihood, SiteWeights
from ..likelihoods.ratio_gradients import RatioGradients
from ..linalg.threads import blas_threads_for
from ..priors.inducing import InducingPrior, Projection, ProjectionBar, solve_lower
from ..priors.protocol import Array
from ..rows import DataRows
from .inducing import ExpectationSums, InducingPosterior, SummedSites
from .newton import per_datum


class Pair(NamedTuple):
    """A change of q(w), or weights of one: ``a [L, M]`` and ``B [L, M, M]``."""

    a: Array
    B: Array

    def flat(self) -> Array:
        """All numbers in a row."""
        return np.concatenate([self.a.ravel(), self.B.ravel()])

    @classmethod
    def of_flat(cls, x: Array, num_latent: int) -> Pair:
        """From :meth:`flat`, with as many inducing variables as fit."""
        M = round((np.sqrt(1.0 + 4.0 * x.size / num_latent) - 1.0) / 2.0)
        size = num_latent * M
        return cls(x[:size].reshape(num_latent, M), x[size:].reshape(num_latent, M, M))


@dataclasses.dataclass
class Block:
    """Some rows, projected, and what is known of them at one q."""

    X: Array
    projections: list[Projection]
    mean: Array  # μ₀ [N, L]
    likelihood: ProjectedLikelihood
    at: Linearised | None = None


class Linearised(NamedTuple):
    """Of a block, at the fixed point."""

    m: Array
    v: Array
    E: ExpectationGradients
    curvature: tuple[Array, ...]
    sites: SummedSites | Any
    """``λ₁`` and ``λ₂`` of every datum, ``[N, L]``."""
    ratios: RatioGradients
    T: list[Array]
    weights: SiteWeights
    """``c₁`` and ``c₂`` of ``∂E/∂m`` and ``−2 ∂E/∂v`` in the objective, by way of the sites."""


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


class GradientSums(NamedTuple):
    """Derivatives of the objective at constant q: what
    :meth:`~gpflow_hybrid.priors.inducing.InducingPrior.in_variables` takes, and in the likelihood's parameters."""

    rows: list[Array]
    factor_products: list[Array]
    parameters: list[Array]


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
            size += sum(p.A.nbytes for p in projections)
            if size <= tuning.KEPT_PROJECTIONS:
                kept.append(block)
            yield block
        if size <= tuning.KEPT_PROJECTIONS:
            self._kept = kept

    def _projection(self, block: Block, latent: int) -> Array:
        parts = block.projections
        return parts[0 if len(parts) == 1 else latent].A

    def _whitened(self, block: Block, q: InducingPosterior) -> list[Array]:
        """``T`` of every latent."""
        return [solve_lower(C, self._projection(block, i)) for i, C in enumerate(q.chol)]

    def _marginals(self, block: Block, q: InducingPosterior, T: list[Array]) -> tuple[Array, Array]:
        """Mean and variance of every projection, ``[N, L]``; the former without ``μ₀``."""
        mean = np.stack([t.T @ h for t, h in zip(T, q.h, strict=True)], 1)
        return mean, np.stack([np.einsum("mn,mn->n", t, t) for t in T], 1)

    def expectations(
        self, q: InducingPosterior, largest_variance: float = np.inf
    ) -> ExpectationSums:
        """``Σ E`` and the natural-gradient map."""
        return self._sum(self._expectations, q, largest_variance)

    def _expectations(self, block: Block, q: InducingPosterior, largest: float) -> ExpectationSums:
        a, v = self._marginals(block, q, self._whitened(block, q))
        E = block.likelihood.expectations(a + block.mean, v, largest)
        lambda_2 = -2.0 * E.variance
        lambda_1 = E.mean + lambda_2 * a
        A = [self._projection(block, i) for i in range(len(q.h))]
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
        a, v = self._marginals(block, q, self._whitened(block, q))
        m = a + block.mean
        E = block.likelihood.expectations(m, v)
        if self.alpha == 0.0:
            return float(np.sum(E.value))
        lambda_2 = -2.0 * E.variance
        lambda_1 = E.mean + lambda_2 * m
        log_t = lambda_1 * m - 0.5 * lambda_2 * (m * m + v)
        return float(block.likelihood.ratios(m, v, lambda_1, lambda_2).value + np.sum(log_t))

    def sites(self, q: InducingPosterior) -> SiteSummary:
        """Of the sites that q says of every datum."""
        found = [self._sites(b, q) for b in self._blocks()]
        return SiteSummary(
            min(x.smallest_cavity for x in found), sum(x.num_negative for x in found)
        )

    def _sites(self, block: Block, q: InducingPosterior) -> SiteSummary:
        a, v = self._marginals(block, q, self._whitened(block, q))
        lambda_2 = -2.0 * block.likelihood.expectations(a + block.mean, v).variance
        return SiteSummary(float(np.min(1.0 / v - lambda_2)), int(np.sum(lambda_2 < 0.0)))

    def linearise(self, q: InducingPosterior) -> ObjectiveSums:
        """The objective, how it changes with q, and all that its gradient needs; α > 0."""
        return self._sum(self._linearise, q)

    def _linearise(self, block: Block, q: InducingPosterior) -> ObjectiveSums:
        T = self._whitened(block, q)
        a, v = self._marginals(block, q, T)
        m = a + block.mean
        E = block.likelihood.expectations(m, v)
        curvature = block.likelihood.curvature(m, v)
        lambda_2 = -2.0 * E.variance
        lambda_1 = E.mean + lambda_2 * m
        ratios = block.likelihood.ratios(m, v, lambda_1, lambda_2)
        d1, d2 = ratios.lambda_1 + m, ratios.lambda_2 - 0.5 * (m * m + v)
        weights = SiteWeights(d1, d2 + m * d1)
        block.at = Linearised(m, v, E, curvature, (lambda_1, lambda_2), ratios, T, weights)
        m_bar, v_bar = _marginal_bars(block.at, weights)
        slope = Pair(
            np.stack([t @ x for t, x in zip(T, (m_bar - E.mean).T, strict=True)]),
            -np.stack(
                [weighted_gram(t, x) for t, x in zip(T, (v_bar - E.variance).T, strict=True)]
            ),
        )
        log_t = lambda_1 * m - 0.5 * lambda_2 * (m * m + v)
        return ObjectiveSums(ratios.value + np.sum(log_t), slope)

    def transpose_product(self, q: InducingPosterior, w: Pair) -> Pair:
        """``(∂G/∂q)ᵀ w``, at the q of :meth:`linearise`."""
        return self._sum(self._transpose_product, q, w)

    def _transpose_product(self, block: Block, q: InducingPosterior, w: Pair) -> Pair:
        at = self._at(block, q)
        T = at.T
        wa, wb = self._weights_of_rows(T, w)
        mm, mv, vm, vv = at.curvature
        lambda_2 = at.sites[1].T
        into_m = per_datum(mm, wa, True) + lambda_2 * wa - 2.0 * per_datum(vm, wb, True)
        into_v = per_datum(mv, wa, True) - 2.0 * per_datum(vv, wb, True)
        return Pair(
            np.stack([t @ x for t, x in zip(T, into_m, strict=True)]),
            -np.stack([weighted_gram(t, x) for t, x in zip(T, into_v, strict=True)]),
        )

    def _at(self, block: Block, q: InducingPosterior) -> Linearised:
        """What was kept with the block, or found again."""
        if block.at is None:
            self._linearise(block, q)
        assert block.at is not None
        return block.at

    @staticmethod
    def _weights_of_rows(T: list[Array], w: Pair) -> tuple[Array, Array]:
        """``Tᵀa`` and ``diag TᵀBT``, ``[L, N]`` each."""
        a = np.stack([t.T @ x for t, x in zip(T, w.a, strict=True)])
        return a, np.stack([np.einsum("mn,mn->n", t, B @ t) for t, B in zip(T, w.B, strict=True)])

    def pull_back(self, q: InducingPosterior, w: Pair | None) -> GradientSums:
        """Of ``Σ φ + wᵀG``, or of ``Σ E`` where there are no weights."""
        return self._sum(self._pull_back, q, w)

    def _pull_back(self, block: Block, q: InducingPosterior, w: Pair | None) -> GradientSums:
        if w is None:
            T = self._whitened(block, q)
            a, v = self._marginals(block, q, T)
            m = a + block.mean
            E = block.likelihood.expectations(m, v)
            m_bar, v_bar = E.mean, E.variance
            pulled = block.likelihood.pull_back(m, v, (m, v), None)
        else:
            at = self._at(block, q)
            T = at.T
            wa, wb = self._weights_of_rows(T, w)
            weights = SiteWeights(at.weights.a + wa.T, at.weights.b + wb.T)
            m_bar, v_bar = _marginal_bars(at, weights)
            pulled = block.likelihood.pull_back(at.m, at.v, at.sites, weights)
        num_parts = len(block.projections)
        A_bars: list[Any] = [0.0] * num_parts
        for i, (t, C) in enumerate(zip(T, q.chol, strict=True)):
            t_bar = np.outer(q.h[i], m_bar[:, i]) + 2.0 * t * v_bar[:, i]
            if w is not None:
                t_bar += np.outer(w.a[i], at.E.mean[:, i])
                t_bar += (w.B[i] @ t) * (2.0 * at.sites[1][:, i])
            part = 0 if num_parts == 1 else i
            A_bars[part] = A_bars[part] + solve_lower(C, t_bar, transpose=True)
        residual = pulled.variance.T
        residual = np.sum(residual, 0, keepdims=True) if num_parts == 1 else residual
        bars = [ProjectionBar(*x) for x in zip(A_bars, residual, strict=True)]
        A = [p.A for p in block.projections]
        found, products = self.prior.pull_back_rows(block.X, A, bars, m_bar)
        return GradientSums(found, products, pulled.parameters)


def _marginal_bars(at: Linearised, weights: SiteWeights) -> tuple[Array, Array]:
    """Derivatives of ``φ`` in m and v, with further weights on ``∂E/∂m`` and ``∂E/∂v``."""
    mm, mv, vm, vv = at.curvature
    a, b = (x.T for x in weights)
    own = at.sites[1] * (at.ratios.lambda_1 + at.m)
    into_m = per_datum(mm, a, True) - 2.0 * per_datum(vm, b, True)
    into_v = per_datum(mv, a, True) - 2.0 * per_datum(vv, b, True)
    return at.ratios.m + at.E.mean + own + into_m.T, at.ratios.v + at.E.variance + into_v.T


def weighted_gram(A: Array, weights: Array) -> Array:
    """``A diag(x) Aᵀ`` for weights of either sign, by symmetric products."""
    negative = weights < 0.0
    if not negative.any():
        B = A * np.sqrt(weights)
        return B @ B.T
    B, C = (A[:, s] * np.sqrt(np.abs(weights[s])) for s in (~negative, negative))
    return B @ B.T - C @ C.T
