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

from ..models import SiteModel
from .history import History
from .steps import EStep, GradientSteps, MStep

if TYPE_CHECKING:
    from .monitoring import Monitoring

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclasses.dataclass
class Run:
    """A run in progress."""

    history: History
    good: Arrays
    """The state after the last complete iteration."""
    best: Arrays | None
    """The state of the best iteration, where a stopping rule asks for it."""
    best_iteration: int
    monitoring: Monitoring


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
    data = hashlib.sha256()
    for part in model.data:
        data.update(np.ascontiguousarray(np.asarray(tf.convert_to_tensor(part))).tobytes())
    m_settings = type(m_step).__name__ + f" {m_step.num_steps}"
    if isinstance(m_step, GradientSteps):
        config = json.dumps(optimizer.get_config(), sort_keys=True, default=repr)
        m_settings += f" {type(optimizer).__name__} {config}"
    return {
        "model": type(model).__name__,
        "likelihood": type(model.likelihood).__name__,
        "data": data.hexdigest(),
        "variables": [list(v.shape) for v in variables],
        "objective": f"power {alpha:g}",
        "e_step": repr(e_step),
        "m_step": m_settings,
    }
