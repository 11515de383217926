"""Where shards come from: arrays of this process, or Dask collections that workers read themselves."""

from __future__ import annotations

import abc
import math
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import InvalidDataError
from ..inputs import numeric_array
from ..priors.protocol import Array
from .shard import Shard

SHARD_BYTES = 2**27
"""Rows that take more are divided into more shards, which Dask can write to disk."""

SMALL_SHARD_BYTES = 2**23
"""Rows that take more are divided too, of which a worker may keep the projections of some,"""

SHARDS_PER_THREAD = 4
"""but into no more than so many for this reason: each is a task of every sum."""

UNEVEN = 1.25
"""Part by which the largest shard may exceed the mean before known chunks are cut anew."""


class Source(abc.ABC):
    """The rows of one shard, from which it can be made again and again."""

    is_recomputed: bool
    """By Dask, where a worker is lost."""

    @abc.abstractmethod
    def place(self, client: Any, workers: Sequence[str], name: str) -> Any:
        """A future of the shard, on one of these workers if they are there."""


class ArraySource(Source):
    """Arrays that this process keeps; sent again where they are lost."""

    is_recomputed = False

    def __init__(self, X: Array, Y: Array) -> None:
        self.shard = Shard(X, Y)

    def place(self, client: Any, workers: Sequence[str], name: str) -> Any:
        return client.scatter(self.shard, workers=list(workers) or None, hash=False)


class ChunkSource(Source):
    """Chunks of Dask collections."""

    is_recomputed = True

    def __init__(self, X: Sequence[Any], Y: Sequence[Any]) -> None:
        """
        :param X: for every chunk of rows its delayed blocks, side by side.
        """
        self.X, self.Y = X, Y

    def place(self, client: Any, workers: Sequence[str], name: str) -> Any:
        where = {"workers": list(workers), "allow_other_workers": True} if workers else {}
        # The blocks may be read anywhere: where all workers that a task may run on are gone, a scheduler
        # never gives it to those that come, whether others are allowed or not.
        X, Y = ([client.compute(row) for row in rows] for rows in (self.X, self.Y))
        return client.submit(shard_of_blocks, X, Y, key=name, pure=False, **where)


def shard_of_blocks(X: Sequence[Sequence[Any]], Y: Sequence[Sequence[Any]]) -> Shard:
    """Blocks of rows, joined."""
    return Shard(*(_joined(name, blocks) for name, blocks in (("X", X), ("Y", Y))))


def _joined(name: str, blocks: Sequence[Sequence[Any]]) -> Array:
    rows = [np.concatenate([numeric_array(name, x) for x in row], axis=1) for row in blocks]
    return rows[0] if len(rows) == 1 else np.concatenate(rows)


def sources_of(X: Any, Y: Any, num_threads: int, num_shards: int | None) -> list[Source]:
    """X and Y in shards.

    :param num_threads: of all workers.
    :param num_shards: None for one for every thread, more of much data.
    """
    if not (_is_dask(X) or _is_dask(Y)):
        return _of_arrays(X, Y, num_threads, num_shards)
    X, Y = (_as_dask_array(name, x) for name, x in zip("XY", with_equal_parts(X, Y), strict=True))
    X, Y = aligned(X, Y)
    if X.shape[0] == 0:
        raise InvalidDataError("X and Y must have at least one row; found none.")
    return _of_chunks(X, Y, num_threads, num_shards)


def with_equal_parts(X: Any, Y: Any) -> tuple[Any, Any]:
    """Two DataFrames with the same partitions as arrays with the same chunks, row by row whatever their
    indices say. Each by itself, Dask joins as many files as their columns leave room for."""
    tables = [
        (name, x)
        for name, x in (("X", X), ("Y", Y))
        if hasattr(x, "npartitions") and hasattr(x, "columns")
    ]
    for name, x in tables:
        _check_rank(name, x)
    if len(tables) < 2 or X.npartitions != Y.npartitions:
        return X, Y
    import dask.dataframe as frames
    import pandas

    width = len(X.columns)
    nothing = pandas.DataFrame(np.zeros((0, width + len(Y.columns))))
    options = {"align_dataframes": False, "meta": nothing}
    both = frames.map_partitions(_side_by_side, X, Y, **options).to_dask_array()
    return both[:, :width], both[:, width:]


def _side_by_side(X: Any, Y: Any) -> Any:
    """Two tables as one of numbers, without their indices."""
    import pandas

    check_chunk(len(X), len(Y))
    both = [numeric_array(name, x).astype(np.float64) for name, x in (("X", X), ("Y", Y))]
    return pandas.DataFrame(np.concatenate(both, axis=1))


def check_chunk(num_X: int, num_Y: int) -> None:
    """Refuse a chunk with different numbers of rows."""
    if num_X != num_Y:
        raise InvalidDataError(
            f"X and Y must have the same number of rows in every chunk; found {num_X} and {num_Y}. Take "
            "both from one DataFrame or array."
        )


def with_own_keys(value: Any) -> Any:
    """The same array by tasks of its own. Dask joins tasks in different ways for different results, under
    the names of the last, by which a scheduler takes them for the same."""
    import dask.array as da

    name = f"rows-of-{uuid.uuid4().hex}"
    return da.map_blocks(
        np.asarray, value, name=name, dtype=value.dtype, meta=np.empty((0, 0), value.dtype)
    )


def _is_dask(value: Any) -> bool:
    return hasattr(value, "__dask_graph__")


def _count(num_bytes: float, num_threads: int, num_shards: int | None, num_rows: float) -> int:
    small = min(math.ceil(num_bytes / SMALL_SHARD_BYTES), SHARDS_PER_THREAD * num_threads)
    count = num_shards or max(num_threads, math.ceil(num_bytes / SHARD_BYTES), small)
    return int(max(1, min(count, num_rows)))


def _of_arrays(X: Any, Y: Any, num_threads: int, num_shards: int | None) -> list[Source]:
    X, Y = (numeric_array(name, x) for name, x in (("X", X), ("Y", Y)))
    for name, value in (("X", X), ("Y", Y)):
        _check_rank(name, value)
    if len(X) != len(Y):
        raise InvalidDataError(
            f"X and Y must have the same number of rows; found {len(X)} and {len(Y)}."
        )
    if len(X) == 0:
        raise InvalidDataError("X and Y must have at least one row; found none.")
    count = _count(X.nbytes + Y.nbytes, num_threads, num_shards, len(X))
    parts = (np.array_split(x, count) for x in (X, Y))
    return [ArraySource(x, y) for x, y in zip(*parts, strict=True)]


def _check_rank(name: str, value: Any) -> None:
    if value.ndim != 2:
        raise InvalidDataError(
            f"{name} must have two dimensions, [N, {'P' if name == 'Y' else 'D'}]; found "
            f"{value.ndim}. Pass {name}.reshape(-1, 1) if it is one column, [['name']] of a table."
        )


def _as_dask_array(name: str, value: Any) -> Any:
    import dask.array as da

    if hasattr(value, "to_dask_array"):  # a table of Dask's, or a column of one
        value = value.to_dask_array()
    if not isinstance(value, da.Array):
        if _is_dask(value):
            raise InvalidDataError(
                f"{name} must be a Dask array or DataFrame, or an array; found "
                f"{type(value).__name__}. dask.array.from_delayed makes one of delayed values."
            )
        value = numeric_array(name, value)
        _check_rank(name, value)
        return da.from_array(value, chunks=(len(value), -1))
    _check_rank(name, value)
    return with_own_keys(value)


def _has_known_rows(value: Any) -> bool:
    return not any(math.isnan(n) for n in value.chunks[0])


def aligned(X: Any, Y: Any) -> tuple[Any, Any]:
    """With equal chunks of rows."""
    if _has_known_rows(X) and _has_known_rows(Y):
        if X.shape[0] != Y.shape[0]:
            raise InvalidDataError(
                f"X and Y must have the same number of rows; found {X.shape[0]} and {Y.shape[0]}."
            )
        return X, Y.rechunk({0: X.chunks[0]})
    if X.numblocks[0] != Y.numblocks[0]:
        raise InvalidDataError(
            "X and Y must have the same chunks of rows where their lengths are not known; found "
            f"{X.numblocks[0]} and {Y.numblocks[0]}. Take both from one DataFrame, or give their "
            "lengths: to_dask_array(lengths=True) of a DataFrame, compute_chunk_sizes() of an array."
        )
    return X, Y


def _of_chunks(X: Any, Y: Any, num_threads: int, num_shards: int | None) -> list[Source]:
    has_lengths = _has_known_rows(X) and _has_known_rows(Y)
    row_bytes = sum(x.dtype.itemsize * x.shape[1] for x in (X, Y) if not math.isnan(x.shape[1]))
    num_bytes = row_bytes * X.shape[0] if has_lengths else 0
    count = _count(num_bytes, num_threads, num_shards, X.shape[0] if has_lengths else math.inf)
    sizes = list(X.chunks[0]) if has_lengths else [1] * X.numblocks[0]
    groups = grouped(sizes, count)
    if has_lengths:
        largest = max(sum(sizes[i] for i in group) for group in groups)
        if len(groups) < count or largest > UNEVEN * sum(sizes) / count:
            size, longer = divmod(sum(sizes), count)
            even = (size + 1,) * longer + (size,) * (count - longer)
            X, Y = X.rechunk({0: even}), Y.rechunk({0: even})
            groups = [[i] for i in range(count)]
    x_blocks, y_blocks = X.to_delayed().tolist(), Y.to_delayed().tolist()
    return [
        ChunkSource([x_blocks[i] for i in group], [y_blocks[i] for i in group]) for group in groups
    ]


def grouped(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Neighbouring chunks in at most so many groups, of about as many rows each."""
    total, before = sum(sizes), 0
    groups: list[list[int]] = [[] for _ in range(count)]
    for i, size in enumerate(sizes):
        middle = before + 0.5 * size
        groups[min(count - 1, int(count * middle / max(total, 1)))].append(i)
        before += size
    return [group for group in groups if group]
