"""Predictions that take what a constructor takes, a batch of rows at a time."""

from __future__ import annotations

import abc
from typing import Any

import tensorflow as tf
from gpflow.base import MeanAndVariance
from gpflow.models import GPModel
from gpflow.utilities import assert_params_false

from ..batches import in_batches
from ..forks import refuse_forked
from ..inputs import columns_of, new_data, new_inputs
from ..likelihoods import predictions
from ..memory import check_covariance
from ..validation import check_outputs, require_finite


class PredictiveModel(GPModel):
    """A GP model whose predictions are deterministic, checked and made a batch of rows at a time.

    New inputs and observations may be whatever the constructor takes: arrays of floats or integers, lists,
    tables. Observations that the likelihood has no density for are refused.
    """

    inducing_variable: Any
    sites: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse_forked()
        super().__init__(*args, **kwargs)

    @abc.abstractmethod
    def _predict_f(self, Xnew: tf.Tensor, full_cov: bool, full_output_cov: bool) -> MeanAndVariance:
        """Mean and variance of f at inputs that have been checked."""

    def _num_inputs(self) -> int | None:
        """Columns of X, where they are known."""
        return columns_of(self.inducing_variable)

    def _width(self) -> int:
        """Covariances with each new input that a prediction needs, if it is not batched itself."""
        return int(self.sites.lambda_1.shape[0]) * self.num_latent_gps

    @tf.autograph.experimental.do_not_convert
    def predict_f(
        self, Xnew: Any, full_cov: bool = False, full_output_cov: bool = False
    ) -> MeanAndVariance:
        """Mean and variance of f at new inputs, for the present sites and hyperparameters."""
        refuse_forked()
        Xnew = new_inputs(Xnew, self._num_inputs())
        if full_cov and Xnew.shape[-2] is not None:
            check_covariance(Xnew.shape[-2], self.num_latent_gps, Xnew.dtype.size)
        if full_cov or full_output_cov:
            found = self._predict_f(Xnew, full_cov, full_output_cov)
            require_finite("The prediction of f", *found)
            return found

        def of_rows(X: tf.Tensor) -> MeanAndVariance:
            return self._predict_f(X, False, False)

        mean, variance = in_batches(of_rows, (Xnew,), self._width())
        require_finite("The prediction of f", mean, variance)
        # What rounding has left of a large prior variance can be a little less than nothing.
        return mean, tf.maximum(variance, tf.zeros_like(variance))

    def predict_f_samples(
        self,
        Xnew: Any,
        num_samples: int | None = None,
        full_cov: bool = True,
        full_output_cov: bool = False,
    ) -> tf.Tensor:
        """Samples of f at new inputs; see GPflow's method."""
        Xnew = new_inputs(Xnew, self._num_inputs())
        return super().predict_f_samples(Xnew, num_samples, full_cov, full_output_cov)

    @tf.autograph.experimental.do_not_convert
    def predict_y(
        self, Xnew: Any, full_cov: bool = False, full_output_cov: bool = False
    ) -> MeanAndVariance:
        """Mean and variance of y at new inputs, the same for the same inputs."""
        assert_params_false(self.predict_y, full_cov=full_cov, full_output_cov=full_output_cov)
        Xnew = new_inputs(Xnew, self._num_inputs())
        F = self.predict_f(Xnew)

        def of_rows(X: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor) -> MeanAndVariance:
            return predictions.predict_mean_and_var(self.likelihood, X, mean, variance)

        mean, variance = in_batches(of_rows, (Xnew, *F), self._num_nodes())
        require_finite("The prediction of y", mean, variance)
        return mean, variance

    @tf.autograph.experimental.do_not_convert
    def predict_log_density(
        self, data: Any, full_cov: bool = False, full_output_cov: bool = False
    ) -> tf.Tensor:
        """``log ∫ p(y|f) q(f) df`` of every new datum, ``[batch..., N]``.

        Observations that the likelihood has no density for are refused, as in the constructor.
        """
        flags = {"full_cov": full_cov, "full_output_cov": full_output_cov}
        assert_params_false(self.predict_log_density, **flags)
        X, Y = new_data(data, self.likelihood, self._num_inputs())
        if Y.shape[-1] is not None:
            check_outputs(Y.shape[-1], self.likelihood, self.num_latent_gps)
        F = self.predict_f(X)

        def of_rows(X: tf.Tensor, mean: Any, variance: Any, Y: Any) -> tuple[tf.Tensor]:
            return (predictions.predict_log_density(self.likelihood, X, mean, variance, Y),)

        (found,) = in_batches(of_rows, (X, *F, Y), self._num_nodes(), rank=1)
        require_finite("The log density of y", found)
        return found

    def _num_nodes(self) -> int:
        return self.num_latent_gps * predictions.num_nodes(self.likelihood, self.num_latent_gps)
