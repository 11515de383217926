"""What a sparse model refuses, before anything is computed, and in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from gpflow.inducing_variables import (
    InducingPoints,
    InducingVariables,
    MultioutputInducingVariables,
    SharedIndependentInducingVariables,
)
from gpflow.kernels import Kernel, MultioutputKernel
from gpflow.likelihoods import Likelihood
from gpflow.mean_functions import MeanFunction
from gpflow.models.util import InducingVariablesLike, inducingpoint_wrapper

from ..covariances import latent_kernels
from ..errors import InvalidDataError, in_short
from ..validation import check_count, check_mean_function


def prepare_inducing_variable(
    inducing_variable: InducingVariablesLike, kernel: Kernel
) -> InducingVariables:
    """GPflow's inducing variables from an array of points, refused where these cannot be used."""
    if not isinstance(inducing_variable, InducingVariables):
        Z = _points(inducing_variable)
        _check_points(Z)
        inducing_variable = inducingpoint_wrapper(Z)
    for part in (inducing_variable, *inducing_variable.submodules):
        if isinstance(part, InducingPoints):
            _check_points(part.Z.numpy())
    is_multioutput = isinstance(inducing_variable, MultioutputInducingVariables)
    if isinstance(kernel, MultioutputKernel) and not is_multioutput:
        return SharedIndependentInducingVariables(inducing_variable)
    return inducing_variable


def _points(Z: Any) -> Any:
    try:
        return np.array(Z, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidDataError(
            f"inducing_variable must be an array of points [M, D]: {str(error).rstrip('.')}."
        ) from None


def _check_points(Z: Any) -> None:
    if Z.ndim != 2 or 0 in Z.shape:
        raise InvalidDataError(
            f"inducing_variable must have the shape [M, D]; found {Z.shape}. "
            "gpflow_hybrid.inducing_points(X, M) chooses points."
        )
    bad = np.argwhere(~np.isfinite(Z))
    if len(bad):
        row, column = bad[0]
        raise InvalidDataError(
            f"inducing_variable must be finite; found {Z[row, column]} at row {row}, column {column}. "
            "gpflow_hybrid.inducing_points(X, M) chooses points."
        )
    order = np.lexsort(Z.T)
    same = np.flatnonzero((np.diff(Z[order], axis=0) == 0.0).all(axis=1))
    if len(same):
        i, j = sorted(order[same[0] : same[0] + 2])
        raise InvalidDataError(
            f"inducing_variable must have distinct points; found {in_short(Z[i])} at rows {i} and {j}. "
            "gpflow_hybrid.inducing_points(X, M) chooses distinct ones."
        )


def check_latents(kernel: Kernel, likelihood: Likelihood, num_latent_gps: int) -> None:
    """Refuse numbers of latent GPs that contradict each other."""
    check_count(num_latent_gps, "num_latent_gps")
    latent_kernels(kernel)
    implied = {}
    if isinstance(kernel, MultioutputKernel):
        implied["kernel"] = int(kernel.num_latent_gps)
    if likelihood.latent_dim is not None:
        implied["likelihood"] = int(likelihood.latent_dim)
    for name, count in implied.items():
        if count != num_latent_gps:
            raise InvalidDataError(
                f"num_latent_gps must be {count}, as {name} implies; found {num_latent_gps}. Pass "
                f"num_latent_gps={count}."
            )


def check_mean(
    mean_function: MeanFunction, inducing_variable: InducingVariables, num_latent_gps: int
) -> None:
    """Refuse a mean function with a wrong number of outputs, seen at an inducing point."""
    for part in (inducing_variable, *inducing_variable.submodules):
        if isinstance(part, InducingPoints):
            check_mean_function(mean_function, part.Z, num_latent_gps)


def check_rows(num_rows: int, num_data: int | None, *, all_of_them: bool = False) -> None:
    """Refuse more rows than there are data, or fewer where all are wanted."""
    if num_data is None:
        return
    if num_rows > num_data:
        raise InvalidDataError(
            f"data must have at most num_data = {num_data} rows; found {num_rows}. Build the model with "
            "num_data=len(X), or without it if training sees all data at once."
        )
    if all_of_them and num_rows < num_data:
        raise InvalidDataError(
            f"data must be all {num_data} rows (num_data); found {num_rows}. For a batch use "
            "model.natgrad_step(batch)."
        )


def check_enough(num_rows: int, num_inducing: int) -> None:
    """Refuse more inducing points than there are data."""
    if num_inducing > num_rows:
        raise InvalidDataError(
            f"inducing_variable must have at most as many points as there are data ({num_rows}); found "
            f"{num_inducing}. Use fewer, gpflow_hybrid.inducing_points(X, M), or CVIModel for few data; "
            "for a batch build the model with num_data."
        )


def check_width(num_columns: int, inducing_variable: InducingVariables) -> None:
    """Refuse inputs that have not as many columns as the inducing points."""
    for part in (inducing_variable, *inducing_variable.submodules):
        if isinstance(part, InducingPoints) and part.Z.shape[1] != num_columns:
            raise InvalidDataError(
                f"X must have {part.Z.shape[1]} column(s), as the inducing points; found {num_columns}."
            )


def check_data_for(model: Any, data: Any) -> None:
    """Refuse to do without data of a sparse model, and data of one that has its own."""
    is_sparse = not hasattr(model, "data")
    if is_sparse and data is None:
        raise InvalidDataError(
            f"data must be given for {type(model).__name__}, which has none of its own; found None. Pass "
            "data=(X, Y)."
        )
    if not is_sparse and data is not None:
        raise InvalidDataError(
            f"data must be left out for {type(model).__name__}, which has its own; found "
            f"{type(data).__name__}. Build the model with other data to use those."
        )


def is_iterator(data: Any) -> bool:
    """Whether it gives a batch at a time."""
    return isinstance(data, Iterator) or isinstance(data, tf.data.Iterator)


EXHAUSTED = (
    "The iterator of batches is exhausted. Repeat the data: "
    "iter(dataset.repeat().shuffle(buffer).batch(size))."
)


def next_batch(model: Any, batches: Any, compile: bool) -> Callable[[], tf.Tensor]:
    """The training loss of one batch after the other."""
    if isinstance(batches, tf.data.Iterator):

        def draw() -> Any:
            found = batches.get_next_as_optional()
            if tf.executing_eagerly():
                if not found.has_value():
                    raise InvalidDataError(EXHAUSTED)
                return found.get_value()
            check = tf.debugging.Assert(found.has_value(), [EXHAUSTED])
            with tf.control_dependencies([check]):
                return found.get_value()

        def closure() -> tf.Tensor:
            return model.training_loss(draw())

        return tf.function(closure, autograph=False) if compile else closure
    if compile:
        raise InvalidDataError(
            "data must be an iterator over a tf.data.Dataset for a compiled closure; found "
            f"{type(batches).__name__}. Pass iter(tf.data.Dataset.from_tensor_slices((X, Y)).repeat()"
            ".batch(size)), or compile=False."
        )

    def eager_closure() -> tf.Tensor:
        try:
            batch = next(batches)
        except StopIteration:
            raise InvalidDataError(EXHAUSTED) from None
        return model.training_loss(batch)

    return eager_closure
