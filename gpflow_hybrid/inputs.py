"""What a user passes for X and Y, as tensors: arrays, lists, tables, variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from gpflow.base import RegressionData
from gpflow.config import default_float
from gpflow.inducing_variables import InducingPoints, InducingVariables
from gpflow.likelihoods import (
    Bernoulli,
    Beta,
    Exponential,
    Gamma,
    Gaussian,
    Likelihood,
    MultiLatentTFPConditional,
    Poisson,
    Softmax,
    StudentT,
    SwitchedLikelihood,
)
from gpflow.utilities import is_variable

from .errors import InvalidDataError
from .labels import check_labels, has_density
from .likelihoods import ProbitBernoulli

# Likelihoods whose formulas multiply Y with floats: integer Y becomes float for them.
_FLOAT_LIKELIHOODS = (
    Gaussian,
    Bernoulli,
    ProbitBernoulli,
    Beta,
    Exponential,
    Gamma,
    Poisson,
    StudentT,
    SwitchedLikelihood,
    MultiLatentTFPConditional,
)


def inputs_of(value: Any, name: str = "X") -> tf.Tensor:
    """X as floats; a variable stays one."""
    return _to_tensor(name, value, to_float=True)


def observations_of(value: Any, likelihood: Likelihood) -> tf.Tensor:
    """Y in the type that its likelihood computes with; a variable stays one."""
    Y = _to_tensor("Y", value, to_float=isinstance(likelihood, _FLOAT_LIKELIHOODS))
    if isinstance(likelihood, Softmax) and Y.dtype.is_floating and not is_variable(Y):
        whole = tf.cast(Y, tf.int64)
        # What is no class number stays what it is, to be refused by name.
        return Y if _differs(whole, Y) else whole
    return Y


def _differs(whole: tf.Tensor, Y: tf.Tensor) -> bool:
    return bool(tf.executing_eagerly() and np.any(whole.numpy() != Y.numpy()))


def columns_of(inputs: Any) -> int | None:
    """Of a model's inputs, or of the points among its inducing variables, where they are known."""
    if not isinstance(inputs, InducingVariables):
        found: int | None = inputs.shape[-1]
        return found
    for part in (*inputs.submodules, inputs):
        if isinstance(part, InducingPoints):
            return int(part.Z.shape[1])
    return None


def new_inputs(value: Any, num_columns: int | None = None, name: str = "Xnew") -> tf.Tensor:
    """New inputs ``[batch..., N, D]``, whatever holds their numbers, of the columns of a model's data."""
    X = inputs_of(value, name)
    rank = tf.TensorShape(X.shape).rank
    if rank is not None and rank < 2:
        raise InvalidDataError(
            f"{name} must have the shape [N, D]; found shape {X.shape}. Pass {name}.reshape(-1, 1) if "
            "it is one column, [['name']] of a table; reshape(1, -1) if it is one row."
        )
    found = None if rank is None else X.shape[-1]
    if None not in (found, num_columns) and found != num_columns:
        raise InvalidDataError(
            f"{name} must have the {num_columns} column(s) of the model's data; found {found}."
        )
    if tf.executing_eagerly():
        check_finite(name, X)
    return X


def new_data(data: Any, likelihood: Likelihood, num_columns: int | None) -> RegressionData:
    """Test data, refused where the likelihood has no density for an observation."""
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        raise InvalidDataError(f"data must be a pair (X, Y); found {type(data).__name__}.")
    X = new_inputs(data[0], num_columns, "X")
    Y = observations_of(data[1], likelihood)
    rank = tf.TensorShape(Y.shape).rank
    if rank is not None and rank < 2:
        raise InvalidDataError(
            f"Y must have two dimensions, [N, P]; found shape {Y.shape}. Pass Y.reshape(-1, 1) if it "
            "is one column, [['name']] of a table."
        )
    num_X, num_Y = X.shape[-2], None if rank is None else Y.shape[-2]
    if None not in (num_X, num_Y) and num_X != num_Y:
        raise InvalidDataError(
            f"X and Y must have the same number of rows; found {num_X} and {num_Y}."
        )
    known = tf.convert_to_tensor(Y) if tf.executing_eagerly() else tf.get_static_value(Y)
    if known is None:  # inside a graph; XLA leaves the assertion out, and checks nothing
        message = (
            f"Y has a value that {type(likelihood).__name__} has no density for. Pass it outside of "
            "tf.function to see which."
        )
        tf.debugging.Assert(tf.reduce_all(has_density(Y, likelihood)), [message])
        return X, Y
    rows = np.asarray(known).reshape(-1, Y.shape[-1])
    check_finite("Y", rows)
    check_labels(rows, likelihood)
    return X, Y


def numeric_array(name: str, value: Any) -> npt.NDArray[Any]:
    """An array of numbers or truth values; what is missing in a table or a masked array is NaN."""
    if isinstance(value, np.ma.MaskedArray):
        value = np.ma.filled(value.astype(np.float64), np.nan)
    table = value
    _refuse_times(name, table)
    if hasattr(value, "to_numpy"):  # or a column of one, perhaps of types with missing values
        value = _from_table(value)
    try:
        array = np.asarray(value)
    except ValueError as error:
        reason = str(error).rstrip(".")
        raise InvalidDataError(f"{name} must be a numeric array: {reason}.") from None
    if array.dtype.kind not in "fiub":
        remedy = ""
        if name == "Y" and array.dtype.kind in "OSUT":
            remedy = " Number the classes: np.unique(Y, return_inverse=True)[1].reshape(-1, 1)."
        columns = _other_columns(table)
        if columns and not remedy:
            remedy = " Encode such columns, or leave them out."
        found = f"dtype {array.dtype}{columns}"
        raise InvalidDataError(f"{name} must be numeric; found {found}.{remedy}")
    return array


def _refuse_times(name: str, table: Any) -> None:
    """Columns that would become nanoseconds beside columns of numbers."""
    columns = _columns(table, lambda kind: getattr(kind, "kind", "O") in "mM")
    if columns:
        raise InvalidDataError(
            f"{name} must be numeric; found times{columns}. Turn them into numbers of a unit, or leave "
            "them out."
        )


def _other_columns(table: Any) -> str:
    """Which columns of a table hold no numbers, in words."""
    return _columns(table, lambda kind: getattr(kind, "kind", "O") not in "fiub")


def _columns(table: Any, is_meant: Callable[[Any], bool]) -> str:
    """Which columns of a table are of a kind that is meant, in words."""
    kinds: Any = getattr(table, "dtypes", None)
    if not hasattr(kinds, "items"):
        return ""
    found = [f"{str(name)!r} ({kind})" for name, kind in kinds.items() if is_meant(kind)]
    return (
        f" by the columns {', '.join(found[:3])}{', …' if len(found) > 3 else ''}" if found else ""
    )


def _from_table(table: Any) -> Any:
    array = table.to_numpy()
    if array.dtype.kind != "O":
        return array
    try:
        return table.to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError):  # text, or a library without these arguments
        return array


def check_finite(name: str, value: Any) -> None:
    """Refuse NaN and infinities, naming the first."""
    array = value if isinstance(value, np.ndarray) else np.asarray(tf.convert_to_tensor(value))
    bad: Any = np.argwhere(~np.isfinite(array)) if array.dtype.kind == "f" else []
    if len(bad):
        *_, row, column = bad[0]  # of a batch of inputs, its own
        raise InvalidDataError(
            f"{name} must be finite; found {array[tuple(bad[0])]} at row {row}, column {column} "
            f"({len(bad)} such value{'s' if len(bad) > 1 else ''} in all). Remove or impute them."
        )


def _to_tensor(name: str, value: Any, to_float: bool) -> tf.Tensor:
    if is_variable(value):
        _check_dtype(name, value.dtype)
        if to_float and not value.dtype.is_floating:
            raise InvalidDataError(
                f"{name} is a tf.Variable of {value.dtype.name}; make it "
                f"{tf.as_dtype(default_float()).name}."
            )
        return value
    if not tf.is_tensor(value):
        has_dtype = hasattr(value, "dtype")  # lists and tables have none that anybody chose
        value = numeric_array(name, value)
        if value.dtype.kind == "f" and not has_dtype:
            value = value.astype(default_float())
    _check_dtype(name, tf.as_dtype(value.dtype))
    tensor = tf.convert_to_tensor(value)
    if (to_float and not tensor.dtype.is_floating) or tensor.dtype == tf.bool:
        return tf.cast(tensor, default_float())
    return tensor


def _check_dtype(name: str, dtype: tf.DType) -> None:
    expected = tf.as_dtype(default_float())
    if dtype.is_floating and dtype != expected:
        raise InvalidDataError(
            f"{name} is {dtype.name}, but GPflow computes in {expected.name}. Pass "
            f"{name}.astype(np.{expected.name}), or set gpflow.config.set_default_float first."
        )
    if not (dtype.is_floating or dtype.is_integer or dtype.is_bool):
        raise InvalidDataError(f"{name} must be numeric; found {dtype.name}.")
