"""The memory of a worker: how much of it projections may take, and how it is given back.

Dask looks at all memory of the process. From 0.7 of what it was given shards are written to disk, from 0.8
the worker is paused: it starts no task until it has given memory back.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

from .. import tuning

FILLED_PART = 0.5
"""Of a worker's memory that libraries, rows and projections may take; the rest is for what is computed of a
block."""

HEAP_ARRAY_BYTES = 2**25
"""Arrays of up to 32 MB come from memory that was freed before. Dask has a nanny's workers give all of it
back to the system (``MALLOC_TRIM_THRESHOLD_``), which takes several times as long to clear its pages as a
quadrature on arrays does with them."""

HEAP_FREE_BYTES = 2**27
"""So much of it may wait at the end of the heap."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc

_most_kept = sys.maxsize


def most_kept() -> int:
    """Bytes of projections that suit the memory of this process."""
    return _most_kept


def prepare_memory(limit: int | None) -> None:
    """What is left of the memory that Dask has given this process, if it has, is for projections."""
    global _most_kept
    _of_glibc("mallopt", M_MMAP_THRESHOLD, HEAP_ARRAY_BYTES)
    _of_glibc("mallopt", M_TRIM_THRESHOLD, HEAP_FREE_BYTES)
    if limit:
        import psutil  # which Dask needs itself

        _most_kept = max(0, int(FILLED_PART * limit) - psutil.Process().memory_info().rss)


def keep_less() -> None:
    """Half of the projections from now on."""
    global _most_kept
    _most_kept = min(_most_kept, tuning.KEPT_PROJECTIONS) // 2


def give_back() -> None:
    """Freed memory to the system, from inside of the heap too."""
    _of_glibc("malloc_trim", 0)


def _of_glibc(name: str, *arguments: int) -> None:
    function: Any = getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None
    if function is not None:
        function(*arguments)
