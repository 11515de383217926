"""When to stop: small rules that read the history, composable with ``|`` and ``&``.

A rule has no state of its own, so that a resumed run stops where an uninterrupted one would.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from gpflow.base import RegressionData

from ..errors import InvalidDataError
from ..models import SiteModel
from ..validation import check_count, check_positive, prepare_data
from .history import History


class Verdict(NamedTuple):
    """Why training stops."""

    status: str
    message: str


def best_of(column: Any) -> int:
    """The position of the largest value; NaN is never it, the last position if all are."""
    comparable = np.where(np.isnan(column), -np.inf, column)
    return int(np.argmax(comparable)) if np.any(np.isfinite(comparable)) else len(comparable) - 1


class StoppingRule(abc.ABC):
    """Says after every iteration whether training should stop."""

    @abc.abstractmethod
    def check(self, history: History) -> Verdict | None:
        """A verdict to stop, None to go on."""

    @property
    def measurements(self) -> Mapping[str, Callable[[SiteModel], float]]:
        """What to measure of the model after every iteration, by name."""
        return {}

    @property
    def best_by(self) -> str | None:
        """The column whose best iteration the model is left with, None for the last."""
        return None

    def __or__(self, other: StoppingRule) -> StoppingRule:
        return AnyOf((self, other))

    def __and__(self, other: StoppingRule) -> StoppingRule:
        return AllOf((self, other))


@dataclasses.dataclass(frozen=True)
class AnyOf(StoppingRule):
    """Stops as soon as one of the rules does."""

    rules: tuple[StoppingRule, ...]

    def check(self, history: History) -> Verdict | None:
        return next((v for v in (rule.check(history) for rule in self.rules) if v), None)

    @property
    def measurements(self) -> Mapping[str, Callable[[SiteModel], float]]:
        """Those of all rules."""
        measures: dict[str, Callable[[SiteModel], float]] = {}
        for rule in self.rules:
            for name, measure in rule.measurements.items():
                if name in measures:
                    raise InvalidDataError(
                        f"Two stopping rules measure {name!r}. Give one another name, for example "
                        'HeldOutDensity(data, name="second_set").'
                    )
                measures[name] = measure
        return measures

    @property
    def best_by(self) -> str | None:
        """That of the first rule that has one; what was measured goes before the objective."""
        columns = [rule.best_by for rule in self.rules if rule.best_by]
        measured = [column for column in columns if column in self.measurements]
        return next(iter(measured or columns), None)


@dataclasses.dataclass(frozen=True)
class AllOf(AnyOf):
    """Stops when all the rules agree."""

    def check(self, history: History) -> Verdict | None:
        verdicts = [v for v in (rule.check(history) for rule in self.rules) if v]
        if len(verdicts) < len(self.rules):
            return None
        return Verdict(verdicts[0].status, " ".join(v.message for v in verdicts))


@dataclasses.dataclass(frozen=True)
class ObjectiveTolerance(StoppingRule):
    """Neither an M-step nor an iteration has changed the objective by more than ``tolerance`` nats.

    Not in each of ``window`` iterations. The M-steps count too: where alternation drifts over the crest
    of the objective, it stands still although every M-step still gains.
    """

    tolerance: float = 1e-3
    window: int = 3

    def __post_init__(self) -> None:
        check_positive(self.tolerance, "tolerance")
        check_count(self.window, "window")

    def check(self, history: History) -> Verdict | None:
        recent = history["objective"][-self.window - 1 :]
        if len(recent) <= self.window:
            return None
        changes = np.concatenate([np.diff(recent), history["m_gain"][-self.window :]])
        if not np.all(np.abs(changes) <= self.tolerance):  # NaN is no plateau
            return None
        return Verdict(
            "converged",
            f"The objective changed by no more than {self.tolerance:g} nats in each of the last "
            f"{self.window} iterations.",
        )


@dataclasses.dataclass(frozen=True)
class HyperparameterTolerance(StoppingRule):
    """No hyperparameter has moved by more than ``tolerance``, relatively, in ``window`` iterations."""

    tolerance: float = 1e-3
    window: int = 3

    def __post_init__(self) -> None:
        check_positive(self.tolerance, "tolerance")
        check_count(self.window, "window")

    def check(self, history: History) -> Verdict | None:
        if len(history) <= self.window:
            return None
        for path in history[-1].hyperparameters:
            values = history[path][-self.window - 1 :].reshape(self.window + 1, -1)
            scale = np.maximum(np.abs(values[-1]), 1e-12)
            if not np.all(np.abs(np.diff(values, axis=0)) <= self.tolerance * scale):
                return None
        return Verdict(
            "converged",
            f"No hyperparameter moved by more than {self.tolerance:g} of itself in each of the last "
            f"{self.window} iterations.",
        )


@dataclasses.dataclass(frozen=True)
class Patience(StoppingRule):
    """The objective has had no new best for ``num_iterations``; the best iteration is restored."""

    num_iterations: int = 20

    def __post_init__(self) -> None:
        check_count(self.num_iterations, "num_iterations")

    best_by = "objective"

    def check(self, history: History) -> Verdict | None:
        best = best_of(history["objective"])
        if len(history) - 1 - best < self.num_iterations:
            return None
        return Verdict(
            "stopped", f"No better objective in the {self.num_iterations} iterations since {best}."
        )


@dataclasses.dataclass(frozen=True)
class TimeBudget(StoppingRule):
    """So many seconds of training have passed, those before a resumption included."""

    seconds: float

    def __post_init__(self) -> None:
        check_positive(self.seconds, "seconds")

    def check(self, history: History) -> Verdict | None:
        if np.sum(history["seconds"]) < self.seconds:
            return None
        return Verdict("stopped", f"The time budget of {self.seconds:g} s is used up.")


@dataclasses.dataclass(frozen=True, eq=False)
class HeldOutDensity(StoppingRule):
    """Mean log predictive density of held-out data, early stopping: the best iteration is restored.

    :param data: ``(X, Y)`` that the model has not seen.
    :param patience: iterations without a new best before training stops.
    :param name: of the column in the history.
    """

    data: RegressionData
    patience: int = 10
    name: str = "held_out_density"
    _compiled: dict[str, Any] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_count(self.patience, "patience")
        if not isinstance(self.data, (tuple, list)) or len(self.data) != 2:
            raise InvalidDataError(f"data must be a pair (X, Y); found {type(self.data).__name__}.")

    @property
    def measurements(self) -> Mapping[str, Callable[[SiteModel], float]]:
        """The density itself."""
        return {self.name: self._density}

    def _density(self, model: SiteModel) -> float:
        """Compiled once for a model; its data are checked like the model's."""
        if self._compiled.get("model") is not model:
            data = prepare_data(self.data, model.likelihood)

            def density() -> tf.Tensor:
                return tf.reduce_mean(model.predict_log_density(data))

            self._compiled.update(model=model, density=tf.function(density, autograph=False))
        return float(self._compiled["density"]())

    @property
    def best_by(self) -> str:
        """The density."""
        return self.name

    def check(self, history: History) -> Verdict | None:
        densities = history[self.name]
        best = best_of(densities)
        if len(history) - 1 - best < self.patience:
            return None
        return Verdict(
            "stopped",
            f"The held-out log predictive density was best at iteration {best} "
            f"({densities[best]:.4f}) and not since.",
        )


@dataclasses.dataclass(frozen=True)
class Drift(StoppingRule):
    """M-steps raise the objective at fixed λ, and the E-steps after them take more than that back.

    With the ELBO that cannot happen: both steps raise one function. With the EP-like value the M-step
    does not see that λ will move, and alternation can run away from the optimum of the surface
    ``θ ↦ L(λ*(θ), θ)``, typically to ever larger kernel variances. After ``window`` such iterations in
    a row training stops and the iteration of the best objective is restored.
    """

    window: int = 5

    def __post_init__(self) -> None:
        check_count(self.window, "window")

    best_by = "objective"

    def check(self, history: History) -> Verdict | None:
        if len(history) <= self.window:
            return None
        objective = history["objective"][-self.window - 1 :]
        gains = history["m_gain"][-self.window :]
        noise = 1e-10 * np.max(np.abs(objective))
        if not np.all((np.diff(objective) < -noise) & (gains > noise)):
            return None
        return Verdict(
            "drift",
            f"In each of the last {self.window} iterations the M-step raised the objective at fixed "
            "sites and the E-step took back more: alternation is drifting away from the optimum of "
            "the objective as a function of the hyperparameters. The collapsed objective has no such "
            "drift: gpflow.optimizers.Scipy().minimize(model.training_loss, "
            "model.trainable_variables), of a sparse model model.training_loss_closure(data), with "
            "model.objective set to what was trained here.",
        )


def default_rules() -> StoppingRule:
    """A plateau of the objective, no new best for long, or drift."""
    return ObjectiveTolerance() | Drift() | Patience()


def as_rule(value: Any) -> StoppingRule:
    """A rule, from a rule or a list of rules of which any may stop."""
    if isinstance(value, StoppingRule):
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(rule, StoppingRule) for rule in value):
        return AnyOf(tuple(value))
    raise InvalidDataError(
        f"stopping must be a stopping rule or a list of them; found {value!r}. See "
        "gpflow_hybrid.training.stopping."
    )
