"""The floor: one Cholesky factor and one triangular inverse of size n, as LAPACK computes them."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from scipy.linalg.lapack import dpotrf, dtrtri

REPEATS = 7
BUDGET = 1.0


def floor_of(num_data: int) -> Callable[[], float]:
    """A function that times one ``dpotrf`` and one ``dtrtri``, both in place."""
    A = np.random.default_rng(0).normal(size=(num_data, num_data))
    A = A @ A.T / num_data + np.eye(num_data)
    work = np.empty((num_data, num_data)).T

    def seconds() -> float:
        work[...] = A
        began = time.perf_counter()
        dpotrf(work, lower=0, overwrite_a=1, clean=0)
        dtrtri(work, lower=0, overwrite_c=1)
        return time.perf_counter() - began

    return seconds


def seconds(num_data: int) -> float:
    """The fastest of seven runs, or of as many as fit in a second."""
    run = floor_of(num_data)
    times: list[float] = []
    while len(times) < REPEATS or sum(times) < BUDGET:
        times.append(run())
    return min(times)
