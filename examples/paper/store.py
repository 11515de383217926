"""Result files: one for each job, written whole or not at all, believed only if intact."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .jobs import Job, digest


class ResultStore:
    """Results of jobs in a directory, by the digest of their settings."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.corrupt: list[Path] = []
        """Files that were found damaged; their jobs are done again."""

    def path(self, job: Job) -> Path:
        """Where the result of this job is, or will be."""
        return self.directory / job.settings["dataset"] / f"{job.name}-{job.key[:16]}.json"

    def load(self, job: Job) -> dict[str, Any] | None:
        """``{"result": ..., "seconds": ...}``; None if there is none, or none that can be believed."""
        path = self.path(job)
        try:
            content = json.loads(path.read_text())
            found = content["found"]
            intact = content["digest"] == digest(found) and content["key"] == job.key
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):  # not text, not JSON, not ours
            intact = False
        if not intact:
            if path not in self.corrupt:
                self.corrupt.append(path)
            return None
        return found

    def save(self, job: Job, found: dict[str, Any]) -> None:
        """Write to a file beside it, then rename: a reader sees the old content or the new."""
        content = {
            "key": job.key,
            "task": job.task,
            "settings": job.settings,
            "found": found,
            "digest": digest(found),
        }
        write_atomically(self.path(job), json.dumps(content, indent=1).encode())


def write_atomically(path: Path, content: bytes) -> None:
    """All of the content or nothing, also if the process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
