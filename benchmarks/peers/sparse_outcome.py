"""What a contender of ``python -m benchmarks.sparse`` reports, and how its progress is followed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from .outcome import score

FIRST_GAP = 0.5
GROWTH = 1.1
"""Progress is looked at after 0.5 s at the latest, then whenever 10 % more time has passed."""


Sight = tuple[float, float, float]
"""Seconds of training, test log density and ELBO; the clock is stopped while the latter are computed."""


@dataclasses.dataclass
class SparseFit:
    """One training run and its test results; None is what a contender does not have."""

    seconds: float
    """From building the model until it is trained, tracing and compilation included."""
    log_density: float
    """Mean log predictive density of the test rows."""
    evaluations: int
    """Evaluations of the objective with its gradient, or steps of a stochastic loop."""
    converged: bool
    part_evaluations: float = 0.0
    """Those on parts of the rows before, in units of such on all."""
    note: str = ""
    """Why it ended if it did not converge."""
    accuracy: float | None = None
    rmse: float | None = None
    objective: float | None = None
    """The final value of what was maximised."""
    elbo: float | None = None
    """The variational lower bound of log p(y) at the end, over all training rows."""
    log_lengthscale: float | None = None
    log_sigma: float | None = None
    step_size: float | None = None
    """The largest of its natural-gradient steps on batches."""
    trace: list[Sight] = dataclasses.field(default_factory=list)
    """What was seen on the way."""


class Clock:
    """Seconds of training, and what test density and ELBO were when."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.trace: list[Sight] = []
        self._began = time.perf_counter()
        self._next = FIRST_GAP

    @property
    def seconds(self) -> float:
        """Of training alone."""
        return time.perf_counter() - self._began

    @property
    def is_over(self) -> bool:
        """Whether the time is used up."""
        return self.seconds > self.limit

    def look(self, measure: Callable[[], tuple[float, float]]) -> None:
        """Note density and ELBO if it is time to, which takes none."""
        seconds = self.seconds
        if seconds >= self._next:
            density, elbo = measure()
            self.trace.append((round(seconds, 3), round(density, 6), round(elbo, 3)))
            self._began = time.perf_counter() - seconds
            self._next = max(seconds + FIRST_GAP, GROWTH * seconds)

    def report(self) -> dict[str, Any]:
        """Seconds and the trace so far, as fields of a :class:`SparseFit`; called once, at the end."""
        return {"seconds": self.seconds, "trace": self.trace}


def classified(probability: np.ndarray, Y_test: np.ndarray) -> dict[str, Any]:
    """Density and accuracy of predicted probabilities."""
    return score(probability, Y_test)


def regressed(log_densities: Any, mean: Any, Y_test: np.ndarray) -> dict[str, Any]:
    """Density and RMSE of predictive log densities and means."""
    errors = np.ravel(mean) - np.ravel(Y_test)
    return {
        "log_density": float(np.mean(log_densities)),
        "rmse": float(np.sqrt(np.mean(errors**2))),
    }


def finished(clock: Clock, converged: bool, note: str) -> dict[str, Any]:
    """How it ended, as fields of a :class:`SparseFit`."""
    if not converged and clock.is_over:
        note = f"stopped after {clock.limit:g} s"
    return {"converged": converged, "note": "" if converged else note}
