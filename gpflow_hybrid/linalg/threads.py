"""How many threads BLAS takes: one for small matrices, where threads wait for each other longer than they
compute, many times as long when other work has the cores."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator
from typing import Any

from threadpoolctl import ThreadpoolController

from .. import tuning

_lock = threading.Lock()
_inside = 0
_limiter: Any = None
_most_threads: int | None = None


def limit_threads(number: int) -> None:
    """Of this process from now on, where several processes share a machine."""
    global _most_threads
    _most_threads = number


def num_threads() -> int:
    """For work that is divided among threads: as many as there are cores, if nobody has set a limit."""
    cores = os.cpu_count() or 1
    return cores if _most_threads is None else min(cores, _most_threads)


@functools.cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


def blas_threads_for_rows(num_rows: int) -> contextlib.AbstractContextManager[None]:
    """As many threads as symmetric matrices of so many rows are worth: triangles, half their elements."""
    return blas_threads_for(num_rows * num_rows // 2)


@contextlib.contextmanager
def blas_threads_for(elements: int) -> Iterator[None]:
    """As many threads as matrices of so many elements are worth.

    The limit is the whole process': it holds as long as any thread is inside, and is lifted by the last.
    """
    if elements > tuning.THREADED_ELEMENTS:
        yield
        return
    with one_blas_thread():
        yield


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """No more than one; the limit is the whole process', as long as any thread is inside."""
    global _inside, _limiter
    with _lock:
        _inside += 1
        if _inside == 1:
            _limiter = _controller().limit(limits=1, user_api="blas")
            _limiter.__enter__()
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _limiter.__exit__(None, None, None)
                _limiter = None
