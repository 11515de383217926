"""Kernel matrices at the data, their distances and their derivatives, against GPflow's."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf

import gpflow_hybrid as gh
from gpflow_hybrid import tuning
from gpflow_hybrid.covariances import covariance
from gpflow_hybrid.linalg import distances, elementwise
from gpflow_hybrid.linalg.distances import differentiable, squared_distances
from gpflow_hybrid.linalg.elementwise import of_distances
from gpflow_hybrid.priors import KernelMatrix

Kernel = gpflow.kernels.Kernel


def inputs(num: int = 40) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(num, 3))


def weights(num: int = 40) -> np.ndarray:
    """A cotangent, which need not be symmetric."""
    return np.random.default_rng(4).normal(size=(num, num))


def evaluated(kernel: Kernel, X: tf.Tensor) -> tf.Tensor:
    return KernelMatrix(X)(kernel)


def with_gradient(
    matrix: Callable[[Kernel, tf.Tensor], tf.Tensor], kernel: Kernel, X: tf.Tensor, W: np.ndarray
) -> list[tf.Tensor]:
    """The matrix, and derivatives in the kernel's parameters."""
    with tf.GradientTape() as tape:
        K = matrix(kernel, X)
        total = tf.reduce_sum(W * K)
    return [K, *tape.gradient(total, kernel.trainable_variables)]


def assert_all_close(found: list[Any], expected: list[Any]) -> None:
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-10)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of rows whenever distances are computed."""
    sizes: list[int] = []
    compute = distances.distances_of_rows

    def counted(X: np.ndarray) -> np.ndarray:
        sizes.append(len(X))
        return compute(X)

    monkeypatch.setattr(distances, "distances_of_rows", counted)
    return sizes


# Values


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
        gpflow.kernels.SharedIndependent(gpflow.kernels.Matern32(), 2),
        gpflow.kernels.SeparateIndependent([gpflow.kernels.RBF(), gpflow.kernels.Cosine()]),
    ],
    ids=lambda k: type(k).__name__,
)
def test_kernel_matrices_are_gpflows(kernel: Kernel) -> None:
    X, W = tf.constant(inputs()), weights()
    W = W + W.T
    assert_all_close(
        with_gradient(evaluated, kernel, X, W), with_gradient(covariance, kernel, X, W)
    )


MANY_DATA_KERNELS = {
    "leaf": gpflow.kernels.Matern52(2.0, 0.7),
    "tree": gpflow.kernels.RationalQuadratic() * gpflow.kernels.RBF(0.3, 2.0)
    + gpflow.kernels.Matern12(),
    "not_of_one_distance": gpflow.kernels.RBF(active_dims=[1])
    + gpflow.kernels.RBF(lengthscales=[0.5, 1.0, 2.0]),
}


@pytest.fixture(params=[20, 3000])
def _many_data(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rows at a time, the last block shorter; in a graph in blocks, or by XLA."""
    monkeypatch.setattr(tuning, "FEW_DATA", 10)
    monkeypatch.setattr(tuning, "LARGE_MATRIX", request.param)
    monkeypatch.setattr(tuning, "CACHED_ELEMENTS", 40 * 7)
    monkeypatch.setattr(tuning, "KEPT_DISTANCES", 20)


@pytest.mark.usefixtures("_many_data")
@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("kernel", MANY_DATA_KERNELS.values(), ids=MANY_DATA_KERNELS.keys())
def test_kernel_matrices_of_many_data(kernel: Kernel, in_graph: bool) -> None:
    """The upstream gradient need not be symmetric."""
    X, W = tf.constant(inputs()), weights()

    def run(matrix: Callable[..., tf.Tensor]) -> list[tf.Tensor]:
        return with_gradient(matrix, kernel, X, W)

    function = tf.function(run, autograph=False) if in_graph else run
    assert_all_close(function(evaluated), function(covariance))


def test_a_kernel_with_a_distance_of_its_own_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Taxicab(gpflow.kernels.Matern12):
        def scaled_squared_euclid_dist(self, X: Any, X2: Any = None) -> tf.Tensor:
            X2 = X if X2 is None else X2
            return tf.square(tf.reduce_sum(tf.abs(X[:, None] - X2[None]), -1))

    X = tf.constant(inputs())
    for few in (10, 300):
        monkeypatch.setattr(tuning, "FEW_DATA", few)
        K = KernelMatrix(X)(Taxicab())
        np.testing.assert_allclose(K, covariance(Taxicab(), X), rtol=1e-12)


@pytest.mark.parametrize("few", [10, 300])
def test_a_gradient_is_that_at_the_values_evaluated(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "FEW_DATA", few)
    kernel, X = gpflow.kernels.Matern32(), tf.constant(inputs())
    gradients = []
    for changed in (False, True):
        kernel.variance.assign(1.0)
        kernel.lengthscales.assign(1.0)
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(KernelMatrix(X)(kernel))
        if changed:
            kernel.variance.assign(2.0)
            kernel.lengthscales.assign(3.0)
        gradients.append(tape.gradient(total, kernel.trainable_variables))
    assert_all_close(*gradients)


def test_parts_of_a_kernel_may_share_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "FEW_DATA", 10)
    first, second = gpflow.kernels.RBF(), gpflow.kernels.Matern32(0.5)
    second.lengthscales = first.lengthscales
    X, W = tf.constant(inputs()), weights()
    kernel = first + second
    assert_all_close(
        with_gradient(evaluated, kernel, X, W), with_gradient(covariance, kernel, X, W)
    )


# Functions of the elements


@pytest.mark.parametrize("in_graph", [False, True])
def test_functions_of_distances_without_a_compiler(
    in_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elementwise, "_can_compile", lambda: False)
    monkeypatch.setattr(tuning, "CACHED_ELEMENTS", 30 * 7)
    X = tf.constant(inputs(30))
    W = weights(30)
    scale, shift = (tf.Variable(x, dtype=tf.float64) for x in (0.3, -1.2))

    def evaluate() -> list[tf.Tensor]:
        parameters = [tf.convert_to_tensor(p) for p in (scale, shift)]
        with tf.GradientTape() as tape:
            tape.watch([X, *parameters])
            found = of_distances(
                lambda D, a, b: tf.sin(a * D) + b,
                lambda: squared_distances(X),
                X,
                parameters,
            )
            total = tf.reduce_sum(W * found)
        return [found, *tape.gradient(total, [X, *parameters])]

    found = (tf.function(evaluate, autograph=False) if in_graph else evaluate)()
    difference = X.numpy()[:, None] - X.numpy()[None]
    D = np.sum(difference**2, -1)
    in_D = W * 0.3 * np.cos(0.3 * D)
    in_X = 2.0 * np.einsum("ij,ijd->id", in_D + in_D.T, difference)
    expected = [np.sin(0.3 * D) - 1.2, in_X, np.sum(W * D * np.cos(0.3 * D)), np.sum(W)]
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)


# Distances


@pytest.mark.parametrize("in_graph", [False, True])
def test_distances_and_their_gradient(in_graph: bool) -> None:
    X = tf.Variable(np.random.default_rng(5).normal(size=(70, 3)))
    W = np.random.default_rng(6).normal(size=(70, 70))

    def by_blas() -> tf.Tensor:
        value = tf.convert_to_tensor(X)
        return differentiable(value, squared_distances(value))

    def direct() -> tf.Tensor:
        return tf.reduce_sum(tf.square(X[:, None] - X[None]), -1)

    def evaluate(distance: Callable[[], tf.Tensor]) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            D = distance()
            total = tf.reduce_sum(W * D)
        return [D, tape.gradient(total, X)]

    function = tf.function(evaluate, autograph=False) if in_graph else evaluate
    for found, expected in zip(function(by_blas), function(direct), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)


def test_distances_far_from_zero_are_symmetric_and_not_negative() -> None:
    D = squared_distances(tf.constant(inputs(70) + 1e6)).numpy()  # differences of large numbers
    assert np.all(D >= 0.0)
    np.testing.assert_array_equal(np.diagonal(D), 0.0)
    np.testing.assert_array_equal(D, D.T)


@pytest.mark.parametrize("few", [10, 300])
def test_distances_of_constant_data_are_computed_once(
    few: int, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "FEW_DATA", few)
    matrix = KernelMatrix(tf.constant(inputs()))
    kernels = [gpflow.kernels.RBF(), gpflow.kernels.Matern32(0.5, 2.0)]
    kernel = gpflow.kernels.SeparateIndependent(kernels)

    @tf.function(autograph=False)
    def in_graph() -> list[tf.Tensor]:
        return with_gradient(lambda k, _: matrix(k), kernel, matrix.X, weights())

    for _ in range(2):
        in_graph()
        with_gradient(lambda k, _: matrix(k), kernel, matrix.X, weights())
    assert computed == [40]


def test_a_model_computes_its_distances_once(computed: list[int]) -> None:
    X = inputs()
    model = gh.CVIModel((X, X[:, :1]), gpflow.kernels.RBF(), gpflow.likelihoods.Gaussian())
    for lengthscale in (1.0, 2.0):
        model.kernel.lengthscales.assign(lengthscale)
        model.training_loss()
        model.elbo()
    model.training_loss_closure(compile=True)()
    assert computed == [40]


def test_distances_of_too_many_data_are_not_kept(
    computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "KEPT_DISTANCES", 39)
    matrix = KernelMatrix(tf.constant(inputs()))
    for _ in range(2):
        matrix(gpflow.kernels.RBF())
    assert computed == [40, 40]
    assert matrix._distances is None


def test_distances_go_with_their_owner() -> None:
    X = tf.constant(inputs())
    matrix = KernelMatrix(X)
    matrix(gpflow.kernels.RBF())
    kept = weakref.ref(matrix._distances)
    gc.collect()
    assert kept() is not None
    del matrix
    gc.collect()
    assert kept() is None


def test_a_copy_neither_shares_nor_copies_distances(computed: list[int]) -> None:
    kernel = gpflow.kernels.RBF()
    original = KernelMatrix(tf.constant(inputs()))
    K = original(kernel)
    other = copy.deepcopy(original)
    assert other._distances is None
    np.testing.assert_allclose(other(kernel), K, rtol=1e-12)
    assert computed == [40, 40]
    assert other._distances is not original._distances


def test_copies_of_data_stay_shared() -> None:
    """One memo: a model's copy has the tensor of its own data, and no other."""
    X = tf.Variable(inputs())
    data, matrix = copy.deepcopy((X, KernelMatrix(X)))
    assert matrix.X is data
    assert data is not X


@pytest.mark.parametrize("few", [10, 300])
def test_data_in_a_variable_are_not_cached(
    few: int, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "FEW_DATA", few)
    kernel, X = gpflow.kernels.Matern32(), tf.Variable(inputs())
    matrix = KernelMatrix(X)
    in_graph = tf.function(lambda: matrix(kernel), autograph=False)
    for scale in (1.0, 0.5):
        X.assign(scale * inputs())
        for K in (matrix(kernel), in_graph()):
            np.testing.assert_allclose(K, covariance(kernel, X), rtol=1e-9, atol=1e-10)
    assert computed == [40] * 4
    assert matrix._distances is None


# Derivatives in X


IN_INPUTS_KERNELS = {
    **MANY_DATA_KERNELS,
    "with_others": gpflow.kernels.Linear() * gpflow.kernels.Matern32()
    + gpflow.kernels.Periodic(gpflow.kernels.RBF()),
    "separate": gpflow.kernels.SeparateIndependent(
        [gpflow.kernels.RBF(), gpflow.kernels.Matern52(lengthscales=[0.5, 1.0, 2.0])]
    ),
}


@pytest.mark.parametrize(
    "num", [40, 50]
)  # TensorFlow makes constants of captures up to 128 elements
@pytest.mark.parametrize("kept", [20, 4000])
@pytest.mark.parametrize("few", [10, 300])
@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("kernel", IN_INPUTS_KERNELS.values(), ids=IN_INPUTS_KERNELS.keys())
def test_gradients_in_constant_data_that_are_watched(
    kernel: Kernel,
    in_graph: bool,
    few: int,
    kept: int,
    num: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "FEW_DATA", few)
    monkeypatch.setattr(tuning, "KEPT_DISTANCES", kept)
    X, W = tf.constant(inputs(num)), weights(num)
    matrix = KernelMatrix(X)
    matrix(kernel)  # what it keeps was not watched

    def gradients(evaluate: Callable[[], tf.Tensor]) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(X)
            total = tf.reduce_sum(W * evaluate())
        return list(tape.gradient(total, (X, *kernel.trainable_variables)))

    function = tf.function(gradients, autograph=False) if in_graph else gradients
    expected = gradients(lambda: covariance(kernel, X))
    assert np.max(np.abs(expected[0])) > 0.1
    assert_all_close(function(lambda: matrix(kernel)), expected)


@pytest.mark.parametrize("in_graph", [False, True])
def test_gradients_in_data_in_a_variable(in_graph: bool) -> None:
    kernel, X, W = MANY_DATA_KERNELS["tree"], tf.Variable(inputs()), weights()
    matrix = KernelMatrix(X)

    def gradient(evaluate: Callable[[], tf.Tensor]) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(W * evaluate())
        return [tape.gradient(total, X)]

    function = tf.function(gradient, autograph=False) if in_graph else gradient
    expected = gradient(lambda: covariance(kernel, tf.convert_to_tensor(X)))
    assert_all_close(function(lambda: matrix(kernel)), expected)


def test_second_derivatives_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "FEW_DATA", 5)
    kernel = gpflow.kernels.SquaredExponential()
    X = tf.constant(np.random.default_rng(0).normal(size=(12, 2)))
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            total = tf.reduce_sum(KernelMatrix(X)(kernel))
        first = inner.gradient(total, kernel.lengthscales.unconstrained_variable)
    with pytest.raises(NotImplementedError, match="Second derivatives"):
        outer.gradient(first, kernel.trainable_variables)
