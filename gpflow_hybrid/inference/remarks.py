"""What a training loss has to say beside its value, and how often."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..errors import ConvergenceWarning
from .options import COLLAPSE, TRAINING

NOT_CONVERGED = (
    "Inference inside the training loss did not converge: its residual is {:.1e}. Value and gradient are "
    "not exact at these hyperparameters."
)

NOT_EXACT = (
    "The total gradient is not exact at these hyperparameters; its relative error is {:.1e}."
)

WIDE_CAVITY = (
    "A cavity does not exist at these hyperparameters, or is much wider than the prior: this concerns {} "
    "of {} data. The training loss takes only a part of their sites out of q, so that it stays finite and "
    "continuous."
)


class Remark(NamedTuple):
    """A sentence with numbers in it; without them it is the kind of which one is enough."""

    kind: str
    numbers: tuple[float, ...] = ()

    def __str__(self) -> str:
        return self.kind.format(*self.numbers)


def remarks_on(num_parts: int, num_data: int, error: float) -> tuple[Remark, ...]:
    """What the user ought to know of a value and its gradient.

    :param num_parts: of so many data, those whose sites are not taken out of q as a whole.
    :param error: relative, of the weights in the gradient.
    """
    found = [Remark(WIDE_CAVITY, (num_parts, num_data))] if num_parts else []
    if error > COLLAPSE.gradient_error:
        found.append(Remark(NOT_EXACT, (error,)))
    return tuple(found)


class Remarks:
    """What a training loss has to say, each kind once: an optimiser evaluates it many times.

    A compiled loss has remarks of its own; those of eager calls are a model's, until :meth:`forget`.
    """

    def __init__(self, silent: bool = False) -> None:
        self._made: set[str] = set()
        self._silent = silent
        self._count = 0

    def forget(self) -> None:
        """Say everything again."""
        self._made.clear()
        self._count = 0

    def count(self) -> int:
        """Which evaluation this is. The first is an optimiser's start, no trial of its line search."""
        self._count += 1
        return 0 if self._silent else self._count

    def make(self, residual: float, remarks: Sequence[Remark]) -> None:
        """Warn of what has not been warned of before.

        :param residual: of inference; infinite where it had nothing to start from.
        """
        if self._silent:
            return
        if TRAINING.warn_residual < residual < np.inf:
            remarks = [*remarks, Remark(NOT_CONVERGED, (float(residual),))]
        for remark in remarks:
            if remark.kind not in self._made:
                self._made.add(remark.kind)
                # Python itself would say the same words once in a process; this is another run. No line of
                # code is to blame.
                warnings.warn_explicit(
                    str(remark), ConvergenceWarning, "gpflow_hybrid", 0, __name__, {}
                )
