"""Models that infer inside their training loss."""

from __future__ import annotations

import abc
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
from check_shapes import inherit_check_shapes
from gpflow.likelihoods import Likelihood

from ..compilation import call_compiled
from ..errors import NonFiniteError, in_short
from ..inference.collapsing import CollapsedTensors, Limits, Remarks, collapse
from ..inference.common import Method, SitePair, Solution
from ..inference.options import COLLAPSE
from ..inference.reports import Diagnosis, InferenceResult, diagnosed, report
from ..inference.servers import run
from ..inference.total_gradient import fixed_sites
from ..likelihoods.expectations import expectation_gradients
from ..linalg import Marginals, uses_lapack
from ..priors import DensePrior, PriorMoments
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

COULD_NOT_START = (
    "Inference inside the training loss could not start: the kernel matrix, the mean "
    "function or the expected log likelihood is not finite at these hyperparameters. "
    "Put bounds or priors on them; model.infer() names the datum."
)

Gradients = Callable[[], list[tf.Tensor]]


class CollapsedModel(SiteModel):
    """A site model whose training loss is a function of the hyperparameters alone.

    It moves λ to the fixed point ``λ*(θ)`` of its method of inference, starting where it is, and returns
    the method's learning objective there with the exact total gradient. λ follows the hyperparameters
    from then on; :meth:`infer` or an assignment to ``model.sites`` make it the user's own again.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._remarks = Remarks()
        self.sites.expect_hyperparameters(self._hyperparameter_values())

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

    def _infer(self, method: Method, tolerance: float, max_steps: int) -> InferenceResult:
        check_positive(tolerance, "tolerance")
        check_count(max_steps, "max_steps")
        if not tf.executing_eagerly():
            raise RuntimeError(
                "infer() reports to Python and cannot run inside tf.function. Call it outside; inside, "
                "model.training_loss() infers."
            )
        found = self._diagnose(method, self.sites.values, Limits(tolerance, int(max_steps)))
        if not found.solution.has_started:
            self._refuse_start(found)
        self.sites.assign(found.solution.sites)
        self._remarks.forget()
        return report(found, self.likelihood, method)

    def _diagnose(self, method: Method, start: SiteValues, limits: Limits) -> Diagnosis:
        """Inference and a look at where it ended."""
        prior = self.host_prior()
        sites = SiteValues(*(x.numpy() for x in start))
        found = run(diagnosed(method, prior, sites, *limits), self.likelihood, self._data_tensors())
        prior.close()
        return found

    def host_prior(self) -> DensePrior:
        """The prior at the data for inference outside of graphs; its kernel matrix by a compiled graph."""
        self.sites.require_rows(self.data[0])
        key = ("prior", uses_lapack(exportable=False))
        moments = call_compiled(self, key, lambda model: model.prior(exportable=False))
        return PriorMoments.on_host(*(x.numpy() for x in moments))

    def _refuse_start(self, found: Diagnosis) -> None:
        """Say why inference could not start from these sites."""
        self._refuse_invalid(self.prior(), found.q)
        X, Y = self._data_tensors()
        mean, variance = (tf.convert_to_tensor(x) for x in (found.q.mean, found.q.variance))
        E = expectation_gradients(self.likelihood, X, mean, variance, Y)
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
                    f"{n} (x = {in_short(X[n])}, y = {Y[n]}, q(f) = N({np.asarray(q.mean)[n]}, "
                    f"{np.asarray(q.variance)[n]})). Rescale the data, or start from a smaller kernel "
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
        gradients: Any
        proper = self._parameters_are_proper()
        if tf.executing_eagerly():
            evaluate = self._infer_and_evaluate if proper else self._penalise
            value, gradients = evaluate(variables)
        else:

            def evaluated() -> tuple[tf.Tensor, list[tf.Tensor]]:
                value, gradients = self._infer_and_evaluate(variables)
                return value, gradients()

            def penalised() -> tuple[tf.Tensor, list[tf.Tensor]]:
                return self._penalty(), [tf.zeros_like(v) for v in variables]

            # The gradient is taken inside of its branch, and keeps nothing of the computation.
            value, found = tf.cond(proper, evaluated, penalised)
            gradients = lambda: found  # noqa: E731
        return _with_gradients(value, gradients, variables)

    @tf.autograph.experimental.do_not_convert
    def objective_at_fixed_sites(self, alpha: float) -> tf.Tensor:
        """``L_α`` at the present sites, which stay, with its gradient: what an M-step climbs; NaN where no
        valid q exists."""
        variables: list[tf.Variable] = []
        found, gradients = self._evaluate(fixed_sites(alpha), variables)
        return _with_gradients(found.value, gradients, variables)

    def _infer_and_evaluate(self, variables: list[tf.Variable]) -> tuple[tf.Tensor, Gradients]:
        """The objective at ``λ*``, which is stored, and its gradient when it is asked for."""
        found, gradients = self._evaluate(self._method(), variables)
        value = tf.where(found.solution.has_started, found.value, self._lowest())
        self._settle(found.solution, training=True)
        return value, gradients

    def _evaluate(
        self, method: Method, variables: list[tf.Variable]
    ) -> tuple[CollapsedTensors, Gradients]:
        """A method's objective, and its gradient when it is asked for.

        :param variables: is filled with those that the objective depends on.
        """
        data = self._data_tensors()
        with tf.GradientTape() as tape:
            # A parameter that is held now may be trainable when this graph is differentiated.
            tape.watch(self._floating_hyperparameters())
            prior = self.prior(exportable=False)
        of_likelihood = [v for v in self.likelihood.variables if v.dtype.is_floating]
        watched = {id(v): v for v in (*tape.watched_variables(), *of_likelihood)}
        # Data in variables have no gradient: λ, which follows θ, does not follow them.
        variables += self._hyperparameters_among(watched.values())
        found = collapse(
            method,
            PriorMoments(*(tf.stop_gradient(x) for x in prior)),
            self.likelihood,
            data,
            SiteValues(*(tf.stop_gradient(x) for x in self.sites.values)),
            self._training_limits(),
            self._remarks if tf.executing_eagerly() else Remarks(),
        )
        has_started = found.solution.has_started
        zero = tf.UnconnectedGradients.ZERO

        def gradients() -> list[tf.Tensor]:
            bars = found.prior_adjoint()
            total = tape.gradient(
                list(prior), variables, output_gradients=list(bars), unconnected_gradients=zero
            )
            in_likelihood = self._likelihood_gradients(method, found)
            total = [
                g + in_likelihood.get(id(v), 0.0) for v, g in zip(variables, total, strict=True)
            ]
            # Dense, as zeros are; constants for whoever differentiates once more.
            total = [tf.stop_gradient(tf.convert_to_tensor(g)) for g in total]
            return [tf.where(has_started, g, tf.zeros_like(g)) for g in total]

        if not tf.executing_eagerly():
            found_gradients = gradients()
            gradients = lambda: found_gradients  # noqa: E731
        return found, gradients

    def _likelihood_gradients(self, method: Method, found: CollapsedTensors) -> dict[int, Any]:
        """Derivatives in the likelihood's own variables, by their identity."""
        variables = [v for v in self.likelihood.variables if v.dtype.is_floating]
        if not variables:
            return {}

        def differentiate(likelihood: Likelihood, *tensors: tf.Tensor) -> list[tf.Tensor]:
            X, Y, m, v, lambda_1, lambda_2, wa, wb = tensors
            mine = [v for v in likelihood.variables if v.dtype.is_floating]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(mine)
                q, sites = Marginals(m, v, tf.zeros([], m.dtype)), SiteValues(lambda_1, lambda_2)
                value = method.likelihood_value(likelihood, X, Y, q, sites, SitePair(wa, wb))
            zero = tf.UnconnectedGradients.ZERO
            return tape.gradient(value, mine, unconnected_gradients=zero)

        q = found.q
        tensors = (*self._data_tensors(), q.mean, q.variance, *found.solution.sites, *found.weights)
        if tf.executing_eagerly():
            key = ("gradients", method.key, self.num_latent_gps)
            gradients = call_compiled(self.likelihood, key, differentiate, *tensors)
        else:
            gradients = differentiate(self.likelihood, *tensors)
        return {id(v): g for v, g in zip(variables, gradients, strict=True)}

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

    def _penalty(self) -> tf.Tensor:
        """The lowest objective, and flat; refused at a first evaluation."""
        message = (
            "A parameter is zero or not finite, and training has not begun: set it to a proper value "
            "(gpflow.utilities.print_summary(model) shows them)."
        )
        begun = self.sites.is_inferred()
        if tf.executing_eagerly() and not begun:
            raise NonFiniteError(message)
        with tf.control_dependencies([tf.debugging.Assert(begun, [message])]):
            return tf.identity(self._lowest())

    def _penalise(self, variables: list[tf.Variable]) -> tuple[tf.Tensor, Gradients]:
        variables += self.trainable_variables
        return self._penalty(), lambda: [tf.zeros_like(v) for v in variables]

    def _training_limits(self) -> Limits:
        eps = float(np.finfo(self.sites.lambda_1.dtype.as_numpy_dtype).eps)
        return Limits(max(TRAINING_TOLERANCE, 1e3 * eps), TRAINING_STEPS)

    # λ follows θ.

    def _settle(self, solution: Solution, training: bool = False) -> None:
        """Store ``λ*`` and what it was inferred for, unless inference could not even start.

        That is an error; but once training has begun it is a line search that went too far, and the sites
        stay those of its last good trial.
        """
        may_fail = self.sites.is_inferred() if training else tf.constant(False)
        hyperparameters = self._hyperparameter_values()
        if tf.executing_eagerly():
            if solution.has_started:
                self.sites.store_inferred(solution.sites, hyperparameters)
            elif not may_fail:
                raise NonFiniteError(COULD_NOT_START)
            return

        def store() -> tf.Operation:
            self.sites.store_inferred(solution.sites, hyperparameters)
            return tf.no_op()

        usable = solution.has_started
        with tf.control_dependencies([tf.debugging.Assert(usable | may_fail, [COULD_NOT_START])]):
            tf.cond(usable, store, tf.no_op)

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

    def _site_values(self) -> SiteValues:
        """λ for the present hyperparameters, never λ*(θ) of one θ with another θ.

        After the training loss has inferred λ, an optimiser may move θ once more. λ then follows;
        inside a graph, which would have to contain the inference, the mixture is refused (and is NaN
        where XLA leaves out assertions).
        """
        if self.sites.is_frozen:
            return self.sites.values
        stale = self.sites.is_stale(self._hyperparameter_values())
        if tf.executing_eagerly():
            if stale:
                self._settle(self._solve_again())
            return self.sites.values
        tf.debugging.Assert(
            ~stale,
            [
                "The hyperparameters have changed since the training loss inferred the sites: call "
                "model.infer() before this compiled function."
            ],
        )
        nan = tf.constant(np.nan, self.sites.lambda_1.dtype)
        return SiteValues(*(tf.where(stale, nan, x) for x in self.sites.values))

    def _solve_again(self) -> Solution:
        """``λ*`` for the present hyperparameters, from warm, then cold."""
        warm = self.sites.values
        found = []
        for start in (warm, SiteValues(*(tf.zeros_like(x) for x in warm))):
            found.append(self._diagnose(self._method(), start, self._training_limits()).solution)
            if found[-1].residual <= COLLAPSE.acceptable_residual:
                break
        return min(found, key=lambda solution: float(solution.residual))


def _with_gradients(
    value: tf.Tensor, gradients: Gradients, variables: list[tf.Variable]
) -> tf.Tensor:
    """The value, with derivatives in the variables' values that are known, or will be when asked for."""

    @tf.custom_gradient
    def attach(value: tf.Tensor, *_: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        def grad(upstream: tf.Tensor) -> tuple[Any, ...]:
            return None, *(tf.cast(upstream, g.dtype) * g for g in gradients())

        return tf.identity(value), grad

    return attach(value, *(tf.convert_to_tensor(v) for v in variables))
