"""The likelihood of a projection: f integrated out given the inducing variables.

With ``f | a ~ N(a, k̃)``, a datum says of its projection a

    p̃_α(a) = (∫ N(f; a, k̃) p(y|f)^α df)^{1/α},     α = 1: the marginal likelihood of a.

In closed form where noise makes a density of the same kind, else by a sum over nodes ``f = a + √k̃ z``:
with ``ℓ = log p``, weights w and ``π ∝ w exp(αℓ)``,

    log p̃ = (1/α) log Σ w exp(αℓ),   g̃ = Σ π g,   H̃ = Σ π (H + α g gᵀ) − α g̃ g̃ᵀ.
"""

from __future__ import annotations

import abc
import copy
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from gpflow.likelihoods import Likelihood, MultiClass, ScalarLikelihood
from gpflow.quadrature import hermgauss

from ..stand_ins import floating_variables
from .density import Array, Density
from .node_rules import PointDerivatives, point_derivatives
from .nodes import hermite_product, mirrored_points

REACH = 6.5
"""Half-width of the inner rule, in standard deviations ``√k̃``."""

NUM_INNER = 33
"""Its nodes, ``0.4 √k̃`` apart."""

NUM_INNER_COUPLED = {2: 10, 3: 4}
"""Gauss–Hermite nodes per latent of likelihoods that couple so many."""

NUM_INNER_POINTS = 64
"""Inner points where a product rule would be too large."""


class Pulled(NamedTuple):
    """Cotangents of the residual variances ``[N, L]`` and of the likelihood's parameters, summed: of their
    values if the likelihood has a density on arrays, else of its variables."""

    variance: Array
    parameters: list[Array]


class Taped(Density):
    """A likelihood that is only known to TensorFlow, at some data; evaluated outside of graphs."""

    def __init__(self, likelihood: Likelihood, X: Array, Y: Array) -> None:
        self.likelihood, self.X, self.Y = likelihood, X, Y
        self.is_scalar = isinstance(likelihood, ScalarLikelihood)

    def at(self, f: Array, second: bool = True) -> PointDerivatives:
        found = point_derivatives(self.likelihood, self.X, self.Y, tf.constant(f), second)
        return PointDerivatives(
            found.log_prob.numpy(), found.first.numpy(), [row.numpy() for row in found.second]
        )

    def pull_back(self, f: Array, log_prob_bar: Array, first_bar: Array) -> list[Array]:
        """In the likelihood's variables, of a sum with these weights."""
        variables = floating_variables(self.likelihood)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(variables)
            at = point_derivatives(self.likelihood, self.X, self.Y, tf.constant(f), False)
            total = tf.reduce_sum(log_prob_bar * at.log_prob) + tf.reduce_sum(first_bar * at.first)
        return gradients_of(tape, total, variables)


def gradients_of(tape: tf.GradientTape, total: tf.Tensor, sources: Sequence[Any]) -> list[Array]:
    """As arrays, zero where there is no connection."""
    zero = tf.UnconnectedGradients.ZERO
    return [g.numpy() for g in tape.gradient(total, sources, unconnected_gradients=zero)]


def pull_parameters(density: Density, f: Array, log_prob_bar: Array, first_bar: Array) -> list[Any]:
    """Cotangents of the parameters from those of ``log p`` and ``∂log p/∂f`` at nodes."""
    if isinstance(density, Taped):
        return density.pull_back(f, log_prob_bar, first_bar)
    return [
        np.sum(log_prob_bar * d.log_prob) + np.sum(first_bar * d.first)
        for d in density.in_parameters(f)
    ]


class Projected(abc.ABC):
    """``p̃`` of some data as a density of a, with its derivatives in ``k̃`` and in the parameters."""

    @abc.abstractmethod
    def at(self, a: Array, second: bool = True) -> PointDerivatives:
        """``log p̃`` and its derivatives at nodes ``[Q, N, L]``."""

    @abc.abstractmethod
    def pull_back(self, a: Array, log_prob_bar: Array, first_bar: Array) -> Pulled:
        """Cotangents from those of ``log p̃`` and ``∂log p̃/∂a`` at nodes."""

    def inner_error(self, a: Array) -> float:
        """The largest error of ``log p̃`` at ``a [N, L]`` by a sum over nodes; none in closed form."""
        return 0.0


class ClosedForm(Projected):
    """Where noise makes a density of the same kind."""

    def __init__(self, found: tuple[Density, Any]) -> None:
        self.density, self.chain = found

    def at(self, a: Array, second: bool = True) -> PointDerivatives:
        return self.density.at(a, second)

    def pull_back(self, a: Array, log_prob_bar: Array, first_bar: Array) -> Pulled:
        found = [
            log_prob_bar * d.log_prob + first_bar * d.first for d in self.density.in_parameters(a)
        ]
        variance, *parameters = self.chain([np.sum(x, axis=0) for x in found])
        return Pulled(variance, [np.sum(x) for x in parameters])


class ByNodes(Projected):
    """By the inner rule.

    :param variance: ``k̃ [N, L]``.
    """

    def __init__(self, density: Density, variance: Array, alpha: float) -> None:
        self.density, self.alpha = density, alpha
        self.s = np.sqrt(variance)
        self.z, self.log_weights = inner_rule(1 if density.is_scalar else variance.shape[1])

    def _nodes(self, a: Array) -> Array:
        """``[I·Q, N, L]``."""
        f = a + self.s * self.z[:, None, None, :]  # [I, Q, N, L]
        return f.reshape(-1, *a.shape[1:])

    def _inner(self, a: Array, second: bool) -> tuple[Any, ...]:
        """The density at all nodes, with axes ``[I, Q, N, …]``; π, ``log p̃`` and ``g̃``."""
        at = self.density.at(self._nodes(a), second)
        sizes = len(self.z), len(a)
        log_prob, first, *rows = (
            x.reshape(*sizes, *x.shape[1:]) for x in (at.log_prob, at.first, *at.second)
        )
        tilted = self.alpha * log_prob
        tilted += self.log_weights.reshape(-1, *(1,) * (log_prob.ndim - 1))
        largest = np.max(tilted, axis=0)
        pi = np.exp(tilted - largest)
        total = np.sum(pi, axis=0)
        pi /= total
        value = (np.log(total) + largest) / self.alpha
        pi = pi if log_prob.ndim == 4 else pi[..., None]
        return first, rows, pi, value, np.sum(pi * first, axis=0)

    def inner_error(self, a: Array) -> float:
        if len(self.z) != NUM_INNER:
            return 0.0
        between = copy.copy(self)  # the trapezoidal rule with nodes halfway between these
        between.z = self.z + 0.5 * (self.z[1] - self.z[0])
        between.log_weights = normalised(-0.5 * between.z[:, 0] ** 2)
        values = [rule.at(a[None], False).log_prob for rule in (self, between)]
        return float(np.max(np.abs(values[0] - values[1])))

    def at(self, a: Array, second: bool = True) -> PointDerivatives:
        first, rows, pi, value, g = self._inner(a, second)
        if not second:
            return PointDerivatives(value, g, [])
        if value.ndim == 3:
            H = np.sum(pi * (rows[0] + self.alpha * first * first), axis=0) - self.alpha * g * g
            return PointDerivatives(value, g, [H])
        found = []
        for k, row in enumerate(rows):
            products = np.sum(pi * (row + self.alpha * first[..., k : k + 1] * first), axis=0)
            found.append(products - self.alpha * g[..., k : k + 1] * g)
        return PointDerivatives(value, g, found)

    def pull_back(self, a: Array, log_prob_bar: Array, first_bar: Array) -> Pulled:
        first, rows, pi, value, g = self._inner(a, True)
        is_scalar = value.ndim == 3
        # ∂log p̃ = Σ π ∂ℓ and ∂g̃ = Σ π ∂g + α Σ π (g − g̃) ∂ℓ
        spread = first_bar * (first - g)
        spread = spread if is_scalar else np.sum(spread, axis=-1, keepdims=True)
        bar = log_prob_bar if is_scalar else log_prob_bar[..., None]
        in_log_prob, in_first = pi * (bar + self.alpha * spread), pi * first_bar
        if is_scalar:
            in_nodes = in_log_prob * first + in_first * rows[0]
        else:
            in_nodes = in_log_prob * first
            in_nodes = in_nodes + sum(in_first[..., k : k + 1] * row for k, row in enumerate(rows))
        z = np.broadcast_to(self.z, (len(self.z), in_nodes.shape[-1]))
        variance = np.einsum("iqnl,il->nl", in_nodes, z)
        if not is_scalar:
            in_log_prob = in_log_prob[..., 0]

        def flat(x: Array, like: Array) -> Array:
            return np.broadcast_to(x, like.shape).reshape(-1, *like.shape[2:])

        parameters = pull_parameters(
            self.density,
            self._nodes(a),
            flat(in_log_prob, in_log_prob),
            flat(in_first, first),
        )
        return Pulled(variance / (2.0 * self.s), parameters)


class Largest(Projected):
    """``RobustMax``: its p is one of two numbers, so that ``p̃`` is a mixture of them with the probability
    ``P(a; k̃)`` that the label's latent is the largest; α = 1."""

    def __init__(self, likelihood: MultiClass, Y: Array, variance: Array) -> None:
        self.likelihood, self.Y, self.variance = likelihood, Y, variance

    def _log_prob(self, a: tf.Tensor, variance: tf.Tensor) -> tf.Tensor:
        Q, N, L = a.shape
        link = self.likelihood.invlink
        gh_x, gh_w = hermgauss(self.likelihood.num_gauss_hermite_points)
        mean = tf.reshape(a, [Q * N, L])
        spread = tf.reshape(tf.broadcast_to(variance, a.shape), [Q * N, L])
        P = link.prob_is_largest(np.tile(self.Y, (Q, 1)), mean, spread, gh_x, gh_w)
        p = P * (1.0 - link.epsilon) + (1.0 - P) * link.eps_k1
        return tf.reshape(tf.math.log(p), [Q, N])

    def at(self, a: Array, second: bool = True) -> PointDerivatives:
        nodes, variance = tf.constant(a), tf.constant(self.variance)
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as outer:
            outer.watch(nodes)
            with tf.GradientTape(watch_accessed_variables=False) as inner:
                inner.watch(nodes)
                log_prob = self._log_prob(nodes, variance)
            first = inner.gradient(log_prob, nodes)
            rows = tf.unstack(first, axis=-1)
        found = [outer.gradient(row, nodes).numpy() for row in rows] if second else []
        return PointDerivatives(log_prob.numpy(), first.numpy(), found)

    def pull_back(self, a: Array, log_prob_bar: Array, first_bar: Array) -> Pulled:
        nodes, variance = tf.constant(a), tf.constant(self.variance)
        variables = floating_variables(self.likelihood)
        with tf.GradientTape(watch_accessed_variables=False) as outer:
            outer.watch((variance, *variables))
            with tf.GradientTape(watch_accessed_variables=False) as inner:
                inner.watch(nodes)
                log_prob = self._log_prob(nodes, variance)
            first = inner.gradient(log_prob, nodes)
            total = tf.reduce_sum(log_prob_bar * log_prob) + tf.reduce_sum(first_bar * first)
        in_variance, *others = gradients_of(outer, total, [variance, *variables])
        return Pulled(in_variance, others)


def normalised(log_weights: Array) -> Array:
    """Such that the weights add up to one."""
    return log_weights - np.log(np.sum(np.exp(log_weights)))


@functools.cache
def inner_rule(num_latent: int) -> tuple[Array, Array]:
    """Nodes ``z [I, L]`` and log weights of N(0, I).

    For one latent a trapezoidal rule, which resolves densities that are narrower than ``√k̃`` better than
    Gauss–Hermite's; for coupled ones a product rule, or points where that would be too large.
    """
    if num_latent == 1:
        z = np.linspace(-REACH, REACH, NUM_INNER)
        return z[:, None], normalised(-0.5 * z * z)
    if num_latent in NUM_INNER_COUPLED:
        return hermite_product(num_latent, NUM_INNER_COUPLED[num_latent])
    return mirrored_points(num_latent, NUM_INNER_POINTS)
