"""Start a contender in its own process and environment, and read what it reports."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from .environments import NotInstalled, interpreter, without_addresses
from .run import THREADS
from .sparse_contenders import ALL

PROJECT = Path(__file__).parents[2]
COUNTED = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)
ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
}


def launch(
    name: str,
    data: Path,
    limit: float,
    threads: int = THREADS,
    *,
    may_create: bool = False,
    once: bool = False,
) -> dict[str, Any]:
    """What ``benchmarks.peers.run`` says of this contender, or ``{"failure": reason}``."""
    environment = None if name == "floor" else ALL[name].environment
    try:
        python = interpreter(environment, may_create)
    except NotInstalled as error:
        return {"failure": str(error), "installed": False}
    command = [python, "-m", "benchmarks.peers.run", name, str(data), *(["--once"] if once else [])]
    try:
        done = subprocess.run(
            command,
            cwd=PROJECT,
            env={**os.environ, **ENVIRONMENT, **dict.fromkeys(COUNTED, str(threads))},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=limit,
        )
        output = done.stdout
        otherwise = {"failure": f"ended with code {done.returncode} and no result"}
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode()
        otherwise = {"failure": f"not finished after {limit:g} s", "at_least": limit}
    return _merge(output, otherwise)


def _merge(output: str, otherwise: dict[str, Any]) -> dict[str, Any]:
    """The lines of JSON as one record; ``otherwise`` if there are none."""
    record: dict[str, Any] = {}
    for line in output.splitlines():
        record.update(json.loads(line))
    if "seconds" in record:  # a second fit that failed or ran out of time takes nothing away
        record.pop("failure", None)
    elif "failure" in record:
        record["failure"] = without_addresses(record["failure"])
    return record or otherwise
