"""Where inducing inputs of a sparse model start: ``Z`` from the rows of X."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from gpflow.config import default_float
from gpflow.kernels import Kernel, Matern52, MultioutputKernel

from . import tuning
from .errors import InvalidDataError
from .linalg.clusters import cluster, lloyd_step, nearest
from .linalg.pivots import pivots
from .validation import check_count, is_integer, numeric_matrix

FloatArray = npt.NDArray[np.float64]

FEW_ROWS = 20_000
"""Up to here all rows take part."""

ROWS_PER_CENTRE = 64
"""k-means of more rows than these, and than ``FEW_ROWS``, takes a sample."""


def inducing_points(
    X: Any, M: int, *, method: str = "kmeans", kernel: Kernel | None = None, seed: int = 0
) -> FloatArray:
    """M different points ``[M, D]`` that represent the rows of X ``[N, D]``: inducing inputs to start from.

    ``"kmeans"`` makes the distance to the nearest of them small,

        Z = argmin  Σₙ minₘ ‖xₙ − zₘ‖²,

    by greedy k-means++ and Lloyd's iterations. Of more than 20,000 rows, or 64 M if that is more, a
    random sample is clustered; one last step is over all of them, in blocks. Distances are those of X as
    it is: standardise columns of different units first.

    ``"greedy"`` takes rows of X, each time the one with the largest conditional variance under the prior
    given those before it (Burt, Rasmussen and van der Wilk, 2020, *Convergence of sparse variational
    inference in Gaussian processes regression*),

        z_{m+1} = argmax over x of  k(x, x) − k(x, Z) K_ZZ⁻¹ k(Z, x),

    in O(N M²). Of more than 20,000 rows, or 2 M if that is more, it sees a random sample. Where no
    variance is left but rounding error, the rest are random rows. Points are in the order of their
    choice: the first of many are the choice of few.

    :param X: an array, tensor, list or data frame of finite numbers.
    :param kernel: for ``"greedy"``; Matérn-5/2 with the lengthscale ``√(Σ_d Var X_d)`` if it is not given,
        which is √D for standardised columns.
    :param seed: of samples and draws; equal seeds give equal points.
    """
    check_count(M, "M")
    if not is_integer(seed) or seed < 0:
        raise InvalidDataError(f"seed must be a non-negative integer; found {seed!r}.")
    if method not in ("kmeans", "greedy"):
        raise InvalidDataError(f'method must be "kmeans" or "greedy"; found {method!r}.')
    _check_kernel(kernel, method)
    rows = numeric_matrix("X", X) + 0.0  # of 0 and −0, which are equal, one
    distinct = _distinct_rows(rows, M)
    rng = np.random.default_rng(seed)
    if method == "kmeans":
        Z = _kmeans(rows, distinct, M, rng)
    else:
        Z = _greedy(rows, distinct, M, kernel, rng)
    return np.ascontiguousarray(Z)


def _check_kernel(kernel: Any, method: str) -> None:
    if kernel is None:
        return
    if method != "greedy":
        raise InvalidDataError(
            f"kernel has no use for method {method!r}; found {type(kernel).__name__}. Pass "
            'method="greedy", or no kernel.'
        )
    if not isinstance(kernel, Kernel) or isinstance(kernel, MultioutputKernel):
        raise InvalidDataError(
            f"kernel must be a gpflow kernel of one output; found {type(kernel).__name__}. Of a "
            "multi-output kernel pass one of its latent_kernels."
        )


def _distinct_rows(X: FloatArray, M: int) -> FloatArray:
    """At least M distinct rows, looked for until they are found; refuses an X that has fewer."""
    distinct = X[:0]
    for start in range(0, len(X), tuning.SCANNED_ROWS):
        distinct = np.unique(
            np.concatenate([distinct, X[start : start + tuning.SCANNED_ROWS]]), axis=0
        )
        if len(distinct) >= M:
            return distinct
    raise InvalidDataError(
        f"M must be at most the number of distinct rows of X, {len(distinct)}; found {M}. Pass a smaller "
        "M, or use gh.CVIModel, which needs no inducing points."
    )


def _sample(
    X: FloatArray, distinct: FloatArray, M: int, size: int, rng: np.random.Generator
) -> tuple[FloatArray, FloatArray]:
    """Distinct rows of a sample of X, at least M of them, and how often each is in it."""
    if len(X) > size:
        X = X[np.sort(rng.choice(len(X), size, replace=False))]
    found, counts = np.unique(X, axis=0, return_counts=True)
    if len(found) < M:  # nearly all rows are the same few
        found, counts = np.unique(np.concatenate([X, distinct]), axis=0, return_counts=True)
    return found, counts.astype(np.float64)


def _kmeans(X: FloatArray, distinct: FloatArray, M: int, rng: np.random.Generator) -> FloatArray:
    size = max(FEW_ROWS, ROWS_PER_CENTRE * M)
    rows, weights = _sample(X, distinct, M, size, rng)
    if len(rows) == M:
        return rows
    # Around zero and of the size of one no square overflows, and few digits are lost.
    scale = max(np.abs(rows).max(), np.finfo(np.float64).tiny)
    offset = (rows / scale).mean(axis=0)
    centres = cluster(rows / scale - offset, weights, M, rng)
    if len(X) > size:
        centres, _ = lloyd_step(X / scale - offset, np.ones(len(X)), centres)
    return _separate((centres + offset) * scale, rows, scale)


def _separate(Z: FloatArray, rows: FloatArray, scale: float) -> FloatArray:
    """Z with every point that is there twice replaced by the row that is furthest from all points."""
    _, first = np.unique(Z, axis=0, return_index=True)
    for m in np.setdiff1d(np.arange(len(Z)), first):
        others = np.delete(Z, m, axis=0)
        _, distances = nearest(rows / scale, others / scale)
        distances[[bool((others == row).all(axis=1).any()) for row in rows]] = -1.0
        Z[m] = rows[np.argmax(distances)]
    return Z


def _greedy(
    X: FloatArray, distinct: FloatArray, M: int, kernel: Kernel | None, rng: np.random.Generator
) -> FloatArray:
    rows, _ = _sample(X, distinct, M, max(FEW_ROWS, 2 * M), rng)
    rows = rows[rng.permutation(len(rows))]  # of equal variances the first counts
    if kernel is None:
        scale = max(np.abs(rows).max(), np.finfo(np.float64).tiny)
        spread = scale * np.sqrt(np.var(rows / scale, axis=0).sum())
        kernel = Matern52(lengthscales=spread if spread > 0.0 else 1.0)
    inputs = tf.constant(rows, default_float())

    column = tf.function(lambda x: kernel(inputs, x))  # eager, the bijectors take most of the time

    def values(of: Any) -> FloatArray:
        found = np.asarray(of, np.float64).reshape(-1)
        bad = np.flatnonzero(~np.isfinite(found))
        if len(bad):
            raise InvalidDataError(
                f"kernel must be finite at the rows of X; found {found[bad[0]]} at {rows[bad[0]]}. "
                "gpflow.utilities.print_summary(kernel) shows its parameters."
            )
        return found

    chosen = pivots(
        values(kernel(inputs, full_cov=False)),
        lambda i: values(column(inputs[i : i + 1])),
        M,
    )
    others = np.setdiff1d(np.arange(len(rows)), chosen)
    rest = rng.choice(others, M - len(chosen), replace=False)
    return rows[np.concatenate([chosen, rest])]
