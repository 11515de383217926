"""A first guess of how an objective curves in the logarithms of a model's parameters.

L-BFGS knows nothing of the curvature at its start, and steps by the gradient itself: hundreds of nats a
factor e, to where no datum tells of another. An objective is a sum over data, and so is its curvature; per
datum it is much the same from set to set. It is least along a ridge, on which a wider prior varies more
slowly: what data tell of is ``σ²/ℓ^ρ``. In

    log ℓ,     log σ² − ρ log ℓ

the guess is diagonal. It changes the way to an optimum, not the optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gpflow
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from gpflow.base import Parameter
from gpflow.models import GPModel
from scipy.optimize import LbfgsInvHessProduct

Array = npt.NDArray[np.float64]

IN_LENGTHSCALES = 0.07
"""Nats a datum of the curvature in the logarithm of all lengthscales of a kernel together, ``log σ² − ρ log
ℓ`` being kept;"""
IN_OTHERS = 0.015
"""in that of a variance, and in any other parameter;"""
RIDGE = 1.3
"""and ρ: near the medians of nine models of five data sets (``python -m benchmarks.curvatures``)."""

MOST_PARAMETERS = 500
"""Of which the curvature is kept as a matrix."""


def units_of(model: GPModel, variables: Sequence[tf.Variable], num_data: int) -> Array:
    """``C`` in ``t = Cz``, so that the guess in z is one: of the variables' numbers t in a row, which are
    logarithms where a parameter is positive."""
    sizes = np.cumsum([0, *(int(np.prod(v.shape)) for v in variables)])
    places = {id(v): np.arange(a, b) for v, a, b in zip(variables, sizes, sizes[1:], strict=False)}
    C = np.eye(sizes[-1]) / np.sqrt(IN_OTHERS * num_data)
    for part in (model.kernel, *model.kernel.submodules):
        if not isinstance(part, gpflow.kernels.Stationary):
            continue
        scales, variance = (_place(p, places) for p in (part.lengthscales, part.variance))
        C[scales, scales] = np.sqrt(max(len(scales), 1) / (IN_LENGTHSCALES * num_data))
        for i in scales:
            C[variance, i] = RIDGE * C[i, i] / len(scales)  # of their geometric mean
    return C


def inverse_curvature(found: LbfgsInvHessProduct) -> Array | None:
    """What L-BFGS has learnt of it, as a matrix, from steps s and changes y of the gradient:
    ``H ← (I − syᵀ/sᵀy) H (I − ysᵀ/sᵀy) + ssᵀ/sᵀy`` from ``H = (sᵀy/yᵀy) I``, as itself has it. None
    without a step, or where it is large.

    :param found: with all pairs: of more than ``maxcor`` the last are in the places of the first.
    """
    steps, changes = found.sk, found.yk
    size = steps.shape[1]
    if len(steps) == 0 or size > MOST_PARAMETERS:
        return None
    s, y = steps[-1], changes[-1]
    H = np.eye(size) * (s @ y) / (y @ y)
    for s, y in zip(steps, changes, strict=True):
        V = np.eye(size) - np.outer(s, y) / (s @ y)
        H = V @ H @ V.T + np.outer(s, s) / (s @ y)
    return H


def _place(parameter: Any, places: dict[int, Any]) -> Any:
    """Where a parameter is in a row; nowhere if it is not trained."""
    if not isinstance(parameter, Parameter):
        return np.arange(0)
    return places.get(id(parameter.unconstrained_variable), np.arange(0))
