"""LAPACK through SciPy, or TensorFlow alone: which of the two computes a posterior.

On a CPU, SciPy's LAPACK and BLAS are several times as fast as TensorFlow's own linear algebra, and are
called from inside its graphs. Such a graph runs in this process only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import tensorflow as tf

from ..errors import InvalidDataError

CHOICES = ("auto", "lapack", "tensorflow")
VARIABLE = "GPFLOW_HYBRID_LINEAR_ALGEBRA"

_chosen: str | None = None


def set_linear_algebra(choice: str) -> None:
    """How posteriors are computed from now on: ``"auto"``, ``"lapack"`` or ``"tensorflow"``.

    ``"auto"``, the default, is LAPACK outside of graphs and in the graphs of ``VEMTrainer``, and TensorFlow
    alone where a GPU is visible and in functions that a user compiles (``predict_f``, ``elbo`` …), which
    may be for XLA or a SavedModel. With ``"lapack"`` these are faster on a CPU, and run in this process
    only. The E-step inside a training loss always runs on the host, by LAPACK. A graph keeps what was
    chosen when it was traced. The environment variable ``GPFLOW_HYBRID_LINEAR_ALGEBRA`` sets the choice
    at the start.
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


def uses_lapack(*, exportable: bool) -> bool:
    """Whether LAPACK computes what is asked for now.

    :param exportable: whether a graph that is traced now may leave this process, or be compiled by XLA.
    """
    choice = _chosen
    if choice is None:
        choice = _check(os.environ.get(VARIABLE, "auto"), VARIABLE)
    if choice == "auto":
        runs_here = tf.executing_eagerly() or not exportable
        return runs_here and not tf.config.list_logical_devices("GPU")
    return choice == "lapack"


def _check(choice: str, name: str) -> str:
    if choice not in CHOICES:
        raise InvalidDataError(
            f"{name} must be one of {', '.join(CHOICES)}; found {choice!r}. Use the first if in doubt."
        )
    return choice
