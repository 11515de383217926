"""Ctrl-C, seen between computations only.

Python raises KeyboardInterrupt wherever it is: between a record and the state that belongs to it, or in a
destructor of a dependency, where it is printed and forgotten. Here the first Ctrl-C is remembered, and
raised where :func:`check` is called; a second one is raised at once.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

_pending = threading.Event()


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Remember Ctrl-C instead of raising it; does nothing where Ctrl-C has another meaning."""
    usual = signal.default_int_handler
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not usual:
        yield
        return

    def remember(number: int, frame: Any) -> None:
        if _pending.is_set():
            usual(number, frame)
        _pending.set()

    _pending.clear()
    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        _pending.clear()


def check() -> None:
    """Raise the Ctrl-C that has come in the meantime."""
    if _pending.is_set():
        _pending.clear()
        raise KeyboardInterrupt


def is_pending() -> bool:
    """Whether :func:`check` would raise."""
    return _pending.is_set()
