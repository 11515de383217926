"""The rows of the data in blocks, projected on the inducing variables, with threads that take them."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable
from typing import Any

import numpy as np

from .. import tuning
from ..likelihoods.projected import Maker
from ..linalg.threads import in_parallel, num_threads, one_blas_thread
from ..priors.inducing import InducingPrior
from ..priors.protocol import Array
from ..rows import DataRows
from .blocks import Block


class ProjectedRows:
    """At one setting of the hyperparameters.

    Threads take blocks, each with one of BLAS': they do not wait for each other, as BLAS' own would in
    every product, and the likelihood is computed by all of them.

    :param rows: read again every time if their projections are too large to keep.
    :param most_kept: bytes of projections that are kept; ``tuning.KEPT_PROJECTIONS`` by default.
    :param most_threads: as many as there are cores by default.
    """

    def __init__(
        self,
        prior: InducingPrior,
        make: Maker,
        rows: DataRows,
        most_kept: int | None = None,
        most_threads: int | None = None,
    ) -> None:
        self._prior, self._make, self._rows = prior, make, rows
        self._kept: list[Block] | None = None
        M, N = len(prior.chol[0]), rows.num_rows
        worth = N * M // tuning.THREADED_PROJECTIONS
        self._threads = max(1, min(most_threads or num_threads(), worth))
        # As many blocks as keep all threads busy to the end.
        rounds = math.ceil(N * M / (self._threads * tuning.PROJECTED_ELEMENTS))
        self.rows_of_block = max(tuning.SMALLEST_BLOCK, math.ceil(N / (self._threads * rounds)))
        # With A of every part and T of every latent.
        self._bytes = 8 * N * (rows.num_columns + M * (len(prior.chol) + prior.num_latent))
        most_kept = tuning.KEPT_PROJECTIONS if most_kept is None else most_kept
        self._is_kept = self._bytes <= most_kept

    @property
    def kept_bytes(self) -> int:
        """Of projections, also of those that are yet to be found."""
        return self._bytes if self._is_kept else 0

    def each(self, function: Callable[..., Any], *arguments: Any) -> Generator[Any]:
        """``function(block, *arguments)`` of all blocks, in their order."""

        def at(block: Block | tuple[Array, Array]) -> Any:
            return function(block if isinstance(block, Block) else self._project(block), *arguments)

        with one_blas_thread():
            yield from in_parallel(at, self._blocks(), self._threads)

    def _blocks(self) -> Iterable[Block | tuple[Array, Array]]:
        """Projected if they are kept, else as they are read."""
        if self._kept is not None:
            return self._kept
        blocks = self._rows.blocks(self.rows_of_block)
        if not self._is_kept:
            return blocks
        self._kept = list(in_parallel(self._project, blocks, self._threads))
        return self._kept

    def _project(self, rows: tuple[Array, Array]) -> Block:
        X, Y = rows
        projections, mean = self._prior.project(X)
        residual = np.stack([p.residual for p in projections], 1)
        residual = np.ascontiguousarray(np.broadcast_to(residual, mean.shape))
        return Block(X, Y, projections, mean, self._make(X, Y, residual))
