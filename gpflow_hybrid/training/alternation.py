"""One E-step and one M-step, compiled, each changing only what it should."""

from __future__ import annotations

from typing import Any, NamedTuple

import gpflow
import numpy as np
import numpy.typing as npt
import scipy.optimize
import tensorflow as tf
from gpflow.utilities import parameter_dict

from .. import interrupts
from ..errors import InvalidDataError, NonFiniteError
from ..inference.options import TRAINING
from ..models import CollapsedModel, CVIModel, SparseCVIModel
from ..objectives import Objective, power_of
from ..sites import SiteValues
from .state import Arrays, optimizer_variables
from .steps import (
    EStep,
    GradientSteps,
    InferToConvergence,
    LBFGSSteps,
    MStep,
    NaturalGradientSteps,
)
from .subjects import subject_of


class EStepOutcome(NamedTuple):
    """Steps on λ, and how far they left it from the fixed point."""

    num_steps: int
    residual: float


class MStepOutcome(NamedTuple):
    """Objective before and after the M-step at fixed λ, and the norm of its last gradient."""

    before: float
    after: float
    gradient_norm: float


class Alternation:
    """A model, an objective, and the two steps on them."""

    def __init__(
        self,
        model: CollapsedModel | SparseCVIModel,
        objective: Objective = "ep_like",
        *,
        data: Any = None,
        e_step: EStep | None = None,
        m_step: MStep | None = None,
    ) -> None:
        self.alpha = power_of(objective)
        self.subject = subject_of(model, data, self.alpha)
        self.model: Any = model
        self.objective = objective
        self.e_step_settings = e_step = InferToConvergence() if e_step is None else e_step
        self.m_step_settings = m_step = LBFGSSteps() if m_step is None else m_step
        if not isinstance(e_step, EStep):
            raise InvalidDataError(
                "e_step must be NaturalGradientSteps(...) or InferToConvergence(...); found "
                f"{e_step!r}."
            )
        if not isinstance(m_step, MStep):
            raise InvalidDataError(
                f"m_step must be GradientSteps(...) or LBFGSSteps(...); found {m_step!r}."
            )
        if isinstance(e_step, NaturalGradientSteps) and not isinstance(
            model, (CVIModel, SparseCVIModel)
        ):
            raise InvalidDataError(
                f"e_step must be InferToConvergence() for {type(model).__name__}: natural-gradient "
                "steps are those of CVIModel and SparseCVIModel."
            )
        # λ is excluded by identity, whatever its flag says: trainable_variables never has it.
        self.variables: tuple[tf.Variable, ...] = tuple(model.trainable_variables)
        self.optimizer = m_step.build(self.variables) if isinstance(m_step, GradientSteps) else None
        trained = {id(v) for v in self.variables}
        self.trained_parameters = {
            path: parameter
            for path, parameter in parameter_dict(model).items()
            if id(getattr(parameter, "unconstrained_variable", parameter)) in trained
        }
        self._compiled_hyperparameters = tf.function(
            lambda: [tf.convert_to_tensor(p) for p in self.trained_parameters.values()],
            autograph=False,
        )
        self._compiled_m_steps = tf.function(self._gradient_steps, autograph=False)
        self._compiled_gradient = tf.function(self._loss_and_gradient, autograph=False)
        self._compiled_assign = tf.function(self._assign, autograph=False)
        self._compiled_diagnosis = self.subject.diagnose

    # One step of each kind.

    def e_step(self) -> EStepOutcome:
        """Move λ at fixed hyperparameters; nothing else changes."""
        settings = self.e_step_settings
        if isinstance(settings, InferToConvergence):
            result = self.subject.infer(settings.tolerance, settings.max_steps)
            return EStepOutcome(result.num_steps, result.residual)
        at = self.subject.natural_gradient_steps(settings.num_steps, settings.lr)
        if not np.isfinite(at.elbo):
            raise NonFiniteError(
                f"{settings.num_steps} natural-gradient steps with lr = {settings.lr:g} left no valid "
                "q(f); λ is unchanged. Use a smaller lr, or e_step=InferToConvergence()."
            )
        self.model.sites.assign(at.sites)
        return EStepOutcome(settings.num_steps, at.residual)

    def m_step(self) -> MStepOutcome:
        """Move the trainable hyperparameters at fixed λ; nothing else changes.

        Where the objective is not finite, :class:`~gpflow_hybrid.NonFiniteError`, and nothing has
        changed.
        """
        before = self._arrays()
        try:
            return self._move_hyperparameters()
        except NonFiniteError:
            self._restore(before)
            raise

    def _move_hyperparameters(self) -> MStepOutcome:
        """:meth:`m_step`, left where the objective is not finite."""
        if not self.variables:
            raise InvalidDataError(
                "The model has no trainable hyperparameters: there is no M-step. Make some trainable "
                "with gpflow.set_trainable(parameter, True) and build a new trainer."
            )
        self.model.sites.release()
        if self.optimizer is not None:
            outcome = MStepOutcome(*(float(x) for x in self._compiled_m_steps()))
        else:
            outcome = self._lbfgs()
        if not np.isfinite(outcome).all():
            raise NonFiniteError("The objective or its gradient is not finite in the M-step.")
        return outcome

    def _lbfgs(self) -> MStepOutcome:
        """L-BFGS-B; where there is no objective, a wall from which its line search backs away."""
        start = gpflow.optimizers.Scipy.pack_tensors(self.variables).numpy()
        values: list[float] = []

        def evaluate(x: npt.NDArray[Any]) -> tuple[float, npt.NDArray[Any]]:
            interrupts.check()
            tensors = self._compiled_gradient(tf.constant(x, tf.float64))
            loss, gradient = (t.numpy().astype(np.float64) for t in tensors)
            if not np.isfinite(loss) or not np.isfinite(gradient).all():
                if not values:
                    raise NonFiniteError(
                        "The objective or its gradient is not finite in the M-step."
                    )
                wall = max(values) + TRAINING.penalty_per_datum * self.subject.num_data
                return wall, np.zeros_like(x)
            values.append(float(loss))
            return float(loss), gradient

        result = scipy.optimize.minimize(
            evaluate,
            start,
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": self.m_step_settings.num_steps},
        )
        self._compiled_assign(tf.constant(result.x, tf.float64))
        return MStepOutcome(-values[0], -float(result.fun), float(np.linalg.norm(result.jac)))

    def _assign(self, x: tf.Tensor) -> None:
        unpacked = gpflow.optimizers.Scipy.unpack_tensors(self.variables, x)
        gpflow.optimizers.Scipy.assign_tensors(self.variables, unpacked)

    def _loss_and_gradient(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        self._assign(x)
        loss, gradients = self._differentiated_loss()
        return loss, gpflow.optimizers.Scipy.pack_tensors(gradients)

    def _loss(self) -> tf.Tensor:
        """``−L_α(λ, θ) − log p(θ)`` at fixed λ."""
        value = self.subject.objective(self.alpha)
        return -(value + self.model.log_prior_density())

    def _differentiated_loss(self) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self.variables)
            loss = self._loss()
        zero = tf.UnconnectedGradients.ZERO
        return loss, tape.gradient(loss, self.variables, unconnected_gradients=zero)

    def _gradient_steps(self) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Objective before and after, and the last gradient's norm; stops at a non-finite value."""
        num_steps = self.m_step_settings.num_steps
        optimizer: Any = self.optimizer
        nan = tf.constant(np.nan, self.model.sites.lambda_1.dtype)

        def body(i: tf.Tensor, first: tf.Tensor, norm: tf.Tensor) -> Any:
            loss, gradients = self._differentiated_loss()
            norm = tf.linalg.global_norm(gradients)
            finite = tf.math.is_finite(loss) & tf.math.is_finite(norm)

            def apply() -> tf.Operation:
                optimizer.apply_gradients(zip(gradients, self.variables, strict=True))
                return tf.no_op()

            tf.cond(finite, apply, tf.no_op)
            return (
                tf.where(finite, i + 1, num_steps + 1),
                tf.where(tf.equal(i, 0), -loss, first),
                tf.where(finite, norm, nan),
            )

        count, first, norm = tf.while_loop(
            lambda i, *_: i < num_steps, body, (tf.constant(0), nan, nan)
        )
        after = tf.cond(tf.equal(count, num_steps), lambda: -self._loss(), lambda: nan)
        return first, after, norm

    # Everything that the steps change.

    def _hyperparameters(self) -> dict[str, npt.NDArray[Any]]:
        values = self._compiled_hyperparameters()
        return dict(zip(self.trained_parameters, (x.numpy() for x in values), strict=True))

    def _changing_variables(self) -> dict[str, Any]:
        """Hyperparameters and the optimiser's state; λ is the rest of what the steps change."""
        named = {f"variable:{i}": v for i, v in enumerate(self.variables)}
        state = optimizer_variables(self.optimizer)
        return named | {f"optimizer:{i}": v for i, v in enumerate(state)}

    def _arrays(self) -> Arrays:
        named = self._changing_variables() | self.model.sites.values._asdict()
        return {name: np.array(value) for name, value in named.items()}

    def _restore(self, arrays: Arrays) -> None:
        for name, variable in self._changing_variables().items():
            variable.assign(arrays[name])
        self.model.sites.assign(SiteValues(arrays["lambda_1"], arrays["lambda_2"]))


def words_of(error: Exception) -> str:
    """What an error says: of TensorFlow's, without the traceback of the graph's making."""
    lines = [line.strip() for line in str(error).splitlines()]
    if not isinstance(error, tf.errors.OpError):
        return lines[0]
    own = [line for line in lines if line and not line.startswith(("[[", "File ", "Detected at"))]
    return next((line for line in own if "assertion failed" in line), own[-1])
