"""Models that infer inside their training loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
import tensorflow_probability as tfp
from check_shapes import inherit_check_shapes

from ..errors import NonFiniteError
from ..forks import refuse_forked
from ..inference.collapsing import CollapsedTensors, collapse
from ..inference.common import INVALID_START, Method
from ..inference.options import TRAINING
from ..inference.remarks import Remarks
from ..inference.total_gradient import fixed_sites
from ..inputs import new_inputs
from ..priors import PriorMoments
from ..sites import SiteValues
from ..stand_ins import leaves_of
from ..validation import require_finite
from .array_loss import ArrayLoss, LossParts, array_loss
from .array_predictions import array_predictions
from .inferred import InferredModel

Array = npt.NDArray[np.float64]
Gradients = Callable[[], list[tf.Tensor]]


class CollapsedModel(InferredModel):
    """A site model whose training loss is a function of the hyperparameters alone.

    It moves λ to the fixed point ``λ*(θ)`` of its method of inference, starting where it is if the
    likelihood is log-concave, else at sites that likelihood and data suggest, and returns the method's
    learning objective there with the exact total gradient. λ follows the hyperparameters from then on;
    :meth:`infer` or an assignment to ``model.sites`` make it the user's own again.
    """

    @inherit_check_shapes
    @tf.autograph.experimental.do_not_convert
    def maximum_log_likelihood_objective(self) -> tf.Tensor:
        """The learning objective at ``λ*(θ)``, with its exact total gradient.

        λ moves to ``λ*`` for the present hyperparameters first.
        """
        refuse_forked()
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
        return with_gradients(value, gradients, variables)

    @tf.autograph.experimental.do_not_convert
    def objective_at_fixed_sites(self, alpha: float) -> tf.Tensor:
        """``L_α`` at the present sites, which stay, with its gradient: what an M-step climbs; NaN where no
        valid q exists."""
        variables: list[tf.Variable] = []
        found, gradients = self._evaluate(fixed_sites(alpha), self.sites.values, variables)
        return with_gradients(found.value, gradients, variables)

    def objective_of_independent_data(self) -> float:
        """The learning objective with ``K∘I`` in the place of K: what it is if no datum tells of another.

        An objective that is no higher has learnt nothing from the data but their own noise.
        """
        K, mean = self.prior()
        diagonal = PriorMoments(tf.linalg.diag(tf.linalg.diag_part(K)), mean)
        nothing = SiteValues(*(tf.zeros_like(x) for x in self.sites.values))
        silent = Remarks(silent=True)
        at = (self.likelihood, self._data_tensors(), nothing, self._training_limits(), silent)
        return float(collapse(self._method(), diagonal, *at).value)

    def loss_on_arrays(self) -> ArrayLoss | None:
        """The training loss and its gradient as a function of the trainable variables' numbers in a row,
        without a graph; None where a kernel, a likelihood or a mean function is not known on arrays."""
        if not type(self).__module__.startswith("gpflow_hybrid.") or "training_loss" in vars(self):
            return None  # a subclass may have another loss
        limits = self._training_limits()
        parts = LossParts(self._training_method(), limits, self._first_sites, self._penalty)
        return array_loss(self, parts)

    def predict_f_on_arrays(self, Xnew: Array) -> tuple[Array, Array] | None:
        """Mean and variance of f at new rows as arrays, without TensorFlow and its gradients.

        None where they are not known so: for kernels that are not stationary ones of GPflow's, mean
        functions other than zero, negative sites, data in variables or too many to keep their distances,
        other types than float64, subclasses of the models, and where a result is not finite.

        What an estimator asks: :meth:`predict_f` takes longer than the arithmetic of some hundred rows.
        """
        refuse_forked()
        if not type(self).__module__.startswith("gpflow_hybrid."):
            return None  # a subclass may predict otherwise
        rows = new_inputs(Xnew, self._num_inputs())
        if rows.shape.rank != 2 or len(rows) == 0:
            return None
        return array_predictions(self, self._site_values, rows.numpy())

    def _infer_and_evaluate(self, variables: list[tf.Variable]) -> tuple[tf.Tensor, Gradients]:
        """The objective at ``λ*``, which is stored, and its gradient when it is asked for."""
        begun = self.sites.is_inferred()
        found, gradients = self._evaluate(self._training_method(), self._start(), variables)
        solution = found.solution
        # What has not converged is no objective: once training has begun a line search backs away from it.
        inaccurate = begun & (solution.residual > TRAINING.warn_residual)
        usable = solution.has_started & ~inaccurate
        if not tf.executing_eagerly():  # an optimiser that is handed NaN goes there
            for g in gradients():
                usable = usable & tf.reduce_all(tf.math.is_finite(g))

        def used() -> list[tf.Tensor]:
            if tf.executing_eagerly() and usable:
                sums = [tf.reduce_sum(g) for g in gradients()]
                require_finite("A derivative of the training loss", *sums)
            return [tf.where(usable, g, tf.zeros_like(g)) for g in gradients()]

        value = tf.where(usable, found.value, self._lowest())
        self._settle(
            solution._replace(status=tf.where(usable, solution.status, INVALID_START)), begun
        )
        return value, used

    def _evaluate(
        self, method: Method, start: SiteValues, variables: list[tf.Variable]
    ) -> tuple[CollapsedTensors, Gradients]:
        """A method's objective, and its gradient when it is asked for.

        :param variables: is filled with those that the objective depends on.
        """
        data = self._data_tensors()
        with tf.GradientTape() as tape:
            # A parameter that is held now may be trainable when this graph is differentiated.
            tape.watch(self._floating_hyperparameters())
            prior = self.prior(exportable=False)
            own = leaves_of(self.likelihood)
        # Data in variables have no gradient: λ, which follows θ, does not follow them.
        variables += self._hyperparameters_among(tape.watched_variables())
        found = collapse(
            method,
            PriorMoments(*(tf.stop_gradient(x) for x in prior)),
            self.likelihood,
            data,
            SiteValues(*(tf.stop_gradient(x) for x in start)),
            self._training_limits(),
            self._remarks if tf.executing_eagerly() else Remarks(),
        )
        has_started = found.solution.has_started
        own_bars = _split(found.parameter_bars, own)

        @functools.cache  # the tape is read once, whoever asks how often
        def gradients() -> list[tf.Tensor]:
            total = tape.gradient(
                [*prior, *own],
                variables,
                output_gradients=[*found.prior_adjoint(), *own_bars],
                unconnected_gradients=tf.UnconnectedGradients.ZERO,
            )
            # Dense, as zeros are; constants for whoever differentiates once more.
            total = [tf.stop_gradient(tf.convert_to_tensor(g)) for g in total]
            return [tf.where(has_started, g, tf.zeros_like(g)) for g in total]

        if not tf.executing_eagerly():
            gradients()
        return found, gradients

    def _parameters_are_proper(self) -> tf.Tensor:
        """Whether no transformed parameter has left its domain: an optimiser's long step can take a
        lengthscale to exactly zero, where nothing has a value or a gradient."""
        proper = tf.constant(True)
        sites = {id(site) for site in self.sites.parameters}
        for parameter in (p for p in self.parameters if id(p) not in sites):
            value = tf.convert_to_tensor(parameter)
            if value.dtype.is_floating:
                proper = proper & tf.reduce_all(tf.math.is_finite(value))
                if isinstance(parameter.transform, (tfp.bijectors.Softplus, tfp.bijectors.Exp)):
                    proper = proper & tf.reduce_all(value > 0.0)
        return proper

    def _lowest(self) -> tf.Tensor:
        """An objective so low that a line search backs away."""
        lambda_1 = self.sites.values.lambda_1
        num_data = tf.cast(tf.shape(lambda_1)[0], lambda_1.dtype)
        return -TRAINING.penalty_per_datum * num_data

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


def _split(row: tf.Tensor, like: list[tf.Tensor]) -> list[tf.Tensor]:
    """Tensors shaped like others, from all their numbers in a row."""
    parts = tf.split(row, [x.shape.num_elements() for x in like]) if like else []
    return [
        tf.cast(tf.reshape(part, x.shape), x.dtype) for part, x in zip(parts, like, strict=True)
    ]


def with_gradients(
    value: tf.Tensor, gradients: Gradients, variables: list[tf.Variable]
) -> tf.Tensor:
    """The value, with derivatives in the variables' values that are known, or will be when asked for."""

    @tf.custom_gradient
    def attach(value: tf.Tensor, *_: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        def grad(upstream: tf.Tensor) -> tuple[Any, ...]:
            return None, *(tf.cast(upstream, g.dtype) * g for g in gradients())

        return tf.identity(value), grad

    return attach(value, *(tf.convert_to_tensor(v) for v in variables))
