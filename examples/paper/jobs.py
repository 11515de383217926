"""A job: one row of a surface or one fit, with everything that its result depends on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import threading
import time
from typing import Any

from .provenance import environment

FORMATS = {"mcmc": 4}
"""By method, 2 if not named; raised whenever the same settings have another result."""

_ONE_AT_A_TIME = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Job:
    """A computation that has its own result file.

    :param task: ``"row"``, one row of a surface, or ``"fit"``, one fold of the table.
    :param settings: numbers, strings and lists of them, the result's only inputs.
    """

    task: str
    settings: dict[str, Any]

    @property
    def key(self) -> str:
        """A digest of task and settings: other settings, another key."""
        version = FORMATS.get(self.settings["method"], 2)
        return digest({"format": version, "task": self.task, "settings": self.settings})

    @property
    def name(self) -> str:
        """For people: in file names and messages."""
        s = self.settings
        parts = [self.task, s["dataset"], s["method"], f"fold{s['fold']}"]
        if self.task == "row":
            parts.append(f"{s['log_lengthscale']:+.2f}")
        return "-".join(parts)

    def __hash__(self) -> int:
        return hash(self.key)


def digest(value: Any) -> str:
    """SHA-256 of a value as canonical JSON."""
    text = json.dumps(value, sort_keys=True, allow_nan=True)
    return hashlib.sha256(text.encode()).hexdigest()


def execute(task: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The result of a job, the seconds it took and what it was made with.

    Imports TensorFlow only where jobs run.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from . import fits, surfaces

    compute = {"row": surfaces.compute_row, "fit": fits.compute_fit}[task]
    with _ONE_AT_A_TIME:  # a Dask worker may have threads
        began = time.perf_counter()
        result = compute(**settings)
        seconds = time.perf_counter() - began
    return {"result": result, "seconds": seconds, "made_with": environment()}
