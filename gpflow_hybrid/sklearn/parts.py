"""Kernels and likelihoods by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import gpflow
import numpy as np
import numpy.typing as npt
import tensorflow as tf
import tensorflow_probability as tfp
from gpflow.kernels import Kernel
from gpflow.likelihoods import Likelihood

from ..errors import InvalidDataError
from ..likelihoods.densities import density_of
from ..models.collapsed import CollapsedModel
from ..training.starts import first_lengthscales, is_noise_around_f

Array = npt.NDArray[Any]

KERNELS: dict[str, Any] = {
    "matern12": gpflow.kernels.Matern12,
    "matern32": gpflow.kernels.Matern32,
    "matern52": gpflow.kernels.Matern52,
    "rbf": gpflow.kernels.SquaredExponential,
    "rational_quadratic": gpflow.kernels.RationalQuadratic,
}

ARD = "_ard"
"""What a kernel's name ends with that has a lengthscale for every column."""

DEGREES_OF_FREEDOM = 4.0
"""Of the Student-t likelihood: heavy tails with a variance."""


def moments_of(model: Any, X: Array) -> tuple[Array, Array]:
    """Mean and variance of f at new rows, ``[N, L]`` each."""
    found = model.predict_f_on_arrays(X) if isinstance(model, CollapsedModel) else None
    mean, variance = model.predict_f(X) if found is None else found
    return np.asarray(mean), np.asarray(variance)


def make_kernel(kernel: Any, X: Array, variance: float = 1.0) -> Kernel:
    """A kernel of an estimator's own: a copy of the user's, or one by its name at the scale of the data."""
    if isinstance(kernel, Kernel):
        return copy.deepcopy(kernel)
    name, is_ard = (
        (kernel.removesuffix(ARD), kernel.endswith(ARD))
        if isinstance(kernel, str)
        else (None, False)
    )
    if name not in KERNELS:
        names = ", ".join(f'"{name}"' for name in KERNELS)
        raise InvalidDataError(
            f"kernel must be a GPflow kernel or one of {names}, with {ARD!r} behind it for a lengthscale "
            f"for every column; found {kernel!r}."
        )
    return KERNELS[name](variance=variance, lengthscales=first_lengthscales(X, int(is_ard)))


def _heteroskedastic() -> Likelihood:
    return gpflow.likelihoods.HeteroskedasticTFPConditional(
        distribution_class=tfp.distributions.Normal, scale_transform=tfp.bijectors.Exp()
    )


LIKELIHOODS: dict[str, Callable[[], Likelihood]] = {
    "gaussian": gpflow.likelihoods.Gaussian,
    "student_t": lambda: gpflow.likelihoods.StudentT(df=DEGREES_OF_FREEDOM),
    "poisson": gpflow.likelihoods.Poisson,
    "gamma": gpflow.likelihoods.Gamma,
    "heteroskedastic": _heteroskedastic,
}


def make_likelihood(likelihood: Any) -> Likelihood:
    """A likelihood of an estimator's own: a copy of the user's, or one by its name."""
    if isinstance(likelihood, Likelihood):
        return copy.deepcopy(likelihood)
    if not isinstance(likelihood, str) or likelihood not in LIKELIHOODS:
        names = ", ".join(f'"{name}"' for name in LIKELIHOODS)
        raise InvalidDataError(
            f"likelihood must be a GPflow likelihood or one of {names}; found {likelihood!r}."
        )
    return LIKELIHOODS[likelihood]()


def is_shifted_with_f(likelihood: Likelihood) -> bool:
    """Whether y is f with a noise: shifting and scaling y is then shifting and scaling f."""
    if isinstance(likelihood, gpflow.likelihoods.HeteroskedasticTFPConditional):
        return density_of(likelihood) is not None  # a normal around the first latent
    return is_noise_around_f(likelihood)


def has_log_link(likelihood: Likelihood) -> bool:
    """Whether y is around ``exp(f)``, so that f is around ``log E[y]`` and not around zero."""
    return getattr(likelihood, "invlink", None) is tf.exp
