"""How the likelihood of projections is made: which form serves which likelihood and power."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from gpflow.likelihoods import Likelihood, MultiClass, ScalarLikelihood
from gpflow.quadrature import NDiagGHQuadrature

from .. import tuning
from ..errors import InvalidDataError
from ..stand_ins import floating_variables, parameters_of
from .averaged import Averaged
from .densities import density_of, values_of
from .density import Array, Density
from .expectations import ExpectationGradients
from .marginalised import (
    ByNodes,
    ClosedForm,
    Largest,
    Projected,
    Pulled,
    Taped,
    gradients_of,
    inner_rule,
)
from .marginalised_probit import MarginalisedProbit
from .node_rules import (
    NodeRule,
    PointDerivatives,
    curvature_by,
    expectation_gradients_by,
    own_rule,
)
from .nodes import NUM_NODES, covering_nodes, hermite_product, mirrored_points, normalised
from .probit import ProbitBernoulli
from .projected import Maker, Moments, ProjectedLikelihood, SiteWeights
from .ratio_gradients import RatioGradients
from .ratios import cavity, has_cavity

NUM_OUTER_COUPLED = {2: 10, 3: 5}
"""Gauss–Hermite nodes per latent under q of likelihoods that couple so many."""

NUM_OUTER_POINTS = 256
"""Points under q where a product rule would be too large."""

SMALL_LEVERAGE = 0.5
"""``αλ₂v`` up to which the likelihood's own nodes for q resolve the cavity as well."""


class TiltedNodes(NamedTuple):
    """Nodes under q, ``log p̃`` there, and the weights ``π ∝ w (p̃/t)^α`` of the data that they serve; zero
    for all others."""

    nodes: Array  # [Q, N, L]
    at: PointDerivatives
    weights: Array  # [Q, N, L] for a scalar likelihood, else [Q, N]
    value: Array  # (1/α) log Σ w (p̃/t)^α


class Marginalised(ProjectedLikelihood):
    """``p̃_α`` with sums over nodes of q."""

    def __init__(self, projected: Projected, rule: NodeRule, is_scalar: bool, alpha: float) -> None:
        self.projected, self.rule = projected, rule
        self.is_scalar, self.alpha = is_scalar, alpha

    def expectations(self, m: Array, v: Array, largest: float = math.inf) -> ExpectationGradients:
        v = np.minimum(v, largest)
        return ExpectationGradients(*expectation_gradients_by(self.rule, self.projected.at, m, v))

    def curvature(self, at: Moments) -> tuple[Array, ...]:
        return curvature_by(self.rule, self.projected.at, at.m, at.v)

    def _rules(self, at: Moments) -> Iterator[tuple[Any, Any, Any]]:
        """Nodes ``[Q, N, L]`` and log weights of q, with the data that each serves: the likelihood's own
        where they resolve the cavity, such that cover it too elsewhere."""
        leverage = self.alpha * at.removed.lambda_2 * at.v
        large = self.is_scalar & (leverage > SMALL_LEVERAGE)
        if not large.all():
            log_weights = np.log(self.rule.weights)
            axes = (1,) * (2 if self.is_scalar else 1)
            nodes = at.m + np.sqrt(at.v) * self.rule.z[:, None, :]
            yield nodes, log_weights.reshape(-1, *axes), ~large
        if large.any():
            cav = cavity(at.m, at.v, *at.removed, self.alpha)
            nodes, log_weights = covering_nodes(at.m, at.v, cav.mean, cav.variance, NUM_NODES[1])
            yield nodes, log_weights, large

    def _tilted(self, at: Moments) -> Iterator[TiltedNodes]:
        lambda_1, lambda_2 = at.removed
        for nodes, log_weights, served in self._rules(at):
            found = self.projected.at(nodes, False)
            log_t = (lambda_1 - 0.5 * lambda_2 * nodes) * nodes
            finite = np.isfinite(found.log_prob)
            h = np.where(finite, found.log_prob, 0.0)
            h = h - (log_t if self.is_scalar else np.sum(log_t, -1))
            weights, total = normalised(np.where(finite, log_weights + self.alpha * h, -np.inf))
            if self.is_scalar:
                weights, total = np.where(served, weights, 0.0), np.where(served, total, 0.0)
            yield TiltedNodes(nodes, found, weights, total / self.alpha)

    def ratios(self, at: Moments) -> RatioGradients:
        lambda_1, lambda_2 = at.removed
        value, d_m, d_v, d_1, d_2 = 0.0, *(np.zeros_like(at.m) for _ in range(4))
        for nodes, found, pi, values in self._tilted(at):
            pi = pi if self.is_scalar else pi[..., None]
            d_h = np.where(pi > 0.0, found.first - (lambda_1 - lambda_2 * nodes), 0.0)
            value += np.sum(values)
            d_m += np.sum(pi * d_h, 0)
            d_v += np.sum(pi * d_h * (nodes - at.m), 0) / (2.0 * at.v)
            d_1 -= np.sum(pi * nodes, 0)
            d_2 += 0.5 * np.sum(pi * nodes * nodes, 0)
        exists = np.all(has_cavity(at.v, lambda_2, self.alpha))
        return RatioGradients(value if exists else np.nan, d_m, d_v, d_1, d_2)

    def pull_back(self, at: Moments, weights: SiteWeights | None) -> Pulled:
        z, w = self.rule.z[:, None, :], self.rule.weights
        nodes = at.m + np.sqrt(at.v) * z
        shape = nodes.shape if self.is_scalar else nodes.shape[:2]
        if weights is None:
            log_bar = np.broadcast_to(w.reshape(-1, *(1,) * (len(shape) - 1)), shape)
            return self.projected.pull_back(nodes, log_bar, np.zeros(nodes.shape))
        a, b = weights
        first_bar = w[:, None, None] * (a - b * z / np.sqrt(at.v))
        bars = [(x.nodes, x.weights) for x in self._tilted(at)]
        if bars[0][0].shape == nodes.shape:  # the likelihood's own nodes: both at once
            pulled = [self.projected.pull_back(nodes, bars.pop(0)[1], first_bar)]
        else:
            pulled = [self.projected.pull_back(nodes, np.zeros(shape), first_bar)]
        pulled += [self.projected.pull_back(x, bar, np.zeros(x.shape)) for x, bar in bars]
        variances, parameters = zip(*pulled, strict=True)
        return Pulled(sum(variances), [sum(x) for x in zip(*parameters, strict=True)])

    def inner_error(self, m: Array) -> float:
        return self.projected.inner_error(m)


def _cut(x: Any, rows: slice) -> Any:
    """Some rows of an array, or of a tuple of them."""
    if not isinstance(x, tuple):
        return x if x is None else x[rows]
    cut = [_cut(each, rows) for each in x]
    return tuple(cut) if type(x) is tuple else type(x)(*cut)


class InChunks(ProjectedLikelihood):
    """A few data at a time, so that their nodes stay in a core's cache."""

    def __init__(self, make: Maker, size: int, X: Array, Y: Array, variance: Array) -> None:
        self.rows = [slice(i, i + size) for i in range(0, len(X), size)]
        self.parts = [make(X[r], Y[r], variance[r]) for r in self.rows]

    def _each(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        parts = zip(self.parts, self.rows, strict=True)
        return [function(part, *(_cut(x, rows) for x in arguments)) for part, rows in parts]

    def expectations(self, m: Array, v: Array, largest: float = math.inf) -> ExpectationGradients:
        found = self._each(lambda part, *x: part.expectations(*x, largest), m, v)
        return ExpectationGradients(*(np.concatenate(x) for x in zip(*found, strict=True)))

    def curvature(self, at: Moments) -> tuple[Array, ...]:
        found = self._each(lambda part, x: part.curvature(x), at)
        return tuple(np.concatenate(x) for x in zip(*found, strict=True))

    def ratios(self, at: Moments) -> RatioGradients:
        found = self._each(lambda part, x: part.ratios(x), at)
        values, *others = zip(*found, strict=True)
        return RatioGradients(np.sum(values), *(np.concatenate(x) for x in others))

    def pull_back(self, at: Moments, weights: SiteWeights | None) -> Pulled:
        found = self._each(lambda part, *x: part.pull_back(*x), at, weights)
        variances, parameters = zip(*found, strict=True)
        totals = [np.sum(x, axis=0) for x in zip(*parameters, strict=True)]
        return Pulled(np.concatenate(variances), totals)

    def inner_error(self, m: Array) -> float:
        return max(self._each(lambda part, x: part.inner_error(x), m))


def own_rule_on_arrays(likelihood: Likelihood, num_latent: int) -> NodeRule | None:
    """The nodes by which a likelihood takes expectations, as arrays; None where it is not by nodes."""
    rule = own_rule(likelihood, num_latent, tf.float64)
    if rule is None:
        quadrature = getattr(likelihood, "quadrature", None)
        if type(quadrature) is not NDiagGHQuadrature:
            return None
        rule = NodeRule(quadrature.Z, quadrature.dZ[:, 0])
    return NodeRule(np.asarray(rule.z), np.asarray(rule.weights))


def has_rule(likelihood: Likelihood) -> bool:
    """Whether it takes expectations by nodes that are known."""
    return own_rule_on_arrays(likelihood, int(likelihood.latent_dim or 1)) is not None


@functools.cache
def _coupled_rule(num_latent: int) -> NodeRule:
    if num_latent in NUM_OUTER_COUPLED:
        z, log_weights = hermite_product(num_latent, NUM_OUTER_COUPLED[num_latent])
    else:
        z, log_weights = mirrored_points(num_latent, NUM_OUTER_POINTS)
    return NodeRule(z, np.exp(log_weights))


def projected(likelihood: Likelihood, alpha: float, num_latent: int) -> Maker:
    """How the likelihood of projections is made for the power α; its parameters are read now."""
    is_scalar = isinstance(likelihood, ScalarLikelihood)
    own = own_rule_on_arrays(likelihood, num_latent)
    # Without known nodes it is asked through TensorFlow, in variables.
    bind = density_of(likelihood) if own is not None else None
    values = values_of(likelihood) if bind is not None else []
    if alpha == 0.0:
        bound = None if bind is None else lambda Y: bind(Y, *values)
        make: Maker = functools.partial(Averaged, likelihood, bound, own)
        num_nodes = 1 if own is None or bind is None else own.z.size
        return functools.partial(InChunks, make, _rows_of(num_nodes))
    if type(likelihood) is ProbitBernoulli and alpha == 1.0:
        # On one thread: BLAS' own wait for work beside it, and two take as long.
        return functools.partial(MarginalisedProbit, likelihood)
    rule = own if is_scalar and own is not None else _coupled_rule(num_latent)
    if isinstance(likelihood, MultiClass):
        if alpha < 1.0:
            raise InvalidDataError(
                f"The power must be 0 or 1 for {type(likelihood).__name__}, whose density is not "
                f"smooth; found {alpha:g}."
            )

        def make_largest(X: Array, Y: Array, variance: Array) -> ProjectedLikelihood:
            return Marginalised(Largest(likelihood, Y, variance), rule, False, alpha)

        num_nodes = rule.z.size * int(likelihood.num_gauss_hermite_points)
        return functools.partial(InChunks, make_largest, _rows_of(num_nodes))

    def make_marginalised(X: Array, Y: Array, variance: Array) -> ProjectedLikelihood:
        density: Density = bind(Y, *values) if bind is not None else Taped(likelihood, X, Y)
        closed = density.with_noise(variance) if alpha == 1.0 else None
        found = ClosedForm(closed) if closed is not None else ByNodes(density, variance, alpha)
        return Marginalised(found, rule, is_scalar, alpha)

    inner, _ = inner_rule(1 if is_scalar else num_latent)
    return functools.partial(InChunks, make_marginalised, _rows_of(rule.z.size * len(inner)))


def _rows_of(num_nodes: int) -> int:
    """Data whose nodes stay in a core's cache."""
    return max(8, tuning.QUADRATURE_ELEMENTS // num_nodes)


def likelihood_gradients(likelihood: Likelihood, pulled: Sequence[Array]) -> list[Array]:
    """Derivatives in its floating variables from what :meth:`ProjectedLikelihood.pull_back` returns."""
    variables = floating_variables(likelihood)
    by_values = density_of(likelihood) is not None and has_rule(likelihood)
    if not variables or not by_values:
        return list(pulled)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(variables)
        values = [tf.convert_to_tensor(p) for p in parameters_of(likelihood)]
        total = tf.add_n([tf.reduce_sum(b * x) for b, x in zip(pulled, values, strict=True)])
    return gradients_of(tape, total, variables)
