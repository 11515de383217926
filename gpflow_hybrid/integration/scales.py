"""Coordinates and priors of common kinds on arrays: what a graph takes a millisecond for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow_probability as tfp
from gpflow.base import Parameter, PriorOn
from scipy.special import expit

from ..array_parameters import transform_of

Array = npt.NDArray[np.float64]
LogDensity = Callable[[Array], tuple[float, Array]]
"""A log density and its gradient, from numbers in a row."""


class Flat:
    """The improper prior that is constant in the coordinate of a parameter: in log θ where θ > 0."""


class Scale(NamedTuple):
    """How a coordinate x, GPflow's unconstrained u and θ belong together.

    θ = lowest + eˣ,     eˣ = eᵘ or softplus(u);     or θ = x = u
    """

    is_log: bool
    is_exp: bool
    lowest: float

    def outward(self, x: Array) -> tuple[Array, Array]:
        """u, and ``du/dx``."""
        if not self.is_log or self.is_exp:
            return x, np.ones_like(x)
        # u = log(exp(e) − 1) with e = eˣ
        e = np.exp(x)
        falling = -np.expm1(-e)
        return e + np.log(falling), e / falling

    def inward(self, u: Array) -> tuple[Array, Array]:
        """x, and ``dx/du``."""
        if not self.is_log or self.is_exp:
            return u, np.ones_like(u)
        e = np.logaddexp(0.0, u)
        return np.log(e), expit(u) / e

    def log_slope(self, x: Array) -> tuple[Array, Array]:
        """``log du/dx`` and its derivative in x."""
        if not self.is_log or self.is_exp:
            return np.zeros_like(x), np.zeros_like(x)
        e = np.exp(x)
        return x - np.log(-np.expm1(-e)), 1.0 - e * np.exp(-e) / -np.expm1(-e)


def scale_of(parameter: Parameter) -> Scale | None:
    """Of a parameter whose transform is known on arrays; None of any other."""
    transform = transform_of(parameter)
    if transform is None:
        return None
    bijector = parameter.transform
    if bijector is None or type(bijector) is tfp.bijectors.Identity:
        return Scale(False, False, 0.0)
    if type(bijector) is tfp.bijectors.Exp:
        return Scale(True, True, 0.0)
    if type(bijector) is tfp.bijectors.Softplus:
        return None if bijector.low is not None else Scale(True, False, 0.0)
    if bijector.bijectors[-1].low is not None:
        return None
    return Scale(True, False, float(transform(np.array(-np.inf))[0]))


def log_prior_on_arrays(
    prior: Any, prior_on: PriorOn, scale: Scale, size: int
) -> LogDensity | None:
    """``log p(x) = log p(θ) + log |dθ/dx|`` of flat, normal and log-normal priors of so many scalars; None
    of others."""
    if isinstance(prior, Flat):
        return lambda x: (0.0, np.zeros_like(x))
    kind = type(prior)
    if kind not in (tfp.distributions.Normal, tfp.distributions.LogNormal):
        return None
    mean, deviation = (np.ravel(np.asarray(p, np.float64)) for p in (prior.loc, prior.scale))
    if not {mean.size, deviation.size} <= {1, size}:
        return None

    def normal(z: Array) -> tuple[Array, Array]:
        r = (z - mean) / deviation
        return -0.5 * (r * r + np.log(2.0 * np.pi)) - np.log(deviation), -r / deviation

    def of_parameter(x: Array) -> tuple[float, Array]:
        """θ is log-normal: with s = d log θ / dx, ``log p(x) = log N(log θ) + log s``."""
        e = np.exp(x)
        log_theta, s = np.log(scale.lowest + e), e / (scale.lowest + e)
        value, slope = normal(log_theta)
        return float(np.sum(value + np.log(s))), slope * s + 1.0 - s

    def of_variable(x: Array) -> tuple[float, Array]:
        """u is normal: ``log p(x) = log N(u) + log du/dx``."""
        u, s = scale.outward(x)
        (value, slope), (log_s, change) = normal(u), scale.log_slope(x)
        return float(np.sum(value + log_s)), slope * s + change

    if kind is tfp.distributions.Normal:
        on_variable = prior_on == PriorOn.UNCONSTRAINED or not scale.is_log
        return of_variable if on_variable else None
    on_parameter = prior_on == PriorOn.CONSTRAINED and scale.is_log
    return of_parameter if on_parameter else None
