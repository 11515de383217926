"""Variational EM: E-steps on the sites in turn with M-steps on the hyperparameters at fixed sites."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Container
from pathlib import Path
from typing import Any

import gpflow
import numpy as np
import tensorflow as tf
from tqdm import tqdm

from .. import interrupts
from ..display import progress_bar
from ..errors import InvalidDataError, InvalidPosteriorError, NonFiniteError
from ..models import CollapsedModel, CVIModel, SparseCVIModel
from ..objectives import Objective
from ..validation import check_count
from .alternation import Alternation, EStepOutcome, MStepOutcome, words_of
from .history import History, IterationRecord, TrainingResult
from .monitoring import Monitoring
from .resuming import CheckpointStore, SavedRun
from .state import Progress, Run
from .steps import EStep, GradientSteps, InferToConvergence, MStep, NaturalGradientSteps
from .stopping import Patience, StoppingRule, Verdict, as_rule, default_rules


class VEMTrainer(Alternation):
    """The paper's training procedure: E-steps on λ in turn with M-steps on the hyperparameters.

    An M-step raises ``L_α(λ, θ)`` plus the log density of the priors over θ at fixed λ; an E-step
    brings λ back towards the optimum of the ELBO at fixed θ. With the ELBO (α = 0) both raise one
    function; with the EP-like value they need not, see :class:`~gpflow_hybrid.training.Drift`.

    :param model: a :class:`~gpflow_hybrid.CVIModel` or :class:`~gpflow_hybrid.SparseCVIModel`, or another
        model with sites if the E-step is ``InferToConvergence()``. Of a sparse one λ is q(u).
    :param objective: ``"elbo"``, ``"ep_like"`` or a power α in [0, 1]; of a sparse model its own.
    :param data: of a sparse model, all of them: ``(X, Y)`` or a ``tf.data.Dataset``.
    :param e_step: ``InferToConvergence()`` (default) or ``NaturalGradientSteps(num_steps, lr)``.
    :param m_step: ``LBFGSSteps(num_steps)`` (default) or ``GradientSteps(num_steps, optimizer, lr)``
        with Adam, SGD or any Keras optimiser.
    :param stopping: a stopping rule, or a list of which any may stop.
    """

    def __init__(
        self,
        model: CollapsedModel | SparseCVIModel,
        objective: Objective = "ep_like",
        *,
        data: Any = None,
        e_step: EStep | None = None,
        m_step: MStep | None = None,
        stopping: StoppingRule | list[StoppingRule] | None = None,
    ) -> None:
        self.stopping = default_rules() if stopping is None else as_rule(stopping)
        super().__init__(model, objective, data=data, e_step=e_step, m_step=m_step)

    @classmethod
    def paper(
        cls,
        model: CVIModel | SparseCVIModel,
        objective: Objective = "ep_like",
        data: Any = None,
    ) -> VEMTrainer:
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
        model.sites.reset(tf.shape(model.sites.lambda_1)[0])
        return cls(
            model,
            objective,
            data=data,
            e_step=NaturalGradientSteps(20, 0.1),
            m_step=GradientSteps(20, "sgd", 0.001),
            stopping=Patience(1),
        )

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
        :param progress: a progress bar; by default on a terminal and in a notebook.
        """
        check_count(max_iterations, "max_iterations")
        check_count(image_period, "image_period")
        check_count(checkpoint_period, "checkpoint_period")
        if [id(v) for v in self.variables] != [id(v) for v in self.model.trainable_variables]:
            raise InvalidDataError(
                "The model's trainable parameters are not those that this trainer was built for: "
                "build a new trainer."
            )
        store = CheckpointStore(checkpoint_dir, checkpoint_period, resume, self)
        with interrupts.deferred():
            run = self._begin(store, Monitoring(self.subject, log_dir, image_period, monitor))
            done = len(run.history) - 1
            with progress_bar(progress, total=max_iterations, initial=done, unit="it") as bar:
                verdict = self._alternate(run, store, max_iterations, bar)
            return self._result(run, verdict)

    def _result(self, run: Run, verdict: Verdict) -> TrainingResult:
        """What came out, after restoring the best iteration where a rule asks for it."""
        last = left_with = run.history[-1].iteration
        if verdict.status != "interrupted" and run.progress.best is not None:
            self._restore(run.progress.best)
            left_with = run.progress.best_iteration
        message = verdict.message
        if left_with != last:
            message += f" The model is as after iteration {left_with}, the best by {self.stopping.best_by}."
        settings, residual = self.e_step_settings, run.history[left_with].e_residual
        if isinstance(settings, InferToConvergence) and residual > settings.tolerance:
            message += (
                f" The E-step there did not converge (residual {residual:.1e}): model.infer() says "
                "why."
            )
        log_dir = run.monitoring.log_dir
        return TrainingResult(
            history=run.history,
            status=verdict.status,
            message=message,
            seconds=float(np.sum(run.history["seconds"])),
            num_iterations=last,
            best_iteration=left_with,
            log_dir=None if log_dir is None else str(log_dir),
        )

    def _begin(self, store: CheckpointStore, monitoring: Monitoring) -> Run:
        """A run from its checkpoint, or from the first E-step."""
        began = time.perf_counter()
        saved = store.load()
        if saved is not None:
            run = Run(self._resume(saved), monitoring, began)
            monitoring.resume(saved.log_dir, run.history[-1])
            return run
        run = Run(Progress(History(), self._arrays()), monitoring, began)
        self._iterate(run)
        store.save(run)  # first, so that the run knows its log_dir again if it is killed
        monitoring.report(run.history[-1])
        store.save(run)
        return run

    def _resume(self, saved: SavedRun) -> Progress:
        """The model and the random generators as they were; what the present rules need to know."""
        self._restore(saved.progress.good)
        saved.random.restore()
        progress = saved.progress
        *before, last = progress.history
        if saved.best_by != self.stopping.best_by:  # other rules: the best is sought from here
            best = None if self.stopping.best_by is None else progress.good
            progress = dataclasses.replace(progress, best=best, best_iteration=last.iteration)
        measured = last.measurements | self._measure(but=last.measurements)
        last = dataclasses.replace(last, measurements=measured)
        return dataclasses.replace(progress, history=History([*before, last]))

    def _alternate(
        self, run: Run, store: CheckpointStore, max_iterations: int, bar: tqdm
    ) -> Verdict:
        """Iterations until there is a verdict."""
        verdict = self._verdict(run.history, max_iterations)
        random_before = None
        try:
            while verdict is None:
                interrupts.check()
                random_before = store.random_state()
                self._iterate(run)
                random_before = None
                record = run.history[-1]
                run.monitoring.report(record)
                verdict = self._verdict(run.history, max_iterations)
                if verdict is not None or record.iteration % store.period == 0:
                    store.save(run)
                bar.set_postfix(
                    objective=f"{record.objective:.4f}", e_steps=record.e_steps, refresh=False
                )
                bar.update(1)
            return verdict
        except KeyboardInterrupt:
            self._restore(run.progress.good)
            if random_before is not None:
                random_before.restore()
            store.save(run)
            return Verdict(
                "interrupted",
                f"Interrupted; the model is as after iteration {run.history[-1].iteration}.",
            )

    def _iterate(self, run: Run) -> None:
        """An M-step, the first time none, and an E-step; the last good state if anything goes wrong."""
        iteration = len(run.history)
        try:
            moved = self._move_hyperparameters() if iteration > 0 else MStepOutcome(*[np.nan] * 3)
            interrupts.check()
            inferred = self.e_step()
            interrupts.check()
            record = self._record(run, moved, inferred)
            run.progress = run.progress.extended(record, self._arrays(), self.stopping.best_by)
            run.clock += record.seconds
        except (NonFiniteError, InvalidPosteriorError, tf.errors.InvalidArgumentError) as error:
            values = ", ".join(
                f"{path} = {np.array2string(np.asarray(v), precision=4, threshold=4)}"
                for path, v in self._hyperparameters().items()
            )
            self._restore(run.progress.good)
            raise NonFiniteError(
                f"Training failed in iteration {iteration} at {values or 'fixed hyperparameters'}: "
                f"{words_of(error)} The model is as after the last complete iteration. Use a smaller "
                "step size in the M-step, put priors on the hyperparameters, or train on the "
                "collapsed objective, model.training_loss."
            ) from error
        except BaseException:
            self._restore(run.progress.good)
            raise

    def _record(self, run: Run, moved: MStepOutcome, inferred: EStepOutcome) -> IterationRecord:
        """The iteration that has just been done."""
        diagnosis = {name: float(x) for name, x in self._compiled_diagnosis().items()}
        if not np.isfinite(diagnosis["objective"]):
            why, cavity = ".", diagnosis["min_cavity_precision"]
            if not cavity > 0.0:
                why = (
                    f": a cavity 1/v − λ₂ is not positive (the smallest is {cavity:.3g}), so that the "
                    'integral diverges. objective="elbo" or a smaller power needs no such cavity.'
                )
            raise NonFiniteError(f"The objective is not finite after the E-step{why}")
        return IterationRecord(
            iteration=len(run.history),
            hyperparameters=self._hyperparameters(),
            e_steps=inferred.num_steps,
            e_residual=inferred.residual,
            gradient_norm=moved.gradient_norm,
            m_gain=moved.after - moved.before,
            measurements=self._measure(),
            # From the end of the iteration before: what is written and saved takes time too.
            seconds=time.perf_counter() - run.clock,
            **diagnosis,
        )

    def _measure(self, but: Container[str] = ()) -> dict[str, float]:
        """What the stopping rules want to know of the model as it is."""
        return {
            name: float(measure(self.model))
            for name, measure in self.stopping.measurements.items()
            if name not in but
        }

    def _verdict(self, history: History, max_iterations: int) -> Verdict | None:
        if not self.variables:
            return Verdict(
                "inferred",
                "The model has no trainable hyperparameters: only the E-step was run.",
            )
        verdict = self.stopping.check(history)
        if verdict is None and history[-1].iteration >= max_iterations:
            return Verdict(
                "max_iterations",
                f"{max_iterations} iterations were not enough for a stopping rule to end the run. "
                "Raise max_iterations, or the number or size of the M-steps.",
            )
        return verdict
