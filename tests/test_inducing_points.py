"""Inducing points against slow references: dense conditional variances, scikit-learn's k-means."""

from __future__ import annotations

import importlib
from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf
from sklearn.cluster import KMeans

import gpflow_hybrid as gh
from gpflow_hybrid import tuning
from gpflow_hybrid.errors import InvalidDataError
from gpflow_hybrid.linalg import clusters

METHODS = ("kmeans", "greedy")
MODULE = importlib.import_module("gpflow_hybrid.inducing_points")  # not the function


def inputs(num: int = 300, columns: int = 2, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(num, columns))


def objective(X: np.ndarray, Z: np.ndarray) -> float:
    """Σ min ‖x − z‖², from all differences."""
    return float(((X[:, None] - Z) ** 2).sum(axis=-1).min(axis=1).sum())


def conditional_variances(kernel: gpflow.kernels.Kernel, X: np.ndarray, Z: np.ndarray) -> Any:
    """diag k(X, X) − k(X, Z) K_ZZ⁻¹ k(Z, X), by a dense solve."""
    cross, prior = kernel(X, Z).numpy(), kernel(X, full_cov=False).numpy()
    if not len(Z):
        return prior
    return prior - np.sum(cross * np.linalg.solve(kernel(Z).numpy(), cross.T).T, axis=1)


def is_row_of(points: np.ndarray, X: np.ndarray) -> bool:
    return all((X == point).all(axis=1).any() for point in points)


class TestBoth:
    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("M", [1, 7, 300])
    def test_shape_type_and_distinctness(self, method: str, M: int) -> None:
        Z = gh.inducing_points(inputs(), M, method=method)
        assert Z.shape == (M, 2)
        assert Z.dtype == np.float64
        assert len(np.unique(Z, axis=0)) == M

    @pytest.mark.parametrize("method", METHODS)
    def test_the_seed_determines_them(self, method: str) -> None:
        first, again, other = (
            gh.inducing_points(inputs(), 20, method=method, seed=seed) for seed in (3, 3, 4)
        )
        np.testing.assert_array_equal(first, again)
        assert (first != other).any()

    @pytest.mark.parametrize("method", METHODS)
    def test_all_distinct_rows_are_returned_if_all_are_asked_for(self, method: str) -> None:
        rows = inputs(12)
        X = rows[np.random.default_rng(1).integers(12, size=200)]
        Z = gh.inducing_points(X, 12, method=method)
        np.testing.assert_array_equal(np.unique(Z, axis=0), np.unique(rows, axis=0))

    @pytest.mark.parametrize("method", METHODS)
    def test_rows_that_repeat_give_distinct_points(self, method: str) -> None:
        X = np.random.default_rng(2).integers(3, size=(400, 3)).astype(float)  # 27 distinct rows
        for M in (5, 20, 26):
            assert len(np.unique(gh.inducing_points(X, M, method=method), axis=0)) == M

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("factor", [1e-150, 1e150])
    def test_any_scale(self, method: str, factor: float) -> None:
        expected = gh.inducing_points(inputs(), 10, method=method)
        found = gh.inducing_points(inputs() * factor, 10, method=method) / factor
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)

    @pytest.mark.parametrize("method", METHODS)
    def test_a_large_offset_leaves_them_distinct(self, method: str) -> None:
        X = 2.0**52 + np.arange(40.0)[:, None]  # neighbouring floats
        assert len(np.unique(gh.inducing_points(X, 30, method=method), axis=0)) == 30

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize(
        "kind", [np.ndarray.tolist, np.float32, tf.constant, tf.Variable, np.asfortranarray]
    )
    def test_whatever_holds_the_numbers(self, method: str, kind: Any) -> None:
        X = inputs().astype(np.float32).astype(np.float64)
        expected = gh.inducing_points(X, 10, method=method)
        np.testing.assert_array_equal(gh.inducing_points(kind(X), 10, method=method), expected)

    def test_data_frames(self) -> None:
        """Of one only this is used: NumPy can make an array of it."""

        class Frame:
            dtypes = "not one dtype but several"

            def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
                return inputs()

        np.testing.assert_array_equal(
            gh.inducing_points(Frame(), 10), gh.inducing_points(inputs(), 10)
        )

    @pytest.mark.parametrize("method", METHODS)
    def test_integers(self, method: str) -> None:
        X = np.arange(50).reshape(-1, 1)
        np.testing.assert_array_equal(
            gh.inducing_points(X, 5, method=method), gh.inducing_points(X * 1.0, 5, method=method)
        )

    @pytest.mark.parametrize("method", METHODS)
    def test_leaves_its_argument_and_the_global_generator_alone(self, method: str) -> None:
        X = inputs()
        before = X.copy()
        np.random.seed(0)
        expected = np.random.random()
        np.random.seed(0)
        gh.inducing_points(X, 300, method=method)[:] = 0.0
        np.testing.assert_array_equal(X, before)
        assert np.random.random() == expected

    @pytest.mark.parametrize("method", METHODS)
    def test_rare_rows_beyond_a_sample_are_found(
        self, method: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(MODULE, "FEW_ROWS", 20)
        monkeypatch.setattr(MODULE, "ROWS_PER_CENTRE", 1)
        monkeypatch.setattr("gpflow_hybrid.tuning.SCANNED_ROWS", 16)
        X = np.concatenate([np.zeros((500, 2)), inputs(15)])
        assert len(np.unique(gh.inducing_points(X, 16, method=method), axis=0)) == 16


class TestKMeans:
    @pytest.mark.parametrize("name", ["banana", "sonar", "diabetes"])
    @pytest.mark.parametrize("M", [5, 50])
    def test_objective_is_about_that_of_scikit_learn(self, name: str, M: int) -> None:
        (X,) = gh.datasets.standardise(gh.datasets.load(name).X)
        reference = KMeans(M, n_init=1, random_state=0).fit(X).inertia_
        # Local optima: those of different seeds differ by several per cent.
        assert objective(X, gh.inducing_points(X, M)) < 1.1 * reference

    def test_separate_clusters_are_found(self) -> None:
        centres = 10.0 * np.stack(np.meshgrid(range(4), range(4)), axis=-1).reshape(-1, 2)
        noise = np.random.default_rng(3).normal(size=(16, 25, 2))
        X = (centres[:, None] + noise).reshape(-1, 2)
        expected = X.reshape(16, 25, 2).mean(axis=1)
        found = gh.inducing_points(X, 16)
        np.testing.assert_allclose(np.unique(found, axis=0), np.unique(expected, axis=0))

    def test_one_point_is_the_mean_of_all_rows(self) -> None:
        X = inputs()[np.random.default_rng(1).integers(300, size=500)]  # some of them twice
        np.testing.assert_allclose(gh.inducing_points(X, 1), X.mean(axis=0)[None], atol=1e-14)

    def test_every_point_has_rows(self) -> None:
        X = inputs(200)
        labels, _ = clusters.nearest(X, gh.inducing_points(X, 60))
        assert len(np.unique(labels)) == 60

    def test_a_centre_without_rows_gets_the_furthest(self) -> None:
        X = np.array([[0.0], [1.0], [2.0], [9.0]])
        centres, value = clusters.lloyd_step(X, np.ones(4), np.array([[0.5], [100.0], [200.0]]))
        assert value == 0.25 + 0.25 + 1.5**2 + 8.5**2
        np.testing.assert_allclose(centres, [[0.5], [9.0], [2.0]])

    def test_nearest_is_that_of_all_differences(self) -> None:
        X, Z = inputs(500, 3), inputs(40, 3, seed=1)
        squares = ((X[:, None] - Z) ** 2).sum(axis=-1)
        labels, distances = clusters.nearest(X, Z)
        np.testing.assert_array_equal(labels, squares.argmin(axis=1))
        np.testing.assert_allclose(distances, squares.min(axis=1), rtol=1e-9, atol=1e-13)

    @pytest.mark.parametrize("elements", [1, 100, 1000])
    def test_blocks_make_no_difference(
        self, elements: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = gh.inducing_points(inputs(), 10)
        monkeypatch.setattr(tuning, "PROJECTED_ELEMENTS", elements)
        np.testing.assert_allclose(gh.inducing_points(inputs(), 10), expected, rtol=1e-10)

    def test_a_sample_is_nearly_as_good(self, monkeypatch: pytest.MonkeyPatch) -> None:
        X = inputs(20_000)
        whole = objective(X, gh.inducing_points(X, 10))
        monkeypatch.setattr(MODULE, "FEW_ROWS", 1000)
        sampled = gh.inducing_points(X, 10)
        assert objective(X, sampled) < 1.05 * whole  # another local optimum
        # The last step is over all rows: every point is the mean of the rows of a cell.
        labels, _ = clusters.nearest(X, sampled)
        assert (np.bincount(labels, minlength=10) > 200).all()


class TestGreedy:
    @pytest.mark.parametrize(
        "kernel",
        [
            gpflow.kernels.Matern52(lengthscales=0.7),
            gpflow.kernels.SquaredExponential(variance=4.0, lengthscales=[0.3, 0.6]),
            gpflow.kernels.Linear() + gpflow.kernels.Matern12(variance=0.2),
            gpflow.kernels.Matern32(active_dims=[1]),
        ],
        ids=["matern52", "ard", "not stationary", "active dims"],
    )
    def test_each_has_the_largest_conditional_variance(self, kernel: gpflow.kernels.Kernel) -> None:
        X = inputs(120)
        Z = gh.inducing_points(X, 25, method="greedy", kernel=kernel)
        assert is_row_of(Z, X)
        for m in range(25):
            variances = conditional_variances(kernel, X, Z[:m])
            chosen = conditional_variances(kernel, Z[m : m + 1], Z[:m])[0]
            np.testing.assert_allclose(chosen, variances.max(), rtol=1e-7)

    def test_default_kernel_has_the_spread_of_the_data(self) -> None:
        X = inputs(150) * [1.0, 20.0]
        spread = np.sqrt(X.var(axis=0).sum())
        kernel = gpflow.kernels.Matern52(lengthscales=spread)
        np.testing.assert_array_equal(
            gh.inducing_points(X, 20, method="greedy"),
            gh.inducing_points(X, 20, method="greedy", kernel=kernel),
        )

    def test_the_first_of_many_are_the_choice_of_few(self) -> None:
        many, few = (gh.inducing_points(inputs(), M, method="greedy") for M in (40, 15))
        np.testing.assert_array_equal(many[:15], few)

    def test_rows_without_variance_are_different_rows(self) -> None:
        """A linear kernel of two columns has nothing left after two points."""
        Z = gh.inducing_points(inputs(), 30, method="greedy", kernel=gpflow.kernels.Linear())
        assert len(np.unique(Z, axis=0)) == 30
        assert is_row_of(Z, inputs())

    def test_single_precision_kernels(self) -> None:
        with gpflow.config.as_context():
            gpflow.config.set_default_float(np.float32)
            Z = gh.inducing_points(inputs(), 10, method="greedy")
        assert Z.dtype == np.float64
        assert is_row_of(Z, inputs())


class TestRefusals:
    @pytest.mark.parametrize(
        ("X", "message"),
        [
            (np.zeros(5), r"^X must have two dimensions, \[N, D\]; found shape \(5,\)\. Pass X"),
            (np.zeros((5, 1, 1)), r"^X must have two dimensions"),
            (np.zeros((5, 0)), "^X must have at least one column; found none."),
            (np.zeros((0, 5)), "^X must have at least one row; found none."),
            ([[1.0], [np.nan]], "^X must be finite; found nan at row 1, column 0"),
            (np.array([["a"], ["b"]]), "^X must be numeric; found dtype <U1"),
            ("some text", "^X must be numeric; found dtype <U9"),
            (tf.constant([["a"]]), "^X must be numeric; found dtype"),
            ([[1.0], [1.0, 2.0]], "^X must be a numeric array"),
            (None, "^X must be numeric; found dtype object"),
        ],
    )
    def test_inputs(self, X: Any, message: str) -> None:
        with pytest.raises(InvalidDataError, match=message):
            gh.inducing_points(X, 1)

    @pytest.mark.parametrize("M", [0, -3, 2.0, True, "5", None])
    def test_numbers(self, M: Any) -> None:
        with pytest.raises(InvalidDataError, match="^M must be a positive integer; found"):
            gh.inducing_points(inputs(), M)

    @pytest.mark.parametrize("method", METHODS)
    def test_more_points_than_distinct_rows(self, method: str) -> None:
        X = np.concatenate([inputs(5), inputs(5), [[0.0, 0.0], [-0.0, 0.0]]])
        message = (
            "^M must be at most the number of distinct rows of X, 6; found 7. Pass a smaller M"
        )
        with pytest.raises(InvalidDataError, match=message):
            gh.inducing_points(X, 7, method=method)

    @pytest.mark.parametrize("method", ["k-means", None, ["kmeans"]])
    def test_methods(self, method: Any) -> None:
        with pytest.raises(InvalidDataError, match='^method must be "kmeans" or "greedy"; found'):
            gh.inducing_points(inputs(), 3, method=method)

    @pytest.mark.parametrize("seed", [-1, 0.5, None])
    def test_seeds(self, seed: Any) -> None:
        with pytest.raises(InvalidDataError, match="^seed must be a non-negative integer; found"):
            gh.inducing_points(inputs(), 3, seed=seed)

    @pytest.mark.parametrize(
        ("method", "kernel", "message"),
        [
            ("kmeans", gpflow.kernels.Matern52(), "^kernel has no use for method 'kmeans'"),
            ("greedy", "rbf", "^kernel must be a gpflow kernel of one output; found str"),
            (
                "greedy",
                gpflow.kernels.SharedIndependent(gpflow.kernels.Matern52(), 2),
                "found SharedIndependent. Of a multi-output kernel pass one of its latent_kernels",
            ),
            (
                "greedy",
                gpflow.kernels.Polynomial(degree=1e4, variance=1e8),
                "^kernel must be finite at the rows of X; found inf at",
            ),
        ],
    )
    def test_kernels(self, method: str, kernel: Any, message: str) -> None:
        with pytest.raises(InvalidDataError, match=message):
            gh.inducing_points(inputs(), 3, method=method, kernel=kernel)
