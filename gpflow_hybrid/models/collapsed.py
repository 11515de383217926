"""Models that infer inside their training loss."""

from __future__ import annotations

import abc
import zlib
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
from check_shapes import inherit_check_shapes
from gpflow.base import Parameter
from tensorflow.python.eager import record

from ..compilation import call_compiled
from ..errors import NonFiniteError, in_short
from ..inference.common import (
    ACCEPTABLE_RESIDUAL,
    Collapsed,
    Method,
    Prior,
    Solution,
)
from ..inference.reports import Diagnosis, InferenceResult, report, with_diagnosis
from ..likelihoods.expectations import expectation_gradients
from ..linalg import Marginals
from ..sites import SiteValues
from ..validation import check_count, check_positive
from .base import SiteModel

TRAINING_TOLERANCE = 1e-9
"""Residual to which the training loss infers: its gradient feels the residual to first order, its value
to second order."""

TRAINING_STEPS = 200
"""Steps that the training loss may try from one start."""

PENALTY_PER_DATUM = 1e3
"""Loss per datum, in nats, at hyperparameters that have no objective."""

WARN_RESIDUAL = 1e-3
"""Residual above which the training loss says that its gradient is not exact."""


class CollapsedModel(SiteModel):
    """A site model whose training loss is a function of the hyperparameters alone.

    It moves λ to the fixed point ``λ*(θ)`` of its method of inference, starting where it is, and returns
    the method's learning objective there with the exact total gradient. λ follows the hyperparameters
    from then on; :meth:`infer` or an assignment to ``model.sites`` make it the user's own again.
    """

    @abc.abstractmethod
    def _method(self) -> Method:
        """How sites are found and which value is learnt from."""

    # Inference.

    def infer(self, *, tolerance: float = 1e-6, max_steps: int = 200) -> InferenceResult:
        """Bring the sites to the fixed point from where they are, and say how it went.

        The model keeps the best sites seen, always with a valid q.

        :param tolerance: on the relative residual of the fixed point.
        :param max_steps: at most so many steps are tried; each costs one evaluation of the posterior.
        """
        return self._infer(self._method(), tolerance, max_steps)

    def _infer(
        self, method: Method, tolerance: float, max_steps: int, *more_limits: tf.Tensor
    ) -> InferenceResult:
        check_positive(tolerance, "tolerance")
        check_count(max_steps, "max_steps")
        if not tf.executing_eagerly():
            raise RuntimeError(
                "infer() reports to Python and cannot run inside tf.function. Call it outside; inside, "
                "model.training_loss() infers."
            )
        start = self.sites.values
        tolerance = tf.constant(tolerance, start.lambda_1.dtype)
        limits = (tolerance, tf.constant(int(max_steps)), *more_limits)
        found = self._diagnose(method, start, *limits)
        if not found.solution.has_started:
            self._refuse_start(found)
        self.sites.assign(found.solution.sites)
        self.sites.release()
        return report(found, self.likelihood, method)

    def _diagnose(self, method: Method, start: SiteValues, *limits: tf.Tensor) -> Diagnosis:
        """Inference and a look at where it ended, compiled: the prior for this model, the rest for every
        model with this likelihood."""
        self.sites.require_rows(self.data[0])
        prior = Prior(*call_compiled(self, "prior", lambda model: model.prior()))
        return self._run(("infer", method.key), with_diagnosis(method), prior, start, *limits)

    def _run(
        self,
        key: Hashable,
        function: Callable[..., Any],
        prior: Prior,
        start: SiteValues,
        *limits: tf.Tensor,
    ) -> Any:
        """``function`` on a prior, this model's data and sites, compiled once."""
        signature = (key, self.num_latent_gps, prior.K.shape[0], prior.K.dtype)
        arguments = (*prior, *self._data_tensors(), *start, *limits)
        return call_compiled(self.likelihood, signature, function, *arguments)

    def _refuse_start(self, found: Diagnosis) -> None:
        """Say why inference could not start from these sites."""
        self._refuse_invalid(self.prior(), found.q)
        X, Y = self._data_tensors()
        E = expectation_gradients(self.likelihood, X, found.q.mean, found.q.variance, Y)
        self._refuse_non_finite(found.q, E.value, E.mean, E.variance)
        raise NonFiniteError(
            "Inference cannot start: the log likelihood or a derivative of it is not finite under "
            "this q(f). Rescale the data, or start from a smaller kernel variance."
        )

    def _refuse_non_finite(self, q: Marginals, *expectations: tf.Tensor) -> None:
        """Name the datum at which an expectation of the likelihood is not finite."""
        X, Y = (d.numpy() for d in self._data_tensors())
        for value in expectations:
            bad = np.argwhere(~np.isfinite(value))
            if len(bad):
                n = bad[0][0]
                raise NonFiniteError(
                    "The expected log likelihood or its gradient is not finite at datum "
                    f"{n} (x = {in_short(X[n])}, y = {Y[n]}, q(f) = N({q.mean.numpy()[n]}, "
                    f"{q.variance.numpy()[n]})). Rescale the data, or start from a smaller kernel "
                    "variance."
                )

    # The collapsed objective.

    @inherit_check_shapes
    @tf.autograph.experimental.do_not_convert
    def maximum_log_likelihood_objective(self) -> tf.Tensor:
        """The learning objective at ``λ*(θ)``, with its exact total gradient.

        λ moves to ``λ*`` for the present hyperparameters first, starting where it is.
        """
        variables: list[tf.Variable] = []
        value, gradients = tf.cond(
            self._parameters_are_proper(),
            lambda: self._with_gradients(variables),
            lambda: self._penalty_with_gradients(variables),
        )
        return _attach_gradients(value, gradients, [tf.convert_to_tensor(v) for v in variables])

    def _with_gradients(self, variables: list[tf.Variable]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """The objective and its gradient. Taken here, inside one branch, the gradient keeps nothing of the
        computation, neither a copy of its graph nor its intermediate results.

        :param variables: is filled with those that the objective depends on.
        """
        method = self._method()
        if tf.executing_eagerly() and not record.could_possibly_record():
            prior = self.prior()
            found = self._collapse(method, prior)
            value = method.surrogate(prior, found, self.likelihood, self._data_tensors())
            return self._or_penalty(found.solution, value), []
        with tf.GradientTape() as tape:
            # A parameter that is held now may be trainable when this graph is differentiated.
            tape.watch(self._floating_hyperparameters())
            prior = self.prior()
            with tape.stop_recording():
                found = self._collapse(method, prior)
            value = method.surrogate(prior, found, self.likelihood, self._data_tensors())
        # Data in variables have no gradient: λ, which follows θ, does not follow them.
        variables += self._hyperparameters_among(tape.watched_variables())
        gradients = tape.gradient(
            value, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        # Dense, as the other branch's zeros are; constants for whoever differentiates once more.
        gradients = [tf.stop_gradient(tf.convert_to_tensor(g)) for g in gradients]
        started = found.solution.has_started
        gradients = [tf.where(started, g, tf.zeros_like(g)) for g in gradients]
        return self._or_penalty(found.solution, value), gradients

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

    def _lowest(self) -> tf.Tensor:
        """An objective so low that a line search backs away."""
        num_data = tf.cast(tf.shape(self.sites.lambda_1)[0], self.sites.lambda_1.dtype)
        return -PENALTY_PER_DATUM * num_data

    def _or_penalty(self, solution: Solution, value: tf.Tensor) -> tf.Tensor:
        """The value, or the lowest where inference could not even start: ℓ² underflows at ℓ = 1e-200."""
        return tf.where(solution.has_started, value, self._lowest())

    def _penalty(self) -> tf.Tensor:
        """The lowest objective, and flat; refused at a first evaluation."""
        message = (
            "A parameter is zero or not finite, and training has not begun: set it to a proper value "
            "(gpflow.utilities.print_summary(model) shows them)."
        )
        begun = self.sites.is_bound()
        if tf.executing_eagerly() and not begun:
            raise NonFiniteError(message)
        with tf.control_dependencies([tf.debugging.Assert(begun, [message])]):
            return tf.identity(self._lowest())

    def _penalty_with_gradients(
        self, variables: list[tf.Variable]
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        if tf.executing_eagerly():  # in a graph, the other branch has filled the list
            variables += self.trainable_variables
        return self._penalty(), [tf.zeros_like(v) for v in variables]

    def _training_limits(self, dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
        tolerance = max(TRAINING_TOLERANCE, 1e3 * float(np.finfo(dtype.as_numpy_dtype).eps))
        return tf.constant(tolerance, dtype), tf.constant(TRAINING_STEPS)

    def _collapse(self, method: Method, prior: Prior) -> Collapsed:
        """``λ*`` from the present sites, stored in the model, and the weights of the gradient."""
        constant = Prior(*(tf.stop_gradient(x) for x in prior))
        limits = self._training_limits(prior.K.dtype)
        if tf.executing_eagerly():
            start = self.sites.values
            key = ("collapse", method.key)
            found = self._run(key, method.collapse, constant, start, *limits)
        else:
            sites = (tf.stop_gradient(x) for x in self.sites.values)
            arguments = (*constant, *self._data_tensors(), *sites, *limits)
            found = method.collapse(self.likelihood, *arguments)
        self._settle(found.solution, training=True)
        return found

    def _settle(self, solution: Solution, training: bool = False) -> None:
        """Store ``λ*`` and what it was inferred for, unless inference could not even start.

        That is an error; but once training has begun it is a line search that went too far, and the sites
        stay those of its last good trial.
        """
        message = (
            "Inference inside the training loss could not start: the kernel matrix, the mean "
            "function or the expected log likelihood is not finite at these hyperparameters. "
            "Put bounds or priors on them; model.infer() names the datum."
        )
        usable = solution.has_started
        refused = ~self.sites.is_bound() if training else tf.constant(True)
        poor = usable & (solution.residual > WARN_RESIDUAL)
        warning = "gpflow_hybrid: inference inside the training loss did not converge; residual"
        if tf.executing_eagerly() and refused and not usable:
            raise NonFiniteError(message)
        tf.cond(poor, lambda: tf.print(warning, solution.residual), tf.no_op)
        with tf.control_dependencies([tf.debugging.Assert(usable | ~refused, [message])]):
            tf.cond(usable, lambda: self._store(solution.sites), tf.no_op)

    def _store(self, sites: SiteValues) -> tf.Operation:
        self.sites.assign(SiteValues(*(tf.identity(x) for x in sites)))
        self.sites.bind(self._hyperparameter_values())
        return tf.no_op()

    def _floating_hyperparameters(self) -> list[tf.Variable]:
        """Every floating variable, trainable or held, but λ and data in variables."""
        return [v for v in self._hyperparameters_among(self.variables) if v.dtype.is_floating]

    def _hyperparameter_values(self) -> tf.Tensor:
        """A mark of the model's parts, and every floating variable but the sites and the data."""
        names = (type(part).__qualname__ for part in self.submodules)
        parts = " ".join((self._method().sites_key, *names))
        return tf.concat(
            [tf.constant([zlib.crc32(parts.encode())], tf.float64)]
            + [tf.cast(tf.reshape(v, [-1]), tf.float64) for v in self._floating_hyperparameters()],
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
                self._settle(self._solve_again())
            return
        tf.debugging.Assert(
            ~stale,
            [
                "The hyperparameters have changed since the training loss inferred the sites: call "
                "model.infer() before this compiled function."
            ],
        )

    def _solve_again(self) -> Solution:
        """``λ*`` for the present hyperparameters by the graph of :meth:`infer`, from warm, then cold."""
        method = self._method()
        warm = self.sites.values
        found = []
        for start in (warm, SiteValues(*(tf.zeros_like(x) for x in warm))):
            limits = self._training_limits(start.lambda_1.dtype)
            found.append(self._diagnose(method, start, *limits).solution)
            if found[-1].residual <= ACCEPTABLE_RESIDUAL:
                break
        return min(found, key=lambda solution: float(solution.residual))


@tf.custom_gradient
def _attach_gradients(
    value: tf.Tensor, gradients: list[tf.Tensor], variables: list[tf.Tensor]
) -> tuple[tf.Tensor, Callable[..., Any]]:
    """The value, with known derivatives in the variables' values."""

    def grad(upstream: tf.Tensor) -> tuple[Any, ...]:
        return None, [None for _ in gradients], [tf.cast(upstream, g.dtype) * g for g in gradients]

    return tf.identity(value), grad
