"""VEMTrainer on a sparse model: q(u) and hyperparameters in turn, on data that the trainer is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

import gpflow_hybrid as gh
from gpflow_hybrid import InvalidDataError
from gpflow_hybrid.errors import CheckpointError
from gpflow_hybrid.training import (
    GradientSteps,
    HeldOutDensity,
    LBFGSSteps,
    NaturalGradientSteps,
    VEMTrainer,
)
from tests.sparse_cases import SparseProblem, sparse_problem
from tests.training.cases import NEVER, assert_identical, columns, hyperparameters, sites, values

PROBLEM = sparse_problem("student_t")
PROBIT = sparse_problem("probit_bernoulli")
DATA = PROBLEM.data
LR_AS_KEPT = float(np.float32(0.01))


def away_from_its_optimum(objective: Any, problem: SparseProblem = PROBLEM) -> gh.SparseCVIModel:
    """With a prior, a fixed parameter, and a q(u) at which no two objectives agree."""
    model = problem.model(objective)
    model.kernel.lengthscales.prior = tfp.distributions.LogNormal(np.float64(0.5), np.float64(0.3))
    gpflow.set_trainable(model.kernel.variance, False)
    for _ in range(3):
        model.natgrad_step(problem.data, 0.4)
    return model


def log_joint(model: gh.SparseCVIModel, objective: Any) -> tf.Tensor:
    power = {"elbo": 0.0, "ep_like": 1.0}.get(objective, objective)
    return model.power_ep_log_marginal(DATA, power) + model.log_prior_density()


@pytest.mark.parametrize("objective", ["elbo", 0.5, "ep_like"])
def test_the_gradient_at_fixed_q_is_that_of_finite_differences(objective: Any) -> None:
    model = away_from_its_optimum(objective)
    gpflow.set_trainable(model.kernel.variance, True)
    power = {"elbo": 0.0, "ep_like": 1.0}.get(objective, objective)

    @tf.function(autograph=False)
    def compiled() -> Any:
        with tf.GradientTape() as tape:
            value = model.objective_at_fixed_sites(DATA, power)
        return value, tape.gradient(value, model.trainable_variables)

    value, gradients = compiled()
    np.testing.assert_allclose(value, model.power_ep_log_marginal(DATA, power), rtol=1e-12)
    rng, h = np.random.default_rng(0), 1e-4
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        direction = rng.normal(size=variable.shape)
        start, ends = variable.numpy(), []
        for sign in (1.0, -1.0):
            variable.assign(start + sign * h * direction)
            ends.append(float(model.power_ep_log_marginal(DATA, power)))
        variable.assign(start)
        difference = (ends[0] - ends[1]) / (2.0 * h)
        found = float(np.sum(gradient * direction))
        np.testing.assert_allclose(found, difference, rtol=1e-6, atol=1e-6, err_msg=variable.name)


@pytest.mark.parametrize("objective", ["elbo", "ep_like"])
def test_steps_are_those_of_the_objective_at_fixed_q(objective: Any) -> None:
    model, other = away_from_its_optimum(objective), away_from_its_optimum(objective)
    trainer = VEMTrainer(model, objective, data=DATA, m_step=GradientSteps(3, "sgd", 0.01))
    before, start = values(model), float(log_joint(model, objective))
    outcome = trainer.m_step()
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = -log_joint(other, objective)
        gradients = tape.gradient(loss, other.trainable_variables)
        for variable, gradient in zip(other.trainable_variables, gradients, strict=True):
            variable.assign_sub(LR_AS_KEPT * gradient)
    after = values(model)
    for path, value in values(other).items():
        np.testing.assert_allclose(after[path], value, rtol=1e-8, err_msg=path)
        fixed = path.startswith((".sites", ".kernel.variance"))
        assert np.array_equal(after[path], before[path]) == fixed, path
    np.testing.assert_allclose(outcome.before, start, rtol=1e-12)
    np.testing.assert_allclose(outcome.after, log_joint(other, objective), rtol=1e-9)
    assert outcome.after > outcome.before


def test_e_steps_are_those_of_the_model() -> None:
    model, other = PROBLEM.model(), PROBLEM.model()
    trainer = VEMTrainer(model, data=DATA, e_step=NaturalGradientSteps(4, 0.3))
    before = hyperparameters(model)
    outcomes = [trainer.e_step() for _ in range(6)]
    for _ in range(24):
        other.natgrad_step(DATA, 0.3)
    for path, value in sites(other).items():
        np.testing.assert_allclose(sites(model)[path], value, rtol=1e-9, atol=1e-12)
    assert_identical(hyperparameters(model), before)
    assert outcomes[-1].residual < 1e-2 * outcomes[0].residual
    trainer = VEMTrainer(model, data=DATA)  # to convergence
    assert trainer.e_step().residual < 1e-6
    assert trainer.e_step().num_steps == 0
    other.infer(DATA)
    np.testing.assert_allclose(model.q_mu, other.q_mu, atol=1e-5)
    model.sites.lambda_2.assign(-2.0 * np.eye(6)[None])
    before = values(model)
    with pytest.raises(gh.NonFiniteError, match=r"left no valid q.*λ is unchanged"):
        VEMTrainer(model, data=DATA, e_step=NaturalGradientSteps(3, 0.1)).e_step()
    assert_identical(values(model), before)


def test_alternation_climbs_svgps_bound_to_the_collapsed_optimum() -> None:
    def make() -> gh.SparseCVIModel:
        model = PROBIT.model("elbo", mean_function=None)
        gpflow.set_trainable(model.inducing_variable, False)
        return model

    model, collapsed = make(), make()
    trainer = VEMTrainer(model, "elbo", data=PROBIT.data, m_step=LBFGSSteps(5))
    result = trainer.fit(60, progress=False)
    gpflow.optimizers.Scipy().minimize(
        collapsed.training_loss_closure(PROBIT.data), collapsed.trainable_variables
    )
    assert result.status == "converged"
    assert np.all(np.diff(result.history["elbo"]) > -1e-8)
    assert result.history["elbo"][0] < result.history["elbo"][-1] - 0.1
    # It stops at changes of 1e-3 nats, short of the optimum.
    best = float(collapsed.elbo(PROBIT.data))
    np.testing.assert_allclose(result.history["elbo"][-1], best, atol=0.02)
    record = result.history[-1]
    np.testing.assert_allclose(record.elbo, model.elbo(PROBIT.data), rtol=1e-10)
    np.testing.assert_allclose(record.ep_like, model.ep_like_log_marginal(PROBIT.data), rtol=1e-10)


def test_leave_one_out_is_that_of_the_dense_model_with_inducing_points_at_the_data() -> None:
    problem = sparse_problem("probit_bernoulli", 25)
    sparse = problem.model(inducing_variable=problem.X.copy())
    arguments = problem.arguments()
    del arguments["inducing_variable"]
    dense = gh.CVIModel(problem.data, **arguments)
    found, expected = (
        VEMTrainer(model, stopping=NEVER, **more).fit(1, progress=False).history[0]
        for model, more in ((sparse, {"data": problem.data}), (dense, {}))
    )
    # The jitter of K_uu, 1e-6, is all that differs.
    for name in (
        "elbo",
        "ep_like",
        "objective",
        "loo_log_predictive_density",
        "min_cavity_precision",
    ):
        np.testing.assert_allclose(
            getattr(found, name), getattr(expected, name), rtol=1e-4, err_msg=name
        )


@pytest.mark.parametrize("stream", [True, False])
def test_checkpoints_and_tensorboard(tmp_path: Path, stream: bool) -> None:
    data: Any = DATA
    if stream:
        data = tf.data.Dataset.from_tensor_slices(DATA).batch(7)

    def trainer(data: Any = data) -> VEMTrainer:
        stopping = HeldOutDensity((PROBLEM.X[:10], PROBLEM.Y[:10]), patience=50)
        m_step = GradientSteps(2, "adam", 0.03)
        e_step = NaturalGradientSteps(3, 0.5)
        return VEMTrainer(
            PROBLEM.model(), data=data, e_step=e_step, m_step=m_step, stopping=stopping
        )

    whole, first, second = trainer(), trainer(), trainer()
    expected = whole.fit(4, progress=False, log_dir=tmp_path / "logs")
    assert list((tmp_path / "logs").glob("events.out.tfevents.*"))
    first.fit(2, progress=False, checkpoint_dir=tmp_path / "saved")
    found = second.fit(4, progress=False, checkpoint_dir=tmp_path / "saved", resume=True)
    for name, column in columns(expected.history).items():
        np.testing.assert_allclose(found.history[name], column, rtol=1e-9, err_msg=name)
    for path, value in values(whole.model).items():
        np.testing.assert_allclose(values(second.model)[path], value, rtol=1e-9, err_msg=path)
    other = trainer((PROBLEM.X, PROBLEM.Y + 0.1))
    with pytest.raises(CheckpointError, match="its data is"):
        other.fit(4, progress=False, checkpoint_dir=tmp_path / "saved", resume=True)


def test_a_checkpoint_knows_the_data_however_they_are_passed(tmp_path: Path) -> None:
    stream = tf.data.Dataset.from_tensor_slices(DATA).batch(7)
    trainers = [VEMTrainer(PROBLEM.model(), data=data) for data in (DATA, stream)]
    assert trainers[0].subject.description() == trainers[1].subject.description()


def test_the_papers_settings() -> None:
    model = PROBIT.model("elbo")
    model.infer(PROBIT.data)
    trainer = VEMTrainer.paper(model, "elbo", data=PROBIT.data)
    assert model.kernel.variance.numpy() == 1.0
    assert not sites(model)[".sites.lambda_1"].any()
    result = trainer.fit(2, progress=False)
    assert result.history["elbo"][-1] > result.history["elbo"][0]


def test_what_is_refused() -> None:
    model = PROBLEM.model()
    with pytest.raises(InvalidDataError, match="data must be given for SparseCVIModel"):
        VEMTrainer(model)
    dense = gh.CVIModel(DATA, gpflow.kernels.Matern52(), gpflow.likelihoods.StudentT())
    with pytest.raises(InvalidDataError, match="data must be left out for CVIModel"):
        VEMTrainer(dense, data=DATA)
    words = (
        r"objective must be that of a SparseCVIModel.* found the power 0 here and 'ep_like' there"
    )
    with pytest.raises(InvalidDataError, match=words):
        VEMTrainer(model, "elbo", data=DATA)
    trainer = VEMTrainer(model, data=DATA)
    model.objective = "elbo"
    with pytest.raises(InvalidDataError, match="found the power 1 here and 'elbo' there"):
        trainer.e_step()
    with pytest.raises(InvalidDataError, match=r"data must be all 40 rows \(num_data\); found 20"):
        VEMTrainer(PROBLEM.model(num_data=40), data=tuple(x[:20] for x in DATA))
