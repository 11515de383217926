"""Conjugate-computation variational inference as a GPflow model."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import tensorflow as tf
from gpflow.base import RegressionData
from gpflow.kernels import Kernel
from gpflow.likelihoods import Likelihood
from gpflow.mean_functions import MeanFunction

from ..errors import InvalidPosteriorError
from ..inference.common import Method
from ..inference.reports import InferenceResult
from ..inference.smooth_start import smoothly_started, starts_smoothly
from ..inference.total_gradient import variational_inference
from ..inference.variational import damped, natural_gradient_step
from ..likelihoods.expectations import expectation_gradients
from ..likelihoods.first_sites import first_sites
from ..linalg import marginals
from ..objectives import Objective, power_of
from ..sites import SiteValues
from ..validation import check_step
from .collapsed import CollapsedModel
from .objective import WithObjective


class CVIModel(WithObjective, CollapsedModel):
    """Gaussian process with any likelihood, inferred by conjugate-computation variational inference.

    The approximate posterior is ``q(f) ∝ N(f; μ₀, K) Πₙ exp(λ₁ₙfₙ − ½λ₂ₙfₙ²)`` (the paper's Eq. 5);
    at the optimum it equals that of :class:`gpflow.models.VGP`. A drop-in replacement for it: the
    training loss first brings λ to its optimum for the present hyperparameters, then returns the
    chosen learning objective there, with the exact total gradient, so that ::

        gpflow.optimizers.Scipy().minimize(model.training_loss, model.trainable_variables)

    is all of training. λ follows the hyperparameters from then on; :meth:`infer`,
    :meth:`natgrad_step` or an assignment to ``model.sites`` make it the user's own again.

    :param objective: what the training loss maximises: ``"ep_like"`` (default), ``"elbo"``, or a
        power α in [0, 1] between the two.

    The other arguments are those of :class:`~gpflow_hybrid.models.SiteModel`.
    """

    def __init__(
        self,
        data: RegressionData,
        kernel: Kernel,
        likelihood: Likelihood,
        mean_function: MeanFunction | None = None,
        num_latent_gps: int | None = None,
        *,
        objective: Objective = "ep_like",
    ) -> None:
        self.objective = objective
        super().__init__(data, kernel, likelihood, mean_function, num_latent_gps)

    def _first_sites(self) -> SiteValues:
        return first_sites(self.likelihood, self._data_tensors()[1], self.sites.values.lambda_1)

    def _method(self) -> Method:
        return variational_inference(power_of(self.objective))

    def _training_method(self) -> Method:
        method = self._method()
        return smoothly_started(method) if starts_smoothly(self.likelihood) else method

    def infer(
        self, *, tolerance: float = 1e-6, max_steps: int = 200, lr: float | None = None
    ) -> InferenceResult:
        """Run the E-step to convergence from the present sites, and say how it went.

        By default a damped Newton iteration that needs no tuning and never lowers the ELBO. The
        model keeps the best sites seen, always with a valid q.

        :param tolerance: on the relative residual of the fixed point.
        :param max_steps: at most so many steps are tried; each costs one evaluation of the posterior.
        :param lr: instead, plain damping ``λ ← (1 − lr) λ + lr g(λ)`` as in the paper.
        """
        if lr is None:
            return super().infer(tolerance=tolerance, max_steps=max_steps)
        step = float(check_step(lr))
        automatic = "or leave lr out: the automatic mode needs no step size."
        plain = dataclasses.replace(
            self._method(),
            solve=functools.partial(damped, lr=step),
            when_stalled=f"a step with this lr left no valid q(f). Take a smaller lr, {automatic}",
            when_exhausted=f"Raise max_steps {automatic}",
        )
        return self._infer(plain, tolerance, max_steps)

    @tf.autograph.experimental.do_not_convert
    def natgrad_step(self, lr: Any = 1.0) -> None:
        """One natural-gradient step on λ: ``λ ← (1 − lr) λ + lr ∇_μ E_q[log p]``.

        With a Gaussian likelihood ``natgrad_step(1.0)`` gives the exact posterior. A step that would
        leave no valid q is refused, and λ stays as it was.

        :param lr: step size in (0, 1].
        """
        lr = tf.cast(check_step(lr), self.sites.lambda_1.dtype)
        prior = self.prior()
        q, sites = self._marginals(prior)
        X, Y = self._data_tensors()
        E = expectation_gradients(self.likelihood, X, q.mean, q.variance, Y)
        new = natural_gradient_step(q, sites, E, lr)

        def are_finite() -> tf.Tensor:
            return tf.reduce_all(tf.math.is_finite(new.lambda_1) & tf.math.is_finite(new.lambda_2))

        def are_valid() -> tf.Tensor:
            q = marginals(*prior, *new)
            is_valid = tf.reduce_all(q.variance > 0.0) & tf.math.is_finite(q.log_normaliser)
            return are_finite() & is_valid

        # Only negative sites can leave the cone of valid posteriors.
        valid = tf.cond(tf.reduce_all(new.lambda_2 >= 0.0), are_finite, are_valid)
        message = (
            "This natural-gradient step leaves no valid q(f): take a smaller lr, or run "
            "model.infer(). λ is unchanged."
        )
        if tf.executing_eagerly():
            if not valid:
                self._refuse_non_finite(q, E.value, E.mean, E.variance)
                raise InvalidPosteriorError(message)
            self.sites.assign(new)
            return
        with tf.control_dependencies([tf.debugging.Assert(valid, [message])]):
            self.sites.assign(SiteValues(*(tf.identity(x) for x in new)))
