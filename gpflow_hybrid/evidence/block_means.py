"""``E[x_b | x_rest]`` of every block of data, in the order of a sweep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .results import FloatArray

COLUMNS = 64
"""Data whose means are found in one product. A block has eight, and a product with so few columns takes
several times longer than its arithmetic."""


class _Member(NamedTuple):
    """A block among those of its group."""

    number: int
    columns: slice  # of the group's weights
    weights: FloatArray  # of the group's own data, [G, L or 1, n, b]


class _Group(NamedTuple):
    """Consecutive blocks."""

    first: int  # of its data, the first
    last: int  # and the last + 1
    weights: FloatArray  # of all other data, [G, L or 1, N, columns]
    members: list[_Member]


class BlockMeans:
    """The means of blocks given all other data, ``x W_b``, while a sweep moves one block after the other.

    What the data outside of a group of blocks say of all its blocks is one product, taken before the first
    of them moves; what those inside say, ``n`` of N, is added for each.

    :param parts: the first datum of each block and the last + 1, in rising order.
    :param weights: ``W_b``, zero at the block's own data, ``[B, G, L or 1, N, b]``.
    """

    def __init__(self, parts: list[tuple[int, int]], weights: FloatArray) -> None:
        size = weights.shape[-1]
        number = max(1, COLUMNS // size) if size else 1
        self.groups = [
            _grouped(parts, weights, range(i, min(i + number, len(parts))))
            for i in range(0, len(parts), number)
        ]

    def follow(self, x: FloatArray) -> Iterator[tuple[int, FloatArray]]:
        """Each block's number and mean ``[G, L, C, b]``, at the x that the blocks before have left.

        :param x: ``[G, L, C, N]``; a block's new values are written into it before the next is asked for.
        """
        for group in self.groups:
            outside = x @ group.weights
            inside = x[..., group.first : group.last]
            for block in group.members:
                yield block.number, outside[..., block.columns] + inside @ block.weights


def _grouped(parts: list[tuple[int, int]], weights: FloatArray, blocks: range) -> _Group:
    first, last = parts[blocks[0]][0], parts[blocks[-1]][1]
    size = weights.shape[-1]
    members = [
        _Member(
            i,
            slice(k * size, (k + 1) * size),
            np.ascontiguousarray(weights[i, ..., first:last, :]),
        )
        for k, i in enumerate(blocks)
    ]
    outside = np.concatenate([weights[i] for i in blocks], axis=-1)
    outside[..., first:last, :] = 0.0
    return _Group(first, last, outside, members)
