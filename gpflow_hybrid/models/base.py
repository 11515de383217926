"""What every model with sites shares: data, sites, predictions."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from check_shapes import inherit_check_shapes
from gpflow.base import InputData, MeanAndVariance, RegressionData
from gpflow.kernels import Kernel
from gpflow.likelihoods import Likelihood
from gpflow.mean_functions import MeanFunction
from gpflow.models import GPModel
from gpflow.models.training_mixins import InternalDataTrainingLossMixin
from gpflow.posteriors import PrecomputeCacheType
from gpflow.utilities import is_variable

from ..covariances import covariance, latent_kernels, prior_mean
from ..errors import InvalidDataError, InvalidPosteriorError, NonFiniteError
from ..inference import Prior
from ..linalg import Marginals, marginals
from ..posteriors import SitePosterior
from ..sites import Sites
from ..validation import count_latent_gps, prepare_data


class SiteModel(GPModel, InternalDataTrainingLossMixin):
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
        data = prepare_data(data, likelihood)
        latent_kernels(kernel)
        num_latent_gps = count_latent_gps(kernel, likelihood, data, num_latent_gps)
        super().__init__(kernel, likelihood, mean_function, num_latent_gps)
        self.data = data
        X, _ = data
        self.sites = Sites(tf.shape(X)[0], X.shape[0], num_latent_gps)

    def update_data(self, data: RegressionData) -> None:
        """Replace the data of a model made with ``tf.Variable`` data; the sites return to zero."""
        if not all(is_variable(d) for d in self.data):
            raise InvalidDataError(
                "data must have been given as tf.Variables for update_data; found tensors. Build a "
                "new model, or pass tf.Variable(X, shape=[None, D]) and tf.Variable(Y, shape=[None, P])."
            )
        X, Y = prepare_data(data, self.likelihood)
        for variable, value in zip(self.data, (X, Y)):
            variable.assign(tf.cast(value, variable.dtype))
        self.sites.reset(tf.shape(X)[0])

    def prior(self) -> Prior:
        """``K = k(X, X)`` ``[L or 1, N, N]`` and ``μ₀ = m(X)`` ``[N, L]`` at the data."""
        X = tf.convert_to_tensor(self.data[0])
        return Prior(
            covariance(self.kernel, X), prior_mean(self.mean_function, X, self.num_latent_gps)
        )

    def _follow_hyperparameters(self) -> None:
        """Hook before anything is read from the sites."""

    def _data_tensors(self) -> RegressionData:
        X, Y = self.data
        return tf.convert_to_tensor(X), tf.convert_to_tensor(Y)

    def _marginals(self, prior: Prior | None = None) -> Marginals:
        """q at the data for the present sites, refused in words where there is no valid q."""
        self._follow_hyperparameters()
        prior = self.prior() if prior is None else prior
        lambda_1, lambda_2 = self.sites.values
        num_sites, num_data = tf.shape(lambda_1)[0], tf.shape(prior.mean)[0]
        tf.debugging.assert_equal(
            num_sites,
            num_data,
            "The data have changed their number of rows and the sites have not: set new data with "
            "model.update_data((X, Y)).",
        )
        q = marginals(*prior, lambda_1, lambda_2)
        if tf.executing_eagerly():
            self._refuse_invalid(prior, q)
            return q
        message = "No valid q(f) for these sites, or a non-finite kernel matrix."
        with tf.control_dependencies(
            [
                tf.debugging.assert_all_finite(q.log_normaliser, message),
                tf.debugging.assert_positive(q.variance, message),
            ]
        ):
            return Marginals(*(tf.identity(x) for x in q))

    def _refuse_invalid(self, prior: Prior, q: Marginals) -> None:
        """Say why q is not valid, if it is not: a non-finite prior, or negative sites."""
        if np.isfinite(q.log_normaliser) and tf.reduce_all(q.variance > 0.0):
            return
        finite_rows = {
            "kernel matrix": np.isfinite(prior.K).all(axis=(0, 2)),
            "mean function": np.isfinite(prior.mean).all(axis=1),
        }
        for name, finite in finite_rows.items():
            if not finite.all():
                n = int(np.argmin(finite))
                raise NonFiniteError(
                    f"The {name} is not finite at datum {n} (x = "
                    f"{self._data_tensors()[0].numpy()[n]}). Check the hyperparameters: "
                    "gpflow.utilities.print_summary(model)."
                )
        lambda_2 = self.sites.values.lambda_2.numpy()
        worst = np.unravel_index(np.argmin(lambda_2), lambda_2.shape)
        raise InvalidPosteriorError(
            "There is no valid q(f) for these sites: K⁻¹ + diag(λ₂) is not positive definite. The "
            f"most negative λ₂ is {lambda_2[worst]:.3g} at datum {worst[0]} (latent {worst[1]}). "
            "Run model.infer(), or restart from zero sites with smaller natural-gradient steps."
        )

    def posterior(
        self,
        precompute_cache: PrecomputeCacheType | str | None = PrecomputeCacheType.TENSOR,
    ) -> SitePosterior:
        """q(f(·)) as an object with precomputed matrices for fast repeated prediction.

        :param precompute_cache: as in GPflow: ``"tensor"``, ``"variable"``, ``"nocache"`` or None.
        """
        self._follow_hyperparameters()
        return SitePosterior(
            self.kernel,
            self.data[0],
            self.sites,
            self.mean_function,
            self.num_latent_gps,
            precompute_cache=precompute_cache,
        )

    @inherit_check_shapes
    @tf.autograph.experimental.do_not_convert
    def predict_f(
        self, Xnew: InputData, full_cov: bool = False, full_output_cov: bool = False
    ) -> MeanAndVariance:
        """Mean and variance of f at new inputs, for the present sites and hyperparameters."""
        return self.posterior(PrecomputeCacheType.NOCACHE).fused_predict_f(
            Xnew, full_cov=full_cov, full_output_cov=full_output_cov
        )
