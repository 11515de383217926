"""What sparse models share: inducing variables, sites, predictions, objectives at the present q(u)."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from check_shapes import check_shapes
from gpflow import kullback_leiblers, posteriors
from gpflow.base import MeanAndVariance
from gpflow.config import default_float
from gpflow.kernels import Kernel
from gpflow.likelihoods import Likelihood
from gpflow.mean_functions import MeanFunction
from gpflow.models.util import InducingVariablesLike
from gpflow.posteriors import PrecomputeCacheType

from ..errors import InvalidDataError, InvalidPosteriorError
from ..inference.collapsing import Remarks
from ..inference.inducing import InducingPosterior, SummedSites
from ..inference.row_sums import RowSums
from ..likelihoods.expectations import variational_expectations
from ..likelihoods.ordinal import with_finite_derivatives
from ..likelihoods.projections import projected
from ..objectives import Objective, check_power, power_of
from ..posteriors import cache_type, following
from ..priors.inducing import InducingPrior
from ..rows import DataRows, Reference, are_constant, rows_of
from ..sites import InducingSites, SiteValues
from ..validation import check_count, check_parts
from .hyperparameters import floating, mark_of
from .predictive import PredictiveModel
from .sparse_validation import (
    check_enough,
    check_latents,
    check_mean,
    check_outputs,
    check_rows,
    check_width,
    prepare_inducing_variable,
)


class SparseSiteModel(PredictiveModel):
    """A GP model with inducing variables u and a Gaussian ``q(u) ∝ p(u) exp(λ₁ᵀw − ½ wᵀΛ₂w)``, ``u = Lw``.

    Subclasses say how the sites are found and which value is the training objective.
    """

    whiten = True
    """``q_mu`` and ``q_sqrt`` are of whitened inducing variables."""

    def __init__(
        self,
        kernel: Kernel,
        likelihood: Likelihood,
        inducing_variable: InducingVariablesLike,
        *,
        mean_function: MeanFunction | None = None,
        num_latent_gps: int = 1,
        num_data: int | None = None,
        objective: Objective = "ep_like",
    ) -> None:
        check_parts(kernel, likelihood, mean_function)
        power_of(objective)
        if default_float() != np.float64:
            raise InvalidDataError(
                "SparseCVIModel computes in float64; found default_float() = "
                f"{np.dtype(default_float()).name}. Call gpflow.config.set_default_float(np.float64)."
            )
        if num_data is not None:
            check_count(num_data, "num_data")
        likelihood = with_finite_derivatives(likelihood)
        check_latents(kernel, likelihood, num_latent_gps)
        super().__init__(kernel, likelihood, mean_function, num_latent_gps)
        self.num_data = num_data
        self._objective = objective
        self.inducing_variable = prepare_inducing_variable(inducing_variable, kernel)
        self.sites = InducingSites(int(self.inducing_variable.num_inducing), num_latent_gps)
        self.sites.follow(self, "_site_values")
        check_mean(self.mean_function, self.inducing_variable, num_latent_gps)
        if num_data is not None:
            check_enough(num_data, int(self.inducing_variable.num_inducing))
        self._remarks = Remarks()
        self._inferred_from = Reference()
        self.sites.expect_hyperparameters(self._hyperparameter_values())

    @property
    def objective(self) -> Objective:
        """What is inferred and learnt: ``"elbo"``, ``"ep_like"`` or a power α."""
        return self._objective

    @objective.setter
    def objective(self, value: Objective) -> None:
        power_of(value)
        self._objective = value

    # Hyperparameters and the sites that belong to them.

    @property
    def trainable_variables(self) -> tuple[tf.Variable, ...]:
        """The variables of the hyperparameters, Z among them; never λ, whatever its flag says."""
        return tuple(self._hyperparameters_among(super().trainable_variables))

    def _hyperparameters_among(self, variables: Any) -> list[tf.Variable]:
        excluded = {id(v) for v in (*self.sites.variables, *self._state())}
        return [v for v in variables if id(v) not in excluded]

    def _state(self) -> tuple[tf.Variable, ...]:
        """Further variables that are no hyperparameters."""
        return ()

    def _infer_again(self, rows: DataRows) -> None:
        """Bring q(u) to the present hyperparameters."""
        raise NotImplementedError

    def _hyperparameters(self) -> list[tf.Variable]:
        return floating(self._hyperparameters_among(self.variables))

    def _hyperparameter_values(self) -> tf.Tensor:
        return mark_of(self, f"sparse {power_of(self.objective)!r}", self._hyperparameters())

    def _site_values(self) -> SiteValues:
        """λ for the present hyperparameters: inferred again where a training loss on all data has left
        those of others."""
        if self.sites.is_frozen:
            return self.sites.values
        stale = self.sites.is_stale(self._hyperparameter_values())
        if not tf.executing_eagerly():
            message = (
                "The hyperparameters have changed since the training loss inferred q(u): call "
                "model.infer(data) before this compiled function."
            )
            tf.debugging.Assert(~stale, [message])
            nan = tf.constant(np.nan, default_float())
            return SiteValues(*(tf.where(stale, nan, x) for x in self.sites.values))
        if stale:
            rows = self._inferred_from.rows
            if rows is None:
                raise InvalidPosteriorError(
                    "The hyperparameters have changed since q(u) was inferred, and the data it was "
                    "inferred from are not at hand: call model.infer(data)."
                )
            self._infer_again(rows)
        return self.sites.values

    def _q(self) -> InducingPosterior:
        lambda_1, lambda_2 = (x.numpy() for x in self._site_values())
        q = InducingPosterior(SummedSites(lambda_1.T, lambda_2))
        if not q.is_valid:
            raise InvalidPosteriorError(
                "There is no valid q(u) for these sites: I + λ₂ is not positive definite, or a site is not "
                "finite. Start again from model.sites.reset(), or run model.infer(data)."
            )
        return q

    def _start(self, prior: InducingPrior) -> SummedSites:
        """Where inference starts: at the sites, as they say of u at the present hyperparameters."""
        lambda_1, lambda_2 = (x.numpy() for x in self.sites.values)
        sites, inferred = SummedSites(lambda_1.T, lambda_2), self._inferred_from
        if not np.array_equal(lambda_2, inferred.lambda_2) or not prior.is_valid:
            return sites  # given by the user, or restored
        return sites.at_other_factors(inferred.factors, prior.chol)

    @staticmethod
    def _as_site_values(sites: SummedSites) -> SiteValues:
        return SiteValues(tf.constant(sites.lambda_1.T), tf.constant(sites.lambda_2))

    @property
    @check_shapes("return: [M, L]")
    def q_mu(self) -> tf.Tensor:
        """The mean of the whitened inducing variables, as SVGP's."""
        return self._moments()[0]

    @property
    @check_shapes("return: [L, M, M]")
    def q_sqrt(self) -> tf.Tensor:
        """The lower triangular root of their covariance, as SVGP's."""
        return self._moments()[1]

    def _moments(self) -> tuple[tf.Tensor, tf.Tensor]:
        lambda_1, lambda_2 = self._site_values()
        eye = tf.eye(tf.shape(lambda_2)[-1], dtype=lambda_2.dtype)
        # With J the reversal, J P J = R Rᵀ: then (J R⁻ᵀ J)(J R⁻ᵀ J)ᵀ = P⁻¹ is its Cholesky factorisation.
        R = tf.linalg.cholesky(tf.reverse(eye + lambda_2, [-1, -2]))
        inverse = tf.linalg.triangular_solve(R, tf.broadcast_to(eye, tf.shape(R)))
        root = tf.reverse(tf.linalg.matrix_transpose(inverse), [-1, -2])
        right = tf.matmul(root, tf.transpose(lambda_1)[..., None], transpose_a=True)
        return tf.transpose(tf.squeeze(tf.matmul(root, right), -1)), root

    # Predictions.

    def posterior(
        self, precompute_cache: PrecomputeCacheType | str | None = PrecomputeCacheType.TENSOR
    ) -> posteriors.BasePosterior:
        """q(f(·)), GPflow's own; ``update_cache()`` brings its precomputed matrices to the present q(u).

        :param precompute_cache: as in GPflow: ``"tensor"``, ``"variable"``, ``"nocache"`` or None.
        """
        return following(self._uncached_posterior, cache_type(precompute_cache))

    def _uncached_posterior(self) -> posteriors.BasePosterior:
        return posteriors.create_posterior(
            self.kernel,
            self.inducing_variable,
            *self._moments(),
            whiten=True,
            mean_function=self.mean_function,
            precompute_cache=PrecomputeCacheType.NOCACHE,
        )

    def _predict_f(self, Xnew: tf.Tensor, full_cov: bool, full_output_cov: bool) -> MeanAndVariance:
        return self._uncached_posterior().fused_predict_f(Xnew, full_cov, full_output_cov)

    # Objectives at the present q(u).

    @check_shapes("return: []")
    def prior_kl(self) -> tf.Tensor:
        """``KL[q(u) ‖ p(u)]``."""
        q_mu, q_sqrt = self._moments()
        return kullback_leiblers.prior_kl(
            self.inducing_variable, self.kernel, q_mu, q_sqrt, whiten=True
        )

    @tf.autograph.experimental.do_not_convert
    def elbo(self, data: Any) -> tf.Tensor:
        """SVGP's bound ``Σ E_q(f)[log p] − KL[q(u) ‖ p(u)]`` at the present q(u), for any ``objective``.

        Of a batch, scaled to ``num_data``. A compiled function checks the labels of constants, not of its
        arguments.
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
        rows = self._rows(data)
        q = self._q()
        value = self._scale(rows) * self._sums(rows, alpha).values(q) - q.kl
        return tf.constant(value, default_float())

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

    def _prior(self, variables: list[tf.Variable] | None = None) -> InducingPrior:
        parts = (self.kernel, self.inducing_variable, self.mean_function)
        return InducingPrior(*parts, self.num_latent_gps, variables or [])

    def _sums(self, rows: DataRows, alpha: float, prior: InducingPrior | None = None) -> RowSums:
        prior = self._prior() if prior is None else prior
        prior.require_valid()
        make = projected(self.likelihood, alpha, self.num_latent_gps)
        return RowSums(prior, make, rows, alpha)
