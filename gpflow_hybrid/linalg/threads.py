"""How many threads BLAS takes: one for small matrices, where threads wait for each other longer than they
compute, many times as long when other work has the cores.

A limit is the whole process': it holds as long as any thread is inside, and is lifted by the last.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from threadpoolctl import ThreadpoolController

from .. import tuning

Item = TypeVar("Item")
Result = TypeVar("Result")

_lock = threading.Lock()
_inside = 0
_limiter: Any = None
_given_threads: int | None = None
_most_threads: int | None = None


def limit_threads(number: int) -> None:
    """Of this process from now on, where several processes share a machine."""
    global _most_threads
    _most_threads = number


def num_threads() -> int:
    """For work that is divided among threads: as many as BLAS was given (``OMP_NUM_THREADS``), one for
    every core by default."""
    _controller()
    limits = (os.cpu_count(), _given_threads, _most_threads)
    return min(x for x in limits if x is not None)


@functools.cache
def _controller() -> ThreadpoolController:
    global _given_threads
    found = ThreadpoolController()
    given = [x["num_threads"] for x in found.info() if x["user_api"] == "blas"]
    _given_threads = max(given, default=None)  # before it is limited here
    return found


def blas_threads_for_rows(num_rows: int) -> contextlib.AbstractContextManager[None]:
    """As many threads as symmetric matrices of so many rows are worth: triangles, half their elements."""
    return blas_threads_for(num_rows * num_rows // 2)


@contextlib.contextmanager
def host_arithmetic(num_rows: int) -> Iterator[None]:
    """NumPy without warnings, as what is not finite comes out so, and the same threads."""
    with np.errstate(all="ignore"), blas_threads_for_rows(num_rows):
        yield


@functools.cache
def _has_one() -> bool:
    """Whether BLAS was started with one thread, as in a worker of joblib's: there is nothing to limit, and
    the libraries need not be looked for, which takes as long as a small fit."""
    general = os.environ.get("OMP_NUM_THREADS")
    names = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
    return all(os.environ.get(name, general) == "1" for name in names)


@contextlib.contextmanager
def blas_threads_for(elements: int) -> Iterator[None]:
    """As many threads as matrices of so many elements are worth."""
    if elements > tuning.THREADED_ELEMENTS or _has_one():
        yield
        return
    with one_blas_thread():
        yield


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """No more than one."""
    global _inside, _limiter
    with _lock:
        if _inside == 0:
            _limiter = _controller().limit(limits=1, user_api="blas")
            _limiter.__enter__()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _limiter.__exit__(None, None, None)
                _limiter = None


def in_parallel(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int
) -> Iterator[Result]:
    """``function`` of every item, in their order, so many at a time; no item is read before its turn."""
    if threads == 1:
        yield from map(function, items)
        return

    def quietly(item: Item) -> Result:
        with np.errstate(all="ignore"):  # which a new thread does not inherit
            return function(item)

    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[Result]] = deque()
        for item in items:
            waiting.append(pool.submit(quietly, item))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
