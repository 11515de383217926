"""Objectives of a sparse model at its present q(u), from sums over the data on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from gpflow.config import default_float

from ..errors import InvalidDataError
from ..inference.inducing import InducingPosterior, Pair
from ..inference.row_sums import GradientSums, RowSums
from ..likelihoods.expectations import variational_expectations
from ..likelihoods.projections import likelihood_gradients, projected
from ..objectives import check_power
from ..posteriors import no_cavity
from ..priors.inducing import InducingPrior
from ..rows import DataRows, ModelParts, are_constant, rows_of
from ..stand_ins import floating_variables
from ..validation import check_outputs
from .collapsed import with_gradients
from .sparse_base import SparseSiteModel
from .sparse_validation import check_enough, check_rows, check_width

ArrayGradients = Callable[[], list[Any]]
"""Derivatives in the hyperparameters, when they are asked for."""

Variables = list[tf.Variable]


class SparseDiagnosis(NamedTuple):
    """Of all data at one q(u)."""

    values: dict[float, float]
    """The objective of every power; NaN where a cavity does not exist."""
    min_cavity_precision: float
    """The smallest ``1/v − λ₂`` of the marginalised model."""
    loo_log_predictive_density: float
    """Its leave-one-out log densities from the cavities, summed."""


class SparseObjectives(SparseSiteModel):
    """A sparse model with the values of all objectives at its q(u), and their gradients at that q(u).

    q(u) is held in whitened coordinates: u moves with the kernel, ``KL[q(u) ‖ p(u)]`` does not.
    """

    @tf.autograph.experimental.do_not_convert
    def elbo(self, data: Any) -> tf.Tensor:
        """SVGP's bound ``Σ E_q(f)[log p] − KL[q(u) ‖ p(u)]`` at the present q(u), for any ``objective``.

        Of a batch, scaled to ``num_data``. Its gradient in the hyperparameters is at this q(u), as SVGP's.
        A compiled function checks the labels of constants, not of its arguments.
        """
        if tf.executing_eagerly():
            return self._value(data, 0.0)
        if not isinstance(data, (tuple, list)) or len(data) != 2:
            raise InvalidDataError(
                f"data must be a pair (X, Y) inside tf.function; found {type(data).__name__}. Call elbo "
                "outside for other data."
            )
        if are_constant(data):
            with tf.init_scope():
                self._rows(data)
        X, Y = (tf.convert_to_tensor(x) for x in data)
        check_width(X.shape[-1], self.inducing_variable)
        check_rows(X.shape[0] or 0, self.num_data)
        mean, variance = self.predict_f(X)
        total = tf.reduce_sum(variational_expectations(self.likelihood, X, mean, variance, Y))
        rows = tf.cast(tf.shape(X)[0], total.dtype)
        scale = 1.0 if self.num_data is None else tf.cast(self.num_data, total.dtype) / rows
        return scale * total - self.prior_kl()

    def ep_like_log_marginal(self, data: Any) -> tf.Tensor:
        """The EP-like value of the marginalised model, ``f`` given u integrated out, at the present q(u),
        whatever ``objective`` is.

        ``Σ (log E_q(a)[p̃/t] + E_q(a)[log t]) − KL``, with the sites t that q(u) says of every datum: never
        less than ``Σ E_q(a)[log p̃] − KL``. Outside of graphs only; of a batch, scaled to ``num_data``.
        """
        return self._value(data, 1.0)

    def power_ep_log_marginal(self, data: Any, alpha: float) -> tf.Tensor:
        """The same for ``p̃_α`` and the power α: from :meth:`elbo` (α = 0) to :meth:`ep_like_log_marginal`
        (α = 1)."""
        return self._value(data, check_power(alpha))

    def _value(self, data: Any, alpha: float) -> tf.Tensor:
        if not tf.executing_eagerly():
            raise RuntimeError(
                "The EP-like value of a sparse model is computed on the host and cannot run inside "
                "tf.function. Call it outside; inside, use model.elbo(data) or model.training_loss(data)."
            )
        with self._host_arithmetic():
            q = self._q()

        def evaluate(rows: DataRows, variables: Variables) -> tuple[float, ArrayGradients]:
            sums = self._sums(rows, alpha, self._prior(variables))
            value, gradients = self._at(q, sums, variables)
            missing = sums.missing_cavities(q) if np.isnan(value) else None
            if missing is not None:
                raise no_cavity(*missing, alpha, "model.sites.reset()")
            return value, gradients

        return self._with_host_gradients(data, self._rows, evaluate)

    @tf.autograph.experimental.do_not_convert
    def objective_at_fixed_sites(self, data: Any, alpha: float) -> tf.Tensor:
        """The objective of the power α at the present q(u), which stays, with its gradient: what an M-step
        climbs; NaN where there is none."""

        def evaluate(rows: DataRows, variables: Variables) -> tuple[float, ArrayGradients]:
            prior, q = self._prior(variables), InducingPosterior(self._present_sites())
            if not (prior.is_valid and q.is_valid):
                return np.nan, lambda: [np.zeros(v.shape) for v in variables]
            return self._at(q, self._sums(rows, alpha, prior), variables)

        return self._with_host_gradients(data, self._rows_to_learn, evaluate)

    def diagnose_at_fixed_sites(self, data: Any, alphas: Iterable[float]) -> SparseDiagnosis:
        """Objectives and cavities at the present q(u), which stays; the power 1 among them."""
        rows, prior, q = self._rows(data), self._prior(), InducingPosterior(self._present_sites())
        values = {}
        for alpha in sorted(alphas):
            with self._host_arithmetic():
                sums = self._sums(rows, alpha, prior)
                values[alpha] = sums.values(q) - q.kl
        with self._host_arithmetic():
            cavity = sums.sites(q).smallest_cavity
            return SparseDiagnosis(values, cavity, sums.loo_log_predictive_density(q))

    def _at(
        self, q: InducingPosterior, sums: RowSums, variables: Variables
    ) -> tuple[float, ArrayGradients]:
        """The objective at q, and its derivatives there as long as the hyperparameters stay."""
        scale, mark = self._scale(sums.rows), self._hyperparameter_values().numpy()
        value = scale * sums.values(q) - q.kl
        nothing = Pair(np.zeros_like(q.h), np.zeros_like(q.chol))

        def gradients() -> list[Any]:
            if not np.array_equal(mark, self._hyperparameter_values().numpy()):
                raise RuntimeError(
                    "The hyperparameters have changed since this value was computed, and its gradient "
                    "was not asked for before: call tape.gradient before an optimiser moves them."
                )
            pulled = sums.pull_back(q, None if sums.alpha == 0.0 else nothing)
            return [scale * g for g in self._gradients(sums.prior, pulled, variables)]

        return value, gradients

    # From the host to tensors with gradients.

    def _with_host_gradients(
        self,
        data: Any,
        prepare: Callable[[Any], DataRows],
        evaluate: Callable[[DataRows, Variables], tuple[float, ArrayGradients]],
    ) -> tf.Tensor:
        """A value of the data and of all hyperparameters, outside of graphs or as an operation of one.

        :param prepare: checks the data.
        :param evaluate: is given the hyperparameters' variables too.
        """
        variables = self._hyperparameters()
        if tf.executing_eagerly():
            rows = prepare(data)
            with self._host_arithmetic():
                value, gradients = evaluate(rows, variables)

            @functools.cache
            def tensors() -> list[tf.Tensor]:
                with self._host_arithmetic():
                    found = gradients()
                return [tf.constant(g, v.dtype) for g, v in zip(found, variables, strict=True)]

            return with_gradients(tf.constant(value, default_float()), tensors, variables)
        prepared: DataRows | None = None
        inputs: list[tf.Tensor] = []
        if are_constant(data):
            with tf.init_scope():  # read while the graph is traced
                prepared = prepare(data)
        else:
            inputs = [tf.convert_to_tensor(x) for x in data]

        def on_host(*tensors: tf.Tensor) -> list[tf.Tensor]:
            rows = prepare(tensors[:2]) if prepared is None else prepared
            with self._host_arithmetic():
                value, gradients = evaluate(rows, variables)
                found = gradients()
            return [tf.constant(value, default_float()), *(tf.constant(g) for g in found)]

        # The variables are inputs so that their values are those of this place in the graph.
        kinds = [default_float(), *(v.dtype for v in variables)]
        value, *found = tf.py_function(on_host, [*inputs, *variables], kinds)
        value = tf.ensure_shape(value, [])
        found = [tf.ensure_shape(g, v.shape) for g, v in zip(found, variables, strict=True)]
        return with_gradients(value, lambda: found, variables)

    def _gradients(
        self, prior: InducingPrior, sums: GradientSums, variables: Variables
    ) -> list[Any]:
        """From sums over the data to derivatives in the variables."""
        found = prior.in_variables(sums.rows, sums.factor_products)
        total = {id(v): g for v, g in zip(variables, found, strict=True)}
        own = likelihood_gradients(self.likelihood, sums.parameters)
        for v, g in zip(floating_variables(self.likelihood), own, strict=True):
            total[id(v)] = total[id(v)] + g
        return [total[id(v)] for v in variables]

    # The data.

    def _rows(self, data: Any) -> DataRows:
        """Data, checked against the likelihood, the inducing points and ``num_data``."""
        rows = rows_of(data, self.likelihood)
        check_rows(rows.num_rows, self.num_data)
        check_width(rows.num_columns, self.inducing_variable)
        check_outputs(rows.num_outputs, self.likelihood, self.num_latent_gps)
        return rows

    def _rows_to_learn(self, data: Any) -> DataRows:
        """The same, refused where there are fewer data than inducing points."""
        rows = self._rows(data)
        num_data = rows.num_rows if self.num_data is None else self.num_data
        check_enough(num_data, int(self.inducing_variable.num_inducing))
        return rows

    def _scale(self, rows: DataRows) -> float:
        return 1.0 if self.num_data is None else self.num_data / rows.num_rows

    def _prior(self, variables: Variables | None = None) -> InducingPrior:
        kernel, Z, mean, _, num_latent = self._parts()
        return InducingPrior(kernel, Z, mean, num_latent, variables or [])

    def _parts(self) -> ModelParts:
        parts = (self.kernel, self.inducing_variable, self.mean_function, self.likelihood)
        return ModelParts(*parts, self.num_latent_gps)

    def _sums(
        self,
        rows: DataRows,
        alpha: float,
        prior: InducingPrior | None = None,
        in_parts: bool = False,
    ) -> RowSums:
        prior = self._prior() if prior is None else prior
        prior.require_valid()
        make = projected(self.likelihood, alpha, self.num_latent_gps)
        elsewhere = rows.sums_elsewhere(self._parts(), prior, alpha, in_parts)
        return RowSums(prior, make, rows, alpha, in_parts) if elsewhere is None else elsewhere
