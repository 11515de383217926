"""Memory that matrices leave to one another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf

from gpflow_hybrid.linalg import buffers, lapack
from gpflow_hybrid.linalg.buffers import ALIGNMENT, empty_matrix


def address(A: np.ndarray) -> int:
    return A.ctypes.data


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_matrix_is_as_asked_for(dtype: type) -> None:
    A = empty_matrix(37, dtype)
    assert A.shape == (37, 37)
    assert A.dtype == dtype
    assert A.flags.c_contiguous
    assert A.flags.writeable
    assert address(A) % ALIGNMENT == 0


def test_memory_is_left_to_the_next_matrix_and_never_shared() -> None:
    A = empty_matrix(64, np.float64)
    first = address(A)
    B = empty_matrix(64, np.float64)
    assert not np.shares_memory(A, B)
    row = A[3]
    del A
    C = empty_matrix(64, np.float64)  # a view of A is left: its memory is not free
    assert not np.shares_memory(row, C)
    del row
    assert address(empty_matrix(64, np.float64)) == first


def test_what_waits_is_little() -> None:
    many = [empty_matrix(64, np.float64) for _ in range(20)]
    del many
    assert len(buffers._waiting) == buffers.MAX_KEPT
    other = empty_matrix(65, np.float64)  # another size: the old ones go
    assert not buffers._waiting
    del other


def test_large_matrices_go_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "MAX_BYTES", 1000)
    buffers._waiting.clear()
    empty_matrix(64, np.float64)
    assert not buffers._waiting


def test_threads_do_not_share_matrices() -> None:
    def fill(value: int) -> bool:
        for _ in range(200):
            A = empty_matrix(40, np.float64)
            A[...] = value
            if not np.all(A == value):
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(fill, range(8)))


def test_tensorflow_keeps_what_it_was_given() -> None:
    @tf.function
    def filled(value: tf.Tensor) -> tf.Tensor:
        def fill(value: np.ndarray) -> np.ndarray:
            A = empty_matrix(64, np.float64)
            A[...] = value
            return A

        return tf.numpy_function(fill, [value], tf.float64, stateful=False)

    held = [filled(tf.constant(float(i))) for i in range(20)]
    views = [A.numpy() for A in held]
    del held
    for _ in range(20):
        empty_matrix(64, np.float64)[...] = np.nan
    for i, view in enumerate(views):
        np.testing.assert_array_equal(view, float(i))


@pytest.mark.parametrize("negative", [False, True])
def test_nothing_reads_what_another_matrix_left(negative: bool) -> None:
    rng = np.random.default_rng(0)
    X, r = rng.normal(size=(70, 3)), rng.normal(size=70)
    lambda_2 = rng.uniform(0.0, 1.0, size=70)
    lambda_2[:3] = 0.0
    if negative:
        lambda_2[3:6] = -0.05

    def everything() -> list[np.ndarray]:
        K = np.exp(-0.5 * lapack.squared_distances(X))
        q = lapack.posterior(K, r, lambda_2)
        Sigma = lapack.covariance(K, lambda_2, q.chol_inverse, q.variance)
        adjoints = [
            lapack.kernel_adjoint(Sigma, r, lambda_2, q.shift, r, v_bar, 1.0)
            for v_bar in (r, np.zeros(70))
        ]
        return [a.copy() for a in (K, *q, Sigma, *adjoints)]

    buffers._waiting.clear()
    expected = everything()
    poisoned = [empty_matrix(70, np.float64) for _ in range(buffers.MAX_KEPT)]
    for A in poisoned:
        A[...] = np.nan
    del poisoned, A
    for found, value in zip(everything(), expected, strict=True):
        np.testing.assert_array_equal(found, value)
