"""Conjugate-computation variational inference with inducing variables, as a GPflow model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from gpflow.models.training_mixins import ExternalDataTrainingLossMixin

from ..errors import ClusterError, NonFiniteError
from ..forks import refuse_forked
from ..inference.common import INVALID_START
from ..inference.inducing import InducingSolution, SummedSites, natural_gradient_steps
from ..inference.inducing_gradient import InducingCollapse, collapse, from_warm_start
from ..inference.options import INDUCING, TRAINING
from ..inference.remarks import Remarks
from ..inference.reports import InferenceResult, sparse_report
from ..inference.row_sums import RowSums
from ..likelihoods.concavity import is_log_concave
from ..likelihoods.first_sites import suggests_sites
from ..objectives import power_of
from ..rows import DataRows, are_constant
from ..sites import SiteValues
from ..validation import check_count, check_positive
from .minibatches import MinibatchModel
from .sparse_objectives import ArrayGradients
from .sparse_validation import check_rows, is_iterator, next_batch

COULD_NOT_START = (
    "Inference cannot start: the kernel, the mean function or the expected log likelihood is not finite "
    "at these hyperparameters. Rescale the data, or start from a smaller kernel variance."
)


class SparseCVIModel(MinibatchModel, ExternalDataTrainingLossMixin):
    """Sparse Gaussian process with any likelihood, in the place of :class:`gpflow.models.SVGP`.

    Inducing variables u at M points, ``f | u ~ N(a, k̃)`` with the projection ``a = k_fu K_uu⁻¹ u`` and the
    residual variance ``k̃ = k_ff − k_fu K_uu⁻¹ k_uf``. The likelihood of a projection is

        p̃_α(a) = (∫ N(f; a, k̃) p(y|f)^α df)^{1/α}

    and q(u), Gaussian, is the optimum of ``Σ E_q[log p̃_α(a)] − KL[q(u) ‖ p(u)]``. As α → 0
    (``objective="elbo"``) that is SVGP's bound; for α = 1 (``"ep_like"``, the default) f is marginalised
    given u, and the learning objective is the EP-like value of that model, which does not lose k̃ as SVGP's
    bound does.

    With all data the training loss infers q(u) and returns the objective with its exact total gradient, in
    the inducing points too, so that ::

        gpflow.optimizers.Scipy().minimize(
            model.training_loss_closure((X, Y)), model.trainable_variables
        )

    is all of training. With batches (``num_data`` given and larger than the batch) it returns an unbiased
    estimate, for Adam, at a q(u) that has not seen the batch, and takes a natural-gradient step; the very
    first call, when nothing is known of any data, takes one before too.

    :param kernel: one kernel for all latents, ``SharedIndependent`` or ``SeparateIndependent``.
    :param likelihood: any GPflow likelihood.
    :param inducing_variable: Z ``[M, D]``, or GPflow's inducing variables.
    :param mean_function: ``m(x)``, zero by default.
    :param num_latent_gps: L.
    :param num_data: the number of rows of all data, if training sees batches of them.
    :param objective: ``"ep_like"``, ``"elbo"`` or a power α in [0, 1].
    """

    # Inference and learning on all data.

    def _settle(self, solution: InducingSolution, sums: RowSums) -> None:
        """Store what was inferred, and what for."""
        values = self._as_site_values(solution.q.sites)
        self.sites.store_inferred(values, self._hyperparameter_values())
        self._inferred_from.rows = sums.rows
        self._inferred_from.hyperparameters = [v.numpy() for v in self._hyperparameters()]
        self._inferred_from.factors = sums.prior.chol
        self._inferred_from.lambda_2 = solution.q.sites.lambda_2

    def _start(self, sums: RowSums) -> SummedSites:
        """Where inference inside a training loss starts.

        From where the sites are, if the fixed point is unique; else from what the likelihood suggests, so
        that the loss is a function of the hyperparameters and not of the way to them.
        """
        if is_log_concave(self.likelihood):
            return self._warm_start(sums.prior)
        if suggests_sites(self.likelihood):
            return sums.suggested(self.likelihood)
        return SummedSites(*(np.zeros_like(x) for x in self._present_sites()))

    def _collapse(self, sums: RowSums) -> InducingCollapse:
        return collapse(sums, self._start(sums), INDUCING.tolerance, INDUCING.max_steps)

    def _infer_again(self, rows: DataRows) -> None:
        with self._host_arithmetic():
            sums = self._sums(rows, power_of(self.objective))
            start = self._start(sums)
            found = from_warm_start(sums, start, INDUCING.tolerance, INDUCING.max_steps)
        if found.status == INVALID_START:
            raise NonFiniteError(COULD_NOT_START)
        self._remarks.make(found.residual, ())
        self._settle(found, sums)

    def all_rows(self, data: Any) -> DataRows:
        """All of the data, checked, as rows that can be read again and again."""
        rows = self._rows_to_learn(data)
        check_rows(rows.num_rows, self.num_data, all_of_them=True)
        return rows

    def natural_gradient_steps(
        self, data: Any, num_steps: int, lr: float
    ) -> tuple[SiteValues, float, float]:
        """Where so many steps on all data lead from the present q(u), which is not changed: sites, ELBO
        (NaN without a valid q) and the relative residual of the fixed point."""
        rows = self.all_rows(data)
        with self._host_arithmetic():
            sums = self._sums(rows, power_of(self.objective))
            found = natural_gradient_steps(sums, self._present_sites(), num_steps, lr)
        return self._as_site_values(found.q.sites), found.elbo, found.residual

    def infer(self, data: Any, *, tolerance: float = 1e-6, max_steps: int = 200) -> InferenceResult:
        """Bring q(u) to the optimum for all data from where it is, and say how it went.

        :param data: ``(X, Y)`` or a ``tf.data.Dataset``, all of the data.
        :param tolerance: on the relative residual of the fixed point.
        :param max_steps: at most so many steps are tried, each a sum over the data.
        """
        refuse_forked()
        check_positive(tolerance, "tolerance")
        check_count(max_steps, "max_steps")
        if not tf.executing_eagerly():
            raise RuntimeError(
                "infer() reports to Python and cannot run inside tf.function. Call it outside; inside, "
                "model.training_loss(data) infers."
            )
        rows = self.all_rows(data)
        with self._host_arithmetic():
            sums = self._sums(rows, power_of(self.objective))
            found = from_warm_start(sums, self._warm_start(sums.prior), tolerance, max_steps)
        if found.status == INVALID_START:
            raise NonFiniteError(COULD_NOT_START)
        self._settle(found, sums)
        self._remarks.forget()
        return sparse_report(found, sums.sites(found.q))

    def _evaluate(
        self, rows: DataRows, variables: list[tf.Variable], remarks: Remarks
    ) -> tuple[float, list[Any]]:
        """The objective at its fixed point, which is stored, and its total gradient in the variables."""
        prior = self._prior(variables)
        penalty = -TRAINING.penalty_per_datum * rows.num_rows
        nothing = [np.zeros(v.shape) for v in variables]
        begun = bool(self.sites.is_inferred())
        if not prior.is_valid and begun:
            return penalty, nothing
        sums = self._sums(rows, power_of(self.objective), prior, in_parts=True)
        try:
            found = self._collapse(sums)
        except ClusterError:
            self._return_to_inferred()
            raise
        if found.gradient is None:
            if not begun:
                raise NonFiniteError(COULD_NOT_START)
            return penalty, nothing
        gradients = self._gradients(prior, found.gradient, variables)
        if not all(np.isfinite(g).all() for g in gradients):
            if not begun:
                raise NonFiniteError(COULD_NOT_START)
            return penalty, nothing
        remarks.make(found.solution.residual, found.remarks)
        if begun and found.solution.residual > TRAINING.warn_residual:
            # What has not converged is no objective: a line search backs away from it.
            return penalty, nothing
        self._settle(found.solution, sums)
        return found.value, gradients

    def _return_to_inferred(self) -> None:
        """The hyperparameters that q(u) belongs to, where an optimiser has tried others in vain."""
        values = self._inferred_from.hyperparameters
        if values and bool(self.sites.is_inferred()):
            for variable, value in zip(self._hyperparameters(), values, strict=True):
                variable.assign(value)

    # Training losses.

    def maximum_log_likelihood_objective(self, data: Any) -> tf.Tensor:
        """The learning objective of all data at the optimal q(u), with its exact total gradient; of a batch
        an unbiased estimate at the present q(u), which then takes a natural-gradient step."""
        refuse_forked()
        remarks = self._remarks if tf.executing_eagerly() else Remarks()

        def evaluate(rows: DataRows, variables: list[tf.Variable]) -> tuple[float, ArrayGradients]:
            is_all = self.num_data is None or rows.num_rows == self.num_data
            of = self._evaluate if is_all else self._estimate
            value, found = of(rows, variables, remarks)
            return value, lambda: found

        return self._with_host_gradients(data, self._rows_to_learn, evaluate)

    @tf.autograph.experimental.do_not_convert
    def training_loss(self, data: Any) -> tf.Tensor:
        """Minus the learning objective and the log density of the priors over hyperparameters.

        :param data: ``(X, Y)``, all or a batch; or a ``tf.data.Dataset`` of all.
        """
        return self._training_loss(data)

    def training_loss_closure(self, data: Any, *, compile: bool = True) -> Callable[[], tf.Tensor]:
        """A closure that returns the training loss, for GPflow's and Keras' optimisers.

        :param data: ``(X, Y)`` or a ``tf.data.Dataset``, all of the data; or an iterator over batches of
            them, ``iter(dataset.repeat().batch(size))``.
        :param compile: whether it is a graph.
        """
        if is_iterator(data):
            return next_batch(self, data, compile)
        rows = self._rows_to_learn(data)
        if not are_constant(data):  # variables are read when the loss is
            rows = data

        def closure() -> tf.Tensor:
            return self.training_loss(rows)

        return tf.function(closure, autograph=False) if compile else closure
