"""What results were made with."""

from __future__ import annotations

import functools
import os
import platform
from importlib import metadata
from pathlib import Path

PACKAGES = (
    "gpflow-hybrid",
    "gpflow",
    "tensorflow",
    "tensorflow-probability",
    "numpy",
    "scipy",
    "matplotlib",
)


@functools.cache
def environment() -> tuple[tuple[str, str], ...]:
    """Versions and machine of this process, recorded with every result."""
    found = [("Python", platform.python_version())]
    for name in PACKAGES:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    found.append(("machine", f"{_processor()}, {available_cores()} cores, {platform.system()}"))
    return tuple(found)


def available_cores() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()
