"""Symmetric matrices of which one triangle is computed, block by block of their rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ..tuning import BLOCK_ROWS as BLOCK

Array = npt.NDArray[Any]

_BELOW = np.tri(BLOCK, dtype=bool)


def row_blocks(n: int) -> Iterator[slice]:
    """All rows, in blocks."""
    return (slice(i, min(i + BLOCK, n)) for i in range(0, n, BLOCK))


def clear_above(A: Array) -> None:
    """Zero what rows of blocks reach above the diagonal: fresh memory can hold anything."""
    for rows in row_blocks(len(A)):
        block = A[rows, rows]
        block[~_BELOW[: len(block), : len(block)]] = 0.0


def mirror(A: Array) -> None:
    """Copy what is below the diagonal above it."""
    n = len(A)
    for rows in row_blocks(n):
        A[: rows.start, rows] = A[rows, : rows.start].T
        block = A[rows, rows]
        size = len(block)
        block[...] = np.where(_BELOW[:size, :size], block, block.T)
