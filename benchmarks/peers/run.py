"""One contender on one fold, in a process of its own: ``python -m benchmarks.peers.run NAME FILE``.

FILE is an npz with ``X_train, Y_train, X_test, Y_test`` and, for sparse models, ``Z`` and settings.
Prints one line of JSON per fit: the first, which compiles, and a second in the same process unless the
first took long or ``--once`` is given. NAME may be ``floor``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import sys
import time
from importlib import metadata
from typing import Any

import numpy as np

from . import floor
from .sparse_contenders import ALL

THREADS = 2
REPEAT_BELOW = 300.0
"""Seconds; a first fit that took longer is not repeated."""


def version(package: str) -> str:
    """The installed version, or that of the sources if the package runs from a checkout."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return str(importlib.import_module(package.replace("-", "_")).__version__)


def _limit_processors() -> None:
    """Let this process use two processors, where the system can say so."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])


def _emit(record: dict[str, Any]) -> None:
    print(json.dumps(record), flush=True)


def _run(name: str, data: dict[str, np.ndarray], once: bool) -> None:
    contender = ALL[name]
    with contextlib.redirect_stdout(sys.stderr):  # libraries print; the line of JSON stays alone
        module = importlib.import_module(f".{contender.module}", __package__)
        before = time.process_time()
        first = module.fit(**data, **contender.arguments)
        busy = time.process_time() - before
    versions = {package: version(package) for package in contender.packages}
    _emit({**dataclasses.asdict(first), "processor_seconds": busy, "versions": versions})
    if not once and first.seconds < REPEAT_BELOW:
        with contextlib.redirect_stdout(sys.stderr):
            again = module.fit(**data, **contender.arguments)
        _emit({"seconds_again": again.seconds})


def main() -> None:
    """Run; an exception becomes a record with the reason."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("contender", choices=["floor", *ALL])
    parser.add_argument("data", help="npz file with the fold")
    parser.add_argument("--once", action="store_true", help="no second fit")
    arguments = parser.parse_args()
    _limit_processors()
    with np.load(arguments.data) as arrays:
        data = {name: value if value.ndim else value.item() for name, value in arrays.items()}
    if arguments.contender == "floor":
        _emit(
            {
                "seconds": floor.seconds(len(data["X_train"])),
                "versions": {p: version(p) for p in ("scipy", "numpy")},
            }
        )
        return
    try:
        _run(arguments.contender, data, arguments.once)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        _emit({"failure": f"raised {type(error).__name__}: {lines[0]}"})
        raise


if __name__ == "__main__":
    main()
