"""Clusters of real processes on this machine's loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpflow
import numpy as np
import pytest
from distributed import Client, LocalCluster

import gpflow_hybrid as gh

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def client() -> Iterator[Client]:
    """Of two workers that nobody kills."""
    options = {
        "processes": True,
        "dashboard_address": "127.0.0.1:0",
        "host": "127.0.0.1",
        "silence_logs": 50,
    }
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, **options) as cluster,
        Client(cluster, set_as_default=False) as found,
    ):
        yield found


class Processes:
    """A scheduler and workers, each started and ended alone, none started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._all: list[subprocess.Popen[bytes]] = []
        self._file = folder / "scheduler.json"
        self.scheduler = self._start(
            "scheduler", "--port", 0, "--scheduler-file", self._file, "--idle-timeout", "600s"
        )
        self.client = Client(scheduler_file=str(self._file), set_as_default=False, timeout="60s")

    def _start(self, kind: str, *options: Any, path: Any = ROOT) -> subprocess.Popen[bytes]:
        more = ("--host", "127.0.0.1", "--dashboard-address", "127.0.0.1:0")
        command = [sys.executable, "-m", f"distributed.cli.dask_{kind}", *more, *map(str, options)]
        environment = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
        log = (self.folder / f"{kind}-{len(self._all)}.log").open("wb")
        process = subprocess.Popen(
            command, cwd=self.folder, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        log.close()
        self._all.append(process)
        return process

    def add_worker(self, path: Any = ROOT, *options: Any) -> None:
        """Another one, which is there when this returns.

        :param path: where it finds its packages first.
        """
        count = len(self.client.nthreads())
        options += ("--scheduler-file", self._file, "--no-nanny", "--nthreads", 1)
        options += ("--death-timeout", "60")  # where the test was killed
        self._start("worker", *options, path=path)
        self.client.wait_for_workers(count + 1, timeout=60)

    def killer(self, address: str | None) -> Callable[[], None]:
        """Kills a worker at once when it is called."""
        assert address is not None
        pid = self.client.run(os.getpid, workers=[address])[address]
        return lambda: os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self.client.close(timeout=5)
        for process in self._all:
            process.kill()
            process.wait()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    found = Processes(tmp_path)
    yield found
    found.close()


def problem(N: int = 300, M: int = 8, seed: int = 0) -> tuple[Any, Any, Callable[..., Any]]:
    """Binary labels, and a model of them."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(N, 2))
    Y = (np.sin(2.0 * X[:, :1]) + X[:, 1:] + rng.normal(size=(N, 1)) > 0.0).astype(float)
    Z = X[:M].copy()

    def model(objective: Any = "ep_like") -> gh.SparseCVIModel:
        kernel = gpflow.kernels.Matern52(lengthscales=np.ones(2))
        likelihood = gh.likelihoods.ProbitBernoulli()
        return gh.SparseCVIModel(kernel, likelihood, Z, objective=objective)

    return X, Y, model
