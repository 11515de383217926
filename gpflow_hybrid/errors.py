"""The errors a user can meet, each with a remedy in its message."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = [
    "CheckpointError",
    "ClusterError",
    "ClusterWarning",
    "ConvergenceWarning",
    "ForkedProcessError",
    "GPflowHybridError",
    "InvalidDataError",
    "InvalidPosteriorError",
    "LargeModelWarning",
    "NonFiniteError",
]


class GPflowHybridError(Exception):
    """Base class of every error that this package raises on purpose."""

    # A constructor of its own lets tf.function re-raise the same type with its own traceback.
    __init__ = Exception.__init__


class InvalidDataError(GPflowHybridError, ValueError):
    """The data or an argument cannot be used; the message names it, what was found, and the remedy."""


class InvalidPosteriorError(GPflowHybridError, ValueError):
    """These sites admit no Gaussian q(f), or no cavity: ``K⁻¹ + Λ`` or ``1/v − αλ₂`` is not positive."""


class NonFiniteError(GPflowHybridError, ArithmeticError):
    """A NaN or infinity appeared; the message names the datum where it did."""


class CheckpointError(GPflowHybridError, OSError):
    """A checkpoint cannot be used, or would be overwritten; nothing was changed."""


class ClusterError(GPflowHybridError, RuntimeError):
    """A Dask cluster cannot be used, or was lost; the model is as its last loss has left it."""


class ClusterWarning(UserWarning):
    """A worker of a Dask cluster was lost, or came; the message says what became of its rows."""


class ForkedProcessError(GPflowHybridError, RuntimeError):
    """This process was forked after models had computed in its parent; the message says what to do."""


class ConvergenceWarning(UserWarning):
    """Inference inside training fell short of what it promises; the message says of what."""


class LargeModelWarning(UserWarning):
    """A model will take most of the machine's memory; the message says how much."""


def in_short(row: npt.ArrayLike) -> str:
    """A row of the data for a message, its middle left out where it is long."""
    return np.array2string(np.asarray(row), threshold=8, edgeitems=3)
