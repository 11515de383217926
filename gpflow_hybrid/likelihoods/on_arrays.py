"""Likelihoods that answer an iteration's questions on NumPy's arrays, without a graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from gpflow.likelihoods import Likelihood, Softmax

from .curvature import Curvature, curvature
from .expectations import ExpectationGradients
from .ratio_gradients import RatioGradients, closed_ratio_gradients
from .softmax import SoftmaxOnArrays

SMALLEST_POWER = 0.01
"""Power below which ``(1/α) log Σ w exp(αh)`` loses more digits than it may without further care."""


class OnArrays(Protocol):
    """What inference asks, from X, Y and arrays ``[N, L]``."""

    def expectations(self, X: Any, Y: Any, m: Any, v: Any) -> ExpectationGradients:
        """``E_q[log p]`` and its derivatives in m and v."""

    def curvature(self, X: Any, Y: Any, m: Any, v: Any, g2: Any, rough: bool = False) -> Curvature:
        """Its second derivatives."""

    def ratios(self, alpha: float) -> Callable[..., RatioGradients] | None:
        """``Σ (1/α) log E_q[(p/t)^α]`` and its derivatives, from m, v, λ₁ and λ₂; None for some powers."""


class _Declared:
    """A likelihood whose class says that it works on arrays."""

    def __init__(self, likelihood: Likelihood) -> None:
        self.likelihood = likelihood

    def expectations(self, X: Any, Y: Any, m: Any, v: Any) -> ExpectationGradients:
        return ExpectationGradients(*self.likelihood.expectation_derivatives(X, m, v, Y))

    def curvature(self, X: Any, Y: Any, m: Any, v: Any, g2: Any, rough: bool = False) -> Curvature:
        return curvature(self.likelihood, X, Y, m, v, g2, rough=rough)

    def ratios(self, alpha: float) -> Callable[..., RatioGradients] | None:
        def closed(X: Any, Y: Any, m: Any, v: Any, *sites: Any) -> RatioGradients:
            return closed_ratio_gradients(self.likelihood, X, m, v, Y, *sites)

        return closed if alpha == 1.0 else None


class _Softmax:
    """GPflow's ``Softmax``, which has no parameters."""

    def __init__(self, num_classes: int) -> None:
        self.rule = SoftmaxOnArrays(num_classes)

    def expectations(self, X: Any, Y: Any, m: Any, v: Any) -> ExpectationGradients:
        return ExpectationGradients(*self.rule.expectations(X, Y, m, v))

    def curvature(self, X: Any, Y: Any, m: Any, v: Any, g2: Any, rough: bool = False) -> Curvature:
        return Curvature(*self.rule.curvature(X, Y, m, v, g2))

    def ratios(self, alpha: float) -> Callable[..., RatioGradients] | None:
        def by_nodes(*arguments: Any) -> RatioGradients:
            return RatioGradients(*self.rule.ratio_gradients(alpha, *arguments))

        return by_nodes if alpha >= SMALLEST_POWER else None


_softmax = functools.cache(_Softmax)


def on_arrays(likelihood: Likelihood) -> OnArrays | None:
    """How a likelihood answers on arrays, if it can."""
    if type(likelihood) is Softmax:
        return _softmax(int(likelihood.latent_dim or 0))
    return _Declared(likelihood) if works_on_arrays(likelihood) else None


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
