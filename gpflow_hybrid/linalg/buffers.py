"""Memory for matrices that come and go with every evaluation.

The system clears the pages of fresh memory, which takes as long as filling them. Matrices that are gone
leave theirs to the next ones.
"""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import numpy.typing as npt

ALIGNMENT = 64
"""Bytes on whose multiples TensorFlow takes over an array without a copy."""

MAX_KEPT = 4
"""Buffers that wait for use."""

MAX_BYTES = 2**25
"""Size above which a buffer goes back to the system: what is computed of such a matrix takes far longer."""

_waiting: collections.deque[npt.NDArray[np.uint8]] = collections.deque(maxlen=MAX_KEPT)


class _Lease:
    """The owner of an array's memory: when the last view of it is gone, the memory waits for use."""

    def __init__(self, buffer: npt.NDArray[np.uint8]) -> None:
        self.buffer = buffer
        self.__array_interface__ = buffer.__array_interface__

    def __del__(self) -> None:
        _waiting.append(self.buffer)


def empty_matrix(n: int, dtype: Any) -> npt.NDArray[Any]:
    """Room for an n×n matrix that TensorFlow can take over."""
    size = n * n * np.dtype(dtype).itemsize
    buffer = np.empty(size + ALIGNMENT, np.uint8) if size > MAX_BYTES else _leased(size + ALIGNMENT)
    offset = -buffer.ctypes.data % ALIGNMENT
    return buffer[offset : offset + size].view(dtype).reshape(n, n)


def _leased(size: int) -> npt.NDArray[np.uint8]:
    """A buffer that waits, or a new one; those of another size make room."""
    buffer = None
    while _waiting and buffer is None:
        try:
            found = _waiting.pop()
        except IndexError:  # another thread was faster
            break
        buffer = found if found.nbytes == size else None
    return np.asarray(_Lease(np.empty(size, np.uint8) if buffer is None else buffer))
