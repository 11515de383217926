"""LAPACK and TensorFlow alone: the same numbers, each where it belongs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf

import gpflow_hybrid as gh
from gpflow_hybrid import tuning
from gpflow_hybrid.covariances import covariance
from gpflow_hybrid.likelihoods import probit_integrals
from gpflow_hybrid.linalg import marginals, uses_lapack
from gpflow_hybrid.linalg.backends import VARIABLE
from gpflow_hybrid.linalg.posterior import LAPACK, TENSORFLOW
from tests import reference
from tests.selection import by_speed

BOTH = ("lapack", "tensorflow")


def binary(num: int = 40, num_inputs: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(num, num_inputs))
    return X, (X[:, :1] + 0.5 * rng.normal(size=(num, 1)) > 0.0).astype(float)


def model(**kwargs: Any) -> gh.CVIModel:
    return gh.CVIModel(
        binary(), gpflow.kernels.Matern52(), gh.likelihoods.ProbitBernoulli(), **kwargs
    )


# The choice


@pytest.mark.parametrize(
    ("exportable", "in_graph"), [(True, False), (False, True)], ids=["user", "trainer"]
)
def test_auto_is_lapack_where_it_can_run(
    exportable: bool, in_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def look(x: tf.Tensor) -> tf.Tensor:
        seen.append(uses_lapack(exportable=exportable))
        return x + 1.0

    look(tf.ones([2]))
    tf.function(look)(tf.ones([2]))
    assert seen == [True, in_graph]
    if exportable:
        tf.function(look, jit_compile=True)(tf.ones([2]))
        assert seen[2:] == [False]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [kind])
    assert not uses_lapack(exportable=exportable)  # a GPU


@pytest.mark.parametrize("exportable", [False, True])
def test_the_setting_overrides(exportable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_use() -> list[bool]:
        """Eagerly and in a graph."""
        seen: list[bool] = []

        def look() -> tf.Tensor:
            seen.append(uses_lapack(exportable=exportable))
            return tf.ones([])

        look()
        tf.function(look)()
        return seen

    monkeypatch.setenv(VARIABLE, "tensorflow")
    assert in_use() == [False, False]
    with gh.linear_algebra("lapack"):
        assert in_use() == [True, True]
        with pytest.raises(ZeroDivisionError), gh.linear_algebra("tensorflow"):
            raise ZeroDivisionError
        assert in_use() == [True, True]
        gh.set_linear_algebra("tensorflow")
        assert in_use() == [False, False]
    assert in_use() == [False, False]


def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(gh.InvalidDataError, match="choice must be one of auto.*found 'cublas'"):
        gh.set_linear_algebra("cublas")
    with (
        pytest.raises(gh.InvalidDataError, match="choice must be one of auto.*found 'mkl'"),
        gh.linear_algebra("mkl"),
    ):
        raise AssertionError("entered")
    monkeypatch.setenv(VARIABLE, "mkl")
    with pytest.raises(gh.InvalidDataError, match=f"{VARIABLE} must be one of auto.*found 'mkl'"):
        uses_lapack(exportable=True)


# The same numbers


@pytest.mark.parametrize("strength", [1e-13, 1e-7, 1e-3, 1.0, 1e4])
@pytest.mark.parametrize("num_negative", [0, 3])
def test_weak_and_strong_sites(strength: float, num_negative: int) -> None:
    rng = np.random.default_rng(1)
    X = rng.normal(size=(90, 2))  # more than one block of rows
    K = covariance(gpflow.kernels.Matern32(), X)
    lambda_2 = strength * rng.uniform(0.1, 1.0, size=(90, 1))
    lambda_2[10:20] = rng.uniform(0.1, 1.0, size=(10, 1))  # always some ordinary ones
    lambda_2[20:24] = 0.0
    lambda_2[:num_negative] = -0.1
    problem = (K, rng.normal(size=(90, 1)), rng.normal(size=(90, 1)), lambda_2)
    expected = reference.posterior(*(np.asarray(x) for x in problem))
    for choice in BOTH:
        with gh.linear_algebra(choice):
            found = marginals(*problem)
        np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-8, atol=1e-8)
        np.testing.assert_allclose(found.variance, expected.variance, rtol=1e-8)
        np.testing.assert_allclose(found.log_normaliser, expected.log_normaliser, rtol=1e-8)


def test_covariances_agree() -> None:
    rng = np.random.default_rng(2)
    K = covariance(gpflow.kernels.Matern32(), rng.normal(size=(90, 2)))
    lam = 10.0 ** rng.uniform(-11.0, 2.0, size=(1, 90))
    lam[0, :2] = -0.05
    r, lam = tf.constant(rng.normal(size=(1, 90))), tf.constant(lam)
    found = []
    for using in (LAPACK, TENSORFLOW):
        _, Sigma = using.posterior(K, r, lam)
        found.append(Sigma().numpy())
    np.testing.assert_allclose(*found, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(found[0], np.swapaxes(found[0], 1, 2), rtol=0.0, atol=1e-14)


def test_a_gradient_is_taken_with_the_linear_algebra_of_its_values() -> None:
    rng = np.random.default_rng(7)
    K = covariance(gpflow.kernels.Matern32(), rng.normal(size=(20, 2)))
    sites = [tf.constant(rng.uniform(0.1, 1.0, size=(20, 1))) for _ in range(3)]
    gradients = []
    for values, derivatives in ((a, b) for a in BOTH for b in BOTH):
        with tf.GradientTape() as tape:
            tape.watch(K)
            with gh.linear_algebra(values):
                total = tf.reduce_sum(marginals(K, *sites).variance)
        with gh.linear_algebra(derivatives):
            gradients.append(tape.gradient(total, K))
    for found in gradients[1:]:
        np.testing.assert_allclose(found, gradients[0], rtol=1e-9, atol=1e-10)


def fitted_values(build: Any, choice: str) -> tuple[float, np.ndarray]:
    """Training loss and its gradient, compiled, from zero sites."""
    with gh.linear_algebra(choice):
        m = build()

        @tf.function(autograph=False)
        def loss_and_gradient() -> Any:
            with tf.GradientTape() as tape:
                loss = m.training_loss()
            return loss, tape.gradient(loss, m.trainable_variables)

        loss, gradients = loss_and_gradient()
    return float(loss), np.concatenate([np.ravel(g) for g in gradients])


def student() -> gh.CVIModel:
    X, _ = binary(30, 1)
    Y = np.sin(3.0 * X)
    Y[::7] += 4.0  # outliers: negative sites
    return gh.CVIModel((X, Y), gpflow.kernels.RBF(), gpflow.likelihoods.StudentT(0.1))


def multiclass() -> gh.CVIModel:
    X, _ = binary(24, 2)
    Y = (np.abs(X[:, :1]) + X[:, 1:] > 0.5) + 0.0 + (X[:, :1] > 1.0)
    likelihood = gpflow.likelihoods.MultiClass(3)
    return gh.CVIModel((X, Y), gpflow.kernels.RBF(), likelihood)


def two_columns() -> gh.CVIModel:
    X, Y = binary(30, 2)
    kernel = gpflow.kernels.SeparateIndependent([gpflow.kernels.RBF(), gpflow.kernels.Matern12()])
    return gh.CVIModel((X, np.hstack([Y, 1.0 - Y])), kernel, gh.likelihoods.ProbitBernoulli())


def laplace() -> gh.LaplaceModel:
    return gh.LaplaceModel(binary(), gpflow.kernels.Matern52(), gh.likelihoods.ProbitBernoulli())


@pytest.mark.parametrize(
    "build",
    by_speed(zip([model, student, multiclass, two_columns, laplace]), [(student,), (two_columns,)]),
)
def test_training_losses_agree(build: Any) -> None:
    (loss, gradient), (expected, expected_gradient) = (fitted_values(build, c) for c in BOTH)
    np.testing.assert_allclose(loss, expected, rtol=1e-9)
    # Both infer to a residual of 1e-9 only.
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-6, atol=1e-7)


def test_the_gradient_does_not_use_the_rough_curvature(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> gh.CVIModel:
        return model(objective="ep_like")

    exact_loss, exact_gradient = fitted_values(build, "lapack")
    asked: list[bool] = []
    exact = gh.likelihoods.ProbitBernoulli.expectation_curvature

    def watched(self: Any, *arguments: Any, rough: bool = False) -> Any:
        asked.append(rough)
        return exact(self, *arguments, rough=rough)

    monkeypatch.setattr(gh.likelihoods.ProbitBernoulli, "expectation_curvature", watched)
    monkeypatch.setattr(tuning, "FEW_DATA", 0)
    monkeypatch.setattr(probit_integrals, "ROUGH", probit_integrals.Rule(3, 3.0))  # very rough
    loss, gradient = fitted_values(build, "lapack")
    assert asked[0]  # for steps,
    assert not asked[-1]  # not for the gradient
    np.testing.assert_allclose(loss, exact_loss, rtol=1e-9)
    np.testing.assert_allclose(gradient, exact_gradient, rtol=1e-6, atol=1e-7)


def test_iterations_and_factors_find_the_same_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for few in (0, 300):
        monkeypatch.setattr(tuning, "FEW_DATA", few)
        m = model()
        assert m.infer(tolerance=1e-10).converged
        found.append(np.hstack(m.sites.values))
    np.testing.assert_allclose(*found, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("objective", ["elbo", "ep_like"])
def test_training_on_many_data_is_that_on_few(
    objective: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every threshold on its other side: the loss and its gradient do not change."""

    def loss_and_gradient() -> list[Any]:
        m = model(objective=objective)

        @tf.function(autograph=False)
        def evaluated() -> Any:
            with tf.GradientTape() as tape:
                loss = m.training_loss()
            return [loss, *tape.gradient(loss, m.trainable_variables)]

        return [float(x) for x in evaluated()]

    few = loss_and_gradient()
    monkeypatch.setattr(tuning, "FEW_DATA", 10)
    monkeypatch.setattr(tuning, "LARGE_MATRIX", 20)
    monkeypatch.setattr(tuning, "KEPT_DISTANCES", 20)
    monkeypatch.setattr(tuning, "KEPT_BYTES", 1000)
    monkeypatch.setattr(tuning, "CACHED_ELEMENTS", 40 * 7)
    monkeypatch.setattr(tuning, "QUADRATURE_ELEMENTS", 1000)
    np.testing.assert_allclose(loss_and_gradient(), few, rtol=1e-8)


# Elsewhere


def test_a_posterior_compiles_with_xla() -> None:
    m = model()
    m.infer()
    K, mean = m.prior()

    def values() -> Any:
        return marginals(K, mean, *m.sites.values)

    compiled = tf.function(values, jit_compile=True, autograph=False)()
    for found, expected in zip(compiled, values(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-8)


def test_what_a_user_compiles_may_be_for_xla() -> None:
    m = model()
    m.infer()
    X = binary()[0][:5] + 0.1
    for function in (m.elbo, lambda: m.predict_f(X)):
        compiled = tf.function(function, jit_compile=True, autograph=False)()
        for found, expected in zip(
            tf.nest.flatten(compiled), tf.nest.flatten(function()), strict=True
        ):
            np.testing.assert_allclose(found, expected, rtol=1e-8)


def test_an_objective_is_saved_and_served(tmp_path: Path) -> None:
    m = model()
    m.infer()
    expected = float(m.elbo())
    m.served = tf.function(m.elbo, input_signature=[], autograph=False)
    m.served()
    with gh.linear_algebra("tensorflow"):
        m.chosen = tf.function(m.elbo, input_signature=[], autograph=False)
        m.chosen()
    tf.saved_model.save(m, str(tmp_path))
    program = (
        "import tensorflow as tf\n"
        f"model = tf.saved_model.load({str(tmp_path)!r})\n"
        "print(repr(float(model.served())), repr(float(model.chosen())))\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    np.testing.assert_allclose([float(x) for x in output.split()], expected, rtol=1e-10)
