"""GPflow's configuration of another process, for a while."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import gpflow
from gpflow.config import Config


class _Turns:
    """GPflow has one configuration for a whole process, which a worker's threads share: tasks with the same
    one compute at the same time, others wait for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_tasks = 0
        self._present = self._own = gpflow.config.config()

    def enter(self, config: Config) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._num_tasks == 0 or self._present == config)
            if self._num_tasks == 0:
                self._present, self._own = config, gpflow.config.config()
                gpflow.config.set_config(config)
            self._num_tasks += 1

    def leave(self) -> None:
        with self._changed:
            self._num_tasks -= 1
            if self._num_tasks == 0:
                gpflow.config.set_config(self._own)
                self._changed.notify_all()


_turns = _Turns()


@contextlib.contextmanager
def configured(config: Config) -> Iterator[None]:
    """Compute under this configuration."""
    _turns.enter(config)
    try:
        yield
    finally:
        _turns.leave()
