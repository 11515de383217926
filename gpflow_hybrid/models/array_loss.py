"""A training loss and its gradient on arrays alone, where kernel and likelihood are known there.

A graph of the same takes TensorFlow a second to trace, optimise and compile: several times what a fit
of two hundred rows takes in arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import gpflow
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from gpflow.functions import Constant, Zero

from .. import tuning
from ..array_parameters import ParametersInARow, identity, transform_of
from ..covariances import latent_kernels
from ..errors import NonFiniteError
from ..inference.collapsing import Limits, iteration_of, questions_of
from ..inference.common import Collapse, Method
from ..inference.options import TRAINING
from ..inference.remarks import Remarks
from ..inference.servers import answers_on_arrays, run_on_arrays
from ..likelihoods.concavity import is_log_concave
from ..likelihoods.densities import values_of
from ..likelihoods.on_arrays import Observations
from ..linalg import Marginals, uses_lapack
from ..linalg.threads import blas_threads_for_rows, host_arithmetic
from ..priors import DensePrior
from ..priors.stationary import StationaryMatrix, is_stationary
from ..sites import SiteValues
from ..stand_ins import is_taken_apart, parameters_of
from .inferred import COULD_NOT_START

Array = npt.NDArray[Any]
LogPrior = Callable[[Array], tuple[Any, Any]]


class LossParts(NamedTuple):
    """What a collapsed model has that its loss is made of, beside its public parts."""

    method: Method
    limits: Limits
    first_sites: Callable[[], SiteValues]
    refuse: Callable[[], Any]
    """Says that the first parameters are improper."""


def array_loss(model: Any, parts: LossParts) -> ArrayLoss | None:
    """The training loss of a collapsed model on arrays; None where a part of it is not known there."""
    is_constant = all(isinstance(d, tf.Tensor) and d.dtype == tf.float64 for d in model.data)
    if not is_constant or len(model.data[0]) > tuning.KEPT_DISTANCES:
        return None
    kernels, mean = latent_kernels(model.kernel), model.mean_function
    if not all(is_stationary(kernel) for kernel in kernels) or type(mean) not in (Zero, Constant):
        return None
    if not uses_lapack(exportable=False) or not is_taken_apart(model.likelihood):
        return None
    found = [parameters_of(part) for part in (*kernels, mean, model.likelihood)]
    parameters = Parameters([p for part in found for p in part], found[-2], found[-1])
    if any(transform_of(p) is None for p in parameters.everything):
        return None
    own = {id(p.unconstrained_variable) for p in parameters.everything}
    variables = tuple(model.trainable_variables)
    if any(id(v) not in own for v in variables):
        return None
    collapsing = iteration_of(parts.method, model.likelihood, parts.limits, Remarks())
    answers = answers_on_arrays(questions_of(parts.method, collapsing), model.likelihood)
    if answers is None:
        return None
    return ArrayLoss(model, variables, parameters, parts, collapsing.iterate, answers)


class Parameters(NamedTuple):
    """That a loss depends on: all, and those of a constant mean and of the likelihood."""

    everything: Sequence[Any]
    of_mean: Sequence[Any]
    of_likelihood: Sequence[Any]


class Arrival(NamedTuple):
    """What is known of a model where its loss was evaluated last."""

    residual: float
    quadrature_error: float
    log_prior: float


class ArrayLoss:
    """``θ ↦ −L(λ*(θ), θ) − log p(θ)`` and its gradient in the trainable variables' numbers, as
    :class:`~gpflow_hybrid.CollapsedModel` has it, λ* being kept here."""

    def __init__(
        self,
        model: Any,
        variables: tuple[tf.Variable, ...],
        parameters: Parameters,
        parts: LossParts,
        iterate: Any,
        answers: Any,
    ) -> None:
        self._model, self._parts, self._iterate, self._answers = model, parts, iterate, answers
        self._X, self._Y = (np.asarray(d) for d in model.data)
        everything, self._constants, self._own = parameters
        error = parts.method.quadrature_error
        self._error = None if error is None else answers_on_arrays([error], model.likelihood)
        self._variables = variables
        self._parameters = ParametersInARow(everything, self._variables)
        with blas_threads_for_rows(len(self._X)):
            self._matrices = [StationaryMatrix(k, self._X) for k in latent_kernels(model.kernel)]
        self._positive = [id(p) for p in everything if transform_of(p) is not identity]
        self.sites = SiteValues(*(x.numpy() for x in model.sites.values))
        """λ*, as arrays, where the loss was last evaluated."""
        self.marginals: Marginals | None = None
        """Those of q there; None if there was no value."""
        self._last: tuple[Array, float, float] | None = None  # x, residual, log p(θ)
        with_prior = {id(p): p for p in everything if p.trainable and p.prior is not None}
        self._log_prior = _log_prior_on_arrays(with_prior.values(), variables)
        self._reads_variables = not is_log_concave(model.likelihood)
        if with_prior and self._log_prior is None:
            self._log_prior = _log_prior_of(model, variables)
            self._reads_variables = True
        self._begun = bool(model.sites.is_inferred())
        self._is_unique = is_log_concave(model.likelihood)

    def __call__(self, x: Array) -> tuple[float, Array]:
        """At the variables' numbers in a row."""
        return self._at(x, True)

    def value(self, x: Array) -> float:
        """Without the gradient, and what it costs."""
        return self._at(x, False)[0]

    def _at(self, x: Array, with_gradient: bool) -> tuple[float, Array]:
        self.marginals = self._last = None
        with np.errstate(all="ignore"):
            values = self._parameters.values(x)
        if not self._are_proper(values):
            if not self._begun:
                self._parts.refuse()
            return self._highest(), np.zeros_like(x)
        if (
            self._reads_variables
        ):  # where inference starts may depend on the likelihood's parameters
            self._assign(x)
        start = self.sites if self._is_unique else self._first_sites()
        with host_arithmetic(len(self._X)):
            value, gradient = self._evaluate(values, start, with_gradient)
        log_p, slope = (0.0, 0.0) if self._log_prior is None else self._log_prior(x)
        if self.marginals is not None:
            self._last = (np.array(x), self._residual, float(log_p))
        return value - float(log_p), gradient - np.asarray(slope)

    def _evaluate(
        self, values: dict[int, tuple[Array, Array]], start: SiteValues, with_gradient: bool
    ) -> tuple[float, Array]:
        at = [[values[id(p)][0] for p in matrix.parameters] for matrix in self._matrices]
        K = np.stack([m.evaluate(*v) for m, v in zip(self._matrices, at, strict=True)])
        mean = np.zeros_like(start.lambda_1)
        for p in self._constants:
            mean += values[id(p)][0]
        prior = DensePrior(K, mean)
        data = Observations(self._X, self._Y, [values[id(p)][0] for p in self._own])
        try:
            found, own = run_on_arrays(self._iterate(prior, start), self._answers, data)
            solution = found.solution
            # What has not converged is no objective: a line search backs away from it.
            inaccurate = self._begun and solution.residual > TRAINING.warn_residual
            if not solution.has_started or inaccurate:
                if not self._begun:
                    raise NonFiniteError(COULD_NOT_START)
                return self._highest(), np.zeros(self._parameters.size)
            if not with_gradient:
                return self._arrived(found), np.zeros(self._parameters.size)
            K_bars, mean_bar = found.prior_adjoint()
        finally:
            prior.close()
        bars: dict[int, Any] = {}
        for matrix, v, K_bar in zip(self._matrices, at, K_bars, strict=True):
            for p, bar in zip(matrix.parameters, matrix.pull_back(v[0], v[1], K_bar), strict=True):
                bars[id(p)] = bars.get(id(p), 0.0) + bar
        for p in self._constants:
            bar = _summed(mean_bar, np.shape(values[id(p)][0]))
            bars[id(p)] = bars.get(id(p), 0.0) + bar
        sizes = [np.size(values[id(p)][0]) for p in self._own]
        for p, bar in zip(self._own, np.split(own, np.cumsum(sizes)[:-1]), strict=bool(sizes)):
            bars[id(p)] = bars.get(id(p), 0.0) + bar.reshape(np.shape(values[id(p)][0]))
        gradient = -self._parameters.gradient(values, bars)
        if not np.isfinite(gradient).all():  # an optimiser that is handed NaN goes there
            if not self._begun:
                raise NonFiniteError(COULD_NOT_START)
            return self._highest(), np.zeros(self._parameters.size)
        return self._arrived(found), gradient

    def _arrived(self, found: Collapse) -> float:
        self.sites, self.marginals, self._begun = found.solution.sites, found.q, True
        self._residual = float(found.solution.residual)
        return -float(found.value)

    def leave_sites(self) -> None:
        """Let the model's own inference start from the sites found last."""
        self._model.sites.assign(SiteValues(*(tf.constant(s) for s in self.sites)))

    def arrive(self) -> Arrival | None:
        """Leave λ* to the model as inferred for where it is, and say what is known there, without another
        E-step; None where the loss was evaluated last elsewhere, and of likelihoods whose quadrature is
        not judged on arrays."""
        if self._last is None or self._error is None or self.marginals is None:
            return None
        x, residual, log_prior = self._last
        if not np.array_equal(x, np.concatenate([np.ravel(v) for v in self._variables])):
            return None
        self._model.restore_sites(SiteValues(*(tf.constant(s) for s in self.sites)))
        data = Observations(self._X, self._Y, values_of(self._model.likelihood))
        (judge,) = self._error.values()
        with host_arithmetic(len(self._X)):
            error = judge(data, self.marginals.mean, self.marginals.variance, *self.sites).size
        return Arrival(residual, float(error), log_prior)

    def _are_proper(self, values: dict[int, tuple[Array, Array]]) -> bool:
        finite = all(np.isfinite(value).all() for value, _ in values.values())
        return finite and all((values[name][0] > 0.0).all() for name in self._positive)

    def _highest(self) -> float:
        return TRAINING.penalty_per_datum * len(self._X)

    def _first_sites(self) -> SiteValues:
        return SiteValues(*(np.asarray(x) for x in self._parts.first_sites()))

    def _assign(self, x: Array) -> None:
        optimizer = gpflow.optimizers.Scipy
        values = optimizer.unpack_tensors(self._variables, tf.constant(x))
        optimizer.assign_tensors(self._variables, values)


def _log_prior_on_arrays(
    with_prior: Iterable[Any], variables: tuple[tf.Variable, ...]
) -> LogPrior | None:
    """``log p(θ)`` and its gradient in the variables' numbers in a row, of priors that offer ``on_arrays``;
    None without a prior, and where one of them does not."""
    sizes = {id(v): int(np.prod(v.shape)) for v in variables}
    ends = dict(zip(sizes, np.cumsum(list(sizes.values())), strict=True))
    parts = []
    for p in with_prior:
        function = p.prior.on_arrays(p) if hasattr(p.prior, "on_arrays") else None
        if function is None:
            return None
        end = int(ends[id(p.unconstrained_variable)])
        size = sizes[id(p.unconstrained_variable)]
        parts.append((slice(end - size, end), function))

    def log_prior(x: Array) -> tuple[float, Array]:
        total, slope = 0.0, np.zeros_like(x)
        for place, function in parts:
            value, slope[place] = function(x[place])
            total += value
        return total, slope

    return log_prior if parts else None


def _log_prior_of(model: Any, variables: tuple[tf.Variable, ...]) -> LogPrior:
    """The same of any priors, compiled, at the variables' values."""

    def log_prior() -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            value = model.log_prior_density()
        zero = tf.UnconnectedGradients.ZERO
        slopes = tape.gradient(value, variables, unconnected_gradients=zero)
        return value, gpflow.optimizers.Scipy.pack_tensors(slopes)

    compiled = tf.function(log_prior, autograph=False)
    return lambda x: compiled()


def _summed(bar: Array, shape: tuple[int, ...]) -> Array:
    """The cotangent ``[N, L]`` of a number or of one for every latent."""
    bar = bar.sum(axis=0)
    return (
        bar.reshape(shape)
        if np.size(bar) == np.prod(shape, dtype=int)
        else bar.sum().reshape(shape)
    )
