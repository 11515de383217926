"""Priors of hyperparameters: the model's own, those that are given, and weak ones where there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import gpflow
import numpy as np
import numpy.typing as npt
import tensorflow_probability as tfp
from gpflow.base import PriorOn
from gpflow.likelihoods import Likelihood
from gpflow.models import GPModel

from ..copying import copied
from ..errors import InvalidDataError
from ..likelihoods import ProbitBernoulli
from ..training.starts import is_noise_around_f, lengthscales, start_from_data
from .coordinates import Coordinate
from .scales import Flat

Array = npt.NDArray[np.float64]

SPREAD = 1.5
"""Standard deviation of the logarithm of a scale under a default prior: 95 % within factors of 19."""

SATURATED_DEVIATION = 10.0
"""Median of a kernel's standard deviation where f is behind a link that saturates, which has no scale of
its own: labels that are hardly ever wrong are explained by any large f."""

SATURATED_SPREAD = 3.0
"""Standard deviation of its logarithm: 95 % within factors of 400. Narrower ones cost predictions on data
whose classes are far apart: ``python -m benchmarks.integration_priors`` compares them."""

WIDE = 10.0
"""Standard deviation of other parameters under a default prior, in units of f."""

Priors = Mapping[str, "tfp.distributions.Distribution | Literal['flat']"]


class ParameterPrior(NamedTuple):
    """A prior, and where it is from."""

    density: Any
    """A distribution of TensorFlow Probability, or flat."""
    prior_on: PriorOn
    source: Literal["model", "given", "default"]

    @property
    def is_flat(self) -> bool:
        """Whether it is improper."""
        return isinstance(self.density, Flat)

    def __str__(self) -> str:
        where = {"model": "the model's", "given": "given", "default": "default"}[self.source]
        on = ", on the unconstrained value" if self.prior_on == PriorOn.UNCONSTRAINED else ""
        density = self.density
        if isinstance(density, Flat):
            words = "flat in its coordinate, improper"
        elif isinstance(density, tfp.distributions.LogNormal):
            median, spread = _numbers(np.exp(density.loc)), _numbers(density.scale)
            words = f"log-normal, median {median}, deviation of the logarithm {spread}"
        elif isinstance(density, tfp.distributions.Normal):
            words = f"normal, mean {_numbers(density.loc)}, deviation {_numbers(density.scale)}"
        else:
            words = str(getattr(density, "name", type(density).__name__))
        return f"{words}{on} ({where})"


def choose_priors(
    model: GPModel, coordinates: Sequence[Coordinate], given: Priors, X: Array, Y: Array
) -> dict[str, ParameterPrior]:
    """The prior of every parameter, by its path: what is given, else the model's, else a default.

    Defaults are log-normal for positive parameters, with a standard deviation of the logarithm of 1.5: for
    lengthscales around the median distance between inputs, for the standard deviation of a kernel around
    that of Y where the likelihood is a noise around f, which has a tenth of its variance; around one for
    others. Where y is a class, of which f beyond a few units says the same, the kernel's standard deviation
    is around ten, with a standard deviation of the logarithm of 3. What is not positive has a normal prior,
    wide in the units of f.
    """
    if not isinstance(given, Mapping):
        raise InvalidDataError(
            "priors must be a dictionary from GPflow's paths to distributions of TensorFlow Probability or "
            f'"flat"; found {given!r}.'
        )
    given = {path if path.startswith(".") else f".{path}": prior for path, prior in given.items()}
    unknown = [path for path in given if path not in {c.path for c in coordinates}]
    if unknown:
        raise InvalidDataError(
            f"priors names {unknown[0]!r}, which is not a trainable hyperparameter of this model; known "
            f"are {', '.join(c.path for c in coordinates)}."
        )
    medians = _medians(model, coordinates, X, Y)
    return {c.path: _prior_of(c, given, medians[c.path], model, Y) for c in coordinates}


def _prior_of(
    coordinate: Coordinate, given: Priors, median: Array, model: GPModel, Y: Array
) -> ParameterPrior:
    path, parameter = coordinate.path, coordinate.parameter
    if path in given:
        density = given[path]
        if isinstance(density, str) and density == "flat":
            return ParameterPrior(Flat(), PriorOn.CONSTRAINED, "given")
        if not isinstance(density, tfp.distributions.Distribution):
            raise InvalidDataError(
                f'priors[{path!r}] must be a distribution of TensorFlow Probability or "flat"; found '
                f"{density!r}."
            )
        if density.dtype != parameter.dtype:
            raise InvalidDataError(
                f"priors[{path!r}] must be of {parameter.dtype.name}, as the parameter; found "
                f"{density.dtype.name}. Pass {parameter.dtype.name} arguments, such as np.float64(1.0)."
            )
        return ParameterPrior(density, PriorOn.CONSTRAINED, "given")
    if parameter.prior is not None:
        return ParameterPrior(parameter.prior, parameter.prior_on, "model")
    dtype = parameter.dtype.as_numpy_dtype
    if coordinate.is_log:
        spread = SPREAD
        is_variance = _name(path) == "variance"
        if is_variance and path.startswith(".kernel") and saturates(model.likelihood):
            spread, median = SATURATED_SPREAD, SATURATED_DEVIATION**2 * median
        if is_variance:  # log-normal on its root: twice the deviation on it
            spread *= 2.0
        location = np.log(median).astype(dtype)
        default: Any = tfp.distributions.LogNormal(location, dtype(spread))
        return ParameterPrior(default, PriorOn.CONSTRAINED, "default")
    size = (
        float(np.sqrt(np.mean(np.square(Y))))
        if is_noise_around_f(model.likelihood) and np.any(Y)
        else 1.0
    )
    is_free = isinstance(parameter.transform, tfp.bijectors.Identity) or parameter.transform is None
    scale = WIDE * size if is_free else 2.0 * SPREAD
    default = tfp.distributions.Normal(dtype(0.0), dtype(scale))
    return ParameterPrior(default, PriorOn.UNCONSTRAINED, "default")


def saturates(likelihood: Likelihood) -> bool:
    """Whether y is a class: f beyond a few units makes no difference to it."""
    L = gpflow.likelihoods
    kinds = (ProbitBernoulli, L.Bernoulli, L.MultiClass, L.Softmax, L.Ordinal)
    return isinstance(likelihood, kinds)


def _medians(
    model: GPModel, coordinates: Sequence[Coordinate], X: Array, Y: Array
) -> dict[str, Array]:
    """Of positive parameters: where a fit from the data starts, and one elsewhere."""
    copy = copied(model)
    parameters = gpflow.utilities.parameter_dict(copy)
    found: dict[str, Array] = {}
    for c in coordinates:
        if c.is_log:
            parameter = parameters[c.path]
            start = float(lengthscales(_few(X), 0)) if _name(c.path) == "period" else 1.0
            parameter.assign(np.full(parameter.shape, start))
    start_from_data(copy, X, Y)
    for c in coordinates:
        found[c.path] = np.asarray(parameters[c.path].numpy(), np.float64)
    return found


def _few(X: Array) -> Array:
    return X[np.linspace(0, len(X) - 1, min(len(X), 1000)).astype(int)]


def _name(path: str) -> str:
    return path.rpartition(".")[2]


def _numbers(values: Any) -> str:
    flat = np.unique(np.round(np.ravel(values), 12))
    return f"{flat[0]:.4g}" if len(flat) == 1 else f"{flat[0]:.4g} to {flat[-1]:.4g}"
