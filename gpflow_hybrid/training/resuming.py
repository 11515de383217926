"""A run and its checkpoint file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tensorflow as tf

from ..errors import CheckpointError
from . import checkpoints
from .checkpoints import Checkpoint
from .history import History, IterationRecord
from .state import Arrays, Progress, Run, identity_of

if TYPE_CHECKING:
    from .trainer import VEMTrainer


class RandomState(NamedTuple):
    """NumPy's global generator and TensorFlow's."""

    arrays: Arrays
    document: dict[str, Any]

    @classmethod
    def now(cls) -> RandomState:
        """As they are."""
        kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
        arrays = {
            "numpy": np.asarray(keys),
            "tensorflow": tf.random.get_global_generator().state.numpy(),
        }
        document = {
            "kind": kind,
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        }
        return cls(arrays, document)

    def restore(self) -> None:
        """Back to what they were."""
        kind, *numbers = (self.document[k] for k in ("kind", "position", "has_gauss", "gauss"))
        np.random.set_state((kind, self.arrays["numpy"], *numbers))
        tf.random.get_global_generator().state.assign(self.arrays["tensorflow"])


class SavedRun(NamedTuple):
    """What a checkpoint holds."""

    progress: Progress
    best_by: str | None
    log_dir: str | None
    random: RandomState


class CheckpointStore:
    """Where a run is saved; nowhere, if no directory was given.

    It refuses, before anything is computed, what would overwrite another run.
    """

    def __init__(
        self, directory: str | Path | None, period: int, resume: bool, trainer: VEMTrainer
    ) -> None:
        self.directory = None if directory is None else Path(directory)
        self.period = period
        self.trainer = trainer
        if self.directory is None:
            if resume:
                raise CheckpointError("resume=True needs checkpoint_dir, where the run was saved.")
            return
        self.identity = identity_of(trainer)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint_dir {self.directory} cannot be a directory: {error.strerror}. Pass another."
            ) from error
        if resume:
            checkpoints.clear_leftovers(self.directory)
        elif checkpoints.exists(self.directory):
            raise CheckpointError(
                f"{self.directory} has the checkpoint of another run. Pass resume=True to go on with "
                "it, or another checkpoint_dir. It was not overwritten."
            )

    def load(self) -> SavedRun | None:
        """The saved run, None if there is none, refused if it is of another model or trainer."""
        if self.directory is None or not checkpoints.exists(self.directory):
            return None
        arrays, document = checkpoints.read(self.directory)
        for key, value in self.identity.items():
            saved = document["identity"].get(key)
            if saved != value:
                raise CheckpointError(
                    f"The checkpoint in {self.directory} is of another run: its {key} is {saved}, here "
                    f"it is {value}. It was not overwritten: pass another checkpoint_dir."
                )
        groups: dict[str, dict[str, Any]] = {"good": {}, "best": {}, "random": {}, "history": {}}
        for name, array in arrays.items():
            group, _, key = name.partition("/")
            groups[group][key] = array
        records = []
        for i, values in enumerate(document["history"]):
            hyperparameters = {path: column[i] for path, column in groups["history"].items()}
            records.append(IterationRecord(**values, hyperparameters=hyperparameters))
        best = groups["best"] or None
        return SavedRun(
            Progress(History(records), groups["good"], best, document["best_iteration"]),
            document["best_by"],
            document["log_dir"],
            RandomState(groups["random"], document["random"]),
        )

    def random_state(self) -> RandomState | None:
        """The generators as they are, if they will be saved."""
        return None if self.directory is None else RandomState.now()

    def save(self, run: Run) -> None:
        """Write the run as of its last complete iteration."""
        if self.directory is None:
            return
        random, progress = RandomState.now(), run.progress
        groups = {
            "good": progress.good,
            "best": progress.best or {},
            "random": random.arrays,
            "history": {path: run.history[path] for path in run.history[-1].hyperparameters},
        }
        records = [dict(vars(record)) for record in run.history]
        for values in records:
            del values["hyperparameters"]
        log_dir = run.monitoring.log_dir or run.monitoring.resumed_dir
        document = {
            "identity": self.identity,
            "history": records,
            "best_iteration": progress.best_iteration,
            "best_by": self.trainer.stopping.best_by,
            "log_dir": None if log_dir is None else str(log_dir),
            "random": random.document,
        }
        arrays = {f"{group}/{k}": v for group, part in groups.items() for k, v in part.items()}
        checkpoints.write(self.directory, Checkpoint(arrays, document))
