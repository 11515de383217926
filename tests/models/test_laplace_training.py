"""LaplaceModel's training loss has an exact gradient, the implicit term included."""

from __future__ import annotations

from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf

import gpflow_hybrid as gh
from tests.gradients import check_gradient, loss_gradient
from tests.likelihood_cases import CASES

N = 20
LOGIT = gpflow.likelihoods.Bernoulli(invlink=tf.sigmoid)  # one instance: its graphs are reused


def inputs() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(N, 2))


def signal(X: np.ndarray, num: int = 1) -> np.ndarray:
    return np.sin(2.0 * X[:, :1] + np.arange(num)) + 0.3 * X[:, 1:]


def ard() -> gpflow.kernels.Kernel:
    return gpflow.kernels.Matern52(variance=2.0, lengthscales=[0.7, 1.5])


def observed(name: str) -> gh.LaplaceModel:
    """A likelihood of :mod:`tests.likelihood_cases` with an ARD kernel and a mean function."""
    X = inputs()
    Y = CASES[name].observe(signal(X), np.random.default_rng(1))
    likelihood = LOGIT if name == "bernoulli_logit" else CASES[name].make()
    return gh.LaplaceModel((X, Y), ard(), likelihood, gpflow.functions.Constant(0.3))


def outliers() -> gh.LaplaceModel:
    X = inputs()
    Y = signal(X)
    Y[[1, 6]] += [[8.0], [-6.0]]
    model = gh.LaplaceModel((X, Y), ard(), gpflow.likelihoods.StudentT(scale=0.4))
    assert model.infer().num_negative_sites >= 1
    return model


def two_columns() -> gh.LaplaceModel:
    X = inputs()
    Y = np.random.default_rng(2).poisson(np.exp(signal(X, 2))).astype(float)
    mean = gpflow.functions.Linear(A=[[0.3, 0.1], [-0.2, 0.4]], b=[0.1, -0.3])
    kernel = gpflow.kernels.SeparateIndependent([ard(), gpflow.kernels.SquaredExponential()])
    return gh.LaplaceModel((X, Y), kernel, gpflow.likelihoods.Poisson(), mean)


FAST = ("bernoulli_logit", "beta")
SLOW = (
    "probit_bernoulli",
    "bernoulli_probit",
    "ordinal",
    "gamma",
    "exponential",
    "own_log_cosh",
    "switched",
)


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
def test_gradient_over_likelihoods(name: str) -> None:
    check_gradient(observed(name))


@pytest.mark.parametrize("make", [outliers, pytest.param(two_columns, marks=pytest.mark.slow)])
def test_gradient_of_larger_models(make: Any) -> None:
    check_gradient(make())


def test_explicit_derivative_is_not_the_total_one() -> None:
    # The mode and W move with the hyperparameters: the term that the weights are for.
    model = observed("bernoulli_logit")
    total = loss_gradient(model)
    with tf.GradientTape() as tape:
        loss = -model.log_marginal_likelihood()
    explicit = tape.gradient(loss, model.trainable_variables)
    assert max(np.max(np.abs(a - b)) for a, b in zip(explicit, total, strict=True)) > 1e-2


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_scipy_is_all_of_training(compile: bool) -> None:
    X = inputs()
    Y = (signal(X) + 0.6 * np.random.default_rng(3).normal(size=(N, 1)) > 0.0).astype(float)
    model = gh.LaplaceModel((X, Y), gpflow.kernels.Matern52(), LOGIT)
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


@pytest.mark.parametrize("make", [gpflow.likelihoods.Softmax, gpflow.likelihoods.MultiClass])
def test_coupled_latents_are_refused(make: Any) -> None:
    data = np.zeros((3, 1)), np.array([[0], [1], [2]])
    with pytest.raises(
        gh.InvalidDataError, match=r"ScalarLikelihood for LaplaceModel.*Use CVIModel"
    ):
        gh.LaplaceModel(data, gpflow.kernels.Matern52(), make(3))
