"""The benchmark of sizes that were tuned to a machine: it knows them all, and changes them in time."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.tuning import CASES, ROOT, measure
from gpflow_hybrid import tuning


def test_every_size_has_work_that_it_matters_to() -> None:
    sizes = {name: value for name, value in vars(tuning).items() if name.isupper()}
    assert {name: case.values[1] for name, case in CASES.items()} == sizes
    for case in CASES.values():
        assert case.values[0] < case.values[1] < case.values[2]


def test_a_size_is_changed_before_it_is_read() -> None:
    program = (
        "from benchmarks.tuning import set_before_import\n"
        "set_before_import('BLOCK_ROWS', 16.0)\n"
        "from gpflow_hybrid import tuning\n"
        "from gpflow_hybrid.linalg import symmetric\n"
        "print(symmetric.BLOCK, tuning.BLOCK_ROWS, tuning.RANK_CHUNK)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["16", "16", str(tuning.RANK_CHUNK)]


def test_a_value_is_measured() -> None:
    seconds, processor, peak = measure("FEW_DATA", 300, 5, 1)
    assert seconds > 0.0
    assert processor > 0.0
    assert peak > 50.0
    with pytest.raises(RuntimeError, match="KEPT_BYTES = nan"):
        measure("KEPT_BYTES", float("nan"), 5, 1)
