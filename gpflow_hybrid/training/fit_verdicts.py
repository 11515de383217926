"""Whether what an optimiser ended with is a fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from gpflow.mean_functions import Zero
from gpflow.models import GPModel

from ..array_parameters import value_of
from ..covariances import latent_kernels, variance
from ..inference.options import INDUCING, REPORT, TRAINING
from ..inference.questions import ratios
from ..inference.servers import answers_on_arrays
from ..likelihoods.densities import values_of
from ..likelihoods.on_arrays import Observations
from ..likelihoods.ratios import log_expected_ratio
from ..linalg.threads import host_arithmetic
from ..models import CollapsedModel, CVIModel, SparseCVIModel
from ..models.array_loss import Arrival
from ..objectives import power_of
from ..priors.stationary import is_stationary
from .constants import evidence_of_constant
from .starts import is_noise_around_f

LITTLE = 1.0
"""Nats by which an objective must exceed that of independent data: less is no evidence for a kernel
with parameters of its own."""

WHOLE_RATIOS = ratios(1.0)

MAX_ROWS = 10_000
"""Rows from which the objective of independent data is found where it is a sum over rows."""


class Assessment(NamedTuple):
    """What is known of an objective where it was left."""

    gain: float
    residual: float = np.nan
    quadrature_error: float = np.nan
    tolerated_error: float = np.nan
    gain_over_constant: float = np.nan
    """NaN where the likelihood is no noise around f."""


class Ending(NamedTuple):
    """How the optimiser ended."""

    loss: float
    gradient_norm: float
    tolerance: float
    reached_maximum: bool
    interrupted: bool
    message: str


def assessment_of(
    model: GPModel,
    data: Any,
    loss: float,
    arrays: Callable[[], tuple[Any, Any]],
    arrival: Arrival | None = None,
) -> Assessment:
    """Look at a model where it was left; sites are brought to its hyperparameters.

    :param arrival: what is known there, of a model whose sites were brought there.
    """
    log_prior = float(model.log_prior_density()) if arrival is None else arrival.log_prior
    value = -loss - log_prior
    found = _assessment(model, data, value, arrays, arrival)
    if not is_noise_around_f(model.likelihood):
        return found
    X, Y = arrays()
    constant = evidence_of_constant(model, X, Y, _num_rows(model, data, X))
    return found._replace(gain_over_constant=value - constant)


def _num_rows(model: Any, data: Any, X: Any) -> int:
    """That an objective is of: of a stream or shards, more than those in memory."""
    if isinstance(model, SparseCVIModel):
        return int(model.all_rows(data).num_rows)
    return int(getattr(model, "num_data", None) or len(X))


def _assessment(
    model: GPModel,
    data: Any,
    value: float,
    arrays: Callable[[], tuple[Any, Any]],
    arrival: Arrival | None,
) -> Assessment:
    if isinstance(model, CollapsedModel):
        report = model.refresh() if arrival is None else arrival
        # Σ log E_q[p/t] + log Z is exact for independent data, whatever the sites: no matrix is needed.
        is_ep_like = type(model) is CVIModel and power_of(model.objective) == 1.0
        if is_ep_like:
            X, Y = arrays()
            gain = value - _independent(model, X, Y, len(X))
        else:
            gain = value - model.objective_of_independent_data()
        return Assessment(gain, report.residual, report.quadrature_error, REPORT.own_error)
    if isinstance(model, SparseCVIModel):
        rows = model.all_rows(data)
        report = model.infer(rows, tolerance=INDUCING.tolerance)
        errors = (report.quadrature_error, REPORT.inner_error)
        gain = value - _independent(model, *arrays(), rows.num_rows)
        return Assessment(gain, report.residual, *errors)
    X, Y = arrays()
    return Assessment(value - _independent(model, X, Y, _num_rows(model, data, X)))


def _independent(model: GPModel, X: Any, Y: Any, num_rows: int) -> float:
    """``Σ log ∫ N(f; μ₀ₙ, kₙₙ) p(yₙ|f) df``, from some of so many rows."""
    rows = np.linspace(0, len(X) - 1, min(len(X), MAX_ROWS)).astype(int)
    host = answers_on_arrays([WHOLE_RATIOS], model.likelihood)
    inputs, observed = tf.convert_to_tensor(X[rows]), tf.convert_to_tensor(Y[rows])
    mean, prior_variance = _prior_marginals(model, inputs)
    nothing = np.zeros_like(mean)
    if host is not None:
        data = Observations(X[rows], Y[rows], values_of(model.likelihood))
        with host_arithmetic(0):
            found = host[WHOLE_RATIOS](data, mean, prior_variance, nothing, nothing)
        return num_rows / len(rows) * float(found.value)
    m, v, zero = (tf.convert_to_tensor(x) for x in (mean, prior_variance, nothing))
    densities = log_expected_ratio(model.likelihood, inputs, m, v, observed, zero, zero, 1.0)
    return num_rows * float(tf.reduce_mean(densities))


def _prior_marginals(model: GPModel, inputs: tf.Tensor) -> tuple[Any, Any]:
    """``μ₀ₙ`` and ``kₙₙ`` as arrays ``[N, L]``, without TensorFlow where the kernels are known so."""
    own = isinstance(model, (CollapsedModel, SparseCVIModel))
    kernels = latent_kernels(model.kernel) if own else (model.kernel,)
    if type(model.mean_function) is Zero and all(is_stationary(k) for k in kernels):
        mean = np.zeros((len(inputs), model.num_latent_gps), inputs.dtype.as_numpy_dtype)
        return mean, mean + [value_of(k.variance) for k in kernels]
    found = variance(model.kernel, inputs) if own else model.kernel(inputs, full_cov=False)
    if found.shape.rank == 1:
        found = found[:, None]
    if found.shape[1] == 1:  # shared by the latents
        found = tf.repeat(found, model.num_latent_gps, 1)
    mean = model.mean_function(inputs) + tf.zeros_like(found)
    return mean.numpy(), found.numpy()


def verdict_on(ending: Ending, found: Assessment) -> tuple[str, str]:
    """Status and message."""
    if ending.interrupted:
        return "interrupted", "Interrupted; the model is at the best parameters seen."
    is_flat = ending.gradient_norm <= ending.tolerance
    if ending.reached_maximum and not is_flat:
        return "max_iterations", (
            f"Not converged: the iterations were used up at a gradient of {ending.gradient_norm:.1e}. "
            "Raise max_iterations, or fit again from here."
        )
    if found.residual > TRAINING.warn_residual:
        return "inaccurate", (
            f"Not to be trusted: the E-step did not converge, its residual is {found.residual:.1e}. "
            "model.infer() says why."
        )
    if found.quadrature_error > found.tolerated_error:
        return "inaccurate", (
            f"Not to be trusted: the quadrature of the likelihood is too coarse, its error is "
            f"{found.quadrature_error:.1e}. model.infer() says what to do."
        )
    # Where a constant is better than no function at all, that is what to say.
    if found.gain_over_constant < min(LITTLE, found.gain):
        return "no_better_than_constant", (
            f"Not a fit: no better than a constant (a gain of {found.gain_over_constant:.2g} nats). "
            "Observations far from the mean function do that: subtract their mean from Y. Data without a "
            "signal do it too."
        )
    if found.gain < LITTLE:
        return "no_better_than_prior", (
            f"Not a fit: no better than the prior (a gain of {found.gain:.2g} nats). Under this "
            "kernel no datum tells of another. Lengthscales far from the scale of the inputs do that: "
            'pass start="data", standardise X, or raise num_starts. Data without a signal do it too.'
        )
    if not is_flat:
        return "steep", (
            f"Not converged: L-BFGS gave up at a gradient of {ending.gradient_norm:.1e} "
            f"({ending.message}). The objective is not smooth there, or its parameters are of very "
            "different scales: raise num_starts, put priors on the parameters, or standardise the data."
        )
    return "converged", f"Converged: the largest derivative is {ending.gradient_norm:.1e}."
