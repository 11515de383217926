"""A model made ready for integration: a copy with priors in the coordinates, and its density."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import gpflow
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from gpflow.base import Parameter, PriorOn
from gpflow.models import GPModel
from gpflow.utilities import parameter_dict, set_trainable

from ..copying import copied
from ..errors import InvalidDataError
from ..models import CollapsedModel, SparseCVIModel
from ..training.fitting import loss_of_all
from ..training.optimiser_coordinates import trained_parameters
from .coordinates import Coordinate, CoordinatePrior
from .movable import MovableModel
from .priors import ParameterPrior, Priors, choose_priors
from .target import Target, watched_rows

Array = npt.NDArray[np.float64]

COLLAPSED = (
    CollapsedModel,
    SparseCVIModel,
    gpflow.models.GPR,
    gpflow.models.SGPR,
    gpflow.models.GPRFITC,
)
"""Models whose training loss is a function of the hyperparameters alone."""


class PreparedModel(NamedTuple):
    """A copy of a model whose training loss is minus the log posterior in the coordinates."""

    model: GPModel
    data: Any
    paths: tuple[str, ...]
    """Of the parameters that are integrated over."""
    priors: dict[str, ParameterPrior]
    rows: tuple[Array, Array]
    mark: str
    """Of the data and the parameters' shapes."""

    def target(self) -> Target:
        """The density; inducing points are held from now on."""
        if hasattr(self.model, "inducing_variable"):
            set_trainable(self.model.inducing_variable, False)
        closure, _ = loss_of_all(self.model, self.data)
        return Target(self.model, closure, coordinates_of(self.model, self.paths), self.rows)

    def movable(self) -> MovableModel:
        """The model with its coordinates alone, for predictions."""
        return MovableModel(self.model, coordinates_of(self.model, self.paths))

    def copy(self) -> PreparedModel:
        """The same with a model of its own."""
        return self._replace(model=copied(self.model))


def prepare(model: GPModel, data: Any, given: Priors) -> PreparedModel:
    """Copy the model, choose priors and put them in their place."""
    if not isinstance(model, COLLAPSED):
        raise InvalidDataError(
            "model must have a training loss that is a function of the hyperparameters alone, as CVIModel, "
            "EPModel, LaplaceModel, SparseCVIModel, GPR, SGPR and GPRFITC do; found "
            f"{type(model).__name__}."
        )
    copy = copied(model)
    _, arrays = loss_of_all(copy, data)
    coordinates = coordinates_of(copy, integrated_paths(copy))
    X, Y = arrays()
    priors = choose_priors(copy, coordinates, given, X, Y)
    for c in coordinates:
        c.parameter.prior = CoordinatePrior(*priors[c.path][:2])
        c.parameter.prior_on = PriorOn.CONSTRAINED
    rows = watched_rows(len(X))
    paths = tuple(c.path for c in coordinates)
    return PreparedModel(
        copy, data, paths, priors, (X[rows], Y[rows]), _mark(copy, coordinates, X, Y)
    )


def _mark(model: GPModel, coordinates: tuple[Coordinate, ...], X: Array, Y: Array) -> str:
    shapes = [(c.path, tuple(c.shape)) for c in coordinates]
    parts = (model.kernel, model.likelihood, model.mean_function)
    kinds = [(type(m).__name__, *_settings(m)) for part in parts for m in (part, *part.submodules)]
    objective = str(getattr(model, "objective", ""))
    kind = (type(model).__name__, objective, kinds, shapes, X.shape, Y.shape)
    text = repr(kind).encode()
    return hashlib.sha256(
        text + np.ascontiguousarray(X).data + np.ascontiguousarray(Y).data
    ).hexdigest()


def _settings(module: tf.Module) -> list[tuple[str, str]]:
    """What a part was made with beside parameters: active dimensions, links, numbers and words."""
    found = []
    for name, value in sorted(vars(module).items()):
        if name.startswith(("_self_", "_name", "_tf_", "_obj_")):
            continue  # TensorFlow's
        if isinstance(value, (bool, int, float, str, slice, np.ndarray)):
            found.append((name, repr(value)))
        elif callable(value) and hasattr(value, "__qualname__"):
            found.append((name, f"{value.__module__}.{value.__qualname__}"))
    return found


def integrated_paths(model: GPModel) -> tuple[str, ...]:
    """Trainable parameters but inducing points, each by its first path."""
    found: dict[int, str] = {}
    for path, parameter in trained_parameters(model, model.trainable_variables).items():
        if path.startswith(".inducing_variable"):
            continue
        if not isinstance(parameter, Parameter):
            raise InvalidDataError(
                f"{path} is a trainable tf.Variable, which can have no prior: make it a gpflow.Parameter, "
                "or tf.Variable(..., trainable=False)."
            )
        found.setdefault(id(parameter), path)
    if not found:
        raise InvalidDataError(
            "model must have a trainable hyperparameter to integrate over; found none. "
            "gpflow.set_trainable(model.kernel, True) makes some."
        )
    return tuple(found.values())


def coordinates_of(model: GPModel, paths: tuple[str, ...]) -> tuple[Coordinate, ...]:
    """The parameters with these paths."""
    parameters = parameter_dict(model)
    return tuple(Coordinate(path, parameters[path]) for path in paths)
