"""Checkpoints: one file per run, written whole or not at all, recognised or refused.

The file is a line that names the format, the SHA-256 of the rest, and a NumPy archive: the arrays of
the state and a JSON document. It is written beside its final name, flushed to disk and renamed, so
that a process killed at any moment leaves the previous one.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError

MAGIC = b"gpflow_hybrid checkpoint 1\n"
FILE_NAME = "vem.ckpt"
_DIGEST = hashlib.sha256().digest_size


class Checkpoint(NamedTuple):
    """Arrays by name, and a document of plain values."""

    arrays: Mapping[str, npt.NDArray[Any]]
    document: dict[str, Any]


def write(directory: Path, checkpoint: Checkpoint) -> None:
    """Replace the directory's checkpoint in one step."""
    buffer = io.BytesIO()
    document = np.frombuffer(json.dumps(checkpoint.document).encode(), np.uint8)
    np.savez(buffer, document=document, **{f"array:{k}": v for k, v in checkpoint.arrays.items()})
    payload = buffer.getvalue()
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / f"{FILE_NAME}.{os.getpid()}.tmp"
    try:
        with temporary.open("wb") as file:
            file.write(MAGIC + hashlib.sha256(payload).digest() + payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, directory / FILE_NAME)
    finally:
        temporary.unlink(missing_ok=True)


def clear_leftovers(directory: Path) -> None:
    """Remove what a process left that was killed while it was writing."""
    for path in directory.glob(f"{FILE_NAME}.*.tmp"):
        path.unlink(missing_ok=True)


def exists(directory: Path) -> bool:
    """Whether there is a checkpoint, good or bad."""
    return (directory / FILE_NAME).exists()


def read(directory: Path) -> Checkpoint:
    """The directory's checkpoint, refused in words if it is truncated or of another kind."""
    path = directory / FILE_NAME
    remedy = "It was not overwritten: move it away, or pass another checkpoint_dir."
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file. {remedy}")
    content = path.read_bytes()
    if not content.startswith(MAGIC):
        raise CheckpointError(f"{path} is not a checkpoint of this version of VEMTrainer. {remedy}")
    digest, payload = content[len(MAGIC) :][:_DIGEST], content[len(MAGIC) + _DIGEST :]
    if hashlib.sha256(payload).digest() != digest:
        raise CheckpointError(f"{path} is truncated or damaged. {remedy}")
    with np.load(io.BytesIO(payload), allow_pickle=False) as archive:
        arrays = {k[len("array:") :]: archive[k] for k in archive.files if k != "document"}
        document = json.loads(archive["document"].tobytes().decode())
    return Checkpoint(arrays, document)
