"""Modules of GPflow with tensors in place of their parameters.

A parameter applies its transform every time it is read, a dozen operations of a graph and as many for their
gradient; a likelihood reads its parameters several times in every evaluation. Here each is read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import tensorflow as tf
from gpflow.base import Module, Parameter

M = TypeVar("M", bound=Module)


def parameters_of(module: Module) -> Sequence[Parameter]:
    """Each once, also where parts of the module share it."""
    return list({id(p): p for p in module.parameters}.values())


def leaves_of(module: Module) -> list[tf.Tensor]:
    """What derivatives in a module's parameters are taken in: their values, or variables where it is not
    known how they are read."""
    if is_taken_apart(module):
        return [tf.convert_to_tensor(p) for p in parameters_of(module)]
    return [tf.convert_to_tensor(v) for v in floating_variables(module)]


def floating_variables(module: Module) -> list[tf.Variable]:
    """Those that have derivatives."""
    return [v for v in module.variables if v.dtype.is_floating]


def is_taken_apart(module: Module) -> bool:
    """Whether it is made of GPflow's and this package's classes: those only read their parameters. What
    else is in it, a bijector for example, must have no variables."""
    parts = (module, *(part for part in module.submodules if not isinstance(part, Parameter)))
    own, foreign = ("gpflow.", "gpflow_hybrid."), "tensorflow_probability."
    return all(
        (name := type(part).__module__).startswith(own)
        or (name.startswith(foreign) and not part.variables)
        for part in parts
    )


def with_values(module: M, values: Sequence[tf.Tensor]) -> M:
    """The same module reading these values, in the order of :func:`parameters_of`."""
    named = {id(p): value for p, value in zip(parameters_of(module), values, strict=True)}

    def replaced(x: Any) -> Any:
        if isinstance(x, Parameter):
            return named.get(id(x), x)
        if isinstance(x, Module):
            copy = object.__new__(type(x))
            copy.__dict__ |= {name: replaced(value) for name, value in vars(x).items()}
            return copy
        if isinstance(x, (list, tuple)) and any(isinstance(part, Module) for part in x):
            return [replaced(part) for part in x]
        return x

    return replaced(module)


def read_once(module: M) -> M:
    """The same module with the present values of its parameters, which no tape sees, as constants."""
    if not is_taken_apart(module):
        return module
    values = [tf.stop_gradient(tf.convert_to_tensor(p)) for p in parameters_of(module)]
    return with_values(module, values)
