"""What is refused in words: by a model's constructor before anything is computed, and of results."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from gpflow.base import RegressionData, TensorType
from gpflow.kernels import Kernel, MultioutputKernel
from gpflow.likelihoods import (
    Likelihood,
    ScalarLikelihood,
    Softmax,
    SwitchedLikelihood,
)
from gpflow.mean_functions import MeanFunction, Zero
from gpflow.models import GPModel
from gpflow.utilities import is_variable

from .errors import InvalidDataError, NonFiniteError
from .inputs import check_finite, inputs_of, numeric_array, observations_of
from .labels import check_labels


def prepare_data(data: Any, likelihood: Likelihood) -> RegressionData:
    """``(X, Y)`` as tensors (variables stay variables), refused where a likelihood cannot use them."""
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        shape = getattr(data, "shape", None)
        of_shape = "" if shape is None else f" of shape {tuple(shape)}"
        raise InvalidDataError(
            f"data must be a pair (X, Y); found {type(data).__name__}{of_shape}."
        )
    X, Y = inputs_of(data[0]), observations_of(data[1], likelihood)
    for name, value in (("X", X), ("Y", Y)):
        _check_rank(name, value)
        if value.shape[1] is None:
            raise InvalidDataError(
                f"{name} must have a fixed number of columns; found shape {value.shape}. Only the "
                f"number of rows may vary: pass tf.Variable({name}, shape=[None, {name}.shape[1]])."
            )
        _check_columns(name, value)
    num_X, num_Y = count_rows(X), count_rows(Y)
    if num_X != num_Y:
        raise InvalidDataError(
            f"X and Y must have the same number of rows; found {num_X} and {num_Y}."
        )
    if num_X == 0:
        raise InvalidDataError("X and Y must have at least one row; found none.")
    check_finite("X", X)
    check_finite("Y", Y)
    check_labels(np.asarray(tf.convert_to_tensor(Y)), likelihood)
    if isinstance(likelihood, Softmax) and Y.dtype.is_floating and is_variable(Y):
        raise InvalidDataError(
            f"Y is a tf.Variable of {Y.dtype.name}; Softmax takes integer labels. Make it int64."
        )
    return X, Y


def numeric_matrix(name: str, value: Any) -> npt.NDArray[np.float64]:
    """A new array ``[N, D]`` of finite floats, whatever holds its numbers."""
    if tf.is_tensor(value) or is_variable(value):
        value = tf.convert_to_tensor(value).numpy()
    array = numeric_array(name, value).astype(np.float64)
    _check_rank(name, array)
    _check_columns(name, array)
    if len(array) == 0:
        raise InvalidDataError(f"{name} must have at least one row; found none.")
    check_finite(name, array)
    return array


def _check_rank(name: str, value: Any) -> None:
    if tf.TensorShape(value.shape).rank != 2:  # of a variable it may be unknown
        raise InvalidDataError(
            f"{name} must have two dimensions, [N, {'P' if name == 'Y' else 'D'}]; found shape "
            f"{value.shape}. Pass {name}.reshape(-1, 1) if it is one column, [['name']] of a table."
        )


def _check_columns(name: str, value: Any) -> None:
    if value.shape[1] == 0:
        raise InvalidDataError(f"{name} must have at least one column; found none.")


def count_rows(X: TensorType) -> int:
    """Of data that are known, also in a variable of any number of rows."""
    rows = X.shape[0]
    return int(tf.shape(X)[0] if rows is None else rows)


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


def check_outputs(num_outputs: int, likelihood: Likelihood, num_latent_gps: int) -> None:
    """Refuse observations that have not as many columns as the likelihood and the latents ask for."""
    expected, reason = None, type(likelihood).__name__
    if likelihood.latent_dim is not None:
        expected = likelihood.observation_dim
    elif isinstance(likelihood, ScalarLikelihood):
        expected = num_latent_gps + isinstance(likelihood, SwitchedLikelihood)
        reason += f" and num_latent_gps={num_latent_gps}"
    if expected is not None and expected != num_outputs:
        raise InvalidDataError(
            f"Y must have {expected} column(s) for {reason}; found {num_outputs}."
        )


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


def check_parts(kernel: Any, likelihood: Any, mean_function: Any = None) -> None:
    """Refuse classes, and other things, in the place of a kernel, a likelihood or a mean function."""
    kinds = {"kernel": Kernel, "likelihood": Likelihood, "mean_function": object}
    for (name, kind), part in zip(kinds.items(), (kernel, likelihood, mean_function), strict=True):
        if isinstance(part, type):
            raise InvalidDataError(
                f"{name} must be an object; found the class {part.__name__}. Call it: {part.__name__}()."
            )
        if not isinstance(part, kind):
            raise InvalidDataError(
                f"{name} must be one of GPflow's, or a subclass of {kind.__name__}; found "
                f"{type(part).__name__}."
            )


def check_scalar(likelihood: Likelihood, model: str) -> None:
    """Refuse likelihoods that couple the latents of a datum, or are no likelihood at all."""
    if not isinstance(likelihood, ScalarLikelihood):
        raise InvalidDataError(
            f"likelihood must be a gpflow.likelihoods.ScalarLikelihood for {model}, one latent GP per "
            f"factor; found {type(likelihood).__name__}. Use CVIModel, which takes every likelihood."
        )


def check_mean_function(mean_function: MeanFunction, X: TensorType, num_latent_gps: int) -> None:
    """Refuse a mean function whose outputs are neither one for all latents nor one each."""
    if type(mean_function) is Zero:
        columns = mean_function.output_dim
    else:
        columns = mean_function(tf.convert_to_tensor(X)[:1]).shape[-1]
    if columns not in (1, num_latent_gps):
        allowed = "1 column" if num_latent_gps == 1 else f"1 or {num_latent_gps} columns"
        raise InvalidDataError(
            f"mean_function must return {allowed}, one per latent GP; found {columns}."
        )


def require_finite(what: str, *tensors: Any) -> None:
    """Refuse a result that is not finite, outside of graphs, and name the row where it is not."""
    if not tf.executing_eagerly():
        return
    for tensor in tensors:
        finite = np.isfinite(tensor)
        if not finite.all():
            where = f", first at row {int(np.argwhere(~finite)[0][0])}" if finite.ndim else ""
            raise NonFiniteError(
                f"{what} is not finite{where}: a number has overflowed. Rescale the data, or use a smaller "
                "kernel variance."
            )
