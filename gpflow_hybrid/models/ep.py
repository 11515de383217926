"""Expectation propagation as a GPflow model."""

from __future__ import annotations

import tensorflow as tf
from check_shapes import check_shapes
from gpflow.base import RegressionData
from gpflow.kernels import Kernel
from gpflow.likelihoods import Likelihood
from gpflow.mean_functions import MeanFunction

from ..inference.common import Method
from ..inference.propagation import expectation_propagation, log_marginal_likelihood
from ..inference.reports import Diagnosis
from ..objectives import check_positive_power
from ..validation import check_parts, check_scalar
from .collapsed import CollapsedModel


class EPModel(CollapsedModel):
    """Gaussian process with a scalar likelihood, inferred by expectation propagation.

    ``q(f) ∝ N(f; μ₀, K) Πₙ tₙ(fₙ)`` with sites such that q and every tilted distribution
    ``q(fₙ) (p(yₙ|fₙ)/tₙ(fₙ))^α`` have the same mean and variance. All sites are updated at once, with
    automatic damping. The training loss is minus EP's log marginal likelihood, with its exact
    gradient.

    Sites may be negative where the likelihood is not log-concave. EP then need not converge; :meth:`infer`
    says so, and says how many updates had to be shortened to keep q and the cavities valid.

    :param alpha: the power of power EP in (0, 1]; 1 is EP itself.

    The other arguments are those of :class:`~gpflow_hybrid.models.SiteModel`. The likelihood must be a
    :class:`gpflow.likelihoods.ScalarLikelihood`; moments are in closed form for
    :class:`~gpflow_hybrid.likelihoods.ProbitBernoulli`, for GPflow's ``Gaussian`` and probit ``Bernoulli``
    (α = 1) and for likelihoods with ``log_expected_power``, and by a rule of 121 points for all others.
    """

    def __init__(
        self,
        data: RegressionData,
        kernel: Kernel,
        likelihood: Likelihood,
        mean_function: MeanFunction | None = None,
        num_latent_gps: int | None = None,
        *,
        alpha: float = 1.0,
    ) -> None:
        check_parts(kernel, likelihood, mean_function)
        check_scalar(likelihood, "EPModel")
        self._alpha = check_positive_power(alpha)
        super().__init__(data, kernel, likelihood, mean_function, num_latent_gps)

    @property
    def alpha(self) -> float:
        """The power of power EP, in (0, 1]."""
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        self._alpha = check_positive_power(value)

    def _method(self) -> Method:
        return expectation_propagation(self.alpha)

    def _refuse_start(self, found: Diagnosis) -> None:
        self._refuse_invalid(self.prior(), found.q)
        self._require_cavities(found.q, self.sites.values, self.alpha)
        super()._refuse_start(found)

    @check_shapes("return: []")
    @tf.autograph.experimental.do_not_convert
    def log_marginal_likelihood(self) -> tf.Tensor:
        """EP's ``log Z + (1/α) Σ log E_q[(p/t)^α]`` at the present sites; EP's value at its fixed point."""
        q, sites = self._marginals()
        self._require_cavities(q, sites, self.alpha)
        return log_marginal_likelihood(q, sites, self.likelihood, *self._data_tensors(), self.alpha)
