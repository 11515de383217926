"""What sparse models share: inducing variables, sites, predictions."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable
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
from ..inference.inducing import InducingPosterior, SummedSites
from ..inference.remarks import Remarks
from ..likelihoods.ordinal import with_finite_derivatives
from ..linalg.threads import host_arithmetic
from ..memory import check_inducing_points
from ..objectives import Objective, power_of
from ..posteriors import cache_type, following
from ..priors.inducing import InducingPrior
from ..rows import DataRows, Reference
from ..sites import InducingSites, SiteValues
from ..validation import check_count, check_parts
from .hyperparameters import floating, mark_of
from .objective import WithObjective
from .predictive import PredictiveModel
from .sparse_validation import check_enough, check_latents, check_mean, prepare_inducing_variable


class SparseSiteModel(WithObjective, PredictiveModel):
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
        self.objective = objective
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
        self.inducing_variable = prepare_inducing_variable(inducing_variable, kernel)
        check_inducing_points(int(self.inducing_variable.num_inducing), num_latent_gps)
        self.sites = InducingSites(int(self.inducing_variable.num_inducing), num_latent_gps)
        self.sites.follow(self, "_site_values")
        check_mean(self.mean_function, self.inducing_variable, num_latent_gps)
        if num_data is not None:
            check_enough(num_data, int(self.inducing_variable.num_inducing))
        self._remarks = Remarks()
        self._inferred_from = Reference()
        self.sites.expect_hyperparameters(self._hyperparameter_values())

    # Hyperparameters and the sites that belong to them.

    @property
    def trainable_variables(self) -> tuple[tf.Variable, ...]:
        """The variables of the hyperparameters, Z among them; never λ, whatever its flag says."""
        return tuple(self._hyperparameters_among(super().trainable_variables))

    def _hyperparameters_among(self, variables: Any) -> list[tf.Variable]:
        excluded = {id(v) for v in self.sites.variables}
        return [v for v in variables if id(v) not in excluded]

    @abc.abstractmethod
    def _infer_again(self, rows: DataRows) -> None:
        """Bring q(u) to the present hyperparameters."""

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

    def restore_sites(self, values: SiteValues) -> None:
        """Set λ to what was inferred before for the present hyperparameters; it follows them then."""
        self.sites.store_inferred(values, self._hyperparameter_values())

    def is_inferred_for_present(self) -> bool:
        """Whether q(u) was inferred, and for the present hyperparameters."""
        stale = self.sites.is_stale(self._hyperparameter_values())
        return bool(self.sites.is_inferred() & ~stale)

    def is_inferred_from(self, rows: DataRows) -> bool:
        """Whether q(u) was inferred from these rows, for whatever hyperparameters."""
        return bool(self.sites.is_inferred()) and self._inferred_from.rows is rows

    def repeat_sites(self, rows: DataRows, times: float) -> None:
        """q(u), if it was inferred from these rows, as if each had been seen so many times: nearly that of
        all rows, from some of them, and where inference from all then starts. Nothing counts as inferred
        any more."""
        if self.is_inferred_from(rows):
            self.sites.assign(SiteValues(*(times * x for x in self.sites.values)))
            self._inferred_from.lambda_2 = times * self._inferred_from.lambda_2
        self.sites.release()

    def memory_of_sites(self) -> Callable[[], None]:
        """What sets q(u) back to what it is now, with what it was inferred from."""
        put_sites_back, inferred_from = self.sites.memory(), vars(self._inferred_from).copy()

        def put_back() -> None:
            put_sites_back()
            vars(self._inferred_from).update(inferred_from)

        return put_back

    def _host_arithmetic(self) -> contextlib.AbstractContextManager[None]:
        """For matrices of M×M numbers."""
        return host_arithmetic(int(self.inducing_variable.num_inducing))

    def _q(self) -> InducingPosterior:
        lambda_1, lambda_2 = (x.numpy() for x in self._site_values())
        q = InducingPosterior(SummedSites(lambda_1.T, lambda_2))
        if not q.is_valid:
            raise InvalidPosteriorError(
                "There is no valid q(u) for these sites: I + λ₂ is not positive definite, or a site is not "
                "finite. Start again from model.sites.reset(), or run model.infer(data)."
            )
        return q

    def _present_sites(self) -> SummedSites:
        lambda_1, lambda_2 = (x.numpy() for x in self.sites.values)
        return SummedSites(lambda_1.T, lambda_2)

    def _warm_start(self, prior: InducingPrior) -> SummedSites:
        """The sites, as they say of u at the present hyperparameters."""
        sites, inferred = self._present_sites(), self._inferred_from
        if not np.array_equal(sites.lambda_2, inferred.lambda_2) or not prior.is_valid:
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

    @check_shapes("return: []")
    def prior_kl(self) -> tf.Tensor:
        """``KL[q(u) ‖ p(u)]``."""
        q_mu, q_sqrt = self._moments()
        return kullback_leiblers.prior_kl(
            self.inducing_variable, self.kernel, q_mu, q_sqrt, whiten=True
        )
