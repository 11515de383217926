"""What a training loss can be differentiated in, and how: eagerly, compiled, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf

import gpflow_hybrid as gh
from gpflow_hybrid import covariances
from gpflow_hybrid.covariances import covariance, data_covariance

RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 1))
Y = (X + 0.5 * RNG.normal(size=X.shape) > 0.0).astype(float)

COMPILED = [False, True]


class GroupMeans(gpflow.functions.MeanFunction):
    """A constant for each of three groups, gathered: its gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.values = gpflow.Parameter(np.zeros(3))

    def __call__(self, X: Any) -> tf.Tensor:
        group = tf.cast(tf.clip_by_value(X[:, 0] + 1.0, 0.0, 2.0), tf.int32)
        return tf.gather(self.values.unconstrained_variable, group)[:, None]


class SinglePrecision(gpflow.functions.MeanFunction):
    """A slope in another precision, in a variable that no module knows."""

    def __init__(self, slope: tf.Variable) -> None:
        super().__init__()
        self.slope = lambda: slope

    def __call__(self, X: Any) -> tf.Tensor:
        return tf.cast(self.slope(), tf.float64) * X


def model(**options: Any) -> gh.CVIModel:
    data = options.pop("data", (X, Y))
    return gh.CVIModel(data, gpflow.kernels.Matern52(), gh.likelihoods.ProbitBernoulli(), **options)


def gradients(m: gh.CVIModel, variables: list[tf.Variable], compiled: bool) -> list[Any]:
    def evaluate() -> Any:
        with tf.GradientTape() as tape:
            loss = m.training_loss()
        found = tape.gradient(loss, variables)
        return [x for x in found if x is not None]

    return [np.asarray(x) for x in (tf.function(evaluate) if compiled else evaluate)()]


def difference(m: gh.CVIModel, variable: tf.Variable, index: Any, step: float) -> float:
    kept = np.array(variable.numpy())
    values = []
    for sign in (1.0, -1.0):
        moved = kept.copy()
        moved[index] += sign * step
        variable.assign(moved)
        values.append(float(m.training_loss()))
    variable.assign(kept)
    return (values[0] - values[1]) / (2.0 * step)


@pytest.mark.parametrize("compiled", COMPILED)
def test_a_sparse_gradient(compiled: bool) -> None:
    m = model(mean_function=GroupMeans())
    variable = m.mean_function.values.unconstrained_variable
    (found,) = gradients(m, [variable], compiled)
    for i in range(3):
        np.testing.assert_allclose(found[i], difference(m, variable, i, 1e-4), rtol=1e-5)


@pytest.mark.parametrize("compiled", COMPILED)
def test_variables_of_another_precision_outside_the_model(compiled: bool) -> None:
    slope = tf.Variable(0.3, dtype=tf.float32)
    m = model(mean_function=SinglePrecision(slope))
    assert all(v is not slope for v in m.variables)
    (found,) = gradients(m, [slope], compiled)
    assert found.dtype == np.float32
    # The step is in single precision.
    np.testing.assert_allclose(found, difference(m, slope, (), 2.0**-6), rtol=2e-3)


@pytest.mark.parametrize("compiled", COMPILED)
def test_data_in_variables_have_no_gradient(compiled: bool) -> None:
    """None, which says so, and not a number that ignores how λ follows."""
    data = tuple(tf.Variable(x) for x in (X, Y))
    assert gradients(model(data=data), list(data), compiled) == []


@pytest.mark.parametrize("many_data", [0, 1000], ids=["by_rows", "whole"])
def test_parameters_that_were_held_while_the_loss_was_traced(
    many_data: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(covariances, "MANY_DATA", many_data)
    likelihood = gpflow.likelihoods.StudentT(scale=0.4)
    m = gh.CVIModel((X, Y), gpflow.kernels.Matern52(), likelihood)
    for held in (m.kernel.lengthscales, likelihood.scale):
        gpflow.set_trainable(held, False)
    loss = m.training_loss_closure()
    loss()
    gpflow.set_trainable(m, True)
    with tf.GradientTape() as tape:
        value = loss()
    found = tape.gradient(value, m.trainable_variables)
    assert len(found) == 3
    np.testing.assert_allclose(
        found, gradients(m, list(m.trainable_variables), compiled=False), rtol=1e-6
    )


def test_two_gradients_of_one_tape() -> None:
    m = model(mean_function=gpflow.functions.Constant(0.1))
    both = [*m.kernel.trainable_variables], [*m.mean_function.trainable_variables]

    @tf.function
    def evaluate() -> Any:
        with tf.GradientTape(persistent=True) as tape:
            loss = m.training_loss()
        return [tape.gradient(loss, variables) for variables in both]

    found = [float(x) for x in tf.nest.flatten(evaluate())]
    once = gradients(m, [*both[0], *both[1]], compiled=True)
    np.testing.assert_allclose(found, [float(x) for x in once], rtol=1e-7)


def test_a_value_alone_costs_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    m = model()
    with tf.GradientTape():
        expected = m.training_loss()
    calls: list[str] = []
    adjoint = gh.linalg.lapack.kernel_adjoint
    monkeypatch.setattr(
        gh.linalg.lapack, "kernel_adjoint", lambda *a: (calls.append("adjoint"), adjoint(*a))[1]
    )
    np.testing.assert_allclose(m.training_loss(), expected, rtol=1e-10)
    assert calls == []
    with tf.GradientTape():
        m.training_loss()
    assert calls == ["adjoint"]


# Kernels of the user's own are not taken apart.


class Diagonal(gpflow.kernels.SquaredExponential):
    """Not a function of every element alike."""

    def K_r2(self, r2: tf.Tensor) -> tf.Tensor:
        K = super().K_r2(r2)
        return tf.linalg.set_diag(K, tf.linalg.diag_part(K) + 0.0 * K[0]) * (1.0 + 0.0 * K[-1:])


def by_tensors() -> gpflow.kernels.Kernel:
    kernel = gpflow.kernels.SquaredExponential()
    kernel.lengthscales = 2.0 * tf.convert_to_tensor(kernel.variance)
    return kernel


@pytest.mark.parametrize("make", [Diagonal, by_tensors], ids=["own function", "tensors"])
def test_kernels_of_the_users_own(
    make: Callable[[], gpflow.kernels.Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(covariances, "MANY_DATA", 5)
    monkeypatch.setattr(covariances, "by_rows", None)  # would fail
    kernel = make()
    np.testing.assert_allclose(
        data_covariance(kernel, tf.constant(X)), covariance(kernel, X), rtol=1e-10
    )


def test_inputs_that_are_watched_keep_their_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(covariances, "MANY_DATA", 5)
    kernel = gpflow.kernels.Matern52()
    inputs = tf.constant(X)
    found = []
    for matrix in (data_covariance, covariance):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            total = tf.reduce_sum(tf.sin(matrix(kernel, inputs)))
        found.append(tape.gradient(total, inputs))
    np.testing.assert_allclose(*found, rtol=1e-8, atol=1e-10)
