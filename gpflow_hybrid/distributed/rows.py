"""Data that the workers of a Dask cluster hold, in shards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..display import progress_bar
from ..errors import InvalidDataError
from ..rows import DataRows, ModelParts, Pair
from ..validation import is_integer
from . import shard as tasks
from .holding import ClusterEvent, Holding
from .sources import Source, check_chunk, sources_of
from .workers import check_client, require_workers

FAN_IN = 8
"""Answers that are added up at a time: on workers where there are more, else here."""

EMBEDDED_BYTES = 2**22
"""Up to so much goes out with the tasks, by way of the scheduler; more is sent to the workers beforehand,
which pass it on to each other."""


class ShardedRows(DataRows):
    """Rows that the workers of a Dask cluster hold; what :func:`shards` returns, in the place of
    ``data=(X, Y)`` of a sparse model.

    Every sum over the rows is one task for each shard. Whatever workers do, answers are added in the order
    of the rows: results do not depend on who has computed them.
    """

    num_passes: int
    """Sums over all rows so far."""
    rows_of_shard: list[int]
    """How many each has."""
    first_of_shard: list[int]
    """The number of its first row among all."""

    def __init__(self, client: Any, sources: Sequence[Source], progress: bool | None) -> None:
        self._held = Holding(client, sources)
        self.num_passes = 0
        self._progress = progress
        self._bar: Any = None
        self._describe(self._each("shape", tasks.shape_of))

    def _describe(self, shapes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
        widths = {(x[1], y[1]) for x, y in shapes}
        for x, y in shapes:
            check_chunk(x[0], y[0])
        if len(widths) > 1:
            raise InvalidDataError(
                f"X and Y must have the same columns in every chunk; found {sorted(widths)}."
            )
        self.num_columns, self.num_outputs = next(iter(widths))
        sizes = [x[0] for x, _ in shapes]
        self.num_rows = sum(sizes)
        if self.num_rows == 0:
            raise InvalidDataError("X and Y must have at least one row; found none.")
        self._held.keep([i for i, size in enumerate(sizes) if size])
        self.rows_of_shard = [size for size in sizes if size]
        self.first_of_shard = [0, *itertools.accumulate(self.rows_of_shard[:-1])]

    def __repr__(self) -> str:
        return f"<ShardedRows: {self.num_rows} rows in {self.num_shards} shards at {self.address}>"

    @property
    def address(self) -> str:
        """Of the scheduler."""
        return self._held.address

    @property
    def name(self) -> str:
        """In the keys of all tasks."""
        return self._held.name

    @property
    def num_shards(self) -> int:
        """Parts that the rows are held in."""
        return len(self._held.sources)

    @property
    def holders(self) -> list[str | None]:
        """The worker that every shard was given to; None where that is Dask's choice."""
        return list(self._held.places)

    @property
    def events(self) -> list[ClusterEvent]:
        """What happened to the cluster."""
        return self._held.events

    @property
    def failure(self) -> Exception | None:  # type: ignore[override]
        """The scheduler, if it was lost."""
        return self._held.failure

    # Of the data.

    def blocks(self, size: int) -> Iterator[Pair]:
        """Rows, brought here a block at a time."""
        for i, rows in enumerate(self.rows_of_shard):
            for first in range(0, rows, size):
                yield self._fetched(i, slice(first, first + size))

    def first_rows(self, number: int) -> Pair:
        """From every shard in proportion, so that they stand for all."""
        part = min(1.0, number / self.num_rows)
        sizes = [max(1, int(part * rows)) for rows in self.rows_of_shard]
        found = [self._fetched(i, slice(size)) for i, size in enumerate(sizes)]
        X, Y = (np.concatenate(x) for x in zip(*found, strict=True))
        return X, Y

    def random_rows(self, number: int, rng: np.random.Generator) -> Pair:
        """Of every shard those that were drawn: no other comes here."""
        chosen = rng.choice(self.num_rows, number, replace=False)
        order = np.argsort(chosen)
        parts = np.split(chosen[order], np.searchsorted(chosen[order], self.first_of_shard[1:]))
        found = [
            self._fetched(i, part - first)
            for i, (part, first) in enumerate(zip(parts, self.first_of_shard, strict=True))
        ]
        back = np.argsort(order)
        X, Y = (np.concatenate(x)[back] for x in zip(*found, strict=True))
        return X, Y

    def _fetched(self, i: int, chosen: Any) -> Any:
        held = self._held

        def attempt() -> Any:
            given = (held.place()[i], chosen)
            options = {"key": held.key("rows", i), "pure": False, **held.where()}
            return held.gathered([held.client.submit(tasks.rows_of_shard, *given, **options)])[0]

        return held.with_faults(attempt)

    def sums_elsewhere(self, parts: ModelParts, prior: Any, alpha: float, in_parts: bool) -> Any:
        """Taken by the workers."""
        from .sums import ClusterSums

        return ClusterSums(parts, prior, self, alpha, in_parts)

    # Sums.

    def ask(
        self,
        name: str,
        question: tasks.SumRequest,
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
        held = self._held

        def attempt() -> list[Any]:
            shards = held.place()
            given: list[Any] = []
            if question is not None:
                given = [[self._sent(question)] * len(shards), self.first_of_shard]
            found = self._mapped(name, task, shards, *given)
            while combine is not None and len(found) > FAN_IN:
                parts = [found[i : i + FAN_IN] for i in range(0, len(found), FAN_IN)]
                found = self._mapped(f"{name}-sum", combine, parts)
            return held.gathered(found)

        found: list[Any] = held.with_faults(attempt)
        return found

    def _mapped(self, name: str, task: Callable[..., Any], *given: list[Any]) -> list[Any]:
        held = self._held
        keys = [held.key(name, i) for i in range(len(given[0]))]
        found: list[Any] = held.client.map(task, *given, key=keys, pure=False, **held.where())
        return found

    def _sent(self, question: tasks.SumRequest) -> Any:
        if question.nbytes * self.num_shards <= EMBEDDED_BYTES:
            return question
        held = self._held
        return held.client.scatter(question, broadcast=True, hash=False, workers=held.known())


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
    :param num_shards: parts of the data, each held by one worker; by default one for every thread, up to
        four of more than 8 MB, and more where one would have more than 128 MB, so that Dask can write them
        to disk.
    :param progress: a bar of passes over the data with the objective; by default on a terminal and in a
        notebook.
    """
    check_client(client)
    if num_shards is not None and (not is_integer(num_shards) or num_shards < 1):
        raise InvalidDataError(f"num_shards must be a positive integer; found {num_shards!r}.")
    threads = require_workers(client)
    sources = sources_of(X, Y, sum(threads.values()), num_shards)
    return ShardedRows(client, sources, progress)
