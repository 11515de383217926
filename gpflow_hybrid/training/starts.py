"""Where an optimiser starts: at the scale of the data, and elsewhere."""

from __future__ import annotations

from typing import Any

import gpflow
import numpy as np
import numpy.typing as npt
import tensorflow as tf
import tensorflow_probability as tfp
from gpflow.base import Parameter
from gpflow.likelihoods import Likelihood
from gpflow.models import GPModel
from scipy.spatial.distance import pdist

FloatArray = npt.NDArray[np.float64]

MAX_ROWS = 1000
"""Rows whose distances are looked at, evenly spread: enough for a median."""

SPREAD = 1.0
"""Standard deviation of the logarithm by which positive parameters of another start differ."""


def start_from_data(model: GPModel, X: FloatArray, Y: FloatArray) -> None:
    """Set what is trainable of stationary kernels to the scale of the data.

    One lengthscale is the median distance between two inputs; one for each dimension is that dimension's
    median distance times √D, so that the median of scaled distances is about one either way. Variances are
    one, or that of Y where the likelihood is a noise around f, whose own variance is then a tenth of it.
    """
    noise = model.likelihood
    is_noise = is_noise_around_f(noise)
    spread = float(np.var(Y)) if is_noise and np.var(Y) > 0.0 else 1.0
    for part in _parts(model.kernel):
        if isinstance(part, gpflow.kernels.Stationary):
            columns = np.asarray(part.slice(X, None)[0], np.float64)
            rank = np.ndim(part.lengthscales.numpy())
            _assign(part.lengthscales, first_lengthscales(columns, rank))
            _assign(part.variance, spread)
    if is_noise:
        for name, value in (("variance", 0.1 * spread), ("scale", np.sqrt(0.1 * spread))):
            _assign(getattr(noise, name, None), value)


def is_noise_around_f(likelihood: Likelihood) -> bool:
    """Whether y is f with a noise of constant width, in the units of y."""
    return isinstance(likelihood, (gpflow.likelihoods.Gaussian, gpflow.likelihoods.StudentT))


def first_lengthscales(X: FloatArray, rank: int) -> Any:
    """:func:`lengthscales` of rows evenly spread."""
    return lengthscales(X[np.linspace(0, len(X) - 1, min(len(X), MAX_ROWS)).astype(int)], rank)


def lengthscales(X: FloatArray, rank: int) -> Any:
    """The scale of inputs ``[N, D]``: one for all (rank 0) or one for each dimension."""
    if rank == 0:
        return _scale(pdist(X)) if len(X) > 1 else 1.0
    found = [_scale(pdist(column[:, None])) if len(X) > 1 else 1.0 for column in X.T]
    return np.sqrt(X.shape[1]) * np.asarray(found)


def _scale(distances: FloatArray) -> float:
    """Their median; their mean where most rows are equal, one where all are."""
    for value in (np.median(distances), np.mean(distances)):
        if np.isfinite(value) and value > 0.0:
            return float(value)
    return 1.0


def another_start(model: GPModel, rng: np.random.Generator) -> None:
    """Multiply every trainable, positive parameter of kernel and likelihood by ``exp N(0, 1)``."""
    for part in (model.kernel, model.likelihood):
        for parameter in part.trainable_parameters:
            transform: Any = parameter.transform
            if is_positive(transform):
                value = parameter.numpy()
                # Where GPflow keeps a variance above a small number, what is above it.
                lowest = transform.forward(np.asarray(-1e6, value.dtype)).numpy()
                above = np.maximum(value - lowest, np.finfo(value.dtype).tiny)
                factor = np.exp(SPREAD * rng.normal(size=np.shape(value)))
                _assign(parameter, lowest + above * factor)


def is_positive(transform: Any) -> bool:
    """Whether a bijector leads to the positive numbers, or those above a small one, elementwise."""
    kinds = (tfp.bijectors.Softplus, tfp.bijectors.Exp)
    if isinstance(transform, tfp.bijectors.Chain):
        *others, last = transform.bijectors
        return isinstance(last, kinds) and all(isinstance(x, tfp.bijectors.Shift) for x in others)
    return isinstance(transform, kinds)


def _parts(kernel: Any) -> list[Any]:
    return [kernel, *kernel.submodules]


def _assign(parameter: Any, value: Any) -> None:
    """A trainable parameter, of its own shape."""
    if isinstance(parameter, Parameter) and parameter.trainable:
        parameter.assign(tf.broadcast_to(tf.cast(value, parameter.dtype), parameter.shape))
