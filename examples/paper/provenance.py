"""What results were made with."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

from .execution import available_cores

PACKAGES = (
    "gpflow-hybrid",
    "gpflow",
    "tensorflow",
    "tensorflow-probability",
    "numpy",
    "scipy",
    "matplotlib",
)


def environment() -> list[tuple[str, str]]:
    """Versions and machine, recorded with every run."""
    found = [("Python", platform.python_version())]
    for name in PACKAGES:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    found.append(("machine", f"{_processor()}, {available_cores()} cores, {platform.system()}"))
    return found


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()
