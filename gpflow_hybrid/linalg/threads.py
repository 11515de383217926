"""How many threads BLAS takes: one for small matrices, where threads wait for each other longer than they
compute, many times as long when other work has the cores."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

from threadpoolctl import ThreadpoolController

from .. import tuning

_lock = threading.Lock()
_inside = 0
_limiter: Any = None


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
