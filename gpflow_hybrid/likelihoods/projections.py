"""How the likelihood of projections is made: which form serves which likelihood and power."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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
from .node_rules import NodeRule, curvature_by, expectation_gradients_by, own_rule
from .nodes import NUM_NODES, covering_nodes, hermite_product, mirrored_points
from .probit import ProbitBernoulli
from .projected import Maker, ProjectedLikelihood, SiteWeights
from .ratio_gradients import RatioGradients
from .ratios import cavity

NUM_OUTER_COUPLED = {2: 10, 3: 5}
"""Gauss–Hermite nodes per latent under q of likelihoods that couple so many."""

NUM_OUTER_POINTS = 256
"""Points under q where a product rule would be too large."""

SMALL_LEVERAGE = 0.5
"""``αλ₂v`` up to which the likelihood's own nodes for q resolve the cavity as well."""


class Marginalised(ProjectedLikelihood):
    """``p̃_α`` with sums over nodes of q."""

    def __init__(self, projected: Projected, rule: NodeRule, is_scalar: bool, alpha: float) -> None:
        self.projected, self.rule = projected, rule
        self.is_scalar, self.alpha = is_scalar, alpha

    def expectations(self, m: Array, v: Array, largest: float = math.inf) -> ExpectationGradients:
        v = np.minimum(v, largest)
        return ExpectationGradients(*expectation_gradients_by(self.rule, self.projected.at, m, v))

    def curvature(self, m: Array, v: Array) -> tuple[Array, ...]:
        return curvature_by(self.rule, self.projected.at, m, v)

    def _nodes(self, m: Array, v: Array, lambda_1: Array, lambda_2: Array) -> tuple[Array, Array]:
        """Nodes ``[Q, N, L]`` and log weights of q: its own, or such that cover the cavity too."""
        leverage = self.alpha * lambda_2 * v
        s = np.sqrt(v)
        if not self.is_scalar or np.max(leverage) <= SMALL_LEVERAGE:
            log_weights = np.log(self.rule.weights)
            axes = (1,) * (2 if self.is_scalar else 1)
            return m + s * self.rule.z[:, None, :], log_weights.reshape(-1, *axes)
        cav = cavity(m, v, lambda_1, lambda_2, self.alpha)
        return covering_nodes(m, v, cav.mean, cav.variance, NUM_NODES[1])

    def _tilted(self, m: Array, v: Array, sites: Any, second: bool = False) -> tuple[Any, ...]:
        """Nodes, derivatives there, ``(1/α) log Σ w exp(αh)`` and the tilted weights."""
        lambda_1, lambda_2 = sites
        nodes, log_weights = self._nodes(m, v, lambda_1, lambda_2)
        at = self.projected.at(nodes, second)
        log_t = (lambda_1 - 0.5 * lambda_2 * nodes) * nodes
        finite = np.isfinite(at.log_prob)
        h = np.where(finite, at.log_prob, 0.0) - (log_t if self.is_scalar else np.sum(log_t, -1))
        tilted = np.where(finite, log_weights + self.alpha * h, -np.inf)
        largest = np.max(tilted, axis=0)
        weights = np.exp(tilted - largest)
        total = np.sum(weights, axis=0)
        value = (np.log(total) + largest) / self.alpha
        no_cavity = ~np.all(self.alpha * lambda_2 * v < 1.0, axis=-1)
        value[no_cavity] = np.nan
        return nodes, at, value, weights / total

    def ratios(self, m: Array, v: Array, lambda_1: Array, lambda_2: Array) -> RatioGradients:
        nodes, at, value, weights = self._tilted(m, v, (lambda_1, lambda_2))
        weights = weights if self.is_scalar else weights[..., None]
        d_h = np.where(weights > 0.0, at.first - (lambda_1 - lambda_2 * nodes), 0.0)
        return RatioGradients(
            np.sum(value),
            np.sum(weights * d_h, 0),
            np.sum(weights * d_h * (nodes - m), 0) / (2.0 * v),
            -np.sum(weights * nodes, 0),
            0.5 * np.sum(weights * nodes * nodes, 0),
        )

    def pull_back(self, m: Array, v: Array, sites: Any, weights: SiteWeights | None) -> Pulled:
        z, w = self.rule.z[:, None, :], self.rule.weights
        own_nodes = m + np.sqrt(v) * z
        if weights is None:
            shape = own_nodes.shape if self.is_scalar else own_nodes.shape[:2]
            log_bar = np.broadcast_to(w.reshape(-1, *(1,) * (len(shape) - 1)), shape)
            return self.projected.pull_back(own_nodes, log_bar, np.zeros(own_nodes.shape))
        a, b = weights
        first_bar = w[:, None, None] * (a - b * z / np.sqrt(v))
        nodes, _, _, tilted = self._tilted(m, v, sites)
        if np.array_equal(nodes, own_nodes):
            return self.projected.pull_back(own_nodes, tilted, first_bar)
        one = self.projected.pull_back(nodes, tilted, np.zeros(nodes.shape))
        zeros = np.zeros(first_bar.shape if self.is_scalar else first_bar.shape[:2])
        other = self.projected.pull_back(own_nodes, zeros, first_bar)
        parameters = [x + y for x, y in zip(one.parameters, other.parameters, strict=True)]
        return Pulled(one.variance + other.variance, parameters)

    def inner_error(self, m: Array) -> float:
        return self.projected.inner_error(m)


class InChunks(ProjectedLikelihood):
    """A few data at a time, so that their nodes stay in a core's cache, on as many threads as there are
    cores: NumPy's functions let go of Python's lock."""

    def __init__(self, make: Maker, size: int, X: Array, Y: Array, variance: Array) -> None:
        self.rows = [slice(i, i + size) for i in range(0, len(X), size)]
        self.parts = [make(X[r], Y[r], variance[r]) for r in self.rows]

    def _each(self, function: Callable[..., Any], *arrays: Array) -> list[Any]:
        def call(part: ProjectedLikelihood, rows: slice) -> Any:
            with np.errstate(all="ignore"):
                return function(part, *(x[rows] for x in arrays))

        if len(self.parts) == 1:
            return [call(self.parts[0], self.rows[0])]
        return list(_threads().map(call, self.parts, self.rows))

    def expectations(self, m: Array, v: Array, largest: float = math.inf) -> ExpectationGradients:
        found = self._each(lambda part, *x: part.expectations(*x, largest), m, v)
        return ExpectationGradients(*(np.concatenate(x) for x in zip(*found, strict=True)))

    def curvature(self, m: Array, v: Array) -> tuple[Array, ...]:
        found = self._each(lambda part, *x: part.curvature(*x), m, v)
        return tuple(np.concatenate(x) for x in zip(*found, strict=True))

    def ratios(self, m: Array, v: Array, lambda_1: Array, lambda_2: Array) -> RatioGradients:
        found = self._each(lambda part, *x: part.ratios(*x), m, v, lambda_1, lambda_2)
        values, *others = zip(*found, strict=True)
        return RatioGradients(np.sum(values), *(np.concatenate(x) for x in others))

    def pull_back(self, m: Array, v: Array, sites: Any, weights: SiteWeights | None) -> Pulled:
        def call(part: ProjectedLikelihood, *x: Array) -> Pulled:
            mine = None if weights is None else SiteWeights(*x[4:])
            return part.pull_back(x[0], x[1], x[2:4], mine)

        found = self._each(call, m, v, *sites, *(weights or ()))
        variances, parameters = zip(*found, strict=True)
        totals = [np.sum(x, axis=0) for x in zip(*parameters, strict=True)]
        return Pulled(np.concatenate(variances), totals)

    def inner_error(self, m: Array) -> float:
        return max(self._each(lambda part, x: part.inner_error(x), m))


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1)


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
        return lambda X, Y, variance: MarginalisedProbit(likelihood, Y, variance)
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
