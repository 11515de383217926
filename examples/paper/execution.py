"""Running jobs: in this process, in processes of this machine, or on a Dask cluster."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import gc
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol

from .jobs import Job, execute
from .provenance import available_cores
from .store import ResultStore

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)

MAX_DEATHS = 2
"""Processes that may die under a job before it is called a failure."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """A job that raised, and what."""

    job: Job
    error: str
    details: str

    def __str__(self) -> str:
        settings = ", ".join(f"{k}={v}" for k, v in self.job.settings.items())
        return f"{self.job.name}: {self.error}\n  settings: {settings}\n{self.details}"


@dataclasses.dataclass
class Outcome:
    """What became of a list of jobs."""

    computed: int = 0
    reused: int = 0
    failures: list[Failure] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    made_with: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    """Versions and machines of the processes that computed, whichever they were."""


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
        self.is_busy = False

    def results(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Found]]:
        waiting = collections.deque(jobs)
        deaths: collections.Counter[str] = collections.Counter()
        running: dict[concurrent.futures.Future[dict[str, Any]], Job] = {}
        self.is_busy = True
        while waiting or running:
            is_broken = False
            # No more than there are processes: what waits can be dropped, and a death has few suspects.
            while waiting and len(running) < self.num_workers and not is_broken:
                if running and any(deaths[j.key] for j in (waiting[0], *running.values())):
                    break  # a suspect runs alone: the next death is its own
                try:
                    running[self._submit(waiting[0])] = waiting[0]
                    waiting.popleft()
                except BrokenProcessPool:  # one died between two jobs
                    is_broken = True
            done, _ = concurrent.futures.wait(
                running, return_when=concurrent.futures.FIRST_COMPLETED
            )
            if is_broken or any(isinstance(f.exception(), BrokenProcessPool) for f in done):
                is_broken = True
                done, _ = concurrent.futures.wait(running)  # a broken pool ends all of them
            for future in done:
                job, error = running.pop(future), future.exception()
                if isinstance(error, BrokenProcessPool) and deaths[job.key] < MAX_DEATHS:
                    deaths[job.key] += 1
                    waiting.append(job)
                else:
                    yield job, future.result() if error is None else _failure(job, error)
            if is_broken:
                self.close()  # the next submission starts new processes
        self.is_busy = False

    def _submit(self, job: Job) -> concurrent.futures.Future[dict[str, Any]]:
        threads = max(1, available_cores() // self.num_workers)
        with _environment(dict.fromkeys(THREAD_VARIABLES, str(threads))):  # inherited at the start
            if self.pool is None:
                self.pool = concurrent.futures.ProcessPoolExecutor(
                    self.num_workers, multiprocessing.get_context("spawn"), _end_with_parent
                )
            return self.pool.submit(execute, job.task, job.settings)

    def close(self) -> None:
        """Ends the processes; those at work, because this was interrupted, at once."""
        if self.pool is None:
            return
        processes = list((self.pool._processes or {}).values())
        self.pool.shutdown(wait=not self.is_busy, cancel_futures=True)
        if self.is_busy:
            for process in processes:
                process.terminate()
        self.pool = None


def _end_with_parent() -> None:
    """A process whose parent was killed does not work on for nobody."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


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
        gc.collect()  # an earlier client that failed would be closed while this one starts, and wait for it
        try:
            self.client = distributed.Client(address, timeout="10s")
        except (OSError, ValueError) as error:
            raise SystemExit(
                f"--scheduler: no Dask scheduler answers at {address} ({error})."
            ) from None
        if not self.client.scheduler_info()["workers"]:
            print(f"{address} has no workers yet: waiting for the first.", file=sys.stderr)
        self.as_completed = distributed.as_completed

    def results(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Found]]:
        by_key = {f"{job.task}-{job.key}": job for job in jobs}
        futures = [
            self.client.submit(execute, job.task, job.settings, key=key, pure=False)
            for key, job in by_key.items()
        ]
        for future in self.as_completed(futures):
            job = by_key[future.key]
            try:
                yield job, future.result()
            except Exception as error:  # of the job, or of a cluster that lost it
                yield job, _failure(job, error)
            future.release()

    def close(self) -> None:
        self.client.close()


def run_jobs(
    jobs: Sequence[Job], store: ResultStore, runner: Runner, bar: Any, outcome: Outcome
) -> None:
    """Compute what the store does not have; every result is stored as soon as it is there.

    :param bar: a progress bar, of all jobs.
    :param outcome: is filled in, also where this is interrupted.
    """
    began = time.perf_counter()
    known = len(store.corrupt)
    missing = [job for job in jobs if store.load(job) is None]
    for path in store.corrupt[known:]:
        bar.write(f"{path.name} is damaged: done again.")
    outcome.reused = len(jobs) - len(missing)
    if not bar.disable:  # what is there already says nothing about the time that is left
        bar.initial += outcome.reused
    bar.update(outcome.reused)
    try:
        for job, found in runner.results(missing) if missing else ():
            if isinstance(found, Failure):
                outcome.failures.append(found)
            else:
                store.save(job, found)
                outcome.computed += 1
                outcome.made_with |= {tuple(item) for item in found.get("made_with", ())}
            bar.update()
    finally:
        outcome.seconds = time.perf_counter() - began


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
