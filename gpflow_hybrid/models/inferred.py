"""Models whose sites are inferred, and follow the hyperparameters once training has begun."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np
import tensorflow as tf
from gpflow.mean_functions import Zero

from ..compilation import call_compiled
from ..errors import NonFiniteError, in_short
from ..forks import refuse_forked
from ..inference.collapsing import Limits
from ..inference.common import Method, Solution, is_better
from ..inference.options import COLLAPSE, RESIDUAL, TRAINING
from ..inference.remarks import Remarks
from ..inference.reports import Diagnosis, InferenceResult, diagnosed, report
from ..inference.servers import run
from ..likelihoods.concavity import is_log_concave
from ..likelihoods.expectations import expectation_gradients
from ..linalg import Marginals, uses_lapack
from ..linalg.threads import blas_threads_for_rows
from ..priors import DensePrior, PriorMoments, stationary
from ..sites import SiteValues, zeros_like
from ..validation import check_count, check_positive
from .base import SiteModel
from .hyperparameters import floating, mark_of

COULD_NOT_START = (
    "Inference inside the training loss could not start: the kernel matrix, the mean "
    "function, the expected log likelihood or a derivative is not finite at these hyperparameters. "
    "Put bounds or priors on them; model.infer() names the datum."
)


class InferredModel(SiteModel):
    """A site model with a method of inference."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._remarks = Remarks()
        self.sites.expect_hyperparameters(self._hyperparameter_values())

    @abc.abstractmethod
    def _method(self) -> Method:
        """How sites are found and which value is learnt from."""

    def _training_method(self) -> Method:
        """The same for a training loss, which may choose its start."""
        return self._method()

    def infer(self, *, tolerance: float = 1e-6, max_steps: int = 200) -> InferenceResult:
        """Bring the sites to the fixed point from where they are, and say how it went.

        The model keeps the best sites seen, always with a valid q.

        :param tolerance: on the relative residual of the fixed point; at least what rounding leaves, 1e-4
            in single precision.
        :param max_steps: at most so many steps are tried; each costs one evaluation of the posterior.
        """
        return self._infer(self._method(), tolerance, max_steps)

    def refresh(self) -> InferenceResult:
        """Bring the sites to ``λ*`` for the present hyperparameters as a training loss does; how it went.

        λ follows the hyperparameters from then on; :meth:`infer` makes it the user's own instead.
        """
        found = self._solve_again()
        if not found.solution.has_started:
            self._refuse_start(found)
        self._settle(found.solution)
        return report(found, self.likelihood, self._method())

    def restore_sites(self, values: SiteValues) -> None:
        """Set λ to what was inferred before for the present hyperparameters; it follows them then."""
        self.sites.store_inferred(values, self._hyperparameter_values())

    def _infer(self, method: Method, tolerance: float, max_steps: int) -> InferenceResult:
        refuse_forked()
        check_positive(tolerance, "tolerance")
        check_count(max_steps, "max_steps")
        if not tf.executing_eagerly():
            raise RuntimeError(
                "infer() reports to Python and cannot run inside tf.function. Call it outside; inside, "
                "model.training_loss() infers."
            )
        # Below this a residual is rounding: in single precision 1e-6 is not to be had.
        tolerance = max(float(tolerance), self._rounding())
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
        """The prior at the data for inference outside of graphs; its kernel matrix by a compiled graph
        where it is not known on arrays."""
        X = self.data[0]
        self.sites.require_rows(X)
        if uses_lapack(exportable=False) and type(self.mean_function) is Zero:
            inputs = tf.convert_to_tensor(X).numpy()
            with blas_threads_for_rows(len(inputs)):
                K = stationary.matrices(self.kernel, inputs)
            if K is not None:
                return DensePrior(K, np.zeros((len(inputs), self.num_latent_gps)))
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

    # λ follows θ.

    def _settle(self, solution: Solution, may_fail: Any = False) -> None:
        """Store ``λ*`` and what it was inferred for, unless inference could not even start.

        That is an error; but once training has begun it is a line search that went too far, and the sites
        stay those of its last good trial.

        :param may_fail: whether training has begun.
        """
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
        return floating(self._hyperparameters_among(self.variables))

    def _hyperparameter_values(self) -> tf.Tensor:
        """A mark of the model's parts, and every floating variable but the sites and the data."""
        return mark_of(self, self._method().sites_key, self._floating_hyperparameters())

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
                self._settle(self._solve_again().solution)
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

    def _start(self) -> SiteValues:
        """Where inference inside a training loss starts.

        From where λ is, if the fixed point is unique; else from :meth:`_first_sites`, so that the loss is a
        function of the hyperparameters and not of the way to them.
        """
        return self.sites.values if is_log_concave(self.likelihood) else self._first_sites()

    def _first_sites(self) -> SiteValues:
        """Where inference starts that knows nothing of earlier ones."""
        return SiteValues(*(zeros_like(x) for x in self.sites.values))

    def _solve_again(self) -> Diagnosis:
        """``λ*`` for the present hyperparameters, as a training loss finds it."""
        method, start, limits = self._method(), self._start(), self._training_limits()
        first = self._diagnose(self._training_method(), start, limits)
        old = first.solution
        is_cold = not any(tf.reduce_any(x != 0.0) for x in start)
        if old.residual <= COLLAPSE.acceptable_residual or is_cold:
            return first
        zeros = SiteValues(*(tf.zeros_like(x) for x in start))
        second = self._diagnose(method, zeros, limits)
        return second if is_better(second.solution, old, method.by_value) else first

    def _training_limits(self) -> Limits:
        return Limits(max(TRAINING.tolerance, self._rounding()), TRAINING.max_steps)

    def _rounding(self) -> float:
        return RESIDUAL.rounding_errors * float(
            np.finfo(self.sites.lambda_1.dtype.as_numpy_dtype).eps
        )
