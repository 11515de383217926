"""Two ways to the same numbers: LAPACK through SciPy, or TensorFlow alone.

On a CPU, SciPy's LAPACK and BLAS are several times as fast as TensorFlow's own linear algebra, and are
called from inside its graphs. Such a graph runs in this process only: on a GPU, under XLA and in a
SavedModel the pure TensorFlow way is taken.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util
from tensorflow.python.saved_model import save_context

from ..errors import InvalidDataError
from . import factors, lapack
from .factors import LatentPosterior

CHOICES = ("auto", "lapack", "tensorflow")
VARIABLE = "GPFLOW_HYBRID_LINEAR_ALGEBRA"

_chosen: str | None = None


class Evaluated(NamedTuple):
    """The posterior at some ``(K, λ)`` by LAPACK, and ``L⁻¹``, from which its covariance can be had."""

    posterior: LatentPosterior
    chol_inverse: tf.Tensor  # [L, N, N]

    def covariance(self, K: tf.Tensor, lambda_2: tf.Tensor) -> tf.Tensor:
        """``Σ``, ``[L, N, N]``."""

        def on_host(K: Any, *others: Any) -> tuple[Any]:
            parts = zip(*others, strict=True)
            found = [lapack.covariance(_latent(K, i), *part) for i, part in enumerate(parts)]
            return (_stack(found),)

        arguments = [K, lambda_2, self.chol_inverse, self.posterior.variance]
        (Sigma,) = call_on_host(on_host, arguments, [_matrix_shape(K, lambda_2)])
        return Sigma


class EvaluatedCovariance(NamedTuple):
    """The posterior at some ``(K, λ)`` with its covariance."""

    posterior: LatentPosterior
    Sigma: tf.Tensor  # [L, N, N]

    def covariance(self, K: tf.Tensor, lambda_2: tf.Tensor) -> tf.Tensor:
        """``Σ``, ``[L, N, N]``."""
        return self.Sigma


Known = Evaluated | EvaluatedCovariance


class Backend(Protocol):
    """The posterior of the sites and its adjoint, for tensors with the latent as leading axis."""

    name: str

    def posterior(self, K: tf.Tensor, r: tf.Tensor, lambda_2: tf.Tensor) -> Known:
        """d, v and log Z, and what their covariance is made of."""

    def kernel_adjoint(self, Sigma: tf.Tensor, *vectors: tf.Tensor) -> tf.Tensor:
        """``K̄`` ``[L, N, N]`` from ``r, λ₂, d, d̄, v̄, z̄``."""


class TensorFlowBackend:
    """TensorFlow alone."""

    name = "tensorflow"

    def posterior(self, K: tf.Tensor, r: tf.Tensor, lambda_2: tf.Tensor) -> Known:
        found = factors.factorise(K, lambda_2)
        posterior = factors.posterior_from_factors(K, found, r, lambda_2)
        return EvaluatedCovariance(posterior, factors.covariance_from_factors(K, found))

    def kernel_adjoint(self, Sigma: tf.Tensor, *vectors: tf.Tensor) -> tf.Tensor:
        return factors.kernel_adjoint(Sigma, *vectors)


class LapackBackend:
    """SciPy's LAPACK and BLAS, one latent after the other."""

    name = "lapack"

    def posterior(self, K: tf.Tensor, r: tf.Tensor, lambda_2: tf.Tensor) -> Known:
        def on_host(K: Any, r: Any, lambda_2: Any) -> tuple[Any, ...]:
            found = [lapack.posterior(_latent(K, i), r[i], lambda_2[i]) for i in range(len(r))]
            return tuple(_stack(parts) for parts in zip(*found, strict=True))

        shift, variance, log_normaliser, chol_inverse = call_on_host(
            on_host, [K, r, lambda_2], [r.shape, r.shape, r.shape[:1], _matrix_shape(K, r)]
        )
        return Evaluated(LatentPosterior(shift, variance, log_normaliser), chol_inverse)

    def kernel_adjoint(self, Sigma: tf.Tensor, *vectors: tf.Tensor) -> tf.Tensor:
        def on_host(*arguments: Any) -> tuple[Any]:
            found = [lapack.kernel_adjoint(*parts) for parts in zip(*arguments, strict=True)]
            return (_stack(found),)

        (K_bar,) = call_on_host(on_host, [Sigma, *vectors], [Sigma.shape])
        return K_bar


def set_linear_algebra(choice: str) -> None:
    """How dense linear algebra is done from now on: ``"auto"``, ``"lapack"`` or ``"tensorflow"``.

    ``"auto"``, the default, is LAPACK in eager code and in graphs that run on a CPU in this process,
    and TensorFlow alone where a GPU is visible, under XLA and while a SavedModel is written. A graph keeps
    what was chosen when it was traced: choose ``"tensorflow"`` before tracing an objective that shall be
    exported. The environment variable ``GPFLOW_HYBRID_LINEAR_ALGEBRA`` sets the choice at the start.
    """
    global _chosen
    _chosen = _check(choice, "choice")


@contextlib.contextmanager
def linear_algebra(choice: str) -> Iterator[None]:
    """:func:`set_linear_algebra` for a ``with`` block."""
    global _chosen
    before, _chosen = _chosen, _check(choice, "choice")
    try:
        yield
    finally:
        _chosen = before


def backend() -> Backend:
    """What to compute with here."""
    choice = _chosen
    if choice is None:
        choice = _check(os.environ.get(VARIABLE, "auto"), VARIABLE)
    if choice == "auto":
        choice = "lapack" if _runs_here() else "tensorflow"
    return LapackBackend() if choice == "lapack" else TensorFlowBackend()


def _runs_here() -> bool:
    """Whether what is computed or traced now will run on a CPU of this process."""
    if save_context.in_save_context() or tf.config.list_logical_devices("GPU"):
        return False
    return not control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def _check(choice: str, name: str) -> str:
    if choice not in CHOICES:
        raise InvalidDataError(
            f"{name} must be one of {', '.join(CHOICES)}; found {choice!r}. Use the first if in doubt."
        )
    return choice


def call_on_host(function: Any, arguments: list[tf.Tensor], shapes: list[Any]) -> list[tf.Tensor]:
    """``function``, which returns a tuple, on NumPy arrays from inside a graph; the results have the type
    of the first argument."""
    dtype = arguments[0].dtype

    def quietly(*arrays: Any) -> Any:
        # What is not finite comes out so, as in TensorFlow, without NumPy's warnings.
        with np.errstate(all="ignore"):
            return function(*arrays)

    found = tf.numpy_function(quietly, arguments, [dtype] * len(shapes), stateful=False)
    return [
        tf.ensure_shape(x, shape) for x, shape in zip(tf.nest.flatten(found), shapes, strict=True)
    ]


def _matrix_shape(K: tf.Tensor, vectors: tf.Tensor) -> tf.TensorShape:
    return vectors.shape[:1].concatenate(K.shape[1:])


def _latent(K: Any, i: int) -> Any:
    """The kernel matrix of a latent, shared or its own."""
    return K[0 if len(K) == 1 else i]


def _stack(parts: Any) -> Any:
    """Along a new leading axis; a single part as it is."""
    return parts[0][None] if len(parts) == 1 else np.stack(parts)
