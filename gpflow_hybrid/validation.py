"""What a model's constructor refuses, before anything is computed, and in words."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from gpflow.base import RegressionData, TensorType
from gpflow.config import default_float
from gpflow.kernels import Kernel, MultioutputKernel
from gpflow.likelihoods import (
    Bernoulli,
    Beta,
    Exponential,
    Gamma,
    Gaussian,
    Likelihood,
    MultiLatentTFPConditional,
    Poisson,
    ScalarLikelihood,
    Softmax,
    StudentT,
    SwitchedLikelihood,
)
from gpflow.mean_functions import MeanFunction
from gpflow.models import GPModel
from gpflow.utilities import is_variable

from .errors import InvalidDataError
from .labels import check_labels
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


def prepare_data(data: Any, likelihood: Likelihood) -> RegressionData:
    """``(X, Y)`` as tensors (variables stay variables), refused where a likelihood cannot use them."""
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        shape = getattr(data, "shape", None)
        of_shape = "" if shape is None else f" of shape {tuple(shape)}"
        raise InvalidDataError(
            f"data must be a pair (X, Y); found {type(data).__name__}{of_shape}."
        )
    X = _to_tensor("X", data[0], to_float=True)
    Y = _to_tensor("Y", data[1], to_float=isinstance(likelihood, _FLOAT_LIKELIHOODS))
    for name, value in (("X", X), ("Y", Y)):
        _check_rank(name, value)
        if value.shape[1] is None:
            raise InvalidDataError(
                f"{name} must have a fixed number of columns; found shape {value.shape}. Only the "
                f"number of rows may vary: pass tf.Variable({name}, shape=[None, {name}.shape[1]])."
            )
        _check_columns(name, value)
    num_X, num_Y = int(tf.shape(X)[0]), int(tf.shape(Y)[0])
    if num_X != num_Y:
        raise InvalidDataError(
            f"X and Y must have the same number of rows; found {num_X} and {num_Y}."
        )
    if num_X == 0:
        raise InvalidDataError("X and Y must have at least one row; found none.")
    _check_finite("X", X)
    _check_finite("Y", Y)
    check_labels(np.asarray(tf.convert_to_tensor(Y)), likelihood)
    if isinstance(likelihood, Softmax) and Y.dtype.is_floating:
        if is_variable(Y):
            raise InvalidDataError(
                f"Y is a tf.Variable of {Y.dtype.name}; Softmax takes integer labels. Make it int64."
            )
        Y = tf.cast(Y, tf.int64)
    return X, Y


def numeric_matrix(name: str, value: Any) -> npt.NDArray[np.float64]:
    """A new array ``[N, D]`` of finite floats, whatever holds its numbers."""
    if tf.is_tensor(value) or is_variable(value):
        value = tf.convert_to_tensor(value).numpy()
    array = _to_array(name, value).astype(np.float64)
    _check_rank(name, array)
    _check_columns(name, array)
    if len(array) == 0:
        raise InvalidDataError(f"{name} must have at least one row; found none.")
    _check_finite(name, array)
    return array


def _check_rank(name: str, value: Any) -> None:
    if tf.TensorShape(value.shape).rank != 2:  # of a variable it may be unknown
        raise InvalidDataError(
            f"{name} must have two dimensions, [N, {'P' if name == 'Y' else 'D'}]; found shape "
            f"{value.shape}. Pass {name}.reshape(-1, 1) if it is one column."
        )


def _check_columns(name: str, value: Any) -> None:
    if value.shape[1] == 0:
        raise InvalidDataError(f"{name} must have at least one column; found none.")


def _check_dtype(name: str, value: Any) -> None:
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return
    dtype = tf.as_dtype(dtype)
    expected = tf.as_dtype(default_float())
    if dtype.is_floating and dtype != expected:
        raise InvalidDataError(
            f"{name} is {dtype.name}, but GPflow computes in {expected.name}. Pass "
            f"{name}.astype(np.{expected.name}), or set gpflow.config.set_default_float first."
        )
    if not (dtype.is_floating or dtype.is_integer or dtype.is_bool):
        raise InvalidDataError(f"{name} must be numeric; found {dtype.name}.")


def _to_array(name: str, value: Any) -> npt.NDArray[Any]:
    try:
        array = np.asarray(value)
    except ValueError as error:
        reason = str(error).rstrip(".")
        raise InvalidDataError(f"{name} must be a numeric array: {reason}.") from None
    if array.dtype.kind not in "fiub":
        raise InvalidDataError(f"{name} must be numeric; found dtype {array.dtype}.")
    return array


def _to_tensor(name: str, value: Any, to_float: bool) -> tf.Tensor:
    _check_dtype(name, value)
    if is_variable(value):
        if to_float and not value.dtype.is_floating:
            raise InvalidDataError(
                f"{name} is a tf.Variable of {value.dtype.name}; make it "
                f"{tf.as_dtype(default_float()).name}."
            )
        return value
    if not tf.is_tensor(value):
        value = _to_array(name, value)
        if value.dtype.kind == "f":
            value = value.astype(default_float())
    tensor = tf.convert_to_tensor(value)
    if (to_float and not tensor.dtype.is_floating) or tensor.dtype == tf.bool:
        return tf.cast(tensor, default_float())
    return tensor


def _check_finite(name: str, value: tf.Tensor) -> None:
    array = np.asarray(tf.convert_to_tensor(value))
    bad: Any = np.argwhere(~np.isfinite(array)) if array.dtype.kind == "f" else []
    if len(bad):
        row, column = bad[0]
        raise InvalidDataError(
            f"{name} must be finite; found {array[row, column]} at row {row}, column {column} "
            f"({len(bad)} such value{'s' if len(bad) > 1 else ''} in all). Remove or impute them."
        )


def count_latent_gps(
    kernel: Kernel, likelihood: Likelihood, data: RegressionData, num_latent_gps: int | None
) -> int:
    """L from the arguments that determine it, refused where they contradict each other."""
    sources = {}
    if num_latent_gps is not None:
        if not isinstance(num_latent_gps, numbers.Integral) or num_latent_gps < 1:
            raise InvalidDataError(
                f"num_latent_gps must be a positive integer; found {num_latent_gps!r}."
            )
        sources["num_latent_gps"] = int(num_latent_gps)
    if isinstance(kernel, MultioutputKernel):
        sources["kernel"] = int(kernel.num_latent_gps)
    num_columns = int(data[1].shape[1])
    if likelihood.latent_dim is not None:
        sources["likelihood"] = int(likelihood.latent_dim)
        observed = likelihood.observation_dim
        if observed is not None and observed != num_columns:
            raise InvalidDataError(
                f"Y must have {observed} column(s) for {type(likelihood).__name__}; found "
                f"{num_columns}."
            )
    elif isinstance(likelihood, ScalarLikelihood):
        sources["Y"] = num_columns - isinstance(likelihood, SwitchedLikelihood)
    if not sources:
        return int(GPModel.calc_num_latent_gps(kernel, likelihood, num_columns))
    if len(set(sources.values())) > 1:
        found = ", ".join(f"{name} implies {count}" for name, count in sources.items())
        raise InvalidDataError(
            f"The number of latent GPs is contradictory: {found}. Give the likelihood, the kernel "
            "and num_latent_gps the same number of latents."
        )
    return next(iter(sources.values()))


def is_integer(value: Any) -> bool:
    """Whether it is a whole number by its type; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether it is a real number by its type; True and False are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_count(value: Any, name: str) -> None:
    """Refuse what is not a positive integer."""
    if not is_integer(value) or value < 1:
        raise InvalidDataError(f"{name} must be a positive integer; found {value!r}.")


def check_positive(value: Any, name: str) -> None:
    """Refuse what is not a positive number."""
    if not is_number(value) or not 0.0 < float(value) < float("inf"):
        raise InvalidDataError(f"{name} must be a positive, finite number; found {value!r}.")


def check_step(lr: Any) -> Any:
    """A step size in (0, 1]: a number is checked here, a tensor when the graph runs."""
    if isinstance(lr, numbers.Real) or not tf.is_tensor(lr):
        if not is_number(lr) or not 0.0 < float(lr) <= 1.0:
            raise InvalidDataError(f"lr must be a number in (0, 1]; found {lr!r}.")
        return np.float64(lr)  # tf.cast of a Python float would pass through float32
    lr = tf.convert_to_tensor(lr)
    if tf.executing_eagerly():
        return check_step(float(lr))
    with tf.control_dependencies(
        [tf.debugging.Assert((lr > 0) & (lr <= 1), ["lr must be in (0, 1]; found", lr])]
    ):
        return tf.identity(lr)


def check_scalar(likelihood: Likelihood, model: str) -> None:
    """Refuse likelihoods that couple the latents of a datum, or are no likelihood at all."""
    if not isinstance(likelihood, ScalarLikelihood):
        raise InvalidDataError(
            f"likelihood must be a gpflow.likelihoods.ScalarLikelihood for {model}, one latent GP per "
            f"factor; found {type(likelihood).__name__}. Use CVIModel, which takes every likelihood."
        )


def check_mean_function(mean_function: MeanFunction, X: TensorType, num_latent_gps: int) -> None:
    """Refuse a mean function whose outputs are neither one for all latents nor one each."""
    columns = mean_function(tf.convert_to_tensor(X)[:1]).shape[-1]
    if columns not in (1, num_latent_gps):
        allowed = "1 column" if num_latent_gps == 1 else f"1 or {num_latent_gps} columns"
        raise InvalidDataError(
            f"mean_function must return {allowed}, one per latent GP; found {columns}."
        )
