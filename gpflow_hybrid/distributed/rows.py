"""Data that the workers of a Dask cluster hold, in shards."""

from __future__ import annotations

import itertools
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..display import progress_bar
from ..errors import ClusterError, ClusterWarning, GPflowHybridError, InvalidDataError
from ..rows import DataRows, ModelParts, Pair
from . import shard as tasks
from .sources import Source, sources_of
from .workers import assigned, check_client, refused, require_equal, versions_on

MAX_ATTEMPTS = 10
"""Times that a sum is begun again after a fault before it is given up."""

FAN_IN = 8
"""Answers that are added up at a time: on workers where there are more, else here."""

EMBEDDED_BYTES = 2**22
"""Up to so much goes out with the tasks, by way of the scheduler; more is sent to the workers, which pass it
on to each other."""

LOOK_SECONDS = 1.0
"""How often it is asked who is there."""


class ClusterEvent(NamedTuple):
    """Something that happened to the cluster."""

    seconds: float
    """Since the rows were made."""
    message: str


class ShardedRows(DataRows):
    """Rows that the workers of a Dask cluster hold; what :func:`shards` returns, in the place of
    ``data=(X, Y)`` of a sparse model.

    Every sum over the rows is one task for each shard. Whatever workers do, answers are added in the order
    of the rows: results do not depend on who has computed them.
    """

    name: str
    """In the keys of all tasks."""
    num_passes: int
    """Sums over all rows so far."""
    events: list[ClusterEvent]
    """What happened to the cluster."""

    def __init__(self, client: Any, sources: Sequence[Source], progress: bool | None) -> None:
        self.client = client
        self.num_passes, self.events = 0, []
        self.address = str(client.scheduler.address)
        self.name = uuid.uuid4().hex[:8]
        self._sources = list(sources)
        self._numbers = itertools.count()
        self._began = self._looked = time.monotonic()
        self._threads: dict[str, int] = dict(client.nthreads())
        self._refused: set[str] = set()
        self._places: list[str | None] = [None] * len(sources)
        self._futures: list[Any] = [None] * len(sources)
        self._progress, self._bar = progress, None
        found = self._each("shape", tasks.shape_of)
        self._describe(found)

    def _describe(self, shapes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
        widths = {(x[1], y[1]) for x, y in shapes}
        counts = [(x[0], y[0]) for x, y in shapes]
        differing = [pair for pair in counts if pair[0] != pair[1]]
        if differing:
            raise InvalidDataError(
                "X and Y must have the same number of rows in every chunk; found "
                f"{differing[0][0]} and {differing[0][1]}."
            )
        if len(widths) > 1:
            raise InvalidDataError(
                f"X and Y must have the same columns in every chunk; found {sorted(widths)}."
            )
        self.num_columns, self.num_outputs = next(iter(widths))
        sizes = [x for x, _ in counts]
        self.num_rows = sum(sizes)
        self.first_of_shard = [0, *itertools.accumulate(sizes[:-1])]
        if self.num_rows == 0:
            raise InvalidDataError("X and Y must have at least one row; found none.")
        # A shard without rows has no sums.
        kept = [i for i, size in enumerate(sizes) if size]
        for name in ("_sources", "_places", "_futures", "first_of_shard"):
            setattr(self, name, [getattr(self, name)[i] for i in kept])
        self.rows_of_shard = [sizes[i] for i in kept]

    def __repr__(self) -> str:
        return (
            f"<ShardedRows: {self.num_rows} rows in {len(self._sources)} shards at {self.address}>"
        )

    @property
    def num_shards(self) -> int:
        """Parts that the rows are held in."""
        return len(self._sources)

    @property
    def holders(self) -> list[str | None]:
        """The worker that every shard was given to; None where that is Dask's choice."""
        return list(self._places)

    # Of the data.

    def blocks(self, size: int) -> Iterator[Pair]:
        """Rows, brought here a block at a time."""
        for i, rows in enumerate(self.rows_of_shard):
            for first in range(0, rows, size):
                yield self._with_faults(lambda i=i, first=first: self._fetch(i, first, size))

    def _fetch(self, i: int, first: int, size: int) -> Any:
        self._place()
        key = self._key("rows", i)
        task = tasks.rows_of_shard
        future = self.client.submit(
            task, self._futures[i], first, first + size, key=key, pure=False, **self._where()
        )
        return self._gathered([future])[0]

    def first_rows(self, number: int) -> Pair:
        """From every shard in proportion, so that they stand for all."""
        part = min(1.0, number / self.num_rows)
        found = []
        for i, rows in enumerate(self.rows_of_shard):
            size = max(1, int(part * rows))
            found.append(self._with_faults(lambda i=i, size=size: self._fetch(i, 0, size)))
        X, Y = (np.concatenate(x) for x in zip(*found, strict=True))
        return X, Y

    def sums_elsewhere(self, parts: ModelParts, prior: Any, alpha: float) -> Any:
        """Taken by the workers."""
        from .sums import ClusterSums

        return ClusterSums(parts, prior, self, alpha)

    # Sums.

    def ask(
        self,
        name: str,
        question: tasks.Question,
        combine: Callable[[list[Any]], Any] | None = None,
    ) -> list[Any]:
        """The answers of all shards, in order.

        :param name: of the tasks, on Dask's dashboard.
        :param combine: neighbours, on the workers, until few are left; None where each is wanted.
        """
        found = self._each(name, tasks.answer, question, combine)
        self.num_passes += 1
        if self._bar is None:
            self._bar = progress_bar(self._progress, unit="pass", desc="cluster", leave=False)
        self._bar.update(1)
        return found

    def tell(self, objective: float) -> None:
        """Show the present value beside the passes."""
        if self._bar is not None:
            self._bar.set_postfix(objective=f"{objective:.4f}", refresh=False)

    def _each(
        self,
        name: str,
        task: Callable[..., Any],
        question: Any = None,
        combine: Callable[[list[Any]], Any] | None = None,
    ) -> list[Any]:
        return self._with_faults(lambda: self._attempt(name, task, question, combine))

    def _attempt(
        self, name: str, task: Callable[..., Any], question: Any, combine: Any
    ) -> list[Any]:
        self._place()
        count = len(self._futures)
        given: list[Any] = []
        if question is not None:
            sent = self._sent(question)
            given = [[sent] * count, self.first_of_shard]
        keys = [self._key(name, i) for i in range(count)]
        found = self.client.map(
            task, self._futures, *given, key=keys, pure=False, **self._where()
        )
        while combine is not None and len(found) > FAN_IN:
            parts = [found[i : i + FAN_IN] for i in range(0, len(found), FAN_IN)]
            keys = [self._key(f"{name}-sum", i) for i in range(len(parts))]
            found = self.client.map(combine, parts, key=keys, pure=False, **self._where())
        return self._gathered(found)

    def _sent(self, question: tasks.Question) -> Any:
        arrays = [*question.setting.values.arrays, *question.sites]
        size = sum(x.nbytes for x in arrays) + sum(
            x.nbytes for y in question.arguments if isinstance(y, tuple) for x in y
        )
        if size * len(self._futures) <= EMBEDDED_BYTES:
            return question
        return self.client.scatter(question, broadcast=True, hash=False)

    def _gathered(self, futures: list[Any]) -> list[Any]:
        from distributed import wait

        is_told = False
        while True:
            try:
                with self.client.as_current():
                    wait(futures, timeout=10 * LOOK_SECONDS)
                break
            except TimeoutError:
                self._look()
                if not self._threads and not is_told:
                    self._say("No worker is left: waiting for one.")
                    is_told = True
        found: list[Any] = self.client.gather(futures)
        return found

    def _key(self, name: str, i: int) -> str:
        return f"{name}-{self.name}-{next(self._numbers)}-{i}"

    def _where(self) -> dict[str, Any]:
        """All workers, but those that were refused."""
        return {"workers": list(self._threads)} if self._refused else {}

    # Faults.

    def _with_faults(self, attempt: Callable[[], Any]) -> Any:
        """A sum, begun again where the cluster has lost a part of it."""
        from distributed import CancelledError, KilledWorker
        from distributed.comm import CommClosedError

        for left in reversed(range(MAX_ATTEMPTS)):
            try:
                if time.monotonic() - self._looked > LOOK_SECONDS:
                    self._look()
                return attempt()
            except (CancelledError, KilledWorker, CommClosedError, OSError, RuntimeError) as error:
                if isinstance(error, GPflowHybridError):
                    raise
                self._require_scheduler(error)
                if left == 0:
                    raise ClusterError(
                        f"A sum over the rows was lost {MAX_ATTEMPTS} times, at last by "
                        f"{type(error).__name__}: {error}. See the logs of the workers; one that runs "
                        "out of memory is killed: raise num_shards, or give workers more."
                    ) from error
                self._look()
        raise AssertionError

    def _require_scheduler(self, error: BaseException) -> None:
        """Raise if it is the scheduler that was lost."""
        reason = getattr(error, "reason", "")
        if self.client.status == "running" and reason != "scheduler-connection-lost":
            return
        self.failure = ClusterError(
            f"The scheduler at {self.address} was lost. The model is as its last loss has left it: start "
            "a scheduler and workers, make new shards with a new client, and go on from here or from a "
            "checkpoint."
        )
        raise self.failure from error

    def _look(self) -> None:
        """Ask who is there, and say who came or left."""
        self._looked = time.monotonic()
        try:
            present = dict(self.client.nthreads())
        except Exception as error:
            self._require_scheduler(error)
            raise
        present = {x: n for x, n in present.items() if x not in self._refused}
        left, joined = (
            sorted(set(a) - set(b)) for a, b in ((self._threads, present), (present, self._threads))
        )
        for address in left:
            held = [i for i, place in enumerate(self._places) if place == address]
            again = "read" if self._sources and self._sources[0].is_recomputed else "sent"
            what = f"its {len(held)} of {len(self._places)} shards are {again} again"
            self._say(f"The worker {address} was lost; {what if held else 'it held no shard'}.")
        if joined:
            reasons = refused(versions_on(self.client, joined))
            for address in joined:
                if address in reasons:
                    self._refused.add(address)
                    del present[address]
                    self._say(
                        f"The worker {address} has joined, and is not used: {reasons[address]}."
                    )
                else:
                    self._say(f"The worker {address} has joined.")
        self._threads = present
        if left:
            self._find_recomputed(left)

    def _find_recomputed(self, left: Sequence[str]) -> None:
        """Where Dask has put what it has computed again by itself."""
        lost = [i for i, place in enumerate(self._places) if place in left]
        for i in lost:
            self._places[i] = None
        kept = [i for i in lost if self._sources[i].is_recomputed and self._futures[i] is not None]
        if kept:
            where = self.client.who_has([self._futures[i] for i in kept])
            for i in kept:
                holders = where.get(self._futures[i].key, ())
                self._places[i] = next((x for x in holders if x in self._threads), None)

    def _place(self) -> None:
        """Every shard on a worker, as evenly as threads are; those that are there stay."""
        for i, future in enumerate(self._futures):
            if future is not None and future.status in ("cancelled", "lost", "error"):
                self._futures[i] = self._places[i] = None
        places = assigned(self._places, self._threads)
        for i, (source, place) in enumerate(zip(self._sources, places, strict=True)):
            if self._futures[i] is None or place != self._places[i]:
                near = [] if place is None else [place]
                name = f"shard-{self.name}-{next(self._numbers)}-{i}"
                self._futures[i] = source.place(self.client, near, name)
        self._places = places

    def _say(self, message: str) -> None:
        self.events.append(ClusterEvent(time.monotonic() - self._began, message))
        warnings.warn(message, ClusterWarning, stacklevel=2)


def shards(
    client: Any,
    X: Any,
    Y: Any,
    *,
    num_shards: int | None = None,
    progress: bool | None = None,
) -> ShardedRows:
    """Data for a sparse model on a Dask cluster, in the place of ``(X, Y)``::

        data = gh.distributed.shards(client, X, Y)
        gpflow.optimizers.Scipy().minimize(
            model.training_loss_closure(data), model.trainable_variables
        )

    All that a :class:`~gpflow_hybrid.SparseCVIModel` needs of its data are sums over rows. Workers hold the
    rows; for every sum θ, Z and q(u) go out, and M×M numbers come back. The results are those of one
    process, to rounding. ``gh.fit(model, data=data)``, ``model.infer(data)``, ``model.elbo(data)`` and
    :class:`~gpflow_hybrid.VEMTrainer` take them too.

    A worker that is lost is warned of (:class:`~gpflow_hybrid.ClusterWarning`), and its rows are read or
    sent again; a worker that joins is given its part.

    :param client: a ``distributed.Client``. Its workers need the versions of this process; each of their
        threads computes with one thread.
    :param X: a Dask array ``[N, D]`` or DataFrame, in any chunks, which workers read; or an array, which is
        sent to them and kept here.
    :param Y: the same, ``[N, P]``.
    :param num_shards: parts of the data, each held by one worker; by default one for every thread, and more
        where one would have more than 128 MB, so that Dask can write them to disk.
    :param progress: a bar of passes over the data with the objective; by default on a terminal and in a
        notebook.
    """
    check_client(client)
    if num_shards is not None and (not isinstance(num_shards, int) or num_shards < 1):
        raise InvalidDataError(f"num_shards must be a positive integer; found {num_shards!r}.")
    threads = client.nthreads()
    if not threads:
        raise ClusterError(
            f"The scheduler at {client.scheduler.address} has no workers. Start some, dask worker "
            f"{client.scheduler.address}, or client.wait_for_workers(1)."
        )
    require_equal(client, list(threads))
    sources = sources_of(X, Y, sum(threads.values()), num_shards)
    return ShardedRows(client, sources, progress)
