"""What one E-step and one M-step are: small settings objects."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ..errors import InvalidDataError
from ..validation import check_count, check_positive, check_step

OPTIMIZERS = ("adam", "sgd")


@dataclasses.dataclass(frozen=True)
class NaturalGradientSteps:
    """E-step: so many steps ``λ ← (1 − lr) λ + lr ∇_μ E_q[log p]``, as in the paper."""

    num_steps: int = 20
    lr: float = 0.1

    def __post_init__(self) -> None:
        check_count(self.num_steps, "num_steps")
        check_step(self.lr)


@dataclasses.dataclass(frozen=True)
class InferToConvergence:
    """E-step: the model's ``infer()``."""

    tolerance: float = 1e-6
    max_steps: int = 200

    def __post_init__(self) -> None:
        check_positive(self.tolerance, "tolerance")
        check_count(self.max_steps, "max_steps")


@dataclasses.dataclass(frozen=True)
class GradientSteps:
    """M-step: so many steps of a first-order optimiser on the hyperparameters at fixed λ.

    :param optimizer: ``"adam"``, ``"sgd"``, or any Keras 3 or tf_keras optimiser.
    :param lr: step size or Keras schedule for an optimiser given by name; one given as an object
        brings its own.
    """

    num_steps: int = 10
    optimizer: Any = "adam"
    lr: Any = 0.05

    def __post_init__(self) -> None:
        check_count(self.num_steps, "num_steps")
        if isinstance(self.optimizer, str):
            if self.optimizer not in OPTIMIZERS:
                raise InvalidDataError(
                    f'optimizer must be "adam", "sgd" or a Keras optimiser; found '
                    f"{self.optimizer!r}."
                )
            if isinstance(self.lr, numbers.Real):
                check_positive(self.lr, "lr")
        elif not hasattr(self.optimizer, "apply_gradients"):
            raise InvalidDataError(
                'optimizer must be "adam", "sgd" or a Keras optimiser with apply_gradients; found '
                f"{type(self.optimizer).__name__}. For L-BFGS use LBFGSSteps()."
            )

    def build(self, variables: Sequence[tf.Variable]) -> Any:
        """The optimiser itself, with its state for these variables."""
        optimizer = self._optimizer()
        others = getattr(optimizer, "_trainable_variables", None)  # Keras 3, once built
        if getattr(optimizer, "built", False) and others is not None:
            if {id(v) for v in others} != {id(v) for v in variables}:
                raise InvalidDataError(
                    "optimizer has been used with other variables and has their state: pass a new "
                    f"{type(optimizer).__name__}."
                )
        if hasattr(optimizer, "build"):
            optimizer.build(variables)
        elif hasattr(optimizer, "_create_all_weights"):  # tf_keras.optimizers.legacy
            optimizer._create_all_weights(variables)
        return optimizer

    def _optimizer(self) -> Any:
        if not isinstance(self.optimizer, str):
            return self.optimizer
        kind = {"adam": tf.keras.optimizers.Adam, "sgd": tf.keras.optimizers.SGD}[self.optimizer]
        try:
            optimizer = kind(learning_rate=self.lr)
            float(optimizer.learning_rate)  # a schedule of another library fails only when called
            return optimizer
        except (TypeError, ValueError) as error:
            raise InvalidDataError(
                f"lr must be a positive number or a schedule of {kind.__module__.split('.')[0]}, which "
                f'"{self.optimizer}" is made with; found {type(self.lr).__name__}. Other schedules go '
                "with an optimiser of their own library, given as an object."
            ) from error


@dataclasses.dataclass(frozen=True)
class LBFGSSteps:
    """M-step: so many iterations of SciPy's L-BFGS-B on the hyperparameters at fixed λ."""

    num_steps: int = 10

    def __post_init__(self) -> None:
        check_count(self.num_steps, "num_steps")


EStep = NaturalGradientSteps | InferToConvergence
MStep = GradientSteps | LBFGSSteps
