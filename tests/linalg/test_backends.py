"""LAPACK and TensorFlow alone: the same numbers, each where it belongs."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf

import gpflow_hybrid as gh
from gpflow_hybrid import covariances
from gpflow_hybrid.covariances import covariance, data_covariance
from gpflow_hybrid.inference import newton_host, variational
from gpflow_hybrid.likelihoods import probit_integrals
from gpflow_hybrid.linalg import (
    backend,
    by_rows,
    distances,
    elementwise,
    evaluate,
    marginals,
    squared_distances,
)
from gpflow_hybrid.linalg.backends import VARIABLE
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


def test_auto_is_lapack_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def look(x: tf.Tensor) -> tf.Tensor:
        seen.append(backend().name)
        return x + 1.0

    look(tf.ones([2]))
    tf.function(look)(tf.ones([2]))
    tf.function(look, jit_compile=True)(tf.ones([2]))
    assert seen == ["lapack", "lapack", "tensorflow"]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [kind])
    assert backend().name == "tensorflow"  # a GPU


def test_the_setting_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "tensorflow")
    assert backend().name == "tensorflow"
    with gh.linear_algebra("lapack"):
        assert backend().name == "lapack"
        with pytest.raises(ZeroDivisionError), gh.linear_algebra("tensorflow"):
            raise ZeroDivisionError
        assert backend().name == "lapack"
        gh.set_linear_algebra("tensorflow")
        assert backend().name == "tensorflow"
    assert backend().name == "tensorflow"


def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(gh.InvalidDataError, match="choice must be one of auto.*found 'cublas'"):
        gh.set_linear_algebra("cublas")
    monkeypatch.setenv(VARIABLE, "mkl")
    with pytest.raises(gh.InvalidDataError, match=f"{VARIABLE} must be one of auto.*found 'mkl'"):
        backend()


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
    for choice in BOTH:
        with gh.linear_algebra(choice):
            found.append(evaluate(K, r, lam).covariance(K, lam).numpy())
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
    monkeypatch.setattr(variational, "FEW_DATA", 0)
    monkeypatch.setattr(probit_integrals, "ROUGH", probit_integrals.Rule(3, 3.0))  # very rough
    probit_integrals._compiled.cache_clear()
    try:
        loss, gradient = fitted_values(build, "lapack")
    finally:
        probit_integrals._compiled.cache_clear()
    np.testing.assert_allclose(loss, exact_loss, rtol=1e-9)
    np.testing.assert_allclose(gradient, exact_gradient, rtol=1e-6, atol=1e-7)


def test_iterations_and_factors_find_the_same_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for small in (0, 300):
        monkeypatch.setattr(newton_host, "SMALL", small)
        m = model()
        assert m.infer(tolerance=1e-10).converged
        found.append(np.hstack(m.sites.values))
    np.testing.assert_allclose(*found, rtol=1e-8, atol=1e-10)


# Elsewhere


def test_an_objective_compiles_with_xla() -> None:
    m = model()
    m.infer()
    K, mean = m.prior()

    def values() -> Any:
        return marginals(K, mean, *m.sites.values)

    compiled = tf.function(values, jit_compile=True, autograph=False)()
    for found, expected in zip(compiled, values(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-8)


def test_an_objective_is_saved_and_served(tmp_path: Path) -> None:
    m = model()
    m.infer()
    with gh.linear_algebra("tensorflow"):
        m.served = tf.function(m.elbo, input_signature=[], autograph=False)
        expected = m.served()
        tf.saved_model.save(m, str(tmp_path))
    program = (
        "import tensorflow as tf\n"
        f"model = tf.saved_model.load({str(tmp_path)!r})\n"
        "print(repr(float(model.served())))\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    np.testing.assert_allclose(float(output), expected, rtol=1e-10)


# Distances


@pytest.mark.parametrize(
    "kernel",
    [
        gpflow.kernels.Matern52(2.0, 0.7),
        gpflow.kernels.RBF(lengthscales=[0.5, 1.0, 2.0]),
        gpflow.kernels.Matern12(active_dims=[1]),
        gpflow.kernels.RationalQuadratic(active_dims=[0, 2]) + gpflow.kernels.White(0.1),
        gpflow.kernels.Linear() * gpflow.kernels.RBF() + gpflow.kernels.Constant(),
        gpflow.kernels.Periodic(gpflow.kernels.RBF()),
        gpflow.kernels.ArcCosine(),
    ],
    ids=lambda k: type(k).__name__,
)
def test_kernel_matrices_are_gpflows(kernel: gpflow.kernels.Kernel) -> None:
    X = tf.constant(binary()[0])
    W = np.random.default_rng(4).normal(size=(40, 40))
    W = W + W.T

    def with_gradient(matrix: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            K = matrix(kernel, X)
            total = tf.reduce_sum(W * K)
        return [K, *tape.gradient(total, kernel.trainable_variables)]

    for found, expected in zip(
        with_gradient(data_covariance), with_gradient(covariance), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize(
    "kernel",
    [
        gpflow.kernels.Matern52(2.0, 0.7),
        gpflow.kernels.RationalQuadratic() * gpflow.kernels.RBF(0.3, 2.0)
        + gpflow.kernels.Matern12(),
        gpflow.kernels.RBF(active_dims=[1]) + gpflow.kernels.RBF(lengthscales=[0.5, 1.0, 2.0]),
    ],
    ids=["leaf", "tree", "not_of_one_distance"],
)
@pytest.mark.parametrize("large", [20, 3000])
def test_kernel_matrices_of_many_data(
    kernel: gpflow.kernels.Kernel, in_graph: bool, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some rows at a time, the last block shorter; the upstream gradient need not be symmetric."""
    monkeypatch.setattr(covariances, "MANY_DATA", 10)
    monkeypatch.setattr(elementwise, "LARGE", large)  # in a graph: in blocks, or by XLA
    monkeypatch.setattr(elementwise, "ELEMENTS", 40 * 7)
    monkeypatch.setattr(distances, "KEPT", 20)
    X = tf.constant(binary()[0])
    W = np.random.default_rng(4).normal(size=(40, 40))

    def with_gradient(matrix: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            K = matrix(kernel, X)
            total = tf.reduce_sum(W * K)
        return [K, *tape.gradient(total, kernel.trainable_variables)]

    run = tf.function(with_gradient, autograph=False) if in_graph else with_gradient
    for found, expected in zip(run(data_covariance), run(covariance), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-10)


def test_functions_by_rows_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise, "_can_compile", lambda: False)
    A = np.random.default_rng(7).normal(size=(30, 30))
    A = tf.constant(A + A.T)
    scale = tf.Variable(0.3, dtype=tf.float64)

    @tf.function(autograph=False)
    def with_gradient() -> Any:
        with tf.GradientTape() as tape:
            found = by_rows(lambda a: tf.sin(scale * a), lambda: A, [scale])
        return found, tape.gradient(found, scale)

    found, gradient = with_gradient()
    np.testing.assert_allclose(found, np.sin(0.3 * A), rtol=1e-12)
    np.testing.assert_allclose(gradient, np.sum(A * np.cos(0.3 * A)), rtol=1e-12)


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
    monkeypatch.setattr(covariances, "MANY_DATA", 10)
    monkeypatch.setattr(distances, "KEPT", 20)
    monkeypatch.setattr(newton_host, "SMALL", 10)
    monkeypatch.setattr(newton_host, "LARGE", 20)
    np.testing.assert_allclose(loss_and_gradient(), few, rtol=1e-8)


def test_a_kernel_with_a_distance_of_its_own_keeps_it() -> None:
    class Taxicab(gpflow.kernels.Matern12):
        def scaled_squared_euclid_dist(self, X: Any, X2: Any = None) -> tf.Tensor:
            X2 = X if X2 is None else X2
            return tf.square(tf.reduce_sum(tf.abs(X[:, None] - X2[None]), -1))

    X = tf.constant(binary()[0])
    np.testing.assert_allclose(data_covariance(Taxicab(), X), covariance(Taxicab(), X), rtol=1e-12)


def test_distances_and_their_gradient() -> None:
    X = tf.Variable(np.random.default_rng(5).normal(size=(70, 3)))
    W = np.random.default_rng(6).normal(size=(70, 70))

    def direct() -> tf.Tensor:
        return tf.reduce_sum(tf.square(X[:, None] - X[None]), -1)

    results = []
    for distance in (lambda: squared_distances(tf.convert_to_tensor(X)), direct):
        with tf.GradientTape() as tape:
            D = distance()
            total = tf.reduce_sum(W * D)
        results.append((D, tape.gradient(total, X)))
    for found, expected in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)


def test_distances_of_constant_data_are_computed_once_and_forgotten() -> None:
    X = tf.constant(binary()[0])
    before = len(distances._KNOWN)
    for _ in range(2):
        squared_distances(X)
    assert len(distances._KNOWN) == before + 1
    del X
    gc.collect()
    assert len(distances._KNOWN) <= before
