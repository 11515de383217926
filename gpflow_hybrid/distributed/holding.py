"""Shards on workers that come and go: who holds which, and what to do where one is lost."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .. import interrupts
from ..errors import ClusterError, ClusterWarning, GPflowHybridError
from . import shard
from .sources import Source
from .workers import assigned, refused, versions_on

MAX_ATTEMPTS = 10
"""Times that a sum is begun again after a fault before it is given up."""

LOOK_SECONDS = 1.0
"""How often it is asked who is there."""

WAIT_SECONDS = 10.0
"""How long answers are waited for before it is asked what holds them up."""

MOST_SECONDS_IN_GRAPHS = 600.0
"""That a worker is waited for where Ctrl-C does not reach: inside a graph, on a thread of TensorFlow's."""

MOST_PAUSES = 12
"""Times that a worker may be found paused in a row before it is given up."""


class _TaskError(Exception):
    """What a task itself has raised: no fault of the cluster's."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class ClusterEvent(NamedTuple):
    """Something that happened to the cluster."""

    seconds: float
    """Since the rows were made."""
    message: str


class Holding:
    """Shards in the hands of a cluster.

    :param sources: what each is made from, again if need be.
    """

    def __init__(self, client: Any, sources: Sequence[Source]) -> None:
        self.client = client
        self.address = str(client.scheduler.address)
        self.name = uuid.uuid4().hex[:8]
        self.sources = list(sources)
        self.events: list[ClusterEvent] = []
        self.failure: GPflowHybridError | None = None
        self.futures: list[Any] = [None] * len(sources)
        self.places: list[str | None] = [None] * len(sources)
        """The worker that each was given to; None where that is Dask's choice."""
        self._threads: dict[str, int] = dict(client.nthreads())
        self._refused: set[str] = set()
        self._relieved: set[str] = set()
        self._pauses: dict[str, int] = {}
        self._numbers = itertools.count()
        self._began = self._looked = time.monotonic()

    def keep(self, indices: Sequence[int]) -> None:
        """Let go of all others."""
        for name in ("sources", "futures", "places"):
            setattr(self, name, [getattr(self, name)[i] for i in indices])

    def key(self, name: str, i: int) -> str:
        """Of a new task."""
        return f"{name}-{self.name}-{next(self._numbers)}-{i}"

    def where(self) -> dict[str, Any]:
        """A task's choice of workers: all, but those that were refused."""
        return {"workers": list(self._threads)} if self._refused else {}

    def known(self) -> list[str]:
        """Who was looked at, and is there: one that has just joined may not read what is sent."""
        present = self.client.nthreads()
        return [address for address in self._threads if address in present] or list(present)

    def place(self) -> list[Any]:
        """Every shard on a worker, as evenly as threads are; those that are there stay."""
        for i, future in enumerate(self.futures):
            if future is not None and future.status in ("cancelled", "lost", "error"):
                self.futures[i] = self.places[i] = None
        places = assigned(self.places, self._threads)
        for i, (source, place) in enumerate(zip(self.sources, places, strict=True)):
            if self.futures[i] is None or place != self.places[i]:
                near = [] if place is None else [place]
                self.futures[i] = source.place(self.client, near, self.key("shard", i))
        self.places = places
        return self.futures

    def gathered(self, futures: list[Any]) -> list[Any]:
        """Results, waited for as long as there is hope."""
        from distributed import wait

        self._pauses.clear()
        while True:
            try:
                with self.client.as_current():
                    wait(futures, timeout=WAIT_SECONDS)
                break
            except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
                interrupts.check()
                self.look()
                self._await_worker()
                self._relieve_paused()
        for future in futures:
            if future.status == "error":
                error = future.exception()
                raise _TaskError(error) if isinstance(error, (OSError, RuntimeError)) else error
        found: list[Any] = self.client.gather(futures)
        return found

    def with_faults(self, attempt: Callable[[], Any]) -> Any:
        """What an attempt returns, begun again where the cluster has lost a part of it."""
        from distributed import CancelledError, KilledWorker
        from distributed.comm.core import CommClosedError

        self.failure = None
        for left in reversed(range(MAX_ATTEMPTS)):
            try:
                if time.monotonic() - self._looked > LOOK_SECONDS:
                    self.look()
                self._await_worker()
                return attempt()
            except GPflowHybridError as error:
                self.failure = error  # what TensorFlow makes of it inside a graph has other words
                raise
            except _TaskError as found:
                raise found.error from None
            except ImportError as error:  # by a worker that has joined, and was not looked at yet?
                num_events = len(self.events)
                self.look()
                if left == 0 or len(self.events) == num_events:
                    self.failure = ClusterError(
                        f"A worker cannot import what it was sent: {error}. Install it there as here, or "
                        "send it: client.upload_file(...) of a module."
                    )
                    raise self.failure from error
            except (
                CancelledError,
                KilledWorker,
                CommClosedError,
                OSError,
                RuntimeError,
                asyncio.TimeoutError,
            ) as error:
                self._require_scheduler(error)
                if left == 0:
                    self.failure = ClusterError(self._given_up(error))
                    raise self.failure from error
                self.look()
        raise AssertionError

    def _await_worker(self) -> None:
        """However long it takes where Ctrl-C ends it: what is sent where nobody is fails after half a
        minute."""
        if not self._threads:
            self._say("No worker is left: waiting for one.")
        is_endless = threading.current_thread() is threading.main_thread()
        last = math.inf if is_endless else time.monotonic() + MOST_SECONDS_IN_GRAPHS
        while not self._threads:
            interrupts.check()
            if time.monotonic() > last:
                raise ClusterError(
                    f"No worker has come to {self.address} for {MOST_SECONDS_IN_GRAPHS:.0f} s. The model "
                    "is as its last loss has left it: start workers, and go on from here. gh.fit, which "
                    "Ctrl-C can end, waits without a limit."
                )
            time.sleep(LOOK_SECONDS)
            self.look()

    def _require_scheduler(self, error: BaseException) -> None:
        """Raise if it is the scheduler that was lost."""
        reason = getattr(error, "reason", "")
        if self.client.status == "running" and reason != "scheduler-connection-lost":
            return
        self.failure = ClusterError(self._scheduler_lost())
        raise self.failure from error

    def look(self) -> None:
        """Ask who is there, and say who came or left."""
        self._looked = time.monotonic()
        try:
            present = dict(self.client.nthreads())
        except Exception as error:
            self._require_scheduler(error)
            raise
        present = {x: n for x, n in present.items() if x not in self._refused}
        left = sorted(set(self._threads) - set(present))
        joined = sorted(set(present) - set(self._threads))
        for address in left:
            self._say(f"The worker {address} was lost; {self._consequence(address)}.")
        reasons = refused(versions_on(self.client, joined)) if joined else {}
        for address in joined:
            if address in reasons:
                self._refused.add(address)
                del present[address]
                self._say(f"The worker {address} has joined, and is not used: {reasons[address]}.")
            else:
                self._say(f"The worker {address} has joined.")
        self._threads = present
        if left:
            self._find_recomputed(left)

    def _relieve_paused(self) -> None:
        """A worker that Dask has paused starts no task before its memory is free again, which it may never
        be while it keeps projections."""
        found = self.client.run(
            shard.status_of_worker, workers=list(self._threads), on_error="ignore"
        )
        paused = [address for address, status in found.items() if status == "paused"]
        self._pauses = {address: self._pauses.get(address, 0) + 1 for address in paused}
        if not paused:
            return
        self.client.run(shard.forget_projections, workers=paused, on_error="ignore")
        for address in set(paused) - self._relieved:
            self._relieved.add(address)
            self._say(
                f"The worker {address} was paused, as its memory is nearly full; it keeps fewer "
                "projections from now on, and finds them again for every sum."
            )
        given_up = [address for address, count in self._pauses.items() if count > MOST_PAUSES]
        if given_up:
            raise ClusterError(
                f"The worker {given_up[0]} stays paused: its memory is nearly full without any "
                "projections. Give workers more memory, or less to hold at a time (num_shards)."
            )

    def _given_up(self, error: BaseException) -> str:
        return (
            f"A sum over the rows was lost {MAX_ATTEMPTS} times, at last by {type(error).__name__}: "
            f"{error}. See the logs of the workers; one that runs out of memory is killed: raise "
            "num_shards, or give workers more."
        )

    def _scheduler_lost(self) -> str:
        return (
            f"The scheduler at {self.address} was lost, or the client was closed. The model is as its "
            "last loss has left it: start a scheduler and workers, make new shards with a new client, "
            "and go on from here or from a checkpoint."
        )

    def _consequence(self, address: str) -> str:
        """What becomes of the shards that a worker held."""
        held = [x for x, place in zip(self.sources, self.places, strict=True) if place == address]
        if not held:
            return "it held no shard"
        again = "read" if held[0].is_recomputed else "sent"
        return f"its {len(held)} of {len(self.sources)} shards are {again} again"

    def _find_recomputed(self, left: Sequence[str]) -> None:
        """Where Dask has put what it has computed again by itself."""
        lost = [i for i, place in enumerate(self.places) if place in left]
        for i in lost:
            self.places[i] = None
        again = [i for i in lost if self.sources[i].is_recomputed and self.futures[i] is not None]
        if again:
            where = self.client.who_has([self.futures[i] for i in again])
            for i in again:
                holders = where.get(self.futures[i].key, ())
                self.places[i] = next((x for x in holders if x in self._threads), None)

    def _say(self, message: str) -> None:
        self.events.append(ClusterEvent(time.monotonic() - self._began, message))
        warnings.warn(message, ClusterWarning, stacklevel=2)
