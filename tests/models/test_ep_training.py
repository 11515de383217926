"""EPModel's training loss has an exact gradient, and training with it works."""

from __future__ import annotations

from collections.abc import Callable

import gpflow
import numpy as np
import pytest
import tensorflow as tf

import gpflow_hybrid as gh
from tests.gradients import check_gradient, loss_gradient
from tests.likelihood_cases import CASES

N = 20
PROBIT = gh.likelihoods.ProbitBernoulli()  # one instance: its compiled graphs are reused


def inputs() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(N, 2))


def signal(X: np.ndarray, num: int = 1) -> np.ndarray:
    return np.sin(2.0 * X[:, :1] + np.arange(num)) + 0.3 * X[:, 1:]


def ard() -> gpflow.kernels.Kernel:
    return gpflow.kernels.Matern52(variance=2.0, lengthscales=[0.7, 1.5])


def observed(name: str, alpha: float) -> gh.EPModel:
    """A likelihood of :mod:`tests.likelihood_cases` with an ARD kernel and a mean function."""
    X = inputs()
    Y = CASES[name].observe(signal(X), np.random.default_rng(1))
    return gh.EPModel(
        (X, Y), ard(), CASES[name].make(), gpflow.functions.Constant(0.3), alpha=alpha
    )


def probit(alpha: float) -> gh.EPModel:
    X = inputs()
    Y = CASES["probit_bernoulli"].observe(signal(X), np.random.default_rng(1))
    return gh.EPModel((X, Y), ard(), PROBIT, gpflow.functions.Constant(0.3), alpha=alpha)


def outliers(alpha: float) -> gh.EPModel:
    X = inputs()
    Y = signal(X)
    Y[[1, 6]] += [[8.0], [-6.0]]
    model = gh.EPModel((X, Y), ard(), gpflow.likelihoods.StudentT(scale=0.4), alpha=alpha)
    assert model.infer().num_negative_sites >= 2
    return model


def two_columns(alpha: float) -> gh.EPModel:
    X = inputs()
    Y = np.random.default_rng(2).poisson(np.exp(signal(X, 2))).astype(float)
    mean = gpflow.functions.Linear(A=[[0.3, 0.1], [-0.2, 0.4]], b=[0.1, -0.3])
    kernel = gpflow.kernels.SeparateIndependent([ard(), gpflow.kernels.SquaredExponential()])
    return gh.EPModel((X, Y), kernel, gpflow.likelihoods.Poisson(), mean, alpha=alpha)


CASES_OF_TRAINING: dict[str, tuple[Callable[[float], gh.EPModel], int]] = {
    "probit": (probit, 3),
    "student_t with outliers": (outliers, 3),
    "poisson with two columns": (two_columns, 6),
    "beta": (lambda alpha: observed("beta", alpha), 4),
    "bernoulli_probit": (lambda alpha: observed("bernoulli_probit", alpha), 3),
    "ordinal": (lambda alpha: observed("ordinal", alpha), 4),
    "gamma": (lambda alpha: observed("gamma", alpha), 4),
    "own_log_cosh": (lambda alpha: observed("own_log_cosh", alpha), 4),
}
"""How to make a model with power α, and its number of trainable parameters."""

FAST = [
    ("probit", 1.0),
    ("student_t with outliers", 1.0),
    ("poisson with two columns", 0.5),
]
"""A trace takes seconds: the others are slow tests."""


@pytest.mark.parametrize(
    ("name", "alpha"),
    [
        pytest.param(name, alpha, marks=() if (name, alpha) in FAST else pytest.mark.slow)
        for name in CASES_OF_TRAINING
        for alpha in (1.0, 0.5)
    ],
)
def test_gradient_is_the_total_one(name: str, alpha: float) -> None:
    make, num_parameters = CASES_OF_TRAINING[name]
    model = make(alpha)
    assert len(model.trainable_variables) == num_parameters
    check_gradient(model)


def explicit_gradient(model: gh.EPModel) -> list[np.ndarray]:
    """Of minus the log marginal likelihood, at constant sites."""
    with tf.GradientTape() as tape:
        loss = -model.log_marginal_likelihood()
    return [g.numpy() for g in tape.gradient(loss, model.trainable_variables)]


@pytest.mark.parametrize("alpha", [1.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_explicit_derivative_is_the_total_one_at_the_fixed_point_only(alpha: float) -> None:
    model = probit(alpha)
    total = loss_gradient(model)
    model.sites.reset(N)
    assert model.infer(tolerance=1e-10).converged
    for found, expected in zip(explicit_gradient(model), total, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-9)
    model.sites.lambda_1.assign(1.3 * model.sites.lambda_1)
    elsewhere = [
        np.max(np.abs(found - expected))
        for found, expected in zip(explicit_gradient(model), total, strict=True)
    ]
    assert max(elsewhere) > 1e-2


@pytest.mark.parametrize("alpha", [1.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_value_is_stationary_in_the_sites(alpha: float) -> None:
    model = probit(alpha)
    variables = [p.unconstrained_variable for p in model.sites.parameters]

    def gradients() -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(variables)
            value = model.log_marginal_likelihood()
        return tape.gradient(value, variables)

    assert max(np.max(np.abs(g)) for g in gradients()) > 0.1
    assert model.infer(tolerance=1e-10).converged
    for gradient in gradients():
        np.testing.assert_allclose(gradient, 0.0, atol=1e-8)


def test_loss_is_minus_the_log_marginal_likelihood_at_the_inferred_sites() -> None:
    model = probit(1.0)
    loss = float(model.training_loss())
    np.testing.assert_allclose(-model.log_marginal_likelihood(), loss, rtol=1e-12)
    model.sites.reset(N)
    model.infer(tolerance=1e-9)
    np.testing.assert_allclose(-model.log_marginal_likelihood(), loss, rtol=1e-10)
    # As a function of any sites it is the EP-like value of the other models.
    model.sites.lambda_1.assign(0.8 * model.sites.lambda_1)
    np.testing.assert_allclose(
        model.log_marginal_likelihood(), model.ep_like_log_marginal(), rtol=1e-10
    )
    assert abs(float(model.log_marginal_likelihood()) + loss) > 1e-3


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_scipy_is_all_of_training(compile: bool) -> None:
    X = inputs()
    Y = (signal(X) + 0.6 * np.random.default_rng(3).normal(size=(N, 1)) > 0.0).astype(float)
    model = gh.EPModel((X, Y), gpflow.kernels.Matern52(), PROBIT)
    start = float(model.training_loss())
    result = gpflow.optimizers.Scipy().minimize(
        model.training_loss, model.trainable_variables, compile=compile
    )
    assert result.success
    assert result.nfev <= 30
    assert result.fun < start - 0.1
    for gradient in loss_gradient(model):
        np.testing.assert_allclose(gradient, 0.0, atol=1e-3)  # L-BFGS stops at ftol, not at zero
    np.testing.assert_allclose(-model.log_marginal_likelihood(), result.fun, rtol=1e-8)

    again = model.infer()
    assert again.converged
    assert again.num_steps == 0
    probability, _ = model.predict_y(np.array([[0.8, 0.0], [-0.8, 0.0]]))  # where |signal| is 1
    assert probability[0, 0] > 0.6
    assert probability[1, 0] < 0.3

    best = {name: p.numpy() for name, p in gpflow.utilities.parameter_dict(model.kernel).items()}
    for name, value in best.items():
        for factor in (0.8, 1.25):
            gpflow.utilities.multiple_assign(model.kernel, {**best, name: factor * value})
            assert model.training_loss() > result.fun


def test_another_power_is_another_value() -> None:
    model = probit(1.0)
    model.sites.lambda_1.assign(np.full((N, 1), 0.3))
    model.sites.lambda_2.assign(np.full((N, 1), 0.5))
    values = []
    for alpha in (1.0, 0.5):
        model.alpha = alpha
        values.append(float(model.log_marginal_likelihood()))
        np.testing.assert_allclose(values[-1], model.power_ep_log_marginal(alpha), rtol=1e-10)
    assert values[0] > values[1] + 1e-2
