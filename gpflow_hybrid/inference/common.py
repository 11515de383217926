"""What the iterations share: what they return, how residuals are measured, how starts are chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..linalg import Marginals
from ..priors import Array, Covariance, Prior
from ..sites import SiteValues
from .options import COLLAPSE, REPORT, RESIDUAL
from .questions import Iteration, Question
from .remarks import Remark

# Status of a finished iteration.
CONVERGED, EXHAUSTED, STALLED, INVALID_START = range(4)

State = TypeVar("State")


class SitePair(NamedTuple):
    """A change of the sites, or weights of one, ``[N, L]`` each: ``a = δλ₁ − m δλ₂`` and ``b = δλ₂``."""

    a: Any
    b: Any

    @property
    def rows(self) -> Array:
        """``[2, L, N]``."""
        return np.stack([self.a.T, self.b.T])

    @classmethod
    def of_rows(cls, x: Array) -> SitePair:
        """From ``[2, L, N]``."""
        return cls(x[0].T, x[1].T)

    def step(self, mean: Array) -> SiteValues:
        """``δλ₁ = a + m b`` and ``δλ₂ = b``."""
        return SiteValues(self.a + mean * self.b, self.b)


class Solution(NamedTuple):
    """What an iteration returns: the best sites seen, and how it went."""

    sites: SiteValues
    status: Any
    num_steps: Any
    num_evaluations: Any
    value: Any
    """What the iteration raises: the ELBO, Laplace's log joint; for EP its log marginal likelihood."""
    residual: Any

    @property
    def has_started(self) -> Any:
        """Whether there was a valid q with finite expectations to start from."""
        return self.status != INVALID_START


class Collapse(NamedTuple):
    """A learning objective at ``λ*`` with all that its total derivative is made of."""

    solution: Solution
    value: Any
    q: Marginals
    """q at λ*."""
    weights: SitePair
    """Of the residual ρ in the total gradient, ``dL = ∂L + wᵀ∂ρ``."""
    covariance: Covariance | None = None
    """Σ, at λ* or a last step before it; None where there was no start."""
    mean_bar: Array | None = None
    """``∂(L + wᵀρ)/∂m``; that in log Z is one."""
    variance_bar: Array | None = None
    remarks: tuple[Remark, ...] = ()
    """What the user ought to know of value or gradient."""
    removed: SiteValues | None = None
    """What the ratios take out of q, if it is not λ*."""
    prior_variance_bar: Array | None = None
    """``∂L/∂(diag K)`` beside that by way of q, if there is one."""

    def prior_adjoint(self) -> tuple[Array, ...]:
        """The total derivatives in the arrays that the prior was made of."""
        assert self.covariance is not None
        lambda_1, lambda_2 = self.solution.sites
        beta = lambda_1 - lambda_2 * self.q.mean
        assert self.mean_bar is not None
        assert self.variance_bar is not None
        own = None if self.prior_variance_bar is None else self.prior_variance_bar.T
        return self.covariance.adjoint(beta.T, self.mean_bar.T, self.variance_bar.T, own)


class FixedPoint(NamedTuple):
    """Where a derivative is taken: q, λ and the weights of the residual, all constant."""

    q: Marginals
    sites: SiteValues
    weights: SitePair


@dataclasses.dataclass(frozen=True)
class Method:
    """How sites are updated and which value is learnt from: all that distinguishes two site models."""

    sites_key: str
    """What the fixed point depends on, beside model and data."""
    solve: Callable[[Prior, SiteValues, float, int], Iteration[Solution]]
    """From one start to the fixed point, with a tolerance and a number of steps."""
    collapse: Callable[[Prior, SiteValues, float, int], Iteration[Collapse]]
    """The fixed point for a training loss, the objective there, and what its gradient is made of."""
    questions: tuple[Question, ...]
    """That the iterations ask."""
    parameter_question: Question
    """The derivatives of ``L + wᵀρ`` in the likelihood's own parameters, from m, v, λ₁, λ₂ and w."""
    when_stalled: str
    """What it means that the iteration cannot go on, and what to do."""
    by_value: bool = True
    """Whether of two ends the better is the one of higher value, or of smaller residual."""
    when_exhausted: str = "Raise max_steps."
    """What to do when the steps did not suffice."""
    quadrature_error: Question | None = None
    """How far the quadrature that the method relies on is from exact, from m, v, λ₁ and λ₂."""
    tolerated_error: float = REPORT.own_error
    """Error of the quadrature, in units of the posterior, that is not worth a remark."""
    when_inaccurate: str | None = None
    """What to do then; None where the quadrature is the likelihood's own."""


def relative_norm(q: Marginals, found: SitePair, target: SitePair) -> float:
    """The largest residual in units of the posterior, relative to where the sites should be.

    ``max(|b| v, |a| √v)`` over the same of ``target`` where that is less than one, so that data which
    barely move the prior are converged too.
    """
    deviation = np.sqrt(q.variance)

    def size(x: SitePair) -> float:
        return max(np.max(np.abs(x.b) * q.variance), np.max(np.abs(x.a) * deviation))

    return float(size(found) / max(min(size(target), 1.0), RESIDUAL.least_target))


def ended(converged: bool, gave_up: bool) -> int:
    """The status of an iteration that had started."""
    if converged:
        return CONVERGED
    return STALLED if gave_up else EXHAUSTED


def is_valid(q: Marginals) -> bool:
    """Whether q is a proper Gaussian: a variance that rounding has made non-positive is as bad as NaN."""
    return bool((q.variance > 0.0).all() and np.isfinite(q.log_normaliser))


def zeros_like(sites: SiteValues) -> SiteValues:
    """Sites that say nothing: q = prior."""
    return SiteValues(*(np.zeros_like(x) for x in sites))


def moved(sites: SiteValues, step: SiteValues) -> SiteValues:
    """``λ + δλ``."""
    return SiteValues(*(x + d for x, d in zip(sites, step, strict=True)))


def no_collapse(solution: Solution) -> Collapse:
    """Where there was nothing to start from."""
    nothing = np.full_like(solution.sites.lambda_1, np.nan)
    return Collapse(
        solution, np.nan, Marginals(nothing, nothing, np.nan), SitePair(nothing, nothing)
    )


def without_state(
    solve: Callable[[SiteValues], Iteration[Solution]],
) -> Callable[[SiteValues, tuple[None, ...]], Iteration[tuple[Solution, None]]]:
    """``solve`` for :func:`from_warm_start`, where nothing but the solution is needed."""

    def solve_alone(start: SiteValues, _: tuple[None, ...]) -> Iteration[tuple[Solution, None]]:
        solution = yield from solve(start)
        return solution, None

    return solve_alone


def is_better(new: Solution, old: Solution, by_value: bool) -> bool:
    """Whether it is the end to take: of higher value, or of smaller residual."""
    better = new.value > old.value if by_value else new.residual < old.residual
    return bool(better or not np.isfinite(old.value))


def from_warm_start(
    solve: Callable[[SiteValues, tuple[State, ...]], Iteration[tuple[Solution, State]]],
    warm: SiteValues,
    *,
    by_value: bool,
) -> Iteration[tuple[Solution, State]]:
    """``solve(warm)``; if that does not come near a solution, ``solve(0)`` as well, and the better.

    A warm start can be a bad one after a long step in the hyperparameters.

    :param solve: also takes what is still needed, and returns the state at the solution.
    :param by_value: whether the better is the one of higher value, or of smaller residual.
    """
    first = yield from solve(warm, ())
    old = first[0]
    is_cold = not any(np.any(x) for x in warm)
    if old.residual <= COLLAPSE.acceptable_residual or is_cold:
        return first
    second = yield from solve(zeros_like(warm), (first[1],))
    return second if is_better(second[0], old, by_value) else first
