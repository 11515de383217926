"""Pivots of a partial Cholesky factor of a matrix that is never formed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

SMALLEST_VARIANCE = 1e-10
"""Part of the largest variance below which a conditional variance is rounding error."""


def pivots(variances: Array, column: Callable[[int], Array], num: int) -> Array:
    """Indices of rows, each that of the largest conditional variance given those before it.

        i = argmax d,     c = (K[:, i] − Cᵀ C[:, i]) / √dᵢ,     d ← d − c²

    with the rows c of C ``[num, N]`` and d = diag K at first. Ends before ``num`` where all that is left
    of d is rounding error.

    :param column: ``i → K[:, i]``.
    """
    d = np.array(variances)
    floor = SMALLEST_VARIANCE * d.max()
    C = np.empty((num, len(d)))
    chosen: list[int] = []
    for m in range(num):
        i = int(np.argmax(d))
        if not d[i] > floor:
            break
        C[m] = (column(i) - C[:m].T @ C[:m, i]) / np.sqrt(d[i])
        d -= C[m] ** 2
        d[i] = -np.inf
        chosen.append(i)
    return np.array(chosen, np.intp)
