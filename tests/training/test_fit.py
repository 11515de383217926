"""fit(): what it records, where it arrives, and what it leaves behind when something happens."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from typing import Any

import gpflow
import keras
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

import gpflow_hybrid as gh
from gpflow_hybrid import interrupts
from gpflow_hybrid.training import (
    AnyOf,
    Drift,
    GradientSteps,
    HyperparameterTolerance,
    InferToConvergence,
    NaturalGradientSteps,
    ObjectiveTolerance,
    VEMTrainer,
)
from tests.training.cases import (
    NEVER,
    PROBIT,
    Measuring,
    assert_identical,
    build,
    calling,
    cheap_trainer,
    columns,
    hyperparameters,
    raising,
    restart,
    values,
)

# What is recorded


def test_records_are_the_values_of_the_model(trainer: VEMTrainer) -> None:
    restart(trainer)
    model = trainer.model
    seen: list[dict[str, Any]] = []

    def look(_: int) -> None:
        cavities = 1.0 / model.predict_f(model.data[0])[1] - model.sites.lambda_2
        seen.append(
            {
                "elbo": model.elbo(),
                "ep_like": model.ep_like_log_marginal(),
                "objective": model.elbo(),
                "min_cavity_precision": tf.reduce_min(cavities),
                "loo_log_predictive_density": tf.reduce_mean(model.loo_log_predictive_density()),
                **hyperparameters(model),
            }
        )

    result = trainer.fit(3, monitor=calling(look), progress=False)
    history = result.history
    assert len(history) == 4
    np.testing.assert_array_equal(history["iteration"], [0, 1, 2, 3])
    np.testing.assert_array_equal(history["e_steps"], 5)
    for name in seen[0]:
        np.testing.assert_allclose(
            history[name][-3:], [float(s[name]) for s in seen[-3:]], rtol=1e-9, err_msg=name
        )
    assert np.all(history["e_residual"] > 0.0)
    assert np.all(history["seconds"] > 0.0)
    for name in ("gradient_norm", "m_gain"):  # iteration 0 is an E-step alone
        assert np.isnan(history[name][0])
        assert np.all(history[name][1:] > 0.0)
    assert result.status == "max_iterations"
    assert "Raise max_iterations" in result.message
    assert result.num_iterations == result.best_iteration == 3
    assert result.log_dir is None
    np.testing.assert_allclose(result.seconds, np.sum(history["seconds"]))
    assert str(result).startswith("max_iterations after 3 iterations")
    assert set(history[-1].hyperparameters) == {".kernel.variance", ".kernel.lengthscales"}
    with pytest.raises(KeyError, match="'accuracy' is not a column"):
        history["accuracy"]


def test_a_users_monitor_sees_every_record(trainer: VEMTrainer) -> None:
    seen: list[int] = []
    result = restart(trainer).fit(2, monitor=calling(seen.append), progress=False)
    assert seen == list(result.history["iteration"])


def test_fit_is_the_public_steps_in_turn(trainer: VEMTrainer) -> None:
    result = restart(trainer).fit(3, progress=False)
    expected = values(trainer.model)
    restart(trainer)
    trainer.e_step()
    for iteration in range(1, 4):
        moved = trainer.m_step()
        inferred = trainer.e_step()
        record = result.history[iteration]
        assert record.gradient_norm == moved.gradient_norm
        assert record.m_gain == moved.after - moved.before
        assert record.e_residual == inferred.residual
    assert_identical(values(trainer.model), expected)


def test_a_second_fit_goes_on_from_the_first(trainer: VEMTrainer) -> None:
    first = restart(trainer).fit(2, progress=False)
    second = trainer.fit(1, progress=False)
    assert len(second.history) == 2
    assert second.history[1].elbo > second.history[0].elbo > first.history[0].elbo


class CountingMatern32(gpflow.kernels.Matern32):
    """Counts the times that Python evaluates it."""

    calls = 0

    def K_r(self, r: tf.Tensor) -> tf.Tensor:
        type(self).calls += 1
        return super().K_r(r)


def test_the_loop_runs_compiled_and_priors_count() -> None:
    model = gh.CVIModel(build().data, CountingMatern32(), PROBIT)
    model.kernel.variance.prior = tfp.distributions.Gamma(np.float64(2.0), np.float64(3.0))
    trainer = cheap_trainer(model)
    trainer.fit(1, progress=False)
    traced = CountingMatern32.calls
    history = trainer.fit(5, progress=False).history
    assert CountingMatern32.calls == traced
    # The objective has the priors in it, the ELBO does not.
    np.testing.assert_allclose(
        history["objective"] - history["elbo"],
        model.kernel.variance.prior.log_prob(history[".kernel.variance"]),
        rtol=1e-9,
    )


# Where it arrives


@pytest.fixture(scope="module")
def collapsed() -> tuple[VEMTrainer, Any]:
    """The default trainer of the ELBO, and the optimum of the collapsed objective."""
    model = build(seed=3, num=25)
    for parameter in (model.kernel.lengthscales, model.kernel.variance):
        parameter.prior = tfp.distributions.LogNormal(np.float64(0.5), np.float64(0.7))
    other = gpflow.utilities.deepcopy(model)
    other.objective = "elbo"
    gpflow.optimizers.Scipy().minimize(
        other.training_loss, other.trainable_variables, compile=False
    )
    return VEMTrainer(model, "elbo"), other


def test_vem_with_the_elbo_climbs_to_the_collapsed_optimum(collapsed: Any) -> None:
    trainer, other = collapsed
    result = trainer.fit(progress=False)
    history = result.history
    assert result.status == "converged"
    assert 3 < result.num_iterations < 100
    assert result.best_iteration == result.num_iterations
    # Both steps raise one function; the E-step's tolerance is far below.
    assert np.all(np.diff(history["objective"]) > -1e-9)
    assert np.all(history["e_residual"] <= 1e-6)
    assert np.all(history["m_gain"][1:] >= 0.0)
    optimum = float(other.elbo() + other.log_prior_density())
    np.testing.assert_allclose(history["objective"][-1], optimum, atol=1e-3)
    assert history["objective"][-1] <= optimum + 1e-6
    for path, value in hyperparameters(other).items():
        # The objective is flat to 1e-3 nats in a range of this size.
        np.testing.assert_allclose(hyperparameters(trainer.model)[path], value, rtol=0.05)


def test_tighter_rules_arrive_closer(collapsed: Any) -> None:
    trainer, other = collapsed
    trainer.stopping = ObjectiveTolerance(1e-7) & HyperparameterTolerance(1e-4)
    result = trainer.fit(300, progress=False)
    assert result.status == "converged"
    assert "nats" in result.message
    assert "of itself" in result.message
    for path, value in hyperparameters(other).items():
        # Linear convergence: the distance left is several times the last step.
        np.testing.assert_allclose(hyperparameters(trainer.model)[path], value, rtol=2e-3)


@pytest.fixture(scope="module")
def drifting() -> VEMTrainer:
    """A subset of Sonar with EP-like, just before the crest of θ ↦ L_EP(λ*(θ), θ) at log σ = 2.17."""
    X, Y = gh.datasets.load("sonar")
    rows = np.random.default_rng(0).permutation(len(X))[:60]
    X, _ = gh.datasets.standardise(X[rows], X[rows])
    kernel = gpflow.kernels.Matern52(variance=np.exp(4.2), lengthscales=np.exp(2.5))
    return VEMTrainer(gh.CVIModel((X, Y[rows]), kernel, PROBIT), "ep_like")


def test_drift_is_named_and_the_best_restored(drifting: VEMTrainer) -> None:
    rules, drifting.stopping = drifting.stopping, Drift(3)
    start = values(drifting.model)
    result = drifting.fit(40, progress=False)
    history = result.history
    assert result.status == "drift"
    kept = f"as after iteration {result.best_iteration}, the best by objective"
    for words in ("drifting away", kept, "model.objective set to what", "model.training_loss"):
        assert words in result.message
    # METHOD.md section 4: the objective falls, and the variance still grows.
    assert np.all(np.diff(history["objective"])[-3:] < 0.0)
    assert np.all(history["m_gain"][-3:] > 0.0)
    assert np.all(np.diff(history[".kernel.variance"]) > 0.0)
    best = int(np.argmax(history["objective"]))
    assert 0 < best == result.best_iteration < result.num_iterations
    model = drifting.model
    np.testing.assert_allclose(model.ep_like_log_marginal(), history["objective"][best], rtol=1e-10)
    assert_identical(hyperparameters(model), history[best].hyperparameters)

    drifting.stopping = rules
    for path, parameter in gpflow.utilities.parameter_dict(model).items():
        parameter.assign(start[path])


def test_the_default_rules_do_not_call_a_crest_convergence(drifting: VEMTrainer) -> None:
    result = drifting.fit(40, progress=False)
    assert result.status == "drift"


def test_expectation_propagation_alternates_to_its_own_optimum() -> None:
    # EP's value is stationary in its sites, so that alternation is ascent and cannot drift.
    model = gh.EPModel(build(seed=3).data, gpflow.kernels.Matern32(), PROBIT)
    model.kernel.variance.prior = tfp.distributions.LogNormal(np.float64(0.5), np.float64(0.7))
    trainer = VEMTrainer(model, "ep_like", stopping=ObjectiveTolerance(1e-6))
    result = trainer.fit(60, progress=False)
    assert result.status == "converged"
    assert np.all(np.diff(result.history["objective"]) > -1e-8)
    last = result.history[-1]
    np.testing.assert_allclose(last.ep_like, model.log_marginal_likelihood(), rtol=1e-8)
    # The partial derivative at fixed λ is the total one, and vanishes.
    start = gpflow.optimizers.Scipy.pack_tensors(model.trainable_variables).numpy()
    assert trainer.m_step().gradient_norm < 1e-2
    end = gpflow.optimizers.Scipy.pack_tensors(model.trainable_variables).numpy()
    np.testing.assert_allclose(start, end, atol=1e-3)  # where 1e-6 nats leave it


def test_the_best_by_a_rule_of_ones_own_is_restored(trainer: VEMTrainer) -> None:
    # The variance grows; the rule likes 1.06 best.
    def closeness(model: gh.SiteModel) -> float:
        return -abs(float(model.kernel.variance.numpy()) - 1.06)

    result = restart(trainer, Measuring(closeness)).fit(6, progress=False)
    history = result.history
    best = int(np.argmax(history["measured"]))
    assert 0 < best < 6
    assert result.best_iteration == best
    assert_identical(hyperparameters(trainer.model), history[best].hyperparameters)
    np.testing.assert_allclose(trainer.model.elbo(), history[best].elbo, rtol=1e-10)


# What can happen


def test_without_trainable_hyperparameters_there_is_only_the_e_step() -> None:
    model = build()
    gpflow.set_trainable(model.kernel, False)
    result = VEMTrainer(model).fit(5, progress=False)
    assert result.status == "inferred"
    assert "no trainable hyperparameters: only the E-step was run" in result.message
    assert result.num_iterations == 0
    assert len(result.history) == 1
    assert result.history[0].hyperparameters == {}
    assert result.history[0].e_residual <= 1e-6
    assert model.infer().num_steps == 0  # it has converged


@pytest.fixture(scope="module")
def failing() -> VEMTrainer:
    """Five good M-steps of two steps each, then one of a length that no kernel survives."""
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([9], [0.05, 1e8])
    return VEMTrainer(
        build(),
        "elbo",
        e_step=NaturalGradientSteps(5, 0.5),
        m_step=GradientSteps(2, keras.optimizers.Adam(schedule)),
        stopping=NEVER,
    )


def state(trainer: VEMTrainer) -> dict[str, Any]:
    """Everything that training changes, the optimiser included."""
    optimizer = {f"optimizer {i}": v.numpy() for i, v in enumerate(trainer.optimizer.variables)}
    return values(trainer.model) | optimizer


def test_a_non_finite_objective_names_everything_and_restores(failing: VEMTrainer) -> None:
    states: dict[int, Any] = {}
    monitor = calling(lambda iteration: states.update({iteration: state(failing)}))
    with pytest.raises(gh.NonFiniteError) as raised:
        failing.fit(20, monitor=monitor, progress=False)
    message = str(raised.value)
    assert max(states) == 5
    assert "iteration 6" in message
    assert ".kernel.variance = " in message
    assert ".kernel.lengthscales = " in message
    assert "as after the last complete iteration" in message
    assert "smaller step size" in message
    assert "model.training_loss" in message
    assert_identical(state(failing), states[5])


def test_a_failure_in_the_first_e_step_restores_the_start(trainer: VEMTrainer) -> None:
    restart(trainer).model.sites.lambda_2.assign(np.full((15, 1), -50.0))
    before = values(trainer.model)
    with pytest.raises(gh.NonFiniteError, match="iteration 0.*no valid q.*smaller lr"):
        trainer.fit(3, progress=False)
    assert_identical(values(trainer.model), before)


def test_an_error_inside_a_graph_keeps_its_words() -> None:
    X, Y = (tf.Variable(a, shape=[None, 1], trainable=False) for a in build().data)
    trainer = cheap_trainer(gh.CVIModel((X, Y), gpflow.kernels.Matern32(), PROBIT))
    X.assign(np.ones((4, 1)))
    Y.assign(np.ones((4, 1)))
    with pytest.raises(Exception, match="number of rows|Incompatible shapes"):
        trainer.fit(1, progress=False)


class Interrupting:
    """Raises KeyboardInterrupt at the n-th call of a method."""

    def __init__(self, at: int, call: Any) -> None:
        self.at, self.call, self.count = at, call, 0

    def __call__(self) -> Any:
        self.count += 1
        if self.count == self.at:
            raise KeyboardInterrupt
        return self.call()


def assert_is_last_record(trainer: VEMTrainer, result: Any, iteration: int) -> None:
    assert result.status == "interrupted"
    assert f"as after iteration {iteration}" in result.message
    assert result.num_iterations == result.best_iteration == iteration
    assert len(result.history) == iteration + 1
    assert_identical(hyperparameters(trainer.model), result.history[-1].hyperparameters)
    np.testing.assert_allclose(trainer.model.elbo(), result.history[-1].elbo, rtol=1e-10)


def test_an_interrupt_between_iterations(trainer: VEMTrainer) -> None:
    result = restart(trainer).fit(9, monitor=raising(KeyboardInterrupt, 2), progress=False)
    assert_is_last_record(trainer, result, 2)


@pytest.mark.parametrize(
    "method",
    [
        "e_step",
        "_move_hyperparameters",
        "_compiled_diagnosis",
        "_arrays",
    ],
)
def test_an_interrupt_inside_an_iteration_takes_it_back(
    trainer: VEMTrainer, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The call that belongs to iteration 3: M-steps begin with iteration 1, and the state is kept once
    # before iteration 0.
    at = {"_move_hyperparameters": 3, "_arrays": 5}.get(method, 4)
    monkeypatch.setattr(trainer, method, Interrupting(at, getattr(trainer, method)))
    result = restart(trainer).fit(9, progress=False)
    assert_is_last_record(trainer, result, 2)
    monkeypatch.undo()
    expected = restart(trainer).fit(2, progress=False)
    assert_identical(columns(result.history), columns(expected.history))


def test_an_interrupt_of_the_first_e_step_restores_the_start(
    trainer: VEMTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = values(restart(trainer).model)
    monkeypatch.setattr(trainer, "_compiled_diagnosis", Interrupting(1, lambda: None))
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(3, progress=False)
    assert_identical(values(trainer.model), before)


def test_interrupts_at_any_moment(trainer: VEMTrainer) -> None:
    rng = np.random.default_rng(0)
    restart(trainer).fit(1, progress=False)  # compiled
    for _ in range(15):
        before = values(restart(trainer).model)
        # From outside: a thread of our own would only be let in between two computations.
        command = f"sleep {rng.uniform(0.02, 0.3)}; kill -INT {os.getpid()}"
        user = subprocess.Popen(["sh", "-c", command])
        try:
            result = trainer.fit(1000, progress=False)
        except KeyboardInterrupt:  # in the first E-step
            assert_identical(values(trainer.model), before)
        else:
            assert_is_last_record(trainer, result, result.num_iterations)
        user.wait()


def test_an_interrupt_is_remembered_until_it_can_be_raised() -> None:
    with interrupts.deferred():
        interrupts.check()
        signal.raise_signal(signal.SIGINT)  # not raised here
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
        interrupts.check()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):  # the second is not kept waiting
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_of_another_meaning_keeps_it() -> None:
    seen: list[int] = []
    usual = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        with interrupts.deferred():
            signal.raise_signal(signal.SIGINT)
            interrupts.check()
    finally:
        signal.signal(signal.SIGINT, usual)
    assert seen == [signal.SIGINT]


def test_an_e_step_that_does_not_converge_is_told() -> None:
    settings = InferToConvergence(1e-9, max_steps=2)
    result = VEMTrainer(build(), "elbo", e_step=settings, stopping=NEVER).fit(1, progress=False)
    assert "The E-step there did not converge (residual" in result.message


def test_an_error_of_the_users_monitor_is_the_users(trainer: VEMTrainer) -> None:
    expected = restart(trainer).fit(1, progress=False)
    with pytest.raises(ZeroDivisionError, match="at 1"):
        restart(trainer).fit(3, monitor=raising(ZeroDivisionError, 1), progress=False)
    assert_identical(hyperparameters(trainer.model), expected.history[-1].hyperparameters)


@pytest.mark.parametrize("name", ["max_iterations", "image_period", "checkpoint_period"])
@pytest.mark.parametrize("value", [0, -3, 2.5, True])
def test_counts_must_be_positive(trainer: VEMTrainer, name: str, value: Any) -> None:
    before = values(restart(trainer).model)
    with pytest.raises(gh.InvalidDataError, match=f"{name} must be a positive integer; found"):
        trainer.fit(**{"max_iterations": 1, name: value})
    assert_identical(values(trainer.model), before)


def test_a_parameter_that_was_fixed_since_is_noticed(trainer: VEMTrainer) -> None:
    kernel = restart(trainer).model.kernel
    gpflow.set_trainable(kernel.variance, False)
    try:
        with pytest.raises(gh.InvalidDataError, match="build a new trainer"):
            trainer.fit(1, progress=False)
    finally:
        gpflow.set_trainable(kernel.variance, True)


def test_data_in_variables_are_not_trained() -> None:
    X, Y = build().data
    model = gh.CVIModel((tf.Variable(X), tf.Variable(Y)), gpflow.kernels.Matern32(), PROBIT)
    assert len(VEMTrainer(model, "elbo").variables) == 2


# Progress and pictures


def test_progress(trainer: VEMTrainer, capsys: pytest.CaptureFixture[str]) -> None:
    restart(trainer).fit(2)
    restart(trainer).fit(2, progress=False)
    assert capsys.readouterr() == ("", "")  # not a terminal
    result = restart(trainer).fit(2, progress=True)
    printed = capsys.readouterr().err
    assert "2/2" in printed
    assert f"objective={result.history[-1].objective:.4f}" in printed


def test_plot(trainer: VEMTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib.use("Agg")
    result = restart(trainer).fit(3, progress=False)
    figure = result.plot()
    top, middle, _ = figure.axes
    by_label = {line.get_label(): line for line in top.lines}
    np.testing.assert_array_equal(by_label["ELBO"].get_ydata(), result.history["elbo"])
    np.testing.assert_array_equal(by_label["EP-like"].get_ydata(), result.history["ep_like"])
    labels = {line.get_label() for line in middle.lines}
    assert labels == {"kernel.variance", "kernel.lengthscales"}
    alone = dataclasses.replace(result, history=type(result.history)(result.history[:1]))
    alone.plot().canvas.draw()  # one record, and no gradient norm
    plt.close("all")
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match="needs matplotlib.*pip install"):
        result.plot()


def test_rules_can_be_given_as_a_list() -> None:
    rules = [ObjectiveTolerance(), Drift()]
    assert VEMTrainer(build(), stopping=rules).stopping == AnyOf(tuple(rules))
