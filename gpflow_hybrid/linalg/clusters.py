"""k-means on arrays, in blocks of rows: no matrix of all rows by all centres."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix

from .. import tuning

Array = npt.NDArray[Any]

MAX_STEPS = 100
SMALLEST_GAIN = 1e-4
"""Iterations end when a step lowers the objective by less than this part of it."""


def nearest(X: Array, centres: Array) -> tuple[Array, Array]:
    """Index of the nearest centre and squared distance to it, both ``[N]``."""
    labels, distances = np.empty(len(X), np.intp), np.empty(len(X))
    squares = np.einsum("md,md->m", centres, centres)
    rows = max(1, tuning.PROJECTED_ELEMENTS // len(centres))
    for start in range(0, len(X), rows):
        block = X[start : start + rows]
        relative = squares - 2.0 * block @ centres.T  # ‖x − c‖² − ‖x‖²  [rows, M]
        found = np.argmin(relative, axis=1)
        labels[start : start + rows] = found
        least = np.take_along_axis(relative, found[:, None], axis=1)[:, 0]
        distances[start : start + rows] = least + np.einsum("nd,nd->n", block, block)
    return labels, np.maximum(distances, 0.0, out=distances)


def seed_centres(X: Array, weights: Array, num: int, rng: np.random.Generator) -> Array:
    """Indices of ``num`` different rows by greedy k-means++ (Arthur and Vassilvitskii, 2007).

    A row is drawn in proportion to its weight times its squared distance to the centres so far; of
    ``2 + ⌊log num⌋`` draws the one that lowers the objective most is kept. Rows have to be distinct.
    """
    trials = 2 + int(np.log(num))
    squares = np.einsum("nd,nd->n", X, X)
    chosen = np.empty(num, np.intp)
    chosen[0] = rng.choice(len(X), p=weights / weights.sum())
    distances = np.maximum(squares + squares[chosen[0]] - 2.0 * X @ X[chosen[0]], 0.0)
    distances[chosen[0]] = 0.0
    for m in range(1, num):
        cumulative = np.cumsum(weights * distances)
        drawn = np.searchsorted(cumulative, rng.random(trials) * cumulative[-1], side="right")
        # Where all that is left is rounding, a row that was chosen may be drawn: take another one.
        drawn = drawn[(drawn < len(X)) & ~np.isin(drawn, chosen[:m])]
        if not len(drawn):
            drawn = np.setdiff1d(np.arange(len(X)), chosen[:m])[:1]
        reduced = squares[drawn, None] + squares - 2.0 * X[drawn] @ X.T  # [trials, N]
        np.clip(reduced, 0.0, distances, out=reduced)
        best = int(np.argmin(reduced @ weights))
        chosen[m], distances = drawn[best], reduced[best]
        distances[chosen[m]] = 0.0
    return chosen


def lloyd_step(X: Array, weights: Array, centres: Array) -> tuple[Array, float]:
    """Means of the rows that are nearest to each centre, and the objective before: ``Σ w ‖x − c‖²``."""
    labels, distances = nearest(X, centres)
    _fill_empty(labels, distances, len(centres))
    members = csr_matrix((weights, (labels, np.arange(len(X)))), shape=(len(centres), len(X)))
    return (members @ X) / np.bincount(labels, weights)[:, None], float(weights @ distances)


def _fill_empty(labels: Array, distances: Array, num: int) -> None:
    """Give every centre without rows the row that is furthest from its own, in place."""
    counts = np.bincount(labels, minlength=num)
    if counts.all():
        return
    furthest = iter(np.argsort(-distances, kind="stable"))
    for empty in np.flatnonzero(counts == 0):
        row = next(i for i in furthest if counts[labels[i]] > 1)
        counts[labels[row]] -= 1
        counts[empty] += 1
        labels[row] = empty


def cluster(X: Array, weights: Array, num: int, rng: np.random.Generator) -> Array:
    """Centres ``[num, D]`` of distinct rows with weights: k-means++, then Lloyd's steps."""
    centres = X[seed_centres(X, weights, num, rng)]
    before = np.inf
    for _ in range(MAX_STEPS):
        centres, objective = lloyd_step(X, weights, centres)
        if objective >= (1.0 - SMALLEST_GAIN) * before:
            break
        before = objective
    return centres
