"""A model's parts on their way to a worker: their structure once, the values of their variables every time.

The structure is a pickle in which variables have shapes and no values. It is the same at all
hyperparameters, so that whoever has read it keeps the objects, and what was compiled for them.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import cloudpickle
import gpflow
import numpy as np
import tensorflow as tf

from ..priors.protocol import Array
from ..rows import ModelParts


class Structure(NamedTuple):
    """Parts of a model without their values, and a name for them."""

    token: str
    pickled: bytes


class Values(NamedTuple):
    """What the variables of a structure hold, in the order of :func:`variables_of`."""

    arrays: tuple[Array, ...]

    def assign_to(self, variables: Sequence[tf.Variable]) -> None:
        """To the same variables elsewhere."""
        for variable, value in zip(variables, self.arrays, strict=True):
            variable.assign(value)


def _empty_variable(shape: tuple[int, ...], dtype: str, trainable: bool, name: str) -> tf.Variable:
    return tf.Variable(tf.zeros(shape, dtype), trainable=trainable, name=name)


class _WithoutValues(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle also takes classes of a notebook."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, tf.Variable):
            name = obj.name.split(":")[0]
            return _empty_variable, (tuple(obj.shape), obj.dtype.name, obj.trainable, name)
        return super().reducer_override(obj)


def variables_of(parts: ModelParts) -> list[tf.Variable]:
    """Of all modules among the parts, each once."""
    modules = (part for part in parts if isinstance(part, tf.Module))
    return list({id(v): v for module in modules for v in module.variables}.values())


def structure_of(parts: ModelParts, name: str) -> Structure:
    """Everything but the values; with GPflow's configuration, whose jitter is part of a kernel matrix.

    :param name: of who asks: others may ask at the same time for other values.
    """
    buffer = io.BytesIO()
    _WithoutValues(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump((parts, gpflow.config.config()))
    pickled = buffer.getvalue()
    return Structure(f"{name}-{hashlib.sha1(pickled).hexdigest()}", pickled)


def values_of(parts: ModelParts) -> Values:
    """The present ones."""
    return Values(tuple(np.asarray(v.numpy()) for v in variables_of(parts)))


def positions(parts: ModelParts, variables: Sequence[tf.Variable]) -> tuple[Any, ...]:
    """Where each of some variables is among those of the parts; the shape of one that is not."""
    place = {id(v): i for i, v in enumerate(variables_of(parts))}
    return tuple(place.get(id(v), tuple(v.shape)) for v in variables)


def restored(structure: Structure) -> tuple[ModelParts, Any]:
    """Parts with variables that hold zeros, and GPflow's configuration."""
    found: tuple[ModelParts, Any] = pickle.loads(structure.pickled)
    return found
