"""Whole first fits with every kind of likelihood: before, now, and GPflow's VGP, in one run.

    python -m benchmarks.likelihoods
    python -m benchmarks.likelihoods student_t softmax --size 400 --before e9325f7

Every fit runs in a process of its own, one after the other: from building the model to the end of L-BFGS,
tracing included, imports not. ``--before`` names a commit, whose ``gpflow_hybrid`` is measured too. *First*
is the first training loss with its gradient, compiled. Behind *now* are milliseconds per evaluation of the
posterior and latent: of the whole fit, and of an E-step from zero sites, Newton systems included, but not
the likelihood, which follows. *Until* is when the loss was first no higher than where the contender before
ended, within 0.01 nats: where a loss has several optima, as with ``robust_max``, whole fits are of
different lengths.

Beside other work ``--processor`` counts the seconds of the processor, on one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FIT = ROOT / "benchmarks" / "peers" / "likelihood_fit.py"
NAMES = (
    "probit",
    "bernoulli",
    "poisson",
    "student_t",
    "gamma",
    "ordinal",
    "heteroskedastic",
    "softmax",
    "robust_max",
)


ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def fit(
    name: str, size: int, method: str, package: Path, limit: float, processor: bool
) -> dict[str, Any] | None:
    """One fit with the ``gpflow_hybrid`` of that folder; None if it took longer than the limit."""
    environment = os.environ | {"PYTHONPATH": str(package), "TF_CPP_MIN_LOG_LEVEL": "3"}
    if processor:
        environment |= ONE_THREAD
    clock = "process_time" if processor else "perf_counter"
    command = [sys.executable, str(FIT), name, str(size), method, clock]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        raise RuntimeError(f"{name}, {method}: {done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """The tree of a commit, for as long as it is needed."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", revision, "gpflow_hybrid"],
            cwd=ROOT,
            check=True,
            capture_output=True,
        ).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        yield Path(folder)


def until(path: list[tuple[float, float]], loss: float) -> str:
    """When a fit was first at that loss."""
    seconds = next((t for t, reached in path if reached <= loss + 0.01), None)
    return "" if seconds is None else f" until {loss:.1f}: {seconds:.2f}"


def compare(
    names: list[str], size: int, before: Path | None, vgp: bool, limit: float, processor: bool
) -> None:
    """Measure and print a line per likelihood."""
    contenders = [("before", "cvi", before)] if before is not None else []
    contenders += [("now", "cvi", ROOT)]
    contenders += [("VGP", "vgp", ROOT)] if vgp else []
    seconds = "seconds of the processor" if processor else "seconds"
    print(
        f"n = {size}; {seconds} of the whole fit (of the first loss; losses evaluated; at the end)"
    )
    for name in names:
        cells, former = [], None
        for label, method, package in contenders:
            found = fit(name, size, method, package, limit, processor)
            cells.append(
                f"{label} over {limit:.0f}"
                if found is None
                else f"{label} {found['seconds']:.2f} ({found['first']:.2f}; "
                f"{found['evaluations']:.0f}; {found['loss']:.4f})"
            )
            if found is not None and "posterior" in found:
                cells[-1] += (
                    f" {found['whole']:.1f}, {found['posterior']:.1f} + {found['likelihood']:.1f} ms"
                )
            if found is not None and label == "now" and former is not None:
                cells[-1] += until(found["path"], former)
            former = found["loss"] if found is not None and label == "before" else None
        print(f"{name:16s} " + "   ".join(cells), flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(NAMES)}; all by default")
    parser.add_argument("--size", type=int, default=400, help="number of data")
    parser.add_argument("--before", help="a commit to measure as well")
    parser.add_argument("--no-vgp", action="store_true", help="leave GPflow's VGP out")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that a fit may take")
    parser.add_argument("--processor", action="store_true", help="seconds of one processor")
    a = parser.parse_args()
    a.names = a.names or list(NAMES)
    if unknown := set(a.names) - set(NAMES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(NAMES)}")
    if a.before is None:
        compare(a.names, a.size, None, not a.no_vgp, a.limit, a.processor)
        return
    with checkout(a.before) as before:
        compare(a.names, a.size, before, not a.no_vgp, a.limit, a.processor)


if __name__ == "__main__":
    main()
