"""What the iterations share: the prior they start from, what they return, how starts are chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import tensorflow as tf
from gpflow.base import RegressionData
from gpflow.likelihoods import Likelihood

from ..compilation import subgraph
from ..linalg import Known, Marginals
from ..namespaces import functions_of
from ..sites import SiteValues

# Status of a finished loop.
CONVERGED, EXHAUSTED, STALLED, INVALID_START = range(4)

GRADIENT_ERROR = 1e-5
"""Relative error of the solved system above which the gradient is not called exact."""

NOT_EXACT = (
    "gpflow_hybrid: the total gradient is not exact at these hyperparameters; relative error"
)

NO_CAVITY = (
    "gpflow_hybrid: a cavity does not exist at these hyperparameters; the training loss falls "
    "back to the ELBO, a lower bound of the objective."
)

ACCEPTABLE_RESIDUAL = 1e-4
"""Residual above which an iteration from a warm start is tried again from zero sites."""


class Prior(NamedTuple):
    """``N(μ₀, K)`` at the data: ``K [L or 1, N, N]`` and ``mean [N, L]``."""

    K: tf.Tensor
    mean: tf.Tensor


class Residual(NamedTuple):
    """Where the fixed point map leads from λ, less λ: ``a = δλ₁ − m δλ₂`` and ``b = δλ₂``, ``[N, L]``."""

    a: tf.Tensor
    b: tf.Tensor


class Solution(NamedTuple):
    """What an iteration returns: the best sites seen, and how it went, as tensors."""

    sites: SiteValues
    status: tf.Tensor
    num_steps: tf.Tensor
    num_evaluations: tf.Tensor
    value: tf.Tensor
    """What the iteration raises: the ELBO, Laplace's log joint; for EP its log marginal likelihood."""
    residual: tf.Tensor

    @property
    def has_started(self) -> tf.Tensor:
        """Whether there was a valid q with finite expectations to start from."""
        return tf.not_equal(self.status, INVALID_START)


class Adjoint(NamedTuple):
    """A learning objective at ``λ*`` and its total derivatives in the marginals of q, ``[N, L]``; that in
    log Z is one."""

    value: tf.Tensor
    mean: tf.Tensor
    variance: tf.Tensor


class Collapse(NamedTuple):
    """``λ*`` and the weights w of the residual ρ in the total gradient, ``dL = ∂L + wᵀ∂ρ``."""

    solution: Solution
    weights: Residual
    known: Known | None = None
    """The posterior at ``λ*``, where the iteration has it."""
    adjoint: Adjoint | None = None
    """The objective and its derivatives, where the iteration has them."""


class Collapsed(Protocol):
    """What a method's ``collapse`` finds and its ``surrogate`` takes."""

    @property
    def solution(self) -> Solution:
        """``λ*``, and how it was found."""


@dataclasses.dataclass(frozen=True)
class Method:
    """How sites are updated and which value is learnt from: all that distinguishes two site models.

    ``solve`` and ``collapse`` take ``(likelihood, K, μ₀, X, Y, λ₁, λ₂, tolerance, max_steps)``.
    """

    key: Hashable
    """What a compiled graph of the method depends on, beside the likelihood."""
    sites_key: str
    """What the fixed point depends on, beside model and data."""
    solve: Callable[..., Solution]
    """From one start to the fixed point."""
    collapse: Callable[..., Collapsed]
    """The fixed point for a training loss, and the weights of its total gradient."""
    surrogate: Callable[[Prior, Any, Likelihood, RegressionData], tf.Tensor]
    """The learning objective, whose automatic derivative at constant λ* is the total one."""
    when_stalled: str
    """What it means that the iteration cannot go on, and what to do."""
    when_exhausted: str = "Raise max_steps."
    """What to do when the steps did not suffice."""
    quadrature_error: Callable[..., tf.Tensor] | None = None
    """How far the quadrature that the method relies on is from exact, from
    ``(likelihood, data, m, v, sites)``."""
    tolerated_error: float = 1e-2
    """Error of the quadrature, in units of the posterior, that is not worth a remark."""
    when_inaccurate: str | None = None
    """What to do then; None where the quadrature is the likelihood's own."""


def unpack(likelihood: Likelihood, *tensors: tf.Tensor) -> tuple[Any, ...]:
    """``prior, likelihood, data, start, *limits`` from ``K, μ₀, X, Y, λ₁, λ₂, *limits``."""
    K, mean, X, Y, lambda_1, lambda_2, *limits = tensors
    return Prior(K, mean), likelihood, (X, Y), SiteValues(lambda_1, lambda_2), *limits


def with_total_gradient(value: tf.Tensor, weights: Residual, residual: Residual) -> tf.Tensor:
    """``L + wᵀρ``: the derivative is the total one, and the value that of ``L(λ*)`` to second order in ρ,
    which is zero only to the iteration's tolerance."""
    return value + tf.add_n(
        [tf.reduce_sum(tf.stop_gradient(w) * r) for w, r in zip(weights, residual, strict=True)]
    )


def no_weights(
    solution: Solution, known: Known | None = None, adjoint: Adjoint | None = None
) -> Collapse:
    """The collapse of an objective that is stationary in λ at the solution."""
    zeros = Residual(*(tf.zeros_like(x) for x in solution.sites))
    return Collapse(solution, zeros, known, adjoint)


def relative_norm(q: Marginals, found: Residual, said: Residual) -> Any:
    """The largest residual in units of the posterior, relative to what the likelihood says.

    ``max(|b| v, |a| √v)`` over the same of ``said`` where that is less than one, so that data which
    barely move the prior are converged too.
    """

    xp = functions_of(q.variance)

    def size(x: Residual) -> Any:
        return xp.maximum(
            xp.max(xp.abs(x.b) * q.variance),
            xp.max(xp.abs(x.a) * xp.sqrt(q.variance)),
        )

    return size(found) / xp.maximum(xp.minimum(size(said), 1.0), 1e-30)


def is_valid(q: Marginals) -> tf.Tensor:
    """Whether q is a proper Gaussian: a variance that rounding has made non-positive is as bad as NaN."""
    return tf.reduce_all(q.variance > 0.0) & tf.math.is_finite(q.log_normaliser)


def from_warm_start(
    solve: Callable[[SiteValues], tuple[Solution, Any]], warm: SiteValues, *, by_value: bool
) -> tuple[Solution, Any]:
    """``solve(warm)``; if that does not come near a solution, ``solve(0)`` as well, and the better.

    A warm start can be a bad one after a long step in the hyperparameters.

    :param solve: returns what it found and whatever else is known there.
    :param by_value: whether the better is the one of higher value, or of smaller residual.
    """
    solve = subgraph(solve)
    first = solve(warm)

    def better() -> tuple[Solution, Any]:
        second = solve(SiteValues(*(tf.zeros_like(x) for x in warm)))
        old, new = first[0], second[0]
        higher = new.value > old.value if by_value else new.residual < old.residual
        return tf.cond(higher | ~tf.math.is_finite(old.value), lambda: second, lambda: first)

    return tf.cond(first[0].residual > ACCEPTABLE_RESIDUAL, better, lambda: first)
