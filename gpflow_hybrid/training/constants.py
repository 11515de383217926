"""What a constant explains: the evidence that data with noise around f have to beat."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt
import scipy.stats
from gpflow.base import Parameter
from gpflow.likelihoods import StudentT
from gpflow.models import GPModel

from .starts import is_noise_around_f

Array = npt.NDArray[np.float64]

NUM_ITERATIONS = 100
"""Of the location and scale of a Student-t distribution: linear convergence, fast unless df is tiny."""


def evidence_of_constant(model: GPModel, X: Array, Y: Array, num_rows: int) -> float:
    """The largest ``log ∫ N(c; 0, σ²) Πₙ p(yₙ | m(xₙ) + c) dc`` over σ and the noise, by Laplace's method.

    It is what a stationary kernel attains as its lengthscales go to infinity. The noise is the model's own
    if that is held.

    :param num_rows: that X and Y stand for.
    :return: NaN where the likelihood is no noise around f, and of residuals that are all equal.
    """
    likelihood = cast(Any, model.likelihood)
    if not is_noise_around_f(likelihood) or len(X) < 2:
        return np.nan
    residuals = np.asarray(Y - model.mean_function(X).numpy(), np.float64)
    df = float(np.asarray(likelihood.df)) if isinstance(likelihood, StudentT) else np.inf
    c, scale = location_and_scale(residuals, df)
    if not scale > 0.0:
        return np.nan
    held = _held_scale(likelihood)
    scale = scale if held is None else held
    densities = scipy.stats.t.logpdf((residuals - c) / scale, df) - np.log(scale)
    # Minus the curvature of Σ log p in c, as expected.
    shrinkage = 1.0 if np.isinf(df) else (df + 1.0) / (df + 3.0)
    precision = num_rows * shrinkage / scale**2
    variance = max(float(np.mean(c**2)) - 1.0 / precision, 0.0)
    occam = np.log1p(variance * precision) + c**2 / (variance + 1.0 / precision)
    return float(num_rows / len(X) * np.sum(densities) - 0.5 * np.sum(occam))


def location_and_scale(values: Array, df: float) -> tuple[Array, float]:
    """Of Student-t distributions with ``df`` degrees of freedom, by expectation maximisation: a location
    for every column ``[P]`` of ``[N, P]``, and one scale."""
    c = np.median(values, axis=0)
    scale = float(np.sqrt(np.mean((values - c) ** 2)))
    for _ in range(NUM_ITERATIONS if scale > 0.0 else 0):
        squares = ((values - c) / scale) ** 2
        weights = np.ones_like(values) if np.isinf(df) else (df + 1.0) / (df + squares)
        c = np.sum(weights * values, axis=0) / np.sum(weights, axis=0)
        scale = float(np.sqrt(np.mean(weights * (values - c) ** 2)))
    return c, scale


def _held_scale(likelihood: Any) -> float | None:
    """Of the noise, if it is one number that is not trained."""
    for name, power in (("scale", 1.0), ("variance", 0.5)):
        parameter = getattr(likelihood, name, None)
        if isinstance(parameter, Parameter) and not parameter.trainable:
            return float(np.max(parameter.numpy())) ** power
    return None
