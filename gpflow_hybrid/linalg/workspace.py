"""Memory for the matrices of one E-step, used again by the next.

The system clears the pages of fresh memory, which takes as long as filling them.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import tuning

Array = npt.NDArray[Any]

ALIGNMENT = 64
"""Bytes on whose multiples TensorFlow takes over an array without a copy."""

MAX_IDLE = 2
"""Workspaces that wait for the next E-step: as many as threads that train at the same time need."""

_idle: collections.deque[Workspace] = collections.deque(maxlen=MAX_IDLE)


class Workspace:
    """n×n matrices by name. A name stands for the same memory every time it is asked for."""

    def __init__(self, n: int, dtype: Any) -> None:
        self.n, self.dtype = n, np.dtype(dtype)
        self._matrices: dict[Hashable, Array] = {}

    def matrix(self, *name: Hashable) -> Array:
        """Room for a matrix, with anything in it; large ones are new every time, so that they can go."""
        if self.n * self.n * self.dtype.itemsize > tuning.KEPT_BYTES:
            return empty_matrix(self.n, self.dtype)
        if name not in self._matrices:
            self._matrices[name] = empty_matrix(self.n, self.dtype)
        return self._matrices[name]


def take_workspace(n: int, dtype: Any) -> Workspace:
    """One that waits, if it has the size, or a new one."""
    try:
        found = _idle.pop()
    except IndexError:
        return Workspace(n, dtype)
    return found if (found.n, found.dtype) == (n, np.dtype(dtype)) else Workspace(n, dtype)


def leave_workspace(workspace: Workspace) -> None:
    """For the next E-step; nothing of it may be read any more."""
    _idle.append(workspace)


def empty_matrix(n: int, dtype: Any) -> Array:
    """An n×n matrix that TensorFlow can take over."""
    dtype = np.dtype(dtype)
    size = n * n * dtype.itemsize
    buffer = np.empty(size + ALIGNMENT, np.uint8)
    offset = -buffer.ctypes.data % ALIGNMENT
    return buffer[offset : offset + size].view(dtype).reshape(n, n)
