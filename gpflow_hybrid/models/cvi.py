"""Conjugate-computation variational inference as a GPflow model."""

from __future__ import annotations

import numbers
import zlib
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
from check_shapes import check_shapes, inherit_check_shapes
from gpflow.base import Parameter, RegressionData
from gpflow.kernels import Kernel
from gpflow.likelihoods import Likelihood
from gpflow.mean_functions import MeanFunction

from .. import objectives
from ..collapsed import Collapse, collapse, surrogate
from ..compilation import call_compiled
from ..errors import InvalidDataError, InvalidPosteriorError, NonFiniteError
from ..inference import (
    INVALID_START,
    Prior,
    Solution,
    infer_damped,
    infer_newton,
    natural_gradient_step,
)
from ..likelihoods.expectations import expectation_gradients
from ..linalg import Marginals, marginals
from ..objectives import Objective, check_power, power_of
from ..reports import InferenceResult, report
from ..sites import SiteValues
from ..validation import check_step
from .base import SiteModel

TRAINING_TOLERANCE = 1e-9
"""Residual to which the training loss infers: the gradient of L_α feels the residual to first order."""

TRAINING_STEPS = 100
"""Steps that the training loss may try from one start."""

PENALTY_PER_DATUM = 1e3
"""Loss per datum, in nats, at hyperparameters that have no objective."""

WARN_RESIDUAL = 1e-3
"""Residual above which the training loss says that its gradient is not exact."""


class CVIModel(SiteModel):
    """Gaussian process with any likelihood, inferred by conjugate-computation variational inference.

    The approximate posterior is ``q(f) ∝ N(f; μ₀, K) Πₙ exp(λ₁ₙfₙ − ½λ₂ₙfₙ²)`` (the paper's Eq. 5);
    at the optimum it equals that of :class:`gpflow.models.VGP`. A drop-in replacement for it: the
    training loss first brings λ to its optimum for the present hyperparameters, then returns the
    chosen learning objective there, with the exact total gradient, so that

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
        power_of(objective)
        super().__init__(data, kernel, likelihood, mean_function, num_latent_gps)
        self._objective = objective

    @property
    def objective(self) -> Objective:
        """What the training loss maximises: ``"elbo"``, ``"ep_like"`` or a power α."""
        return self._objective

    @objective.setter
    def objective(self, value: Objective) -> None:
        power_of(value)
        self._objective = value

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
        q, sites = self._marginals(), self.sites.values
        self._require_cavities(q, sites, 1.0)
        return objectives.leave_one_out(q, sites, self.likelihood, self._data_tensors())

    @tf.autograph.experimental.do_not_convert
    def _objective_value(self, alpha: float) -> tf.Tensor:
        q, sites = self._marginals(), self.sites.values
        self._require_cavities(q, sites, alpha)
        return objectives.power_ep(q, sites, self.likelihood, self._data_tensors(), alpha)

    def _require_cavities(self, q: Marginals, sites: SiteValues, alpha: float) -> None:
        """Refuse, per datum and in words, where ``1/v − αλ₂`` is not positive."""
        if alpha == 0.0:
            return
        kept = 1.0 - alpha * sites.lambda_2 * q.variance
        if not tf.executing_eagerly():
            tf.debugging.assert_positive(kept, "A cavity 1/v − αλ₂ is not positive.")
            return
        bad = np.argwhere(~(kept.numpy() > 0.0))
        if len(bad):
            n, latent = bad[0]
            raise InvalidPosteriorError(
                f"The cavity of datum {n} (latent {latent}) does not exist: 1/v − αλ₂ = "
                f"{(kept / q.variance).numpy()[n, latent]:.3g} with α = {alpha:g} ({len(bad)} such "
                "data). The integral diverges there: use the ELBO or a smaller α, or run "
                "model.infer() first."
            )

    # Inference.

    @tf.autograph.experimental.do_not_convert
    def natgrad_step(self, lr: Any = 1.0) -> None:
        """One natural-gradient step on λ: ``λ ← (1 − lr) λ + lr ∇_μ E_q[log p]``.

        With a Gaussian likelihood ``natgrad_step(1.0)`` gives the exact posterior. A step that would
        leave no valid q is refused, and λ stays as it was.

        :param lr: step size in (0, 1].
        """
        lr = tf.cast(check_step(lr), self.sites.lambda_1.dtype)
        prior = self.prior()
        q = self._marginals(prior)
        X, Y = self._data_tensors()
        E = expectation_gradients(self.likelihood, X, q.mean, q.variance, Y)
        new = natural_gradient_step(q, self.sites.values, E, lr)

        def is_finite() -> tf.Tensor:
            return tf.reduce_all(tf.math.is_finite(new.lambda_1) & tf.math.is_finite(new.lambda_2))

        def is_valid() -> tf.Tensor:
            q = marginals(*prior, *new)
            proper = tf.math.is_finite(q.log_normaliser) & tf.reduce_all(q.variance > 0.0)
            return is_finite() & proper

        # Only negative sites can leave the cone of valid posteriors.
        valid = tf.cond(tf.reduce_all(new.lambda_2 >= 0.0), is_finite, is_valid)
        message = (
            "This natural-gradient step leaves no valid q(f): take a smaller lr, or run "
            "model.infer(). λ is unchanged."
        )
        if tf.executing_eagerly():
            if not valid:
                self._refuse_non_finite(q, E.value, E.mean, E.variance)
                raise InvalidPosteriorError(message)
            self.sites.assign(new)
            self.sites.release()
            return
        with tf.control_dependencies([tf.debugging.Assert(valid, [message])]):
            self.sites.assign(SiteValues(*(tf.identity(x) for x in new)))
            self.sites.release()

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
        if not isinstance(tolerance, numbers.Real) or not tolerance > 0.0:
            raise InvalidDataError(f"tolerance must be a positive number; found {tolerance!r}.")
        if not isinstance(max_steps, numbers.Integral) or max_steps < 1:
            raise InvalidDataError(f"max_steps must be a positive integer; found {max_steps!r}.")
        if not tf.executing_eagerly():
            raise RuntimeError(
                "infer() reports to Python and cannot run inside tf.function. Call it outside; inside, "
                "model.training_loss() infers, and model.natgrad_step(lr) takes one step."
            )
        prior = self.prior()
        dtype = prior.K.dtype
        limits = [tf.constant(tolerance, dtype), tf.constant(int(max_steps))]
        function: Any = infer_newton
        if lr is not None:
            limits.append(tf.constant(check_step(lr), dtype))
            function = infer_damped
        solution = self._run(function.__name__, function, prior, *limits)
        q = marginals(*prior, *solution.sites)
        if int(solution.status) == INVALID_START:
            self._refuse_invalid(prior, q)
            X, Y = self._data_tensors()
            E = expectation_gradients(self.likelihood, X, q.mean, q.variance, Y)
            self._refuse_non_finite(q, E.value, E.mean, E.variance)
        self.sites.assign(solution.sites)
        self.sites.release()
        data = self._data_tensors()
        return report(solution, q, self.likelihood, data, fixed_lr=lr is not None)

    def _run(self, key: Any, function: Any, prior: Prior, *limits: tf.Tensor) -> Any:
        """``function`` of the E-step on this model's prior, data and sites, compiled once."""
        signature = (key, self.num_latent_gps, prior.K.shape[0], prior.K.dtype)
        arguments = (*prior, *self._data_tensors(), *self.sites.values, *limits)
        return call_compiled(self.likelihood, signature, function, *arguments)

    def _refuse_non_finite(self, q: Marginals, *expectations: tf.Tensor) -> None:
        """Name the datum at which an expectation of the likelihood is not finite."""
        X, Y = (d.numpy() for d in self._data_tensors())
        for value in expectations:
            bad = np.argwhere(~np.isfinite(value))
            if len(bad):
                n = bad[0][0]
                raise NonFiniteError(
                    "The expected log likelihood or its gradient is not finite at datum "
                    f"{n} (x = {X[n]}, y = {Y[n]}, q(f) = N({q.mean.numpy()[n]}, "
                    f"{q.variance.numpy()[n]})). Rescale the data, or start from a smaller kernel "
                    "variance."
                )

    # The collapsed objective.

    @inherit_check_shapes
    @tf.autograph.experimental.do_not_convert
    def maximum_log_likelihood_objective(self) -> tf.Tensor:
        """``L_α(λ*(θ), θ)`` for the chosen objective, with its exact total gradient.

        λ moves to its optimum ``λ*`` for the present hyperparameters first, starting where it is.
        """
        return tf.cond(self._parameters_are_proper(), self._collapsed_objective, self._penalty)

    def _collapsed_objective(self) -> tf.Tensor:
        alpha = power_of(self.objective)
        prior = self.prior()
        found = self._collapse(prior, alpha)
        return surrogate(prior, found, self.likelihood, self._data_tensors(), alpha)

    def _parameters_are_proper(self) -> tf.Tensor:
        """Whether no transformed parameter has left its domain: an optimiser's long step can take a
        lengthscale to exactly zero, where nothing has a value or a gradient."""
        proper = tf.constant(True)
        for parameter in self.parameters:
            value = tf.convert_to_tensor(parameter)
            if value.dtype.is_floating:
                proper = proper & tf.reduce_all(tf.math.is_finite(value))
                if isinstance(parameter.transform, (tfp.bijectors.Softplus, tfp.bijectors.Exp)):
                    proper = proper & tf.reduce_all(value > 0.0)
        return proper

    def _penalty(self) -> tf.Tensor:
        """An objective so low, and flat, that a line search backs away; refused at a first evaluation."""
        message = (
            "A parameter is zero or not finite, and training has not begun: set it to a proper value "
            "(gpflow.utilities.print_summary(model) shows them)."
        )
        begun = self.sites.is_bound()
        if tf.executing_eagerly() and not begun:
            raise NonFiniteError(message)
        with tf.control_dependencies([tf.debugging.Assert(begun, [message])]):
            num_data = tf.cast(tf.shape(self.sites.lambda_1)[0], self.sites.lambda_1.dtype)
            return -PENALTY_PER_DATUM * num_data

    def _collapse(self, prior: Prior, alpha: float) -> Collapse:
        dtype = prior.K.dtype
        tolerance = max(TRAINING_TOLERANCE, 1e3 * float(np.finfo(dtype.as_numpy_dtype).eps))
        limits = (tf.constant(tolerance, dtype), tf.constant(TRAINING_STEPS))

        def function(likelihood: Likelihood, *args: tf.Tensor) -> Collapse:
            return collapse(alpha, likelihood, *args)

        constant_prior = Prior(*(tf.stop_gradient(x) for x in prior))
        if tf.executing_eagerly():
            found = self._run(("collapse", alpha), function, constant_prior, *limits)
        else:
            sites = (tf.stop_gradient(x) for x in self.sites.values)
            found = function(
                self.likelihood, *constant_prior, *self._data_tensors(), *sites, *limits
            )
        self._settle(found.solution)
        return found

    def _settle(self, solution: Solution) -> None:
        """Store ``λ*`` and what it was inferred for, unless inference could not even start."""
        message = (
            "Inference inside the training loss could not start: the kernel matrix, the mean "
            "function or the expected log likelihood is not finite at these hyperparameters. "
            "Put bounds or priors on them; model.infer() names the datum."
        )
        usable = tf.not_equal(solution.status, INVALID_START)
        poor = usable & (solution.residual > WARN_RESIDUAL)
        warning = "gpflow_hybrid: inference inside the training loss did not converge; residual"
        if tf.executing_eagerly():
            if not usable:
                raise NonFiniteError(message)
        tf.cond(poor, lambda: tf.print(warning, solution.residual), tf.no_op)
        with tf.control_dependencies([tf.debugging.Assert(usable, [message])]):
            self.sites.assign(SiteValues(*(tf.identity(x) for x in solution.sites)))
            self.sites.bind(self._hyperparameter_values())

    def _hyperparameter_values(self) -> tf.Tensor:
        """A mark of the model's parts, and every floating variable but the sites and the data."""
        excluded = {id(v) for v in (*self.sites.variables, *self.data)}
        parts = " ".join(type(part).__qualname__ for part in self.submodules)
        return tf.concat(
            [tf.constant([zlib.crc32(parts.encode())], tf.float64)]
            + [
                tf.cast(tf.reshape(v, [-1]), tf.float64)
                for v in self.variables
                if id(v) not in excluded and v.dtype.is_floating
            ],
            axis=0,
        )

    def _follow_hyperparameters(self) -> None:
        """Never mix λ*(θ) of one θ with another θ.

        After the training loss has inferred λ, an optimiser may move θ once more. λ then follows;
        inside a graph, which would have to contain the inference, the mixture is refused.
        """
        if not isinstance(self.sites.lambda_1, Parameter):
            return  # a frozen copy: its sites are constants
        stale = self.sites.bound_elsewhere(self._hyperparameter_values())
        if tf.executing_eagerly():
            if stale:
                prior = Prior(*(tf.stop_gradient(x) for x in self.prior()))
                self._collapse(prior, 0.0)
            return
        tf.debugging.Assert(
            ~stale,
            [
                "The hyperparameters have changed since the training loss inferred the sites: call "
                "model.infer() before this compiled function."
            ],
        )
