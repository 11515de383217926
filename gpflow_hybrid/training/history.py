"""What a run leaves behind: one record per iteration, and how it ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from ..display import ShownAsText
from ..plotting import pyplot


@dataclasses.dataclass(frozen=True)
class IterationRecord:
    """The model after one iteration; values are at the hyperparameters and sites of that moment."""

    iteration: int
    """0 is the state after the first E-step, before any M-step."""
    elbo: float
    """``L_0`` at λ and θ."""
    ep_like: float
    """NaN where a cavity does not exist."""
    objective: float
    """The objective that is trained, with the log density of the priors."""
    hyperparameters: dict[str, Any]
    """Every trainable parameter by GPflow's path, as arrays."""
    e_steps: int
    """Steps on λ in this iteration's E-step."""
    e_residual: float
    """Residual of the E-step's fixed point, relative, in units of the posterior."""
    gradient_norm: float
    """Of the objective in the trained variables, at the last gradient of the M-step."""
    m_gain: float
    """By how much the M-step raised the objective at fixed λ."""
    min_cavity_precision: float
    """The smallest ``1/v − λ₂``; EP-like values exist where it is positive."""
    loo_log_predictive_density: float
    """Mean leave-one-out log density from the cavities; NaN where one does not exist."""
    seconds: float
    """Wall time of this iteration."""
    measurements: dict[str, float] = dataclasses.field(default_factory=dict)
    """What stopping rules measured, by name."""


class History(Sequence[IterationRecord]):
    """The records of a run; ``history["elbo"]`` is a column as an array."""

    def __init__(self, records: Sequence[IterationRecord] = ()) -> None:
        self._records = list(records)

    def extended(self, record: IterationRecord) -> History:
        """A history with one more record."""
        return History([*self._records, record])

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[IterationRecord]:
        return iter(self._records)

    @overload
    def __getitem__(self, key: int) -> IterationRecord: ...
    @overload
    def __getitem__(self, key: slice) -> Sequence[IterationRecord]: ...
    @overload
    def __getitem__(self, key: str) -> npt.NDArray[Any]: ...

    def __getitem__(self, key: int | slice | str) -> Any:
        """A record by position, or a column by name: a field, a hyperparameter or a measurement."""
        if not isinstance(key, str):
            return self._records[key]
        if key in {field.name for field in dataclasses.fields(IterationRecord)}:
            return np.array([getattr(record, key) for record in self._records])
        if self._records and key in self._records[-1].hyperparameters:
            return np.array([record.hyperparameters[key] for record in self._records])
        if self._records and key in self._records[-1].measurements:
            # A rule may have been added on resumption: NaN before that.
            return np.array([record.measurements.get(key, np.nan) for record in self._records])
        raise KeyError(f"{key!r} is not a column of this history.")

    def __repr__(self) -> str:
        return f"History of {len(self)} records"


@dataclasses.dataclass(frozen=True, repr=False)
class TrainingResult(ShownAsText):
    """How a run of :meth:`~gpflow_hybrid.VEMTrainer.fit` ended."""

    history: History
    """One record for each iteration, and one before the first."""
    status: str
    """``"converged"``, ``"stopped"``, ``"drift"``, ``"max_iterations"``, ``"interrupted"`` or
    ``"inferred"`` (no trainable hyperparameters)."""
    message: str
    """What happened in words, and what to do about it."""
    seconds: float
    """Wall time of all iterations, those before a resumption included."""
    num_iterations: int
    """Iterations done, those before a resumption included."""
    best_iteration: int
    """The iteration whose state the model was left with."""
    log_dir: str | None = None
    """Where TensorBoard files were written."""

    def __str__(self) -> str:
        record = self.history[-1]
        return (
            f"{self.status} after {self.num_iterations} iterations ({self.seconds:.1f} s): "
            f"{self.message}\nELBO {record.elbo:.4f}, EP-like {record.ep_like:.4f}"
        )

    def plot(self) -> Any:
        """Objectives, hyperparameters and E-step residual against the iteration; needs matplotlib."""
        plt = pyplot()
        history = self.history
        iterations = history["iteration"]
        figure, (top, middle, bottom) = plt.subplots(3, 1, sharex=True, figsize=(7, 8))
        for name, label in (("elbo", "ELBO"), ("ep_like", "EP-like")):
            top.plot(iterations, history[name], label=label)
        top.axvline(self.best_iteration, color="0.7", linestyle=":", label="kept")
        top.set_ylabel("nats")
        top.legend()
        for path in history[-1].hyperparameters:
            values = history[path].reshape(len(history), -1)
            for column in range(min(values.shape[1], 4)):
                suffix = f"[{column}]" if values.shape[1] > 1 else ""
                middle.plot(iterations, values[:, column], label=path.lstrip(".") + suffix)
        if all(np.all(history[path] > 0) for path in history[-1].hyperparameters):
            middle.set_yscale("log")
        middle.set_ylabel("hyperparameters")
        if history[-1].hyperparameters:
            middle.legend(fontsize="small")
        residual = np.maximum(history["e_residual"], 1e-16)
        bottom.semilogy(iterations, residual, label="E-step residual")
        bottom.semilogy(iterations, np.abs(history["gradient_norm"]), label="gradient norm")
        bottom.set_xlabel("iteration")
        bottom.legend()
        figure.suptitle(f"{self.status}: {self.num_iterations} iterations, {self.seconds:.1f} s")
        figure.tight_layout()
        return figure
