"""Memory that matrices leave to one another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gpflow_hybrid.linalg import buffers
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
