"""Stochastic loops of all contenders: the batches, the step sizes, and when to stop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from .sparse_outcome import Clock, finished
from .stopping import TOLERANCE, WINDOW

BATCH = 512
SHORTEST = 400
"""Steps without progress at the least, where epochs are short."""
NATGRAD_LRS = (0.05, 0.01, 0.002)
"""Step sizes of stochastic natural gradients: the first with which q(u) stays valid. With 0.1, as in
GPflow's tutorials, SVGP leaves the positive-definite cone on MAGIC."""
RAMP = 20

T = TypeVar("T")


def natgrad_lr(step: int, largest: float) -> float:
    """Step size of stochastic natural gradients: from a tenth to all of the largest in the first 20 steps,
    then that."""
    return largest * 10.0 ** min(0.0, step / RAMP - 1.0)


def first_that_runs(attempt: Callable[[float], T], failures: tuple[type[Exception], ...]) -> T:
    """What ``attempt(step size)`` returns for the largest step size with which it does not fail; it begins
    anew for each, and the time of those that failed does not count."""
    for lr in NATGRAD_LRS[:-1]:
        with contextlib.suppress(FloatingPointError, *failures):
            return attempt(lr)
    return attempt(NATGRAD_LRS[-1])


def minimise(
    step: Callable[[int, np.ndarray], float],
    num_data: int,
    clock: Clock,
    measure: Callable[[], tuple[float, float]],
) -> dict[str, Any]:
    """Call ``step(count, rows) -> loss`` with the rows of one batch after another.

    Every epoch is a new permutation of the rows, so that its mean loss hardly depends on the batches;
    the loop ends when 20 epochs, and 400 steps, have lowered the least of these means by less than 1e-5 per
    datum, or when the time is used up.
    """
    rng = np.random.default_rng(0)
    epochs: list[float] = []
    batches = max(1, num_data // BATCH)
    window = max(WINDOW, -(-SHORTEST // batches))
    steps, converged = 0, False
    while not converged and not clock.is_over:
        losses = []
        for rows in np.array_split(rng.permutation(num_data), batches):
            loss = step(steps, np.sort(rows))
            if not np.isfinite(loss):
                raise FloatingPointError(f"the loss is {loss} at step {steps}")
            losses.append(loss)
            steps += 1
            clock.look(measure)
            if clock.is_over:
                break
        epochs.append(float(np.mean(losses)))
        if len(epochs) > window:
            gain = min(epochs[:-window]) - min(epochs[-window:])
            converged = gain < TOLERANCE * num_data
    return {
        "evaluations": steps,
        "objective": -epochs[-1],
        **finished(clock, converged, ""),
    }
