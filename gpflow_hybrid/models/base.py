"""What every model with sites shares: data, sites, predictions."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import tensorflow as tf
from check_shapes import check_shapes
from gpflow.base import MeanAndVariance, RegressionData, TensorType
from gpflow.kernels import Kernel
from gpflow.likelihoods import Likelihood
from gpflow.mean_functions import MeanFunction
from gpflow.models.training_mixins import InternalDataTrainingLossMixin
from gpflow.posteriors import PrecomputeCacheType
from gpflow.utilities import is_variable

from .. import objectives
from ..covariances import covariance, latent_kernels, prior_mean
from ..errors import InvalidDataError
from ..inputs import columns_of
from ..likelihoods.ordinal import with_finite_derivatives
from ..linalg import Marginals, marginals, uses_lapack
from ..memory import check_dense_model
from ..objectives import check_power
from ..posteriors import NO_VALID_Q, SitePosterior, explain_invalid, no_cavity
from ..priors import KernelMatrix, PriorMoments
from ..sites import Sites, SiteValues
from ..validation import (
    check_mean_function,
    check_parts,
    count_latent_gps,
    count_rows,
    prepare_data,
    require_finite,
)
from .predictive import PredictiveModel


class SiteModel(PredictiveModel, InternalDataTrainingLossMixin):
    """A GP model with ``q(f) ∝ N(f; μ₀, K) Πₙ exp(λ₁ₙfₙ − ½λ₂ₙfₙ²)``, independent latents.

    Subclasses say how the sites are found and which value is the training objective.

    :param data: ``(X, Y)``, ``[N, D]`` and ``[N, P]``: arrays, tensors or variables.
    :param kernel: one kernel for all latents, ``SharedIndependent`` or ``SeparateIndependent``.
    :param likelihood: any GPflow likelihood.
    :param mean_function: ``m(x)``, zero by default.
    :param num_latent_gps: L; inferred from the other arguments if not given.
    """

    def __init__(
        self,
        data: RegressionData,
        kernel: Kernel,
        likelihood: Likelihood,
        mean_function: MeanFunction | None = None,
        num_latent_gps: int | None = None,
    ) -> None:
        check_parts(kernel, likelihood, mean_function)
        likelihood = with_finite_derivatives(likelihood)
        data = prepare_data(data, likelihood)
        latent_kernels(kernel)
        num_latent_gps = count_latent_gps(kernel, likelihood, data, num_latent_gps)
        super().__init__(kernel, likelihood, mean_function, num_latent_gps)
        check_mean_function(self.mean_function, data[0], num_latent_gps)
        self.data = data
        X, _ = data
        self._check_size(X)
        self.sites = Sites(count_rows(X), X.shape[0], num_latent_gps)
        self.sites.follow(self, "_site_values")
        self._kernel_matrix = KernelMatrix(X)

    # Without autograph, which would transform GPflow's code on every trace.
    training_loss = tf.autograph.experimental.do_not_convert(
        InternalDataTrainingLossMixin.training_loss
    )

    @property
    def trainable_variables(self) -> tuple[tf.Variable, ...]:
        """The variables of the hyperparameters; never λ or data in variables, whatever their flags say."""
        return tuple(self._hyperparameters_among(super().trainable_variables))

    def _hyperparameters_among(self, variables: Iterable[tf.Variable]) -> list[tf.Variable]:
        """Without λ and data in variables."""
        excluded = {id(v) for v in (*self.sites.variables, *self.data)}
        return [v for v in variables if id(v) not in excluded]

    def _check_size(self, X: TensorType) -> None:
        num_kernels = len(latent_kernels(self.kernel))
        check_dense_model(count_rows(X), self.num_latent_gps, num_kernels, X.dtype.size)

    def update_data(self, data: RegressionData) -> None:
        """Replace the data of a model made with ``tf.Variable`` data; the sites return to zero."""
        if not all(is_variable(d) for d in self.data):
            raise InvalidDataError(
                "data must have been given as tf.Variables for update_data; found tensors. Build a "
                "new model, or pass tf.Variable(X, shape=[None, D]) and tf.Variable(Y, shape=[None, P])."
            )
        X, Y = prepare_data(data, self.likelihood)
        for name, variable, value in zip("XY", self.data, (X, Y), strict=True):
            rows, columns = variable.shape
            if value.shape[1] != columns:
                raise InvalidDataError(
                    f"{name} must have {columns} column(s) as before; found {value.shape[1]}. "
                    "Build a new model for other columns."
                )
            found = count_rows(value)
            if rows not in (None, found):
                raise InvalidDataError(
                    f"{name} must have {rows} rows, the fixed number of its tf.Variable; found "
                    f"{found}. Build the model with tf.Variable({name}, shape=[None, {columns}])."
                )
        self._check_size(X)
        for variable, value in zip(self.data, (X, Y), strict=True):
            variable.assign(tf.cast(value, variable.dtype))
        self.sites.reset(tf.shape(X)[0])

    def prior(self, *, exportable: bool = True) -> PriorMoments:
        """``K = k(X, X)`` ``[L or 1, N, N]`` and ``μ₀ = m(X)`` ``[N, L]`` at the data.

        :param exportable: whether a graph that is traced now may leave this process, or be compiled by XLA.
        """
        X = self.data[0]
        self.sites.require_rows(X)
        if uses_lapack(exportable=exportable):
            if self._kernel_matrix.X is not X:
                self._kernel_matrix = KernelMatrix(X)
            K = self._kernel_matrix(self.kernel)
        else:
            K = covariance(self.kernel, tf.convert_to_tensor(X))
        X = tf.convert_to_tensor(X) if is_variable(X) else X  # a constant stays one inside graphs
        return PriorMoments(K, prior_mean(self.mean_function, X, self.num_latent_gps))

    def _site_values(self) -> SiteValues:
        """λ, for the present hyperparameters."""
        return self.sites.values

    def _data_tensors(self) -> RegressionData:
        X, Y = self.data
        return tf.convert_to_tensor(X), tf.convert_to_tensor(Y)

    def _marginals(
        self, prior: PriorMoments | None = None, sites: SiteValues | None = None
    ) -> tuple[Marginals, SiteValues]:
        """q at the data, refused in words where there is no valid one, and the present sites."""
        sites = self._site_values() if sites is None else sites
        prior = self.prior() if prior is None else prior
        q = marginals(*prior, *sites)
        if tf.executing_eagerly():
            self._refuse_invalid(prior, q)
            return q, sites
        with tf.control_dependencies(
            [
                tf.debugging.assert_all_finite(q.log_normaliser, NO_VALID_Q),
                tf.debugging.assert_positive(q.variance, NO_VALID_Q),
            ]
        ):
            return Marginals(*(tf.identity(x) for x in q)), sites

    def _refuse_invalid(self, prior: PriorMoments, q: Marginals) -> None:
        """Say why q is not valid, if it is not: a non-finite prior, or negative sites."""
        if np.isfinite(q.log_normaliser) and np.all(np.asarray(q.variance) > 0.0):
            return
        X, _ = self._data_tensors()
        raise explain_invalid(X, *prior, self.sites.values.lambda_2)

    def posterior(
        self,
        precompute_cache: PrecomputeCacheType | str | None = PrecomputeCacheType.TENSOR,
    ) -> SitePosterior:
        """q(f(·)) as an object with precomputed matrices for fast repeated prediction.

        :param precompute_cache: as in GPflow: ``"tensor"``, ``"variable"``, ``"nocache"`` or None.
        """
        return SitePosterior(
            self.kernel,
            self.data[0],
            self.sites,
            self.mean_function,
            self.num_latent_gps,
            precompute_cache=precompute_cache,
            site_values=self._site_values,
        )

    @tf.autograph.experimental.do_not_convert
    def _predict_f(self, Xnew: tf.Tensor, full_cov: bool, full_output_cov: bool) -> MeanAndVariance:
        return self.posterior(PrecomputeCacheType.NOCACHE).fused_predict_f(
            Xnew, full_cov=full_cov, full_output_cov=full_output_cov
        )

    def _num_inputs(self) -> int | None:
        return columns_of(self.data[0])

    def _width(self) -> int:
        return 0  # SitePosterior makes batches itself, with one factorisation

    # Pure functions of (λ, θ).

    @check_shapes("return: []")
    def elbo(self) -> tf.Tensor:
        """The evidence lower bound ``log Z + Σ E_q[log p − log t]`` (the paper's L_VI)."""
        return self._objective_value(0.0)

    @check_shapes("return: []")
    def ep_like_log_marginal(self) -> tf.Tensor:
        """The EP-like log marginal likelihood ``log Z + Σ log E_q[p/t]`` (the paper's L_EP).

        Never less than the ELBO; usually much closer to log p(y), but not a bound on it.
        """
        return self._objective_value(1.0)

    @check_shapes("return: []")
    def power_ep_log_marginal(self, alpha: float) -> tf.Tensor:
        """``L_α = log Z + (1/α) Σ log E_q[(p/t)^α]``, from the ELBO (α = 0) to EP-like (α = 1)."""
        return self._objective_value(check_power(alpha))

    @check_shapes("return: [N]")
    @tf.autograph.experimental.do_not_convert
    def loo_log_predictive_density(self) -> tf.Tensor:
        """Leave-one-out densities ``log ∫ q₋ₙ(f) p(yₙ|f) df`` from the cavities, ``[N]``.

        A diagnostic, and an optimistic one: maximised over hyperparameters it overfits.
        """
        q, sites = self._marginals()
        self._require_cavities(q, sites, 1.0)
        return objectives.loo_log_predictive_density(
            q, sites, self.likelihood, self._data_tensors()
        )

    @tf.autograph.experimental.do_not_convert
    def _objective_value(self, alpha: float) -> tf.Tensor:
        q, sites = self._marginals()
        self._require_cavities(q, sites, alpha)
        value = objectives.power_ep(q, sites, self.likelihood, self._data_tensors(), alpha)
        require_finite("The objective", value)
        return value

    def _require_cavities(self, q: Marginals, sites: SiteValues, alpha: float) -> None:
        """Refuse, per datum and in words, where ``1/v − αλ₂`` is not positive."""
        if alpha == 0.0:
            return
        lambda_2, variance = sites.lambda_2, q.variance
        if not tf.executing_eagerly():
            precision = 1.0 / variance - alpha * lambda_2
            tf.debugging.assert_positive(precision, "A cavity 1/v − αλ₂ is not positive.")
            return
        precision = 1.0 / np.asarray(variance) - alpha * np.asarray(lambda_2)
        bad = np.argwhere(~(precision > 0.0))
        if len(bad):
            n, latent = bad[0]
            reset = "model.sites.reset(N)"
            raise no_cavity(n, latent, precision[n, latent], len(bad), alpha, reset)
