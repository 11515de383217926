"""What compiles with XLA gives what it gives without."""

from __future__ import annotations

from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf

import gpflow_hybrid as gh
from tests.likelihood_cases import CASES


def fitted(name: str) -> gh.CVIModel:
    rng = np.random.default_rng(1)
    case = CASES[name]
    X = rng.normal(size=(20, 2))
    Y = case.observe(np.sin(3.0 * X[:, :1]), rng)
    if name == "student_t":
        Y[::6] += 5.0  # outliers: negative sites
    kernel = gpflow.kernels.Matern52(variance=2.0)
    mean = gpflow.functions.Constant(0.1)
    model = gh.CVIModel((X, Y), kernel, case.make(), mean, case.num_latent)
    model.infer()
    return model


@pytest.mark.parametrize(
    "name", ["probit_bernoulli", "bernoulli_logit", "student_t", "heteroskedastic"]
)
def test_predictions_and_objectives_compile(name: str) -> None:
    model = fitted(name)
    if name == "student_t":
        assert (model.sites.lambda_2.numpy() < 0.0).any()
    _, Y = model.data
    Xnew = tf.constant(np.random.default_rng(2).normal(size=(7, 2)))
    Ynew = Y[:7]
    calls: dict[str, Any] = {
        "predict_f": lambda: model.predict_f(Xnew),
        "full covariance": lambda: model.predict_f(Xnew, full_cov=True),
        "predict_y": lambda: model.predict_y(Xnew),
        "predict_log_density": lambda: model.predict_log_density((Xnew, Ynew)),
        "elbo": model.elbo,
        "ep_like_log_marginal": model.ep_like_log_marginal,
        "power_ep_log_marginal": lambda: model.power_ep_log_marginal(0.5),
    }
    for call in calls.values():
        compiled = tf.function(call, jit_compile=True, autograph=False)()
        for x, y in zip(tf.nest.flatten(compiled), tf.nest.flatten(call()), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("objective", ["elbo", "ep_like_log_marginal"])
def test_gradients_compile(objective: str) -> None:
    model = fitted("probit_bernoulli")

    def gradient() -> Any:
        with tf.GradientTape() as tape:
            value = getattr(model, objective)()
        return tape.gradient(value, model.trainable_variables)

    compiled = tf.function(gradient, jit_compile=True, autograph=False)()
    for x, y in zip(compiled, gradient(), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-7, atol=1e-9)


def test_a_mixture_of_hyperparameters_is_no_number() -> None:
    """XLA leaves out assertions: what a compiled function refuses in words is NaN here."""
    model = fitted("probit_bernoulli")
    model.training_loss()
    compiled = tf.function(model.elbo, jit_compile=True, autograph=False)
    np.testing.assert_allclose(compiled(), model.elbo(), rtol=1e-9)
    model.kernel.variance.assign(7.0)
    assert np.isnan(compiled())
    model.infer()
    np.testing.assert_allclose(compiled(), model.elbo(), rtol=1e-9)


def test_a_training_loss_does_not_compile_and_says_so() -> None:
    model = fitted("probit_bernoulli")
    with pytest.raises((tf.errors.InvalidArgumentError, tf.errors.UnimplementedError)):
        tf.function(model.training_loss, jit_compile=True, autograph=False)()
