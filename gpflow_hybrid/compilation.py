"""Compiled functions that live as long as an object, without being stored on it.

A ``tf.function`` kept on a module breaks ``deepcopy`` and goes stale when a part of the module is
replaced. Here it is kept beside the module, under a fingerprint of everything a trace depends on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import tensorflow as tf

_CACHE: weakref.WeakKeyDictionary[tf.Module, dict[Hashable, Any]] = weakref.WeakKeyDictionary()
_MAX_ENTRIES = 16
_VALUES = (bool, int, float, str, bytes, type(None))


def subgraph(function: Callable[..., Any], **arguments: Any) -> Any:
    """``function`` as a part of larger graphs, traced and optimised once however often it is used.

    TensorFlow would paste a copy of it into each place, and optimise every one.
    """
    return tf.function(
        function, autograph=False, experimental_attributes={"_noinline": True}, **arguments
    )


def fingerprint(module: tf.Module) -> Hashable:
    """Changes when an attribute of the module, or of a module inside it, is replaced.

    Variables count by identity: a trace reads their current values.
    """

    def mark(value: Any) -> Hashable:
        if isinstance(value, _VALUES):
            return value
        if isinstance(value, np.ndarray):  # may have been changed in place
            return (value.shape, value.tobytes())
        return id(value)

    return tuple(
        (id(part), name, mark(value))
        for part in (module, *module.submodules)
        for name, value in sorted(vars(part).items())
        if not name.startswith(("_self_", "_name", "_tf"))
    )


def _reference(value: Any) -> Callable[[], Any]:
    """Weak where it can be: a function that a module has may hold the module."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def compiled(
    owner: tf.Module, key: Hashable, function: Callable[..., Any], *args: tf.Tensor
) -> Callable[..., Any]:
    """``function(owner, *args)`` as a compiled graph for arguments like these, unseen by any gradient tape.

    The graph is reused while ``key`` and the owner's fingerprint stay the same; the
    cache holds no strong reference to the owner.
    """
    entries = _CACHE.setdefault(owner, {})
    full_key = (key, fingerprint(owner))
    if full_key in entries and any(x() is None for x in entries[full_key][1]):
        del entries[full_key]  # an identity in the key is another's by now
    if full_key not in entries:
        while len(entries) >= _MAX_ENTRIES:
            entries.pop(next(iter(entries)))
        reference = weakref.ref(owner)

        def call(*args: Any) -> Any:
            return function(reference(), *args)

        parts = (owner, *owner.submodules)
        identified = [value for part in parts for value in (part, *vars(part).values())]
        graph = tf.function(call, reduce_retracing=True, autograph=False)
        entries[full_key] = graph, [_reference(x) for x in identified if not isinstance(x, _VALUES)]
    # Traced here, because init_scope silences the tapes inside the trace too; run below, where a
    # tape of the caller does not see it.
    specs = [tf.TensorSpec(a.shape, a.dtype) for a in args]
    concrete = entries[full_key][0].get_concrete_function(*specs)

    def run(*args: tf.Tensor) -> Any:
        with tf.init_scope():
            return concrete(*args)

    return run


def call_compiled(
    owner: tf.Module, key: Hashable, function: Callable[..., Any], *args: tf.Tensor
) -> Any:
    """:func:`compiled`, called."""
    return compiled(owner, key, function, *args)(*args)
