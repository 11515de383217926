"""Every stopping rule on histories made by hand, their combinations, and the held-out set in a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gpflow_hybrid as gh
from gpflow_hybrid.training import (
    AllOf,
    AnyOf,
    Drift,
    HeldOutDensity,
    History,
    HyperparameterTolerance,
    IterationRecord,
    ObjectiveTolerance,
    Patience,
    StoppingRule,
    TimeBudget,
    VEMTrainer,
)
from gpflow_hybrid.training.stopping import Verdict, default_rules
from tests.training.cases import (
    Measuring,
    assert_identical,
    binary,
    build,
    hyperparameters,
    restart,
)

NAN = float("nan")


def history(
    objective: Any,
    m_gain: Any = 0.0,
    hyperparameters: dict[str, Any] | None = None,
    seconds: float = 1.0,
    **measurements: Any,
) -> History:
    """Records with these columns; a number is the same for all."""
    num = len(objective)
    gains = np.broadcast_to(m_gain, num)
    return History(
        [
            IterationRecord(
                iteration=i,
                elbo=0.0,
                ep_like=0.0,
                objective=float(objective[i]),
                hyperparameters={p: np.asarray(v[i]) for p, v in (hyperparameters or {}).items()},
                e_steps=1,
                e_residual=0.0,
                gradient_norm=NAN if i == 0 else 1.0,
                m_gain=NAN if i == 0 else float(gains[i]),
                min_cavity_precision=1.0,
                loo_log_predictive_density=0.0,
                seconds=seconds,
                measurements={name: float(v[i]) for name, v in measurements.items()},
            )
            for i in range(num)
        ]
    )


def stops_at(rule: StoppingRule, records: History) -> int | None:
    """The first iteration at which the rule stops, each time with what was known by then."""
    for i in range(len(records)):
        if rule.check(History(records[: i + 1])) is not None:
            return i
    return None


# The objective


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        ([0.0, 1.0, 1.05, 1.09, 1.0], 4),
        ([0.0, 1.0, 1.05, 1.2, 1.25], None),  # one change too large
        ([0.0, 0.05, 0.1, 0.15], 3),  # a plateau from the start
        ([0.0, 0.05, 0.1], None),  # too short
        pytest.param(
            [0.0, 1.0, 1.05, NAN, 1.05, 1.05],
            None,
        ),
    ],
)
def test_objective_tolerance(objective: Any, expected: int | None) -> None:
    rule = ObjectiveTolerance(tolerance=0.1, window=3)
    assert stops_at(rule, history(objective)) == expected


def test_objective_tolerance_says_so() -> None:
    verdict = ObjectiveTolerance(0.1, 2).check(history([1.0, 1.0, 1.0]))
    assert verdict is not None
    assert verdict.status == "converged"
    assert "no more than 0.1 nats in each of the last 2 iterations" in verdict.message


def test_a_crest_is_not_convergence() -> None:
    crest = history([0.0, 0.05, 0.08, 0.08, 0.05, 0.0], m_gain=0.5)
    assert stops_at(ObjectiveTolerance(tolerance=0.1, window=3), crest) is None


# The hyperparameters


def test_hyperparameter_tolerance() -> None:
    moves = {
        ".a": [1.0, 2.0, 2.01, 2.02, 2.03],
        ".b": np.array([[5.0, 1.0]] * 3 + [[5.0, 1.2]] * 2),
    }
    rule = HyperparameterTolerance(tolerance=0.01, window=2)
    assert stops_at(rule, history(np.zeros(5), hyperparameters={".a": moves[".a"]})) == 3
    # One entry of an array suffices to go on; a large move before the window does not matter.
    assert stops_at(rule, history(np.zeros(5), hyperparameters=moves)) is None
    still = {".b": np.array([[5.0, 1.0], [5.0, 0.0], [5.0, 0.0], [5.0, 0.0]])}
    assert stops_at(rule, history(np.zeros(4), hyperparameters=still)) == 3
    verdict = rule.check(history(np.zeros(3), hyperparameters={".a": [1.0, 1.0, 1.0]}))
    assert verdict is not None
    assert verdict.status == "converged"
    assert "0.01 of itself in each of the last 2" in verdict.message


# Patience, time


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        ([0.0, 1.0, 0.9, 0.8, 0.7], 3),
        ([0.0, 1.0, 0.9, 1.1, 0.8, 0.7], 5),
        ([3.0, 1.0, 1.0], 2),  # never better than the start
        ([0.0, 0.1, 0.2, 0.3], None),
        ([1.0, 1.0, 1.0], 2),  # a tie is not better
    ],
)
def test_patience(objective: Any, expected: int | None) -> None:
    assert stops_at(Patience(2), history(objective)) == expected


def test_patience_says_when_the_best_was_and_keeps_it() -> None:
    verdict = Patience(2).check(history([0.0, 1.0, 0.9, 0.8]))
    assert verdict is not None
    assert verdict.status == "stopped"
    assert "2 iterations since 1" in verdict.message
    assert Patience(2).best_by == "objective"


def test_time_budget_counts_what_was_before_a_resumption() -> None:
    assert stops_at(TimeBudget(3.5), history(np.zeros(9), seconds=1.0)) == 3
    assert stops_at(TimeBudget(100.0), history(np.zeros(9), seconds=1.0)) is None
    verdict = TimeBudget(0.5).check(history([0.0]))
    assert verdict is not None
    assert verdict.status == "stopped"
    assert "time budget of 0.5 s" in verdict.message


# Drift


@pytest.mark.parametrize(
    ("objective", "m_gain", "expected"),
    [
        ([5.0, 6.0, 5.9, 5.8, 5.7], 0.1, 4),
        ([5.0, 6.0, 5.9, 5.95, 5.8, 5.7], 0.1, None),  # one rise in between
        ([5.0, 6.0, 5.9, 5.8, 5.7], 0.0, None),  # falls that no M-step pretended to be rises
        ([5.0, 6.0, 5.9, 5.8, 5.7], [NAN, 1.0, 0.1, -0.1, 0.1], None),
        ([5.0, 4.9, 4.8, 4.7], 0.1, 3),
        ([5.0, 4.9, 4.8], 0.1, None),  # too short
        ([5.0, 5.0, 5.0, 5.0, 5.0], 0.1, None),
        ([5e3 - i * 1e-8 for i in range(5)], 0.1, None),  # rounding
    ],
)
def test_drift(objective: Any, m_gain: Any, expected: int | None) -> None:
    assert stops_at(Drift(3), history(objective, m_gain)) == expected


def test_drift_points_to_the_collapsed_objective() -> None:
    verdict = Drift(2).check(history([3.0, 2.0, 1.0], 0.1))
    assert verdict is not None
    assert verdict.status == "drift"
    for words in ("each of the last 2 iterations", "drifting away", "model.training_loss"):
        assert words in verdict.message
    assert Drift().best_by == "objective"


# Held-out data


@pytest.mark.parametrize(
    ("density", "expected"),
    [
        ([-1.0, -0.5, -0.6, -0.7, -0.8], 3),
        ([-1.0, -0.9, -0.8, -0.7], None),
        pytest.param(
            [-1.0, -0.5, NAN, -0.6, -0.7],
            3,
        ),
    ],
)
def test_held_out_density_on_histories(density: Any, expected: int | None) -> None:
    rule = HeldOutDensity(binary(), patience=2)
    records = history(np.zeros(len(density)), held_out_density=density)
    assert stops_at(rule, records) == expected
    if expected is not None:
        verdict = rule.check(records)
        assert verdict is not None
        assert verdict.status == "stopped"
        assert "best at iteration 1 (-0.5000)" in verdict.message


def flipped(seed: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Labels that training only makes less likely."""
    X, Y = binary(seed, num=8)
    return X, 1.0 - Y


def test_early_stopping_restores_the_best(trainer: VEMTrainer) -> None:
    rule = HeldOutDensity(flipped(), patience=3)
    result = restart(trainer, rule).fit(20, progress=False)
    densities = result.history["held_out_density"]
    assert result.status == "stopped"
    assert result.num_iterations == 3
    assert result.best_iteration == 0
    assert np.all(np.diff(densities) < 0.0)
    model = trainer.model
    density = tf.reduce_mean(model.predict_log_density(flipped()))
    np.testing.assert_allclose(density, densities[0], rtol=1e-10)
    assert_identical(hyperparameters(model), result.history[0].hyperparameters)


@pytest.mark.parametrize(
    "combine",
    [
        lambda held_out: held_out | Patience(50),
        pytest.param(
            lambda held_out: Patience(50) | held_out,
        ),
        pytest.param(
            lambda held_out: default_rules() | held_out,
        ),
    ],
    ids=["first", "last", "after_the_default"],
)
def test_early_stopping_restores_its_best_in_any_order(
    trainer: VEMTrainer, combine: Callable[[StoppingRule], StoppingRule]
) -> None:
    rule = combine(HeldOutDensity(flipped(), patience=3))
    result = restart(trainer, rule).fit(20, progress=False)
    assert "held-out log predictive density was best at iteration 0" in result.message
    assert result.best_iteration == 0


def test_a_measurement_that_is_not_a_number(trainer: VEMTrainer) -> None:
    result = restart(trainer, Measuring(lambda model: NAN)).fit(2, progress=False)
    assert np.all(np.isnan(result.history["measured"]))


def test_held_out_labels_are_checked_like_the_models(trainer: VEMTrainer) -> None:
    X, Y = flipped()
    with pytest.raises(gh.InvalidDataError, match="Y must be 0 or 1"):
        restart(trainer, HeldOutDensity((X, 2.0 * Y - 1.0))).fit(1, progress=False)


def test_two_held_out_sets_do_not_share_a_column(trainer: VEMTrainer) -> None:
    rule = HeldOutDensity(flipped()) | HeldOutDensity(binary(6))
    with pytest.raises(gh.InvalidDataError, match="another name"):
        restart(trainer, rule).fit(1, progress=False)


def test_rules_with_data_can_be_compared() -> None:
    rule = HeldOutDensity(flipped())
    assert rule == rule
    assert rule != HeldOutDensity(flipped(6))


# Combinations


class Says(StoppingRule):
    """Stops from an iteration on."""

    def __init__(self, at: int, status: str = "stopped", best_by: str | None = None) -> None:
        self.at, self.status, self._best_by = at, status, best_by

    def check(self, records: History) -> Verdict | None:
        return Verdict(self.status, f"At {self.at}.") if len(records) > self.at else None

    @property
    def measurements(self) -> Any:
        return {f"measured at {self.at}": lambda model: 0.0}

    @property
    def best_by(self) -> str | None:
        return self._best_by


def test_any_and_all() -> None:
    records = history(np.zeros(9))
    early, late = Says(2, "converged"), Says(5, best_by="elbo")
    either, both = early | late, early & late
    assert isinstance(either, AnyOf)
    assert isinstance(both, AllOf)
    assert stops_at(either, records) == 2
    assert stops_at(both, records) == 5
    assert either.check(records) == Verdict("converged", "At 2.")
    assert both.check(records) == Verdict("converged", "At 2. At 5.")
    for combined in (either, both):
        assert set(combined.measurements) == {"measured at 2", "measured at 5"}
        assert combined.best_by == "elbo"
    assert stops_at((early & late) | Says(3), records) == 3
    assert stops_at((early | late) & Says(3), records) == 3
    assert stops_at(AnyOf(()), records) is None


def test_the_default_rules_on_a_climb_a_fall_and_a_plateau() -> None:
    climb = np.arange(50.0)
    assert stops_at(default_rules(), history(climb, 1.0)) is None
    fall = np.concatenate([climb[:10], 9.0 - np.arange(1.0, 9.0)])
    assert stops_at(default_rules(), history(fall, 1.0)) == 14
    # No gain in the M-step: no drift, but no better objective either.
    swinging = np.concatenate([[1.0], np.tile([0.0, 0.5], 15)])
    assert stops_at(default_rules(), history(swinging, 0.0)) == 20
    assert stops_at(default_rules(), history(np.full(9, 2.0))) == 3


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: ObjectiveTolerance(0.0), "tolerance must be a positive, finite number; found 0"),
        (lambda: ObjectiveTolerance(1e-3, 0), "window must be a positive integer; found 0"),
        (lambda: HyperparameterTolerance(-1.0), "tolerance must be a positive, finite number"),
        (lambda: HyperparameterTolerance(1e-3, 1.5), "window must be a positive integer"),
        (lambda: Patience(0), "num_iterations must be a positive integer; found 0"),
        (lambda: TimeBudget(NAN), "seconds must be a positive, finite number; found nan"),
        (lambda: HeldOutDensity(binary(), 0), "patience must be a positive integer; found 0"),
        (lambda: HeldOutDensity(np.ones(3)), r"data must be a pair \(X, Y\); found ndarray"),
        (lambda: Drift(-1), "window must be a positive integer; found -1"),
        (lambda: VEMTrainer(build(), stopping=[Drift(), "never"]), "stopping must be"),
    ],
)
def test_refusals(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(gh.InvalidDataError, match=match):
        make()
