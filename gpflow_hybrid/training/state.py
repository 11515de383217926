"""The state of a run: arrays of everything that training changes, and what identifies it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from gpflow.kernels import Kernel
from gpflow.utilities import parameter_dict

from .history import History, IterationRecord
from .subjects import digest

if TYPE_CHECKING:
    from .alternation import Alternation
    from .monitoring import Monitoring

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclasses.dataclass(frozen=True)
class Progress:
    """What is known after a complete iteration. Replaced as a whole: an interrupt finds all or nothing."""

    history: History
    good: Arrays
    """The state after the last complete iteration."""
    best: Arrays | None = None
    """The state of the best iteration, where a stopping rule asks for it."""
    best_iteration: int = 0

    def extended(self, record: IterationRecord, good: Arrays, best_by: str | None) -> Progress:
        """After one more iteration, which is the best so far if ``best_by`` is larger than there."""
        history = self.history.extended(record)
        best, best_iteration = self.best, self.best_iteration
        if best_by is not None:
            column = history[best_by]
            if best is None or not (np.isnan(column[-1]) or column[-1] <= column[best_iteration]):
                best, best_iteration = good, record.iteration
        return Progress(history, good, best, best_iteration)


@dataclasses.dataclass
class Run:
    """A run in progress."""

    progress: Progress
    monitoring: Monitoring
    clock: float
    """When the last iteration ended."""

    @property
    def history(self) -> History:
        """The records so far; that of an iteration has its number as its position."""
        return self.progress.history


def optimizer_variables(optimizer: Any) -> Sequence[Any]:
    """All variables of a Keras 3 or tf_keras optimiser, none for None."""
    if optimizer is None:
        return ()
    variables = optimizer.variables
    return tuple(variables() if callable(variables) else variables)


def identity_of(steps: Alternation) -> dict[str, Any]:
    """What must be equal for a checkpoint to be of the same run."""
    model, optimizer = steps.model, steps.optimizer
    m_step = f"{type(steps.m_step_settings).__name__} {steps.m_step_settings.num_steps}"
    if optimizer is not None:
        m_step += f" {type(optimizer).__name__} {_configuration(optimizer)}"
    fixed: dict[str, Any] = {}
    priors = {}
    for path, p in parameter_dict(model).items():
        if path.startswith((".sites", ".data")):
            continue
        if path not in steps.trained_parameters:
            fixed[path] = tf.convert_to_tensor(p)
        elif (prior := getattr(p, "prior", None)) is not None:
            values = {k: str(v) for k, v in sorted(prior.parameters.items())}
            priors[path] = f"{type(prior).__name__} {values}"
    kernels = (model.kernel, *model.kernel.submodules)
    return {
        "model": type(model).__name__,
        "kernel": " ".join(type(k).__name__ for k in kernels if isinstance(k, Kernel)),
        "likelihood": type(model.likelihood).__name__,
        "mean_function": type(model.mean_function).__name__,
        "data": steps.subject.description(),
        "variables": [[v.dtype.name, *v.shape] for v in steps.variables],
        "fixed parameters": f"{list(fixed)}, their values {digest(fixed.values())}",
        "priors": str(priors),
        "objective": f"power {steps.alpha:g}",
        "e_step": repr(steps.e_step_settings),
        "m_step": m_step,
    }


def _configuration(optimizer: Any) -> str:
    """Settings of a Keras optimiser, without the name, which Keras numbers, and without addresses."""
    try:
        config = dict(optimizer.get_config())
    except NotImplementedError:  # a schedule of the user's own
        schedule = getattr(optimizer, "_learning_rate", None)
        return f"with {type(schedule).__name__}"
    config.pop("name", None)
    return json.dumps(config, sort_keys=True, default=lambda value: type(value).__name__)
