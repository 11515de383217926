"""Predictions at Dask arrays: lazy, a chunk of rows at a time, by a model that travels once."""

from __future__ import annotations

import functools
import hashlib
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import gpflow
import numpy as np
import tensorflow as tf
from gpflow.models import GPModel

from ..errors import GPflowHybridError, InvalidDataError
from ..priors.protocol import Array
from .configuration import configured
from .shard import prepare_process
from .sources import aligned, check_chunk, with_equal_parts, with_own_keys
from .workers import require_dask


def predict_f(model: GPModel, Xnew: Any) -> tuple[Any, Any]:
    """Mean and variance of f at the rows of a Dask array, as Dask arrays ``[N, L]``.

    ``model.predict_f`` of every chunk. Nothing is computed before ``compute()``; the model is taken as it
    is now.

    :param model: any model with ``predict_f``.
    :param Xnew: a Dask array ``[N, D]`` or DataFrame.
    """
    mean, variance = _predicted(model, "predict_f", Xnew, 2)
    return mean, variance


def predict_y(model: GPModel, Xnew: Any) -> tuple[Any, Any]:
    """Mean and variance of new observations, ``[N, P]``; otherwise as :func:`predict_f`."""
    mean, variance = _predicted(model, "predict_y", Xnew, 2)
    return mean, variance


def predict_log_density(model: GPModel, data: tuple[Any, Any]) -> Any:
    """Log predictive density of every row of ``(X, Y)``, Dask arrays with equal chunks of rows, as a Dask
    array ``[N]``."""
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        raise InvalidDataError(f"data must be a pair (X, Y); found {type(data).__name__}.")
    require_dask()
    X, Y = with_equal_parts(*data)
    (found,) = _predicted(model, "predict_log_density", X, 1, _as_dask("Y", Y))
    return found


def _as_dask(name: str, value: Any) -> Any:
    import dask.array as da

    if hasattr(value, "to_dask_array"):
        value = value.to_dask_array()
    if not isinstance(value, da.Array) or value.ndim != 2:
        shape = f" of {value.ndim} dimensions" if isinstance(value, da.Array) else ""
        raise InvalidDataError(
            f"{name} must be a Dask array or DataFrame of two dimensions; found "
            f"{type(value).__name__}{shape}. For arrays in memory call the model's own method."
        )
    return with_own_keys(value.rechunk({1: -1}))


def _predicted(model: GPModel, method: str, X: Any, number: int, Y: Any = None) -> list[Any]:
    require_dask()
    import dask.array as da
    from dask.delayed import delayed

    if not isinstance(model, GPModel):
        raise InvalidDataError(f"model must be a GPflow model; found {type(model).__name__}.")
    X = _as_dask("Xnew" if Y is None else "X", X)
    if Y is not None:
        X, Y = aligned(X, Y)
    for (
        parameter
    ) in model.parameters:  # sites that follow the hyperparameters do so when they are read
        parameter.numpy()
    # With GPflow's configuration, whose jitter is part of a prediction.
    pickled = cloudpickle.dumps((model, gpflow.config.config()))
    token = hashlib.sha1(pickled).hexdigest()[:16]
    sent = delayed(pickled, name=f"model-{token}")
    blocks = [row[0] for row in X.to_delayed()]
    others = [None] * len(blocks) if Y is None else [row[0] for row in Y.to_delayed()]
    width = _width(model, method, X.shape[1]) if Y is None else None
    task = delayed(_predict, pure=False, nout=number)
    parts: list[list[Any]] = [[] for _ in range(number)]
    for i, (x, y, rows) in enumerate(zip(blocks, others, X.chunks[0], strict=True)):
        found = task(sent, token, method, i, x, y)
        shape = (rows,) if width is None else (rows, width)
        for each, part in zip(found, parts, strict=True):
            part.append(da.from_delayed(each, shape, np.float64))
    return [da.concatenate(part) if len(part) > 1 else part[0] for part in parts]


def _width(model: Any, method: str, num_columns: int) -> int:
    """How many numbers are predicted for a row; one row costs nothing."""
    mean, _ = getattr(model, method)(np.zeros((1, int(num_columns))))
    return int(mean.shape[-1])


@functools.lru_cache(maxsize=2)
def _kept_model(token: str) -> dict[str, Any]:
    return {}


def _predict(
    pickled: bytes, token: str, method: str, chunk: int, X: Array, Y: Array | None
) -> tuple[Any, ...]:
    kept = _kept_model(token)
    if "model" not in kept:
        prepare_process()
        kept["model"] = pickle.loads(pickled)
    model, config = kept["model"]
    predict: Callable[..., Any] = getattr(model, method)
    try:
        with configured(config):
            if Y is not None:
                check_chunk(len(X), len(Y))
                return (np.asarray(predict((X, Y))),)
            return tuple(tf.convert_to_tensor(x).numpy() for x in predict(X))
    except GPflowHybridError as error:
        raise type(error)(f"Chunk {chunk} of the rows, counted from its first: {error}") from None
