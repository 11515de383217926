"""e_step() and m_step(): what they do, against loops written by hand, and what they leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpflow
import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
import tf_keras

import gpflow_hybrid as gh
from gpflow_hybrid.training import (
    GradientSteps,
    InferToConvergence,
    LBFGSSteps,
    NaturalGradientSteps,
    Patience,
    VEMTrainer,
)
from tests.training.cases import (
    NEVER,
    PROBIT,
    assert_identical,
    binary,
    build,
    hyperparameters,
    sites,
    values,
)

# Keras keeps a step size as a float32.
LR = 0.05
LR_AS_KEPT = float(np.float32(LR))


def regression(seed: int = 1, num: int = 12) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.uniform(0.0, 3.0, size=(num, 2))
    return X, np.sin(2.0 * X[:, :1]) + 0.3 * rng.normal(size=(num, 1))


def with_everything() -> gh.CVIModel:
    """Hyperparameters in kernel, likelihood and mean function, arrays and scalars, priors, a fixed one;
    λ away from its optimum, so that no two objectives agree, and trainable by its flag."""
    model = gh.CVIModel(
        regression(),
        gpflow.kernels.Matern52(variance=0.8, lengthscales=[0.7, 1.4])
        + gpflow.kernels.Linear(variance=0.2),
        gpflow.likelihoods.Gaussian(0.2),
        gpflow.functions.Constant(0.1),
    )
    matern, linear = model.kernel.kernels
    gpflow.set_trainable(linear, False)
    matern.lengthscales.prior = tfp.distributions.LogNormal(np.float64(0.5), np.float64(0.3))
    model.likelihood.variance.prior = tfp.distributions.Gamma(np.float64(2.0), np.float64(9.0))
    model.natgrad_step(0.4)
    model.natgrad_step(0.4)
    gpflow.set_trainable(model.sites, True)
    return model


def log_joint(model: gh.CVIModel, objective: Any) -> tf.Tensor:
    """The objective at fixed λ with the priors, by the model's own public methods."""
    value = {
        "elbo": model.elbo,
        "ep_like": model.ep_like_log_marginal,
        0.5: lambda: model.power_ep_log_marginal(0.5),
    }[objective]()
    return value + model.log_prior_density()


def descend(
    model: gh.CVIModel, objective: Any, num_steps: int, move: Callable[[int, list[Any]], list[Any]]
) -> list[float]:
    """``num_steps`` by hand; ``move(step, gradients of the loss)`` says by how much."""
    variables = model.trainable_variables

    def gradients() -> Any:
        with tf.GradientTape() as tape:
            loss = -log_joint(model, objective)
        return tape.gradient(loss, variables)

    if num_steps > 10:
        gradients = tf.function(gradients, autograph=False)
    norms = []
    for step in range(num_steps):
        found = gradients()
        norms.append(float(tf.linalg.global_norm(found)))
        moves = move(step, [g.numpy() for g in found])
        for variable, by in zip(variables, moves, strict=True):
            variable.assign_add(by)
    return norms


# The E-step


def test_natural_gradient_steps_are_those_of_the_model() -> None:
    model, other = build(), build()
    trainer = VEMTrainer(model, e_step=NaturalGradientSteps(6, 0.3))
    before = hyperparameters(model)
    outcome = trainer.e_step()
    for _ in range(6):
        other.natgrad_step(0.3)
    for path, value in sites(other).items():
        np.testing.assert_allclose(sites(model)[path], value, rtol=1e-10, err_msg=path)
    assert outcome.num_steps == 6
    assert_identical(hyperparameters(model), before)

    # The residual is that of the fixed point λ = g(λ), here from one full step.
    m, v = (t.numpy() for t in other.predict_f(other.data[0]))
    old = [t.numpy() for t in other.sites.values]
    other.natgrad_step(1.0)
    new = [t.numpy() for t in other.sites.values]
    b = new[1] - old[1]
    a = new[0] - old[0] - m * b
    said = (new[0] - new[1] * m, new[1])

    def size(a: np.ndarray, b: np.ndarray) -> float:
        return max(np.max(np.abs(b) * v), np.max(np.abs(a) * np.sqrt(v)))

    np.testing.assert_allclose(outcome.residual, size(a, b) / min(size(*said), 1.0), rtol=1e-8)

    # A second call goes on from there; enough of them converge.
    residuals = [trainer.e_step().residual for _ in range(6)]
    assert np.all(np.diff([outcome.residual, *residuals]) < 0.0)
    assert residuals[-1] < 1e-4


def test_infer_to_convergence_is_the_models_infer() -> None:
    model, other = build(), build()
    trainer = VEMTrainer(model, e_step=InferToConvergence(tolerance=1e-8))
    before = hyperparameters(model)
    outcome = trainer.e_step()
    result = other.infer(tolerance=1e-8)
    assert result.converged
    assert (outcome.num_steps, outcome.residual) == (result.num_steps, result.residual)
    assert_identical(sites(model), sites(other))
    assert_identical(hyperparameters(model), before)
    assert trainer.e_step().num_steps == 0


def test_expectation_propagation_is_inferred_to_convergence_only() -> None:
    model, other = (gh.EPModel(binary(), gpflow.kernels.Matern32(), PROBIT) for _ in range(2))
    outcome = VEMTrainer(model).e_step()
    assert other.infer().converged
    assert outcome.residual <= 1e-6
    assert_identical(sites(model), sites(other))
    with pytest.raises(gh.InvalidDataError, match=r"InferToConvergence\(\) for EPModel"):
        VEMTrainer(model, e_step=NaturalGradientSteps())


def test_an_e_step_without_a_valid_q_changes_nothing() -> None:
    model = build()
    model.sites.lambda_2.assign(np.full((15, 1), -50.0))
    before = values(model)
    with pytest.raises(gh.NonFiniteError, match=r"lr = 0\.1 left no valid q.*λ is unchanged"):
        VEMTrainer(model, e_step=NaturalGradientSteps(3, 0.1)).e_step()
    assert_identical(values(model), before)


# The M-step


@pytest.mark.parametrize("objective", ["elbo", 0.5, "ep_like"])
def test_gradient_descent_is_that_of_the_objective_at_fixed_sites(objective: Any) -> None:
    model, other = with_everything(), with_everything()
    trainer = VEMTrainer(model, objective, m_step=GradientSteps(5, "sgd", LR))
    before, kept = values(model), float(log_joint(model, objective))
    outcome = trainer.m_step()
    norms = descend(other, objective, 5, lambda _, grads: [-LR_AS_KEPT * g for g in grads])
    assert len(trainer.variables) == 4
    assert all(v is not t for v in trainer.variables for t in model.sites.trainable_variables)
    after = values(model)
    for path, value in values(other).items():
        np.testing.assert_allclose(after[path], value, rtol=1e-9, err_msg=path)
    fixed = (".sites", ".kernel.kernels[1]")
    for path, value in after.items():
        assert np.array_equal(value, before[path]) == path.startswith(fixed), path
    np.testing.assert_allclose(outcome.before, kept, rtol=1e-12)
    np.testing.assert_allclose(outcome.after, log_joint(other, objective), rtol=1e-10)
    np.testing.assert_allclose(outcome.gradient_norm, norms[-1], rtol=1e-8)
    assert outcome.after > outcome.before


def test_sites_that_followed_a_training_loss_are_fixed_too() -> None:
    # As training_loss() leaves them, λ is λ*(θ) and follows θ in elbo() and in predictions.
    model = build()
    trainer = VEMTrainer(model, "elbo", m_step=GradientSteps(2, "sgd", LR))
    model.natgrad_step(0.5)
    model.sites.store_inferred(model.sites.values, model._hyperparameter_values())
    before = sites(model)
    trainer.m_step()
    model.elbo()
    model.predict_f(model.data[0])
    assert_identical(sites(model), before)

    # Where there is no objective, nothing is moved.
    model.kernel.lengthscales.unconstrained_variable.assign(-2000.0)  # softplus is exactly zero
    before = values(model)
    with pytest.raises(gh.NonFiniteError):
        trainer.m_step()
    assert_identical(values(model), before)


class Adam:
    """Kingma and Ba's, by hand, with Keras' ε."""

    def __init__(self, lr: Callable[[int], float]) -> None:
        self.lr = lr
        self.m: list[Any] = []
        self.v: list[Any] = []

    def __call__(self, step: int, gradients: list[Any]) -> list[Any]:
        if not self.m:
            self.m = [np.zeros_like(g) for g in gradients]
            self.v = [np.zeros_like(g) for g in gradients]
        self.m = [0.9 * m + 0.1 * g for m, g in zip(self.m, gradients, strict=True)]
        self.v = [0.999 * v + 0.001 * g**2 for v, g in zip(self.v, gradients, strict=True)]
        t = step + 1
        scale = self.lr(step) * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        return [-scale * m / (np.sqrt(v) + 1e-7) for m, v in zip(self.m, self.v, strict=True)]


def decaying(library: Any) -> Any:
    return library.optimizers.schedules.ExponentialDecay(LR, 3, 0.5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: GradientSteps(2, "adam", decaying(keras)),
        lambda: GradientSteps(2, keras.optimizers.Adam(decaying(keras))),
        pytest.param(
            lambda: GradientSteps(2, tf_keras.optimizers.Adam(decaying(tf_keras))),
            marks=pytest.mark.slow,
        ),
        lambda: GradientSteps(2, tf_keras.optimizers.legacy.Adam(decaying(tf_keras))),
    ],
    ids=["name", "keras", "tf_keras", "tf_keras_legacy"],
)
def test_state_and_schedule_go_on_from_one_m_step_to_the_next(
    make: Callable[[], GradientSteps],
) -> None:
    model, other = with_everything(), with_everything()
    trainer = VEMTrainer(model, "elbo", m_step=make())
    before = sites(model)
    for _ in range(3):
        trainer.m_step()
    descend(other, "elbo", 6, Adam(lambda step: LR * 0.5 ** (step / 3)))
    for path, value in hyperparameters(other).items():
        # Keras keeps Adam's decay rates as float32: 1 − 0.999 is off by 1e-5 of itself.
        np.testing.assert_allclose(hyperparameters(model)[path], value, rtol=2e-5, err_msg=path)
    assert_identical(sites(model), before)


class Harmonic(keras.optimizers.schedules.LearningRateSchedule):
    """A user's own schedule, without a configuration."""

    def __call__(self, step: Any) -> Any:
        return LR / (1.0 + tf.cast(step, tf.float32))


def test_a_schedule_need_not_have_a_configuration() -> None:
    model = build()
    gpflow.set_trainable(model.kernel, False)  # no M-step to compile: only fit's preparations
    trainer = VEMTrainer(model, "elbo", m_step=GradientSteps(2, "sgd", Harmonic()))
    assert trainer.fit(1, progress=False).status == "inferred"


def test_lbfgs_is_scipys_at_fixed_sites() -> None:
    model, other = with_everything(), with_everything()
    trainer = VEMTrainer(model, "ep_like", m_step=LBFGSSteps(200))
    before = sites(model)
    outcome = trainer.m_step()
    result = gpflow.optimizers.Scipy().minimize(
        lambda: -log_joint(other, "ep_like"),
        other.trainable_variables,
        tf_fun_args={"autograph": False},
    )
    assert_identical(sites(model), before)
    np.testing.assert_allclose(outcome.after, -result.fun, atol=1e-6)
    np.testing.assert_allclose(outcome.after, log_joint(model, "ep_like"), rtol=1e-10)
    # L-BFGS stops at a relative change of 2e-9, short of a vanishing gradient.
    assert outcome.gradient_norm < 1e-2


def test_m_step_without_trainable_hyperparameters_is_refused() -> None:
    model = build()
    gpflow.set_trainable(model.kernel, False)
    with pytest.raises(gh.InvalidDataError, match="no trainable hyperparameters.*set_trainable"):
        VEMTrainer(model).m_step()


@pytest.mark.parametrize(
    "m_step",
    [
        GradientSteps(2, "sgd", LR),
        pytest.param(
            LBFGSSteps(2),
        ),
    ],
    ids=["sgd", "lbfgs"],
)
def test_a_trainable_parameter_that_the_objective_does_not_use(m_step: Any) -> None:
    class WithSpare(gpflow.kernels.Matern32):
        def __init__(self) -> None:
            super().__init__()
            self.spare = gpflow.Parameter(2.0)

    model = gh.CVIModel(regression(), WithSpare(), gpflow.likelihoods.Gaussian(0.2))
    outcome = VEMTrainer(model, "elbo", m_step=m_step).m_step()
    assert outcome.after > outcome.before
    assert model.kernel.spare.numpy() == 2.0


# Several latents, single precision


def test_several_latents() -> None:
    def heteroskedastic() -> gh.CVIModel:
        kernel = gpflow.kernels.SeparateIndependent(
            [gpflow.kernels.SquaredExponential(), gpflow.kernels.Matern32(variance=0.5)]
        )
        likelihood = gpflow.likelihoods.HeteroskedasticTFPConditional()
        return gh.CVIModel(regression(), kernel, likelihood)

    model, other = heteroskedastic(), heteroskedastic()
    trainer = VEMTrainer(
        model, "elbo", e_step=NaturalGradientSteps(2, 0.3), m_step=GradientSteps(2, "sgd", LR)
    )
    assert model.sites.lambda_1.shape == (12, 2)
    trainer.e_step()
    for _ in range(2):
        other.natgrad_step(0.3)
    trainer.m_step()
    descend(other, "elbo", 2, lambda _, grads: [-LR_AS_KEPT * g for g in grads])
    for path, value in values(other).items():
        np.testing.assert_allclose(values(model)[path], value, rtol=1e-9, err_msg=path)


def test_float32() -> None:
    double = build()
    for _ in range(5):
        double.natgrad_step(0.5)
    descend(double, "elbo", 3, Adam(lambda _: LR))
    gpflow.config.set_default_float(np.float32)
    X, Y = (a.astype(np.float32) for a in binary())
    single = gh.CVIModel((X, Y), gpflow.kernels.Matern32(), PROBIT)
    trainer = VEMTrainer(
        single, "elbo", e_step=NaturalGradientSteps(5, 0.5), m_step=GradientSteps(3, "adam", LR)
    )
    trainer.e_step()
    trainer.m_step()
    for path, value in values(double).items():
        assert values(single)[path].dtype == np.float32
        np.testing.assert_allclose(values(single)[path], value, rtol=1e-4, atol=1e-5)


# The paper's settings


def test_the_papers_preset_is_the_papers_procedure() -> None:
    def untouched() -> gh.CVIModel:
        kernel = gpflow.kernels.Matern52(variance=3.0, lengthscales=0.4)
        model = gh.CVIModel(binary(), kernel, PROBIT)
        model.natgrad_step(0.7)
        return model

    model = untouched()
    trainer = VEMTrainer.paper(model)
    assert trainer.objective == "ep_like"
    assert trainer.e_step_settings == NaturalGradientSteps(20, 0.1)
    assert trainer.m_step_settings == GradientSteps(20, "sgd", 0.001)
    assert trainer.stopping == Patience(1)
    for parameter in model.kernel.parameters:
        assert parameter.numpy() == 1.0
    for value in sites(model).values():
        np.testing.assert_array_equal(value, 0.0)

    trainer.stopping = NEVER
    result = trainer.fit(2, progress=False)

    other = untouched()
    other.kernel.lengthscales.assign(1.0)
    other.kernel.variance.assign(1.0)
    other.sites.reset(15)
    natural_gradient_step = tf.function(lambda: other.natgrad_step(0.1), autograph=False)
    lr = float(np.float32(0.001))
    ep_like, elbo = [], []
    for iteration in range(3):
        if iteration > 0:
            descend(other, "ep_like", 20, lambda _, grads: [-lr * g for g in grads])
        for _ in range(20):
            natural_gradient_step()
        ep_like.append(float(other.ep_like_log_marginal()))
        elbo.append(float(other.elbo()))
    np.testing.assert_allclose(result.history["ep_like"], ep_like, rtol=1e-10)
    np.testing.assert_allclose(result.history["elbo"], elbo, rtol=1e-10)
    for path, value in values(other).items():
        np.testing.assert_allclose(values(model)[path], value, rtol=1e-9, err_msg=path)


# Refusals

FOREIGN_SCHEDULE = tf_keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)


def used_elsewhere() -> keras.optimizers.Optimizer:
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build([tf.Variable(1.0)])
    return optimizer


def test_a_failed_m_step_changes_nothing() -> None:
    trainer = VEMTrainer(build(), "elbo", m_step=GradientSteps(3, "adam", 1e200))
    trainer.e_step()
    before = trainer._arrays()
    with pytest.raises(gh.NonFiniteError, match="not finite in the M-step"):
        trainer.m_step()
    assert_identical(trainer._arrays(), before)


def test_the_papers_preset_leaves_other_parameters_alone() -> None:
    white, linear = gpflow.kernels.White(0.3), gpflow.kernels.Linear(0.4)
    fixed = gpflow.kernels.RBF(variance=2.0, lengthscales=3.0)
    gpflow.set_trainable(fixed.variance, False)
    kernel = gpflow.kernels.Matern32(5.0, 6.0) + white + linear * fixed
    VEMTrainer.paper(gh.CVIModel(binary(), kernel, PROBIT))
    first = kernel.kernels[0]
    assert first.variance.numpy() == first.lengthscales.numpy() == fixed.lengthscales.numpy() == 1.0
    assert (white.variance.numpy(), linear.variance.numpy(), fixed.variance.numpy()) == (
        pytest.approx(0.3),
        pytest.approx(0.4),
        pytest.approx(2.0),
    )


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: VEMTrainer(build(), "evidence"), r'objective must be "elbo".*\'evidence\''),
        (lambda: VEMTrainer(build(), 1.5), r"objective must be a number in \[0, 1\].*1\.5"),
        (
            lambda: VEMTrainer(gpflow.models.VGP(binary(), gpflow.kernels.RBF(), PROBIT)),
            "model must be a model with sites, such as CVIModel; found VGP",
        ),
        (lambda: VEMTrainer(build(), e_step=20), r"e_step must be NaturalGradientSteps.*found 20"),
        (lambda: VEMTrainer(build(), m_step="adam"), r"m_step must be GradientSteps.*'adam'"),
        (lambda: VEMTrainer(build(), stopping="soon"), r"stopping must be a stopping rule.*'soon'"),
        (lambda: NaturalGradientSteps(0), "num_steps must be a positive integer; found 0"),
        (lambda: NaturalGradientSteps(5, 0.0), r"lr must be a number in \(0, 1\]; found 0"),
        (lambda: NaturalGradientSteps(5, 1.5), r"lr must be a number in \(0, 1\]; found 1\.5"),
        (lambda: InferToConvergence(0.0), "tolerance must be a positive, finite number; found 0"),
        (lambda: InferToConvergence(1e-6, -1), "max_steps must be a positive integer; found -1"),
        (lambda: GradientSteps(2.5), r"num_steps must be a positive integer; found 2\.5"),
        (lambda: GradientSteps(5, "newton"), r'optimizer must be "adam", "sgd".*\'newton\''),
        (
            lambda: GradientSteps(5, "sgd", -0.1),
            r"lr must be a positive, finite number; found -0\.1",
        ),
        (
            lambda: GradientSteps(5, "adam", np.inf),
            "lr must be a positive, finite number; found inf",
        ),
        (
            lambda: VEMTrainer(build(), m_step=GradientSteps(5, "adam", FOREIGN_SCHEDULE)),
            "lr must be a positive number or a schedule of keras.*found ExponentialDecay",
        ),
        (
            lambda: VEMTrainer(build(), m_step=GradientSteps(5, used_elsewhere())),
            "optimizer has been used with other variables.*pass a new Adam",
        ),
        (lambda: GradientSteps(5, gpflow.optimizers.Scipy()), r"For L-BFGS use LBFGSSteps\(\)"),
        (lambda: LBFGSSteps(True), "num_steps must be a positive integer; found True"),
    ],
)
def test_refusals(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(gh.InvalidDataError, match=match):
        make()


def test_the_trainer_is_public() -> None:
    assert gh.VEMTrainer is VEMTrainer
