"""A progress bar that is quiet where nobody would see it."""

from __future__ import annotations

import sys

from tqdm import tqdm

from .history import IterationRecord


class ProgressBar:
    """tqdm with the objective and the iteration."""

    def __init__(self, total: int, done: int, enabled: bool) -> None:
        self._bar = tqdm(total=total, initial=done, disable=not enabled, unit="it")

    def show(self, record: IterationRecord) -> None:
        """One iteration is done."""
        self._bar.set_postfix(
            objective=f"{record.objective:.4f}", e_steps=record.e_steps, refresh=False
        )
        self._bar.update(1)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._bar.close()


def bar(total: int, done: int, progress: bool | None) -> ProgressBar:
    """A bar; by default only if standard error is a terminal."""
    return ProgressBar(total, done, sys.stderr.isatty() if progress is None else progress)
