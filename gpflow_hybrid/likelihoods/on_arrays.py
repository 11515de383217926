"""Likelihoods that answer an iteration's questions on NumPy's arrays, without a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from gpflow.likelihoods import Likelihood, MultiClass, ScalarLikelihood

from .. import tuning
from .curvature import Curvature, curvature
from .densities import Binding, density_of
from .density import Density
from .expectations import ExpectationGradients, has_independent_rule, quadrature_error
from .first_sites import smooth_relative
from .node_rules import (
    NodeRule,
    curvature_by,
    expectation_gradients_by,
    gauss_hermite_rule,
    independent_rule,
    own_rule,
)
from .nodes import NUM_NODES
from .predictions import predict_log_density
from .ratio_gradients import (
    ParameterGradients,
    RatioGradients,
    closed_ratio_gradients,
    ratio_gradients_by,
)
from .ratios import cavity, covering_rule, covering_size, tilting

Array = npt.NDArray[Any]


class Observations(NamedTuple):
    """Data as arrays, and the values of the likelihood's parameters."""

    X: Array
    Y: Array
    values: Sequence[Array] = ()


class OnArrays:
    """What inference asks of a likelihood with a density, from :class:`Observations` and arrays ``[N, L]``.

    It holds no reference to the likelihood: graphs that hold it would keep that alive.
    """

    smooth_relative: OnArrays | None = None
    """Of a likelihood that has one, which has no parameters."""

    def __init__(self, likelihood: Likelihood, bind: Binding | None, rule: NodeRule | None) -> None:
        self._kind = type(likelihood)
        self._bind = bind
        # Where expectations are closed, they are polynomials in f times a function of a parameter, of
        # the second degree at most: three nodes integrate their derivatives in it.
        z, weights = rule or gauss_hermite_rule(3)
        self._rule = NodeRule(np.asfortranarray(z), weights)
        self._has_independent_rule = has_independent_rule(likelihood)

    def _density(self, data: Observations, dtype: Any) -> Density:
        assert self._bind is not None
        return self._bind(data.Y.astype(dtype), *data.values)

    def expectations(self, data: Observations, m: Array, v: Array) -> ExpectationGradients:
        """``E_q[log p]`` and its derivatives in m and v."""

        def of_some(data: Observations, m: Array, v: Array) -> tuple[Array, ...]:
            density = self._density(data, m.dtype)
            closed = density.expected(m, v)
            if closed is not None:
                return np.sum(closed.value, -1), closed.m, closed.v
            return expectation_gradients_by(self._rule, density.at, m, v)

        return ExpectationGradients(*_in_chunks(of_some, len(self._rule.z), data, m, v))

    def curvature(
        self, data: Observations, m: Array, v: Array, g2: Array, rough: bool = False
    ) -> Curvature:
        """Its second derivatives."""

        def of_some(data: Observations, m: Array, v: Array) -> tuple[Array, ...]:
            density = self._density(data, m.dtype)
            closed = density.expected(m, v)
            if closed is not None:
                return closed.curvature
            return curvature_by(self._rule, density.at, m, v)

        return Curvature(*_in_chunks(of_some, len(self._rule.z), data, m, v))

    def ratios(self, alpha: float) -> Callable[..., RatioGradients] | None:
        """``Σ (1/α) log E_q[(p/t)^α]`` and its derivatives, from m, v, λ₁ and λ₂; None for some powers."""
        if self._bind is None:
            return None

        def of_some(data: Observations, *arguments: Array) -> RatioGradients:
            m, v, lambda_1, lambda_2 = arguments
            density = self._density(data, m.dtype)

            def log_expected(M: Array, V: Array) -> tuple[Array, Array, Array] | None:
                found = density.expected_power(M, V, alpha)
                return None if found is None else found[:3]

            closed = closed_ratio_gradients(log_expected, arguments, alpha)
            if closed is not None:
                return closed
            rule = covering_rule(self._kind, m, v, cavity(m, v, lambda_1, lambda_2, alpha))
            E = self.expectations(data, m, v) if alpha < 1.0 else None
            return ratio_gradients_by(rule, density.at(rule[0], False), arguments, alpha, E)

        return lambda data, *arrays: RatioGradients(
            *_in_chunks(of_some, covering_size(self._kind, arrays[0].shape[1]), data, *arrays)
        )

    def in_parameters(self, alpha: float) -> Callable[..., ParameterGradients]:
        """The derivatives of ``Σ ℓ_α + wᵀρ`` in the likelihood's parameters, from m, v, λ and w.

        ``Σ π ∂log p`` with the tilted weights π, and ``w_a ∂E_m − 2 w_b ∂E_v`` for the residual.
        """

        def of_some(data: Observations, *arrays: Array) -> list[Any]:
            return self._in_parameters(alpha, data, *arrays)

        def answer(data: Observations, *arrays: Array) -> ParameterGradients:
            m = arrays[0]
            found = _in_chunks(of_some, covering_size(self._kind, m.shape[1]), data, *arrays)
            return ParameterGradients(np.array(found, m.dtype))

        return answer

    def _in_parameters(
        self, alpha: float, data: Observations, m: Array, v: Array, *sites_and_weights: Array
    ) -> list[Any]:
        lambda_1, lambda_2, wa, wb = sites_and_weights
        density = self._density(data, m.dtype)
        own = density.expected_in_parameters(self._rule, m, v)
        if alpha == 0.0:
            return [np.sum(d.value) for d in own]
        in_residual = [np.sum(wa * d.m) - 2.0 * np.sum(wb * d.v) for d in own]
        cav = cavity(m, v, lambda_1, lambda_2, alpha)
        closed = density.expected_power(cav.mean, cav.variance, alpha)
        if closed is not None:
            return [x + np.sum(d) for x, d in zip(in_residual, closed.parameters, strict=True)]
        nodes, log_weights = covering_rule(self._kind, m, v, cav)
        log_prob = density.at(nodes, False).log_prob
        tilted = tilting(nodes, log_weights, log_prob, lambda_1, lambda_2, alpha)
        return [
            x
            + np.sum(tilted.weights * np.where(tilted.finite, d.log_prob, 0.0))
            + (1.0 - alpha) * np.sum(of_own.value)
            for x, d, of_own in zip(in_residual, density.in_parameters(nodes), own, strict=True)
        ]

    def quadrature_error(self, data: Observations, m: Array, v: Array) -> Any:
        """How far the likelihood's own expectations are from exact, in units of the posterior."""
        E = self.expectations(data, m, v)
        mm = np.einsum("nll->nl", self.curvature(data, m, v, -2.0 * E.variance).mm)
        if self._bind is None or not self._has_independent_rule:
            return quadrature_error(E, mm, None, v)

        def of_some(data: Observations, m: Array, v: Array) -> tuple[Array, ...]:
            rule = independent_rule(m.dtype)
            return expectation_gradients_by(rule, self._density(data, m.dtype).at, m, v)

        _, slope, _ = _in_chunks(of_some, NUM_NODES[1], data, m, v)
        return quadrature_error(E, mm, slope, v)


class _Declared(OnArrays):
    """A likelihood without parameters whose class says that its methods work on arrays."""

    def __init__(self, likelihood: Likelihood) -> None:
        super().__init__(likelihood, density_of(likelihood), None)
        self._likelihood = likelihood

    def expectations(self, data: Observations, m: Array, v: Array) -> ExpectationGradients:
        return ExpectationGradients(*self._likelihood.expectation_derivatives(data.X, m, v, data.Y))

    def curvature(
        self, data: Observations, m: Array, v: Array, g2: Array, rough: bool = False
    ) -> Curvature:
        return curvature(self._likelihood, data.X, data.Y, m, v, g2, rough=rough)

    def quadrature_error(self, data: Observations, m: Array, v: Array) -> Any:
        """None of expectations that are exact: ``E_mm`` is taken to be ``2 E_v``."""
        return super().quadrature_error(data, m, v) if self._has_independent_rule else 0.0

    def ratios(self, alpha: float) -> Callable[..., RatioGradients] | None:
        def closed(data: Observations, *arguments: Array) -> Any:
            def log_expected(M: Array, V: Array) -> tuple[Array, Array, Array]:
                return self._likelihood.log_expected_derivatives(data.X, M, V, data.Y)

            return closed_ratio_gradients(log_expected, arguments)

        return closed if alpha == 1.0 else super().ratios(alpha)


def _in_chunks(
    function: Callable[..., Iterable[Any]], num_nodes: int, data: Observations, *arrays: Array
) -> list[Any]:
    """``function`` of a few data at a time, so that their nodes stay in a core's cache: what it returns of
    them side by side, or summed where it is a number."""
    N, L = arrays[0].shape
    size = max(1, tuning.QUADRATURE_ELEMENTS // (num_nodes * L))
    parts = []
    for start in range(0, N, size):
        rows = slice(start, start + size)
        some = Observations(data.X[rows], data.Y[rows], data.values)
        # Nodes are fast in memory, latents slow, as in all that is made of nodes.
        parts.append(function(some, *(np.asfortranarray(x[rows]) for x in arrays)))
    dtype = arrays[0].dtype
    return [
        np.concatenate(x).astype(dtype, copy=False) if np.ndim(x[0]) else sum(x)
        for x in zip(*parts, strict=True)
    ]


def on_arrays(likelihood: Likelihood) -> OnArrays | None:
    """How a likelihood answers on arrays, if it can."""
    if works_on_arrays(likelihood):
        return _Declared(likelihood)
    bind = density_of(likelihood)
    if bind is None or hasattr(likelihood, "expectation_derivatives"):
        return None
    rule = own_rule(likelihood, likelihood.latent_dim or 1, tf.float64)
    is_closed = isinstance(likelihood, ScalarLikelihood) and not has_independent_rule(likelihood)
    is_closed |= isinstance(likelihood, MultiClass)
    if not (rule or is_closed):
        return None
    found, relative = OnArrays(likelihood, bind, rule), smooth_relative(likelihood)
    if relative is not None:
        found.smooth_relative = on_arrays(relative)
    return found


def log_densities(likelihood: Likelihood, X: Array, Y: Array) -> Callable[[Array, Array], Array]:
    """``log ∫ p(y|f) q(f) df`` of these observations ``[N]``, from marginals ``[N, L]``: on arrays where
    the likelihood works on them, else compiled."""
    if works_on_arrays(likelihood):
        return lambda m, v: np.sum(likelihood.log_expected_derivatives(X, m, v, Y)[0], axis=-1)
    inputs, observed = tf.constant(X), tf.constant(Y)

    @tf.function(autograph=False)
    def compiled(m: tf.Tensor, v: tf.Tensor) -> tf.Tensor:
        return predict_log_density(likelihood, inputs, m, v, observed)

    return lambda m, v: np.asarray(compiled(tf.constant(m), tf.constant(v)))


_ASKED = ("expectation_derivatives", "expectation_curvature", "log_expected_derivatives")
"""Methods of a likelihood that works on arrays."""

_DENSITIES = (
    "_log_prob",
    "_scalar_log_prob",
    "_variational_expectations",
    "variational_expectations",
    "log_expected_power",
)
"""Methods that say the same in a graph."""


def works_on_arrays(likelihood: Likelihood) -> bool:
    """Whether a likelihood without parameters takes NumPy's arrays, as its class says: ``works_on_arrays``.

    A subclass that has changed one of the methods must say so again: it may have left the others behind.
    """
    kind = type(likelihood)
    declaring = next((c for c in kind.__mro__ if "works_on_arrays" in vars(c)), None)
    if declaring is None or not vars(declaring)["works_on_arrays"] or likelihood.variables:
        return False
    as_declared = (
        getattr(kind, n, None) is getattr(declaring, n, None) for n in (*_ASKED, *_DENSITIES)
    )
    return all(as_declared) and all(hasattr(kind, n) for n in _ASKED)
