"""What a model's constructor refuses, before anything is computed, and in words."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from gpflow.base import AnyNDArray, RegressionData, TensorType
from gpflow.config import default_float
from gpflow.kernels import Kernel, MultioutputKernel
from gpflow.likelihoods import (
    Bernoulli,
    Beta,
    Exponential,
    Gamma,
    Gaussian,
    Likelihood,
    MultiClass,
    MultiLatentTFPConditional,
    Ordinal,
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
        raise InvalidDataError(f"data must be a pair (X, Y); found {_describe(data)}.")
    X, Y = data
    _check_floats("X", X)
    _check_floats("Y", Y)
    X = _to_tensor("X", X, to_float=True)
    Y = _to_tensor("Y", Y, to_float=isinstance(likelihood, _FLOAT_LIKELIHOODS))
    for name, value in (("X", X), ("Y", Y)):
        if value.shape.rank != 2:
            raise InvalidDataError(
                f"{name} must have two dimensions, [N, {'D' if name == 'X' else 'P'}]; found shape "
                f"{value.shape}. Pass {name}.reshape(-1, 1) if it is one column."
            )
        if value.shape[1] is None:
            raise InvalidDataError(
                f"{name} must have a fixed number of columns; found shape {value.shape}. Only the "
                f"number of rows may vary: pass tf.Variable({name}, shape=[None, {name}.shape[1]])."
            )
        if value.shape[1] == 0:
            raise InvalidDataError(f"{name} must have at least one column; found none.")
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


def _describe(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ + ("" if shape is None else f" of shape {tuple(shape)}")


def _check_floats(name: str, value: Any) -> None:
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return
    dtype = tf.as_dtype(dtype) if not isinstance(dtype, tf.DType) else dtype
    expected = tf.as_dtype(default_float())
    if dtype.is_floating and dtype != expected:
        raise InvalidDataError(
            f"{name} is {dtype.name}, but GPflow computes in {expected.name}. Pass "
            f"{name}.astype(np.{expected.name}), or set gpflow.config.set_default_float first."
        )
    if not (dtype.is_floating or dtype.is_integer or dtype.is_bool):
        raise InvalidDataError(f"{name} must be numeric; found {dtype.name}.")


def _to_tensor(name: str, value: Any, to_float: bool) -> tf.Tensor:
    if is_variable(value):
        if to_float and not value.dtype.is_floating:
            raise InvalidDataError(
                f"{name} is a tf.Variable of {value.dtype.name}; make it "
                f"{tf.as_dtype(default_float()).name}."
            )
        return value
    if not tf.is_tensor(value):
        try:
            value = np.asarray(value)
        except ValueError as error:
            reason = str(error).rstrip(".")
            raise InvalidDataError(f"{name} must be a numeric array: {reason}.") from None
        if value.dtype.kind not in "fiub":
            raise InvalidDataError(f"{name} must be numeric; found dtype {value.dtype}.")
        if value.dtype.kind == "f":
            value = value.astype(default_float())
    tensor = tf.convert_to_tensor(value)
    if to_float and not tensor.dtype.is_floating:
        tensor = tf.cast(tensor, default_float())
    elif tensor.dtype == tf.bool:
        tensor = tf.cast(tensor, default_float())
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


def check_labels(Y: AnyNDArray, likelihood: Likelihood, rows: AnyNDArray | None = None) -> None:
    """Refuse observations outside the likelihood's support, naming one and the remedy.

    :param rows: the rows of the data that Y holds; all by default.
    """
    rows = np.arange(len(Y)) if rows is None else rows
    if len(Y) == 0:
        return
    if isinstance(likelihood, SwitchedLikelihood):
        _check_switched(Y, likelihood)
        return
    for kind, test, support in _SUPPORTS:
        if isinstance(likelihood, kind):
            _require(Y, rows, test(Y), likelihood, *support(Y, likelihood))
            return
    if isinstance(likelihood, (MultiClass, Softmax, Ordinal)):
        _check_classes(Y, rows, likelihood)


def _require(
    Y: AnyNDArray,
    rows: AnyNDArray,
    ok: AnyNDArray,
    likelihood: Likelihood,
    support: str,
    remedy: str,
) -> None:
    if not ok.all():
        row, column = np.argwhere(~ok)[0]
        raise InvalidDataError(
            f"Y must be {support} for {type(likelihood).__name__}; found {Y[row, column]:g} at row "
            f"{rows[row]}. {remedy}"
        )


def _binary_support(Y: AnyNDArray, likelihood: Likelihood) -> tuple[str, str]:
    values = set(np.unique(Y).tolist())
    if values <= {-1, 1}:
        remedy = "Pass (Y + 1) / 2."
    elif values <= {1, 2}:
        remedy = "Pass Y - 1."
    else:
        remedy = "Recode the two classes as 0 and 1."
    return "0 or 1", remedy


_Test = Callable[[AnyNDArray], AnyNDArray]
_Support = Callable[[AnyNDArray, Likelihood], tuple[str, str]]
_SUPPORTS: tuple[tuple[Any, _Test, _Support], ...] = (
    ((Bernoulli, ProbitBernoulli), lambda Y: (Y == 0) | (Y == 1), _binary_support),
    (
        (Poisson,),
        lambda Y: (Y >= 0) & (Y == np.round(Y)),
        lambda Y, _: (
            "a count (0, 1, 2, …)",
            "Pass counts; model rates or scores with another likelihood.",
        ),
    ),
    (
        (Beta,),
        lambda Y: (Y > 0) & (Y < 1),
        lambda Y, _: (
            "strictly between 0 and 1",
            "Rescale Y, or move exact zeros and ones inside the interval.",
        ),
    ),
    (
        (Gamma,),
        lambda Y: Y > 0,
        lambda Y, _: ("positive", "Remove or shift values that are not."),
    ),
    (
        (Exponential,),
        lambda Y: Y >= 0,
        lambda Y, _: ("non-negative", "Remove or shift values that are not."),
    ),
)


def _check_classes(Y: AnyNDArray, rows: AnyNDArray, likelihood: Likelihood) -> None:
    num = likelihood.num_bins if isinstance(likelihood, Ordinal) else likelihood.num_classes
    if Y.shape[1] != 1 and not isinstance(likelihood, Ordinal):
        raise InvalidDataError(
            f"Y must have one column of class numbers for {type(likelihood).__name__}; found "
            f"{Y.shape[1]} columns. Pass Y.argmax(1)[:, None] if it is one-hot."
        )
    ok = (Y >= 0) & (Y < num) & (Y == np.round(Y))
    remedy = "Pass Y - 1." if Y.min() == 1 and Y.max() == num else "Number the classes from 0."
    _require(Y, rows, ok, likelihood, f"a class number from 0 to {num - 1}", remedy)


def _check_switched(Y: AnyNDArray, likelihood: SwitchedLikelihood) -> None:
    num = len(likelihood.likelihoods)
    if Y.shape[1] < 2:
        raise InvalidDataError(
            "Y must have a last column that selects the likelihood for SwitchedLikelihood; found "
            f"{Y.shape[1]} column. Append the index of each row's likelihood."
        )
    index = Y[:, -1:]
    ok = (index >= 0) & (index < num) & (index == np.round(index))
    _require(
        index,
        np.arange(len(index)),
        ok,
        likelihood,
        f"an index from 0 to {num - 1} in its last column",
        "It selects each row's likelihood.",
    )
    for i, part in enumerate(likelihood.likelihoods):
        rows = np.flatnonzero(index[:, 0] == i)
        check_labels(Y[rows, :-1], part, rows)


def count_latent_gps(
    kernel: Kernel,
    likelihood: Likelihood,
    data: RegressionData,
    num_latent_gps: int | None,
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


def check_count(value: Any, name: str) -> None:
    """Refuse what is not a positive integer."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise InvalidDataError(f"{name} must be a positive integer; found {value!r}.")


def check_positive(value: Any, name: str) -> None:
    """Refuse what is not a positive number."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not 0.0 < float(value) < float("inf"):
        raise InvalidDataError(f"{name} must be a positive, finite number; found {value!r}.")


def check_step(lr: Any) -> Any:
    """A step size in (0, 1]: a number is checked here, a tensor when the graph runs."""
    if isinstance(lr, numbers.Real) or not tf.is_tensor(lr):
        if not isinstance(lr, numbers.Real) or isinstance(lr, bool) or not 0.0 < float(lr) <= 1.0:
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
