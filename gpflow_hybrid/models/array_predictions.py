"""Predictions of f on arrays alone, where the kernel is known there and no site is negative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from gpflow.functions import Zero

from .. import tuning
from ..array_parameters import value_of
from ..covariances import latent_kernels
from ..linalg import uses_lapack
from ..linalg.threads import host_arithmetic
from ..priors.stationary import is_stationary
from ..priors.stationary_cross import StationaryCross
from ..sites import SiteValues

Array = npt.NDArray[Any]


def array_predictions(
    model: Any, present_sites: Callable[[], SiteValues], Xnew: Array
) -> tuple[Array, Array] | None:
    """Mean and variance of f at new rows, ``[N, L]`` each; None where a part of it is not known on arrays,
    and where there is no prediction: ``predict_f`` says why."""
    X, kernels = model.data[0], latent_kernels(model.kernel)
    is_constant = isinstance(X, tf.Tensor) and X.dtype == tf.float64
    if not is_constant or len(X) > tuning.KEPT_DISTANCES or not uses_lapack(exportable=False):
        return None
    if type(model.mean_function) is not Zero or not all(is_stationary(k) for k in kernels):
        return None
    sites = SiteValues(*(x.numpy() for x in present_sites()))
    if (sites.lambda_2 < 0.0).any():
        return None
    inputs, L = X.numpy(), model.num_latent_gps
    crosses = [
        StationaryCross(k, value_of(k.variance), value_of(k.lengthscales), inputs) for k in kernels
    ]
    variance = np.array([cross.variance for cross in crosses])
    prior = model.host_prior()
    # Covariances with some rows at a time: memory does not grow with their number.
    size = max(1, tuning.PREDICTED_ELEMENTS // (L * len(inputs)))
    parts = []
    try:
        with host_arithmetic(len(inputs)):
            q = prior.posterior(sites)
            for rows in (Xnew[i : i + size] for i in range(0, len(Xnew), size)):
                cross = [c.evaluate(rows) for c in crosses]
                cross = cross * L if len(cross) == 1 else cross
                parts.append(q.at_new_rows(cross, np.broadcast_to(variance, (len(rows), L))))
    finally:
        prior.close()
    mean, variance = (np.concatenate(x) for x in zip(*parts, strict=True))
    if not (np.isfinite(mean).all() and np.isfinite(variance).all()):
        return None
    # What rounding has left of a large prior variance can be a little less than nothing.
    return mean, np.maximum(variance, 0.0)
