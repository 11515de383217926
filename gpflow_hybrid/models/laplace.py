"""Laplace's method as a GPflow model."""

from __future__ import annotations

import tensorflow as tf
from check_shapes import check_shapes
from gpflow.base import RegressionData
from gpflow.kernels import Kernel
from gpflow.likelihoods import Likelihood
from gpflow.mean_functions import MeanFunction

from ..inference.common import Method
from ..inference.laplace import laplace, log_marginal_likelihood
from ..validation import check_parts, check_scalar
from .collapsed import CollapsedModel


class LaplaceModel(CollapsedModel):
    """Gaussian process with a scalar likelihood, inferred by Laplace's method.

    ``q(f) = N(f̂, (K⁻¹ + W)⁻¹)`` with f̂ the mode of ``p(f | y)`` and ``W = −∂² log p(y|f)/∂f²`` there,
    found by Newton's method with a line search. As sites: ``λ₂ = W``, ``λ₁ = W f̂ + ∂ log p/∂f``. The
    training loss is minus Laplace's log marginal likelihood, with its exact gradient: the mode and W
    move with the hyperparameters, and the derivative through them is part of it.

    The arguments are those of :class:`~gpflow_hybrid.models.SiteModel`. The likelihood must be a
    :class:`gpflow.likelihoods.ScalarLikelihood` with three derivatives.
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
        check_scalar(likelihood, "LaplaceModel")
        super().__init__(data, kernel, likelihood, mean_function, num_latent_gps)

    def _method(self) -> Method:
        return laplace()

    @check_shapes("return: []")
    @tf.autograph.experimental.do_not_convert
    def log_marginal_likelihood(self) -> tf.Tensor:
        """Laplace's ``log p(y|f̂) + log N(f̂; μ₀, K) + ½ log|2πΣ|``, at the mean f̂ of the present q."""
        q, sites = self._marginals()
        X, Y = self._data_tensors()
        log_prob = tf.reduce_sum(self.likelihood.log_prob(X, q.mean, Y))
        return log_marginal_likelihood(q, sites, log_prob)
