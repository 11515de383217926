"""Copies of GPflow's modules."""

from __future__ import annotations

from typing import TypeVar

from gpflow.utilities import deepcopy

Copied = TypeVar("Copied")

MAX_ATTEMPTS = 5


def copied(module: Copied) -> Copied:
    """GPflow's deepcopy of a module, or of a tuple of such that may share parts.

    It clears the caches of bijectors, and TensorFlow Probability misses an entry there (``KeyError``) that
    the garbage collector takes at that moment: then it is begun again.
    """
    for left in reversed(range(MAX_ATTEMPTS)):
        try:
            found: Copied = deepcopy(module)
            return found
        except KeyError:
            if left == 0:
                raise
    raise AssertionError
