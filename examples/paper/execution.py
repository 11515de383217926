"""Running jobs: in this process, in processes of this machine, or on a Dask cluster."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol

from tqdm import tqdm

from .jobs import Job, execute
from .store import ResultStore

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)

MAX_DEATHS = 3
"""Processes that may die before the jobs that are left are called failures."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """A job that raised, and what."""

    job: Job
    error: str
    details: str

    def __str__(self) -> str:
        settings = ", ".join(f"{k}={v}" for k, v in self.job.settings.items())
        return f"{self.job.name}: {self.error}\n  settings: {settings}\n{self.details}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a list of jobs."""

    computed: int
    reused: int
    failures: list[Failure]
    seconds: float


Found = dict[str, Any] | Failure


class Runner(Protocol):
    """Somewhere jobs run."""

    def results(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Found]]:
        """Every job with its result or failure, in the order in which they end."""

    def close(self) -> None:
        """Give back what it holds; jobs that wait are dropped."""


class InProcess:
    """One after the other, here."""

    def results(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Found]]:
        for job in jobs:
            try:
                yield job, execute(job.task, job.settings)
            except Exception as error:
                yield job, _failure(job, error)

    def close(self) -> None:
        pass


class Processes:
    """So many processes, each with its part of the cores as threads, for every list of jobs."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.pool: concurrent.futures.ProcessPoolExecutor | None = None

    def results(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Found]]:
        waiting = {job.key: job for job in jobs}
        deaths = 0
        while waiting:
            try:
                for job, found in self._completed(list(waiting.values())):
                    del waiting[job.key]
                    yield job, found
            except BrokenProcessPool as error:
                # What was under way is lost, and with it which job it was: go on with a new pool.
                self.close()
                deaths += 1
                if deaths > MAX_DEATHS:
                    for job in waiting.values():
                        yield job, _failure(job, error)
                    return

    def _completed(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Found]]:
        threads = max(1, (os.cpu_count() or 1) // self.num_workers)
        with _environment(
            dict.fromkeys(THREAD_VARIABLES, str(threads))
        ):  # processes start at submit
            if self.pool is None:
                self.pool = concurrent.futures.ProcessPoolExecutor(
                    self.num_workers, multiprocessing.get_context("spawn")
                )
            futures = {self.pool.submit(execute, job.task, job.settings): job for job in jobs}
        for future in concurrent.futures.as_completed(futures):
            job = futures[future]
            error = future.exception()
            if isinstance(error, BrokenProcessPool):
                raise error
            yield job, future.result() if error is None else _failure(job, error)

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)
            self.pool = None


class DaskCluster:
    """The workers of a Dask scheduler; they need this package and this directory importable.

    A job whose worker dies is given to another by Dask.
    """

    def __init__(self, address: str) -> None:
        try:
            import distributed
        except ImportError:
            raise SystemExit(
                "--scheduler needs dask.distributed: pip install 'gpflow-hybrid[dask]'."
            ) from None
        try:
            self.client = distributed.Client(address, timeout="10s")
        except OSError as error:
            raise SystemExit(
                f"--scheduler: no Dask scheduler answers at {address} ({error})."
            ) from None
        self.as_completed = distributed.as_completed

    def results(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Found]]:
        by_key = {job.key: job for job in jobs}
        futures = [
            self.client.submit(execute, job.task, job.settings, key=job.key, pure=False)
            for job in jobs
        ]
        for future in self.as_completed(futures):
            job = by_key[future.key]
            error = future.exception()
            yield job, future.result() if error is None else _failure(job, error)
            future.release()

    def close(self) -> None:
        self.client.close()


def run_jobs(
    jobs: Sequence[Job], store: ResultStore, runner: Runner, title: str, quiet: bool = False
) -> Outcome:
    """Compute what the store does not have; every result is stored as soon as it is there."""
    began = time.perf_counter()
    missing = [job for job in jobs if store.load(job) is None]
    for path in store.corrupt:
        tqdm.write(f"{path.name} is damaged: done again.")
    failures: list[Failure] = []
    with tqdm(
        total=len(jobs), initial=len(jobs) - len(missing), desc=title, disable=quiet or None
    ) as bar:
        for job, found in runner.results(missing) if missing else ():
            if isinstance(found, Failure):
                failures.append(found)
            else:
                store.save(job, found)
            bar.update()
    return Outcome(
        len(missing) - len(failures),
        len(jobs) - len(missing),
        failures,
        time.perf_counter() - began,
    )


def _failure(job: Job, error: BaseException) -> Failure:
    summary = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return Failure(job, summary, "".join(traceback.format_exception(error)).rstrip())


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Environment variables that processes started inside inherit; what the user has set stays."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
