"""What a training loss can be differentiated in, and how: eagerly, compiled, once."""

from __future__ import annotations

import dataclasses
from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf

import gpflow_hybrid as gh
from gpflow_hybrid import tuning
from gpflow_hybrid.inference import remarks

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
    monkeypatch.setattr(tuning, "FEW_DATA", many_data)
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
    expected = m.training_loss()
    calls: list[str] = []
    adjoint = gh.linalg.lapack.kernel_adjoint
    monkeypatch.setattr(
        gh.linalg.lapack, "kernel_adjoint", lambda *a: (calls.append("adjoint"), adjoint(*a))[1]
    )
    with tf.GradientTape() as tape:
        value = m.training_loss()
    np.testing.assert_allclose(value, expected, rtol=1e-10)
    assert calls == []
    tape.gradient(value, m.trainable_variables)
    assert calls == ["adjoint"]


def test_a_gradient_is_that_of_its_own_loss() -> None:
    """Asked for when the parameters have moved, after another loss that could have taken its memory."""
    m = gh.CVIModel((X, Y), gpflow.kernels.Matern52(), gpflow.likelihoods.StudentT(0.4))
    expected = gradients(m, list(m.trainable_variables), compiled=False)
    with tf.GradientTape() as tape:
        value = m.training_loss()
    m.kernel.variance.assign(9.0)
    m.likelihood.scale.assign(1.0)
    m.training_loss()
    np.testing.assert_allclose(tape.gradient(value, m.trainable_variables), expected, rtol=1e-6)


def test_a_persistent_tape_may_ask_twice() -> None:
    m = model()
    variables = m.trainable_variables
    with tf.GradientTape(persistent=True) as tape:
        value = m.training_loss()
    found = [float(tape.gradient(value, v)) for v in variables]
    expected = gradients(m, list(variables), compiled=False)
    np.testing.assert_allclose(found, expected, rtol=1e-7)


def test_an_eager_line_search_that_goes_too_far() -> None:
    """Once training has begun there is a high loss and a flat slope where nothing can be computed."""
    m = model()
    proper = float(m.training_loss())
    m.kernel.lengthscales.assign(1e-200)  # ℓ² underflows
    with tf.GradientTape() as tape:
        value = m.training_loss()
    assert value > proper
    for gradient in tape.gradient(value, m.trainable_variables):
        np.testing.assert_array_equal(gradient, 0.0)


# What a training loss has to say


@pytest.mark.parametrize("compiled", COMPILED)
def test_a_warning_is_given_once_and_again_after_inference(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = dataclasses.replace(remarks.TRAINING, warn_residual=-1.0)  # none is good enough
    monkeypatch.setattr(remarks, "TRAINING", strict)
    m = model()
    loss = tf.function(m.training_loss, autograph=False) if compiled else m.training_loss
    with pytest.warns(gh.ConvergenceWarning, match="did not converge: its residual is"):
        loss()
    loss()  # another warning would be an error
    if not compiled:
        m.infer()
        with pytest.warns(gh.ConvergenceWarning):
            m.training_loss()


def test_nothing_is_said_of_a_loss_that_converged(recwarn: pytest.WarningsRecorder) -> None:
    m = model()
    m.training_loss()
    tf.function(m.training_loss, autograph=False)()
    assert not [w for w in recwarn if w.category is gh.ConvergenceWarning]
