"""What results were made with."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

PACKAGES = (
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
    found.append(("gpflow-hybrid", _own_version()))
    found.append(("machine", f"{_processor()}, {available_cores()} cores, {platform.system()}"))
    return tuple(found)


def _own_version() -> str:
    """The package's version, and the commit where it runs from a checkout."""
    import gpflow_hybrid

    git = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--dirty",
        "--exclude=*",
    ]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = ""
    return gpflow_hybrid.__version__ + (f" ({commit})" if commit else "")


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
