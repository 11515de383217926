"""What a fit leaves behind: numbers, and whether it is one."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ..display import ShownAsText, in_rows, values_in_short

CONVERGED = ("converged", "inferred")
"""Statuses of what is a fit."""


@dataclasses.dataclass(frozen=True, repr=False)
class FitResult(ShownAsText):
    """How :func:`~gpflow_hybrid.fit` ended; prints as a few lines."""

    status: str
    """``"converged"``; or ``"no_better_than_prior"``, ``"no_better_than_constant"`` (where the likelihood
    is a noise around f), ``"inaccurate"`` (the E-step or its quadrature), ``"steep"`` (the line search gave
    up on a slope), ``"max_iterations"``, ``"interrupted"``; ``"inferred"`` if nothing is trainable."""
    message: str
    """What happened in words, and what to do about it."""
    loss: float
    """Where the model was left: minus the objective and the log density of the priors."""
    gradient_norm: float
    """The largest derivative of the loss in an unconstrained parameter, in nats."""
    gain: float
    """Nats by which the objective is higher than that of independent data, under which none tells of
    another; NaN where it is not known."""
    residual: float
    """Of the E-step at the end, relative; NaN for a model without one."""
    quadrature_error: float
    """Of the E-step, in units of the posterior; NaN for a model without one."""
    hyperparameters: dict[str, Any]
    """Every trained parameter by GPflow's path, as arrays."""
    num_iterations: int
    """Of L-BFGS, over all starts."""
    num_evaluations: int
    """Of the training loss of all data and its gradient, over all starts."""
    seconds: float
    """Wall time, tracing included."""
    losses: tuple[float, ...]
    """Where every start ended, in order; NaN for one that failed."""
    part_evaluations: float = 0.0
    """Of losses of parts of the rows, by which a sparse model begins, in units of such of all rows."""

    @property
    def converged(self) -> bool:
        """Whether this is a fit: a vanishing gradient of an accurate objective that beats the prior's."""
        return self.status in CONVERGED

    def __repr__(self) -> str:
        return (
            f"<FitResult: {self.status}, loss {self.loss:.6g}, gradient {self.gradient_norm:.1e}>"
        )

    def __str__(self) -> str:
        count = f"{self.num_iterations} ({self.num_evaluations} evaluations, {self.seconds:.1f} s)"
        rows = [("loss", f"{self.loss:.4f}"), ("gradient", f"{self.gradient_norm:.1e}")]
        if not math.isnan(self.gain):
            rows.append(("gain over the prior", f"{self.gain:.4g} nats"))
        if not math.isnan(self.residual):
            rows.append(("E-step residual", f"{self.residual:.1e}"))
        if self.quadrature_error > 0.0:
            rows.append(("quadrature error", f"{self.quadrature_error:.1e}"))
        rows.append(("iterations", count))
        if self.part_evaluations > 0.0:
            passes = f"as much as {self.part_evaluations:.2g} evaluations"
            rows.append(("before, on parts of the rows", passes))
        if len(self.losses) > 1:
            ends = ", ".join("failed" if math.isnan(x) else f"{x:.4f}" for x in self.losses)
            rows.append((f"{len(self.losses)} starts", ends))
        rows += [
            (path.lstrip("."), values_in_short(value))
            for path, value in self.hyperparameters.items()
        ]
        return f"{self.message}\n{in_rows(rows)}"
