"""The state of a run: arrays of everything that training changes, and what identifies it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from gpflow.kernels import Kernel
from gpflow.utilities import parameter_dict

from ..models import SiteModel
from .history import History
from .steps import EStep, GradientSteps, MStep

if TYPE_CHECKING:
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


@dataclasses.dataclass
class Run:
    """A run in progress."""

    progress: Progress
    monitoring: Monitoring
    clock: float
    """When the last iteration ended."""

    @property
    def history(self) -> History:
        """The records so far."""
        return self.progress.history


def optimizer_variables(optimizer: Any) -> Sequence[Any]:
    """All variables of a Keras 3 or tf_keras optimiser, none for None."""
    if optimizer is None:
        return ()
    variables = optimizer.variables
    return tuple(variables() if callable(variables) else variables)


def identity_of(
    model: SiteModel,
    variables: Sequence[tf.Variable],
    optimizer: Any,
    alpha: float,
    e_step: EStep,
    m_step: MStep,
) -> dict[str, Any]:
    """What must be equal for a checkpoint to be of the same run."""
    m_settings = type(m_step).__name__ + f" {m_step.num_steps}"
    if isinstance(m_step, GradientSteps):
        m_settings += f" {type(optimizer).__name__} {_configuration(optimizer)}"
    trained = {id(v) for v in variables}
    fixed: dict[str, Any] = {}
    priors = {}
    for path, p in parameter_dict(model).items():
        if path.startswith((".sites", ".data")):
            continue
        if id(getattr(p, "unconstrained_variable", p)) not in trained:
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
        "data": _digest(model.data),
        "variables": [[v.dtype.name, *v.shape] for v in variables],
        "fixed parameters": f"{list(fixed)} {_digest(fixed.values())}",
        "priors": str(priors),
        "objective": f"power {alpha:g}",
        "e_step": repr(e_step),
        "m_step": m_settings,
    }


def _digest(tensors: Any) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        array = np.ascontiguousarray(np.asarray(tf.convert_to_tensor(tensor)))
        found.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
    return found.hexdigest()


def _configuration(optimizer: Any) -> str:
    """Settings of a Keras optimiser, without the name, which Keras numbers, and without addresses."""
    try:
        config = dict(optimizer.get_config())
    except NotImplementedError:  # a schedule of the user's own
        schedule = getattr(optimizer, "_learning_rate", None)
        return f"with {type(schedule).__name__}"
    config.pop("name", None)
    return json.dumps(config, sort_keys=True, default=lambda value: type(value).__name__)
