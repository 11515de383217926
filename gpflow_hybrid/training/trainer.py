"""Variational EM: E-steps on the sites in turn with M-steps on the hyperparameters at fixed sites."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import gpflow
import numpy as np
import tensorflow as tf

from ..errors import InvalidDataError, InvalidPosteriorError, NonFiniteError
from ..models import CollapsedModel, CVIModel
from ..objectives import Objective
from ..validation import check_count
from . import interrupts
from . import progress as progress_bars
from .alternation import Alternation, EStepOutcome, MStepOutcome
from .history import History, IterationRecord, TrainingResult
from .monitoring import Monitoring
from .resuming import CheckpointStore
from .state import Progress, Run
from .steps import (
    EStep,
    GradientSteps,
    InferToConvergence,
    MStep,
    NaturalGradientSteps,
)
from .stopping import Patience, StoppingRule, Verdict, as_rule, default_rules


class VEMTrainer(Alternation):
    """The paper's training procedure: E-steps on λ in turn with M-steps on the hyperparameters.

    An M-step raises ``L_α(λ, θ)`` plus the log density of the priors over θ at fixed λ; an E-step
    brings λ back towards the optimum of the ELBO at fixed θ. With the ELBO (α = 0) both raise one
    function; with the EP-like value they need not, see :class:`~gpflow_hybrid.training.Drift`.

    :param model: a :class:`~gpflow_hybrid.CVIModel`, or another model with sites if the E-step is
        ``InferToConvergence()``.
    :param objective: ``"elbo"``, ``"ep_like"`` or a power α in [0, 1].
    :param e_step: ``InferToConvergence()`` (default) or ``NaturalGradientSteps(num_steps, lr)``.
    :param m_step: ``LBFGSSteps(num_steps)`` (default) or ``GradientSteps(num_steps, optimizer, lr)``
        with Adam, SGD or any Keras optimiser.
    :param stopping: a stopping rule, or a list of which any may stop.
    """

    def __init__(
        self,
        model: CollapsedModel,
        objective: Objective = "ep_like",
        *,
        e_step: EStep | None = None,
        m_step: MStep | None = None,
        stopping: StoppingRule | list[StoppingRule] | None = None,
    ) -> None:
        self.stopping = default_rules() if stopping is None else as_rule(stopping)
        super().__init__(model, objective, e_step=e_step, m_step=m_step)

    @classmethod
    def paper(cls, model: CVIModel, objective: Objective = "ep_like") -> VEMTrainer:
        """The paper's training details: 20 E-steps at 0.1, 20 M-steps of gradient descent at 0.001.

        Sets lengthscales and variances of stationary kernels, where they are trainable, to
        ℓ = σ = 1, where the paper starts, and λ to zero. The gradient descent is in GPflow's
        unconstrained parameters. The paper does not say when to stop; this stops at the first decrease
        of the objective and restores what was before it.
        """
        for part in (model.kernel, *model.kernel.submodules):
            if isinstance(part, gpflow.kernels.Stationary):
                for parameter in (part.lengthscales, part.variance):
                    if parameter.trainable:
                        parameter.assign(tf.ones_like(parameter))
        model.sites.reset(tf.shape(model.data[0])[0])
        return cls(
            model,
            objective,
            e_step=NaturalGradientSteps(20, 0.1),
            m_step=GradientSteps(20, "sgd", 0.001),
            stopping=Patience(1),
        )

    # The whole run.

    def fit(
        self,
        max_iterations: int = 200,
        *,
        log_dir: str | Path | None = None,
        image_period: int = 10,
        monitor: gpflow.monitor.Monitor | None = None,
        checkpoint_dir: str | Path | None = None,
        checkpoint_period: int = 1,
        resume: bool = False,
        progress: bool | None = None,
    ) -> TrainingResult:
        """Alternate until a stopping rule ends it, and say how it went.

        An E-step comes first; an iteration is an M-step and the E-step after it, so that the model is
        always left with sites for its hyperparameters. Without trainable hyperparameters there is
        only the E-step.

        Ctrl-C ends the run after restoring the last complete iteration; a non-finite objective
        raises :class:`~gpflow_hybrid.NonFiniteError` after restoring it.

        :param max_iterations: iterations at most, those before a resumption included.
        :param log_dir: writes TensorBoard files there; if the directory has some already and the run
            is not resumed, into the next free ``log_dir-2``, ``log_dir-3``, ... (see ``result.log_dir``).
        :param image_period: iterations between images of the fit (one or two inputs).
        :param monitor: a GPflow monitor of your own, called with the iteration.
        :param checkpoint_dir: saves the run there, in one step, so that it can go on if it is killed.
        :param checkpoint_period: iterations between checkpoints.
        :param resume: go on from the checkpoint if there is one; a run that was interrupted ends as
            it would have without.
        :param progress: a progress bar; by default only on a terminal.
        """
        check_count(max_iterations, "max_iterations")
        check_count(image_period, "image_period")
        check_count(checkpoint_period, "checkpoint_period")
        if [id(v) for v in self.variables] != [id(v) for v in self.model.trainable_variables]:
            raise InvalidDataError(
                "The model's trainable parameters are not those that this trainer was built for: "
                "build a new trainer."
            )
        identity = {} if checkpoint_dir is None else self._identity()
        store = CheckpointStore.open(checkpoint_dir, identity, resume)
        with interrupts.deferred():
            return self._run(
                store, max_iterations, log_dir, image_period, monitor, checkpoint_period, progress
            )

    def _run(
        self,
        store: CheckpointStore,
        max_iterations: int,
        log_dir: str | Path | None,
        image_period: int,
        monitor: gpflow.monitor.Monitor | None,
        checkpoint_period: int,
        progress: bool | None,
    ) -> TrainingResult:
        run = self._begin(store, log_dir, image_period, monitor)
        monitoring = run.monitoring
        bar = progress_bars.bar(max_iterations, len(run.history) - 1, progress)
        verdict = self._verdict(run.history, max_iterations)
        before_iteration = None
        try:
            while verdict is None:
                interrupts.check()
                before_iteration = store.random_state()
                self._iterate(run)
                before_iteration = None
                record = run.history[-1]
                monitoring.write(record)
                if monitor is not None:
                    monitor(record.iteration)
                verdict = self._verdict(run.history, max_iterations)
                if verdict is not None or record.iteration % checkpoint_period == 0:
                    store.save(self, run)
                bar.show(record)
        except KeyboardInterrupt:
            self._restore(run.progress.good)
            if before_iteration is not None:
                before_iteration.restore()
            store.save(self, run)
            verdict = Verdict(
                "interrupted",
                f"Interrupted; the model is as after iteration {run.history[-1].iteration}.",
            )
        finally:
            bar.close()
        kept = run.history[-1].iteration
        if verdict.status != "interrupted" and run.progress.best is not None:
            self._restore(run.progress.best)
            kept = run.progress.best_iteration
        return TrainingResult(
            history=run.history,
            status=verdict.status,
            message=verdict.message + self._remarks(run.history, kept),
            seconds=float(np.sum(run.history["seconds"])),
            num_iterations=run.history[-1].iteration,
            best_iteration=kept,
            log_dir=None if monitoring.log_dir is None else str(monitoring.log_dir),
        )

    def _begin(
        self,
        store: CheckpointStore,
        log_dir: str | Path | None,
        image_period: int,
        monitor: gpflow.monitor.Monitor | None,
    ) -> Run:
        """A run from its checkpoint, or from the first E-step."""
        began = time.perf_counter()
        saved = store.load()
        if saved is not None:
            self._restore(saved.progress.good)
            saved.random.restore()
            progress = saved.progress
            if saved.best_by != self.stopping.best_by:  # other rules: the best is sought from here
                last = progress.history[-1].iteration
                best = None if self.stopping.best_by is None else progress.good
                progress = dataclasses.replace(progress, best=best, best_iteration=last)
            *before, last_record = progress.history
            measured = {
                name: float(measure(self.model))
                for name, measure in self.stopping.measurements.items()
                if name not in last_record.measurements
            }
            if measured:
                last_record = dataclasses.replace(
                    last_record, measurements=last_record.measurements | measured
                )
                progress = dataclasses.replace(progress, history=History([*before, last_record]))
            monitoring = Monitoring(
                self.model, log_dir, image_period, saved.log_dir, last_record.iteration
            )
            if monitoring.log_dir is not None and not monitoring.log_dir.exists():
                monitoring.write(last_record)  # killed after the checkpoint and before this
            return Run(progress, monitoring, began)
        run = Run(
            Progress(History(), self._arrays()),
            Monitoring(self.model, log_dir, image_period),
            began,
        )
        with self._guard(run, 0):
            inferred = self.e_step()
            interrupts.check()
            self._finish_iteration(run, 0, inferred, None)
        store.save(self, run)  # first, so that the run knows its log_dir again if it is killed
        run.monitoring.write(run.history[-1])
        if monitor is not None:
            monitor(0)
        store.save(self, run)
        return run

    def _iterate(self, run: Run) -> None:
        iteration = run.history[-1].iteration + 1
        with self._guard(run, iteration):
            moved = self._move_hyperparameters()
            interrupts.check()
            inferred = self.e_step()
            interrupts.check()
            self._finish_iteration(run, iteration, inferred, moved)

    def _finish_iteration(
        self,
        run: Run,
        iteration: int,
        inferred: EStepOutcome,
        moved: MStepOutcome | None,
    ) -> None:
        """Record the iteration; what it left becomes the last good state."""
        elbo, ep_like, objective, cavity, loo = (float(x) for x in self._compiled_diagnosis())
        if not np.isfinite(objective):
            why = "."
            if not cavity > 0.0:
                why = (
                    f": a cavity 1/v − λ₂ is not positive (the smallest is {cavity:.3g}), so that the "
                    'integral diverges. objective="elbo" or a smaller power needs no such cavity.'
                )
            raise NonFiniteError(f"The objective is not finite after the E-step{why}")
        record = IterationRecord(
            iteration=iteration,
            elbo=elbo,
            ep_like=ep_like,
            objective=objective,
            hyperparameters=self._hyperparameters(),
            e_steps=inferred.num_steps,
            e_residual=inferred.residual,
            gradient_norm=np.nan if moved is None else moved.gradient_norm,
            m_gain=np.nan if moved is None else moved.after - moved.before,
            min_cavity_precision=cavity,
            leave_one_out=loo,
            seconds=0.0,
            measurements={
                name: float(measure(self.model))
                for name, measure in self.stopping.measurements.items()
            },
        )
        good, now = self._arrays(), time.perf_counter()
        # From the end of the iteration before: what is written and saved takes time too.
        record = dataclasses.replace(record, seconds=now - run.clock)
        history = run.history.extended(record)
        best, best_iteration = run.progress.best, run.progress.best_iteration
        column = self.stopping.best_by
        if column is not None:
            values = history[column]
            if best is None or not values[-1] <= values[best_iteration]:
                if best is None or not np.isnan(values[-1]):
                    best, best_iteration = good, iteration
        run.progress, run.clock = Progress(history, good, best, best_iteration), now

    @contextlib.contextmanager
    def _guard(self, run: Run, iteration: int) -> Iterator[None]:
        """Restore the last good state when anything goes wrong, and name the iteration."""
        try:
            yield
        except (NonFiniteError, InvalidPosteriorError, tf.errors.InvalidArgumentError) as error:
            values = ", ".join(
                f"{path} = {np.array2string(np.asarray(v), precision=4, threshold=4)}"
                for path, v in self._hyperparameters().items()
            )
            self._restore(run.progress.good)
            message = words_of(error)
            raise NonFiniteError(
                f"Training failed in iteration {iteration} at {values or 'fixed hyperparameters'}: "
                f"{message} The model is as after the last complete iteration. Use a smaller step "
                "size in the M-step, put priors on the hyperparameters, or train on the collapsed "
                "objective, model.training_loss."
            ) from error
        except BaseException:
            self._restore(run.progress.good)
            raise

    def _remarks(self, history: History, kept: int) -> str:
        """What a user should know beside why training stopped."""
        remarks = ""
        if kept != history[-1].iteration:
            remarks += (
                f" The model is as after iteration {kept}, the best by {self.stopping.best_by}."
            )
        settings, residual = self.e_step_settings, history[kept].e_residual
        if isinstance(settings, InferToConvergence) and residual > settings.tolerance:
            remarks += (
                f" The E-step there did not converge (residual {residual:.1e}): model.infer() says "
                "why."
            )
        return remarks

    def _verdict(self, history: History, max_iterations: int) -> Verdict | None:
        if not self.variables:
            return Verdict(
                "inferred",
                "The model has no trainable hyperparameters: only the E-step was run.",
            )
        found = self.stopping.check(history)
        if found is None and history[-1].iteration >= max_iterations:
            return Verdict(
                "max_iterations",
                f"{max_iterations} iterations were not enough for a stopping rule to end the run. "
                "Raise max_iterations, or the number or size of the M-steps.",
            )
        return found


def words_of(error: Exception) -> str:
    """What an error says: of TensorFlow's, without the traceback of the graph's making."""
    text = str(error)
    if not isinstance(error, tf.errors.OpError):
        return text.splitlines()[0]
    lines = [line.strip() for line in text.splitlines()]
    said = [line for line in lines if line and not line.startswith(("[[", "File ", "Detected at"))]
    return next((line for line in said if "assertion failed" in line), said[-1])
