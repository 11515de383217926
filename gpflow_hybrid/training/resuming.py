"""A run and its checkpoint file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from ..errors import CheckpointError
from . import checkpoints
from .checkpoints import Checkpoint
from .history import History, IterationRecord
from .state import Arrays, Progress, Run

if TYPE_CHECKING:
    from .trainer import VEMTrainer


@dataclasses.dataclass(frozen=True)
class RandomState:
    """NumPy's global generator and TensorFlow's."""

    arrays: Arrays
    document: dict[str, Any]

    @classmethod
    def now(cls) -> RandomState:
        """As they are."""
        kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
        tensorflow = tf.random.get_global_generator().state.numpy()
        document = {
            "kind": kind,
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        }
        return cls({"numpy": np.asarray(keys), "tensorflow": tensorflow}, document)

    def restore(self) -> None:
        """Back to what they were."""
        document = self.document
        np.random.set_state(
            (
                document["kind"],
                self.arrays["numpy"],
                document["position"],
                document["has_gauss"],
                document["gauss"],
            )
        )
        tf.random.get_global_generator().state.assign(self.arrays["tensorflow"])


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """What a checkpoint holds."""

    progress: Progress
    best_by: str | None
    log_dir: str | None
    random: RandomState


class CheckpointStore:
    """Where a run is saved; nowhere, if no directory was given."""

    def __init__(self, directory: Path | None, identity: dict[str, Any], resume: bool) -> None:
        self.directory = directory
        self.identity = identity
        self.resume = resume

    @classmethod
    def open(
        cls, directory: str | Path | None, identity: dict[str, Any], resume: bool
    ) -> CheckpointStore:
        """Refuse, before anything is computed, what would overwrite another run."""
        if directory is None:
            if resume:
                raise CheckpointError("resume=True needs checkpoint_dir, where the run was saved.")
            return cls(None, identity, resume)
        path = Path(directory)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint_dir {path} cannot be a directory: {error.strerror}. Pass another."
            ) from error
        if checkpoints.exists(path) and not resume:
            raise CheckpointError(
                f"{path} has the checkpoint of another run. Pass resume=True to go on with it, or "
                "another checkpoint_dir. It was not overwritten."
            )
        if resume:
            checkpoints.clear_leftovers(path)
        return cls(path, identity, resume)

    def load(self) -> SavedRun | None:
        """The saved run, None if there is none, refused if it is of another model or trainer."""
        if self.directory is None or not checkpoints.exists(self.directory):
            return None
        found = checkpoints.read(self.directory)
        for key, value in self.identity.items():
            saved = found.document["identity"].get(key)
            if saved != value:
                raise CheckpointError(
                    f"The checkpoint in {self.directory} is of another run: its {key} is {saved}, here "
                    f"it is {value}. It was not overwritten: pass another checkpoint_dir."
                )
        groups: dict[str, dict[str, Any]] = {"good": {}, "best": {}, "random": {}, "history": {}}
        for name, array in found.arrays.items():
            group, _, key = name.partition("/")
            groups[group][key] = array
        records = []
        for i, values in enumerate(found.document["history"]):
            hyperparameters = {p: column[i] for p, column in groups["history"].items()}
            records.append(IterationRecord(**values, hyperparameters=hyperparameters))
        return SavedRun(
            progress=Progress(
                history=History(records),
                good=groups["good"],
                best=groups["best"] or None,
                best_iteration=found.document["best_iteration"],
            ),
            best_by=found.document["best_by"],
            log_dir=found.document["log_dir"],
            random=RandomState(groups["random"], found.document["random"]),
        )

    def random_state(self) -> RandomState | None:
        """The generators as they are, if they will be saved."""
        return None if self.directory is None else RandomState.now()

    def save(self, trainer: VEMTrainer, run: Run) -> None:
        """Write the run as of its last complete iteration."""
        if self.directory is None:
            return
        random, progress = RandomState.now(), run.progress
        arrays: dict[str, Any] = {f"good/{k}": v for k, v in progress.good.items()}
        arrays |= {f"best/{k}": v for k, v in (progress.best or {}).items()}
        arrays |= {f"random/{k}": v for k, v in random.arrays.items()}
        for path in run.history[-1].hyperparameters:
            arrays[f"history/{path}"] = run.history[path]
        records = []
        for record in run.history:
            values = dict(vars(record))
            del values["hyperparameters"]
            records.append(values)
        log_dir = run.monitoring.log_dir or run.monitoring.resumed_dir
        document = {
            "identity": self.identity,
            "history": records,
            "best_iteration": progress.best_iteration,
            "best_by": trainer.stopping.best_by,
            "log_dir": None if log_dir is None else str(log_dir),
            "random": random.document,
        }
        checkpoints.write(self.directory, Checkpoint(arrays, document))
