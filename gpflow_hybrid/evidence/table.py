"""Estimates of log p(y | θ) side by side, as a table and as a plot."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ..display import ShownAsText, with_footnotes
from ..plotting import pyplot


@dataclasses.dataclass(frozen=True)
class EvidenceEstimate:
    """One estimate of ``log p(y | θ)``."""

    name: str
    """``"elbo"``, ``"ep_like"``, ``"ep"``, ``"laplace"``, ``"ais"`` or ``"power_ep_…"``."""
    value: float
    """NaN where the method has no value; the note says why."""
    standard_error: float | None
    """Of a sampled estimate, else None."""
    seconds: float
    """Wall time of its inference, tracing included."""
    note: str
    """What it is, or what went wrong."""


@dataclasses.dataclass(frozen=True, repr=False)
class EvidenceComparison(ShownAsText):
    """What :func:`compare_evidence` found; prints as a table."""

    estimates: tuple[EvidenceEstimate, ...]
    """One for each method."""
    num_data: int
    """By which the table divides."""

    def __getitem__(self, name: str) -> EvidenceEstimate:
        """The estimate of this name."""
        for estimate in self.estimates:
            if estimate.name == name:
                return estimate
        names = ", ".join(estimate.name for estimate in self.estimates)
        raise KeyError(f"{name!r} was not computed; computed were {names}.")

    def as_dict(self) -> dict[str, float]:
        """Values by name; the standard error of AIS as ``"ais_standard_error"``."""
        values = {estimate.name: estimate.value for estimate in self.estimates}
        errors = {
            f"{estimate.name}_standard_error": estimate.standard_error
            for estimate in self.estimates
            if estimate.standard_error is not None
        }
        return {**values, **errors}

    @property
    def reference(self) -> EvidenceEstimate | None:
        """The sampled estimate, where there is one."""
        return next((e for e in self.estimates if e.standard_error is not None), None)

    def __str__(self) -> str:
        header = ["", "log p(y)", "per datum", "from AIS", "seconds", ""]
        notes, below = with_footnotes([estimate.note for estimate in self.estimates])
        found = [self._row(*pair) for pair in zip(self.estimates, notes, strict=True)]
        rows = [header, *found]
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        lines = []
        for name, *numbers, note in rows:
            cells = [f"{cell:>{width}}" for cell, width in zip(numbers, widths[1:-1], strict=True)]
            lines.append("  ".join([f"{name:<{widths[0]}}", *cells, note]).rstrip())
        return "\n".join([*lines, *below])

    def _row(self, estimate: EvidenceEstimate, note: str) -> list[str]:
        seconds = f"{estimate.seconds:.1f}"
        if math.isnan(estimate.value):
            return [estimate.name, "none", "", "", seconds, note]
        value, difference = f"{estimate.value:.3f}", ""
        if estimate.standard_error is not None:
            value += f" ± {estimate.standard_error:.3f}"
        elif self.reference is not None:
            difference = f"{estimate.value - self.reference.value:+.3f}"
        per_datum = f"{estimate.value / self.num_data:.4f}"
        return [estimate.name, value, per_datum, difference, seconds, note]

    def plot(self, ax: Any = None) -> Any:
        """The estimates as points on a line, AIS as a band of two standard errors; needs matplotlib."""
        plt = pyplot()
        ax = plt.subplots(figsize=(6.0, 0.4 * len(self.estimates) + 1.0))[1] if ax is None else ax
        shown = [e for e in self.estimates if math.isfinite(e.value)][::-1]
        for row, estimate in enumerate(shown):
            ax.errorbar(
                estimate.value,
                row,
                xerr=None if estimate.standard_error is None else 2.0 * estimate.standard_error,
                fmt="o",
                color="black" if estimate.standard_error is not None else "C0",
                capsize=3,
            )
        reference = self.reference
        if reference is not None and reference.standard_error is not None:
            half = 2.0 * reference.standard_error
            ax.axvspan(reference.value - half, reference.value + half, color="0.85", zorder=0)
        ax.set_yticks(range(len(shown)), [e.name for e in shown])
        ax.set_xlabel("log p(y)")
        ax.grid(axis="x", linestyle="--", alpha=0.5)
        return ax
