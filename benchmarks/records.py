"""The results of all fits as records in one JSON file, merged by contender, data set and fold."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Key = tuple[str, str, int]


def key(record: Record) -> Key:
    """What makes a record unique."""
    return record["dataset"], record["contender"], record["fold"]


def load(path: Path) -> dict[Key, Record]:
    """The records of a file, none if there is no file."""
    if not path.exists():
        return {}
    return {key(record): record for record in json.loads(path.read_text())}


def save(path: Path, records: Iterable[Record]) -> None:
    """Write all records, sorted, replacing the file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(sorted(records, key=key), indent=1, sort_keys=True)
    partial = path.with_suffix(".partial")
    partial.write_text(text + "\n")
    os.replace(partial, path)


def processor() -> str:
    """The model of the processor, as the system names it."""
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
