"""TensorFlow does not survive a fork: its threads stay behind, and a child waits for them for ever."""

from __future__ import annotations

import os

from .errors import ForkedProcessError

_parent_has_begun = False
_has_begun = False


def refuse_forked() -> None:
    """Refuse to compute in a process that was forked from one in which models had computed."""
    global _has_begun
    if _parent_has_begun:
        raise ForkedProcessError(
            "This process was forked after models had computed in its parent, and TensorFlow does not "
            'survive a fork. Use multiprocessing.get_context("spawn"), or joblib, whose workers are '
            "fresh; or fork before the first model is made."
        )
    _has_begun = True


def _in_child() -> None:
    global _parent_has_begun
    _parent_has_begun = _parent_has_begun or _has_begun


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
