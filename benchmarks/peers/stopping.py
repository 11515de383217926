"""The common settings of all first-order loops: when to stop, and how large the steps are.

L-BFGS stops by SciPy's own default (a relative decrease below 2.2e-9 in one step). A loop of Adam or
natural-gradient steps has no such test, so all of them use this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

TOLERANCE = 1e-5
WINDOW = 20
CAP = 10000
ADAM_LR = 0.05


def has_converged(losses: Sequence[float], num_data: int) -> bool:
    """Whether the last 20 iterations lowered the best loss by less than 1e-5 per datum."""
    if len(losses) <= WINDOW:
        return False
    return min(losses[:-WINDOW]) - min(losses[-WINDOW:]) < TOLERANCE * num_data


def natgrad_lr(iteration: int) -> float:
    """Step size of the natural gradients: from 0.1 to 1 in the first 20 iterations, then 1."""
    return 0.1 * 10.0 ** min(1.0, iteration / WINDOW)


def minimise(step: Callable[[int], float], num_data: int) -> tuple[list[float], bool]:
    """Call ``step(iteration) -> loss`` until :func:`has_converged`; the losses, and whether it did.

    A loss that is not finite raises; after ``CAP`` iterations the loop ends without convergence.
    """
    losses: list[float] = []
    for iteration in range(CAP):
        loss = float(step(iteration))
        if loss != loss or loss in (float("inf"), float("-inf")):
            raise FloatingPointError(f"the loss is {loss} at iteration {iteration}")
        losses.append(loss)
        if has_converged(losses, num_data):
            return losses, True
    return losses, False


def summary(losses: Sequence[float], converged: bool) -> dict[str, Any]:
    """How a loop ended, as fields of a :class:`~benchmarks.peers.outcome.Fit`."""
    return {
        "evaluations": len(losses),
        "objective": -losses[-1],
        "converged": converged,
        "note": "" if converged else f"stopped at {CAP} iterations",
    }
