"""L-BFGS as GPflow has it, begun again where it gave up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import gpflow
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from gpflow.models import GPModel
from gpflow.utilities import parameter_dict

from ..errors import InvalidPosteriorError, NonFiniteError
from ..models import CollapsedModel
from ..models.array_loss import ArrayLoss
from ..rows import DataRows
from . import interrupts
from .coordinates import Coordinates, positive_entries
from .curvatures import units_of

Array = npt.NDArray[np.float64]

MAX_RESTARTS = 5
"""L-BFGS is begun again at most so often where its line search gave up on a slope."""


FAILURES = (NonFiniteError, InvalidPosteriorError, tf.errors.InvalidArgumentError)
"""What may go wrong at a start that others need not share."""


class Run(NamedTuple):
    """Where one start ended."""

    x: Array
    loss: float
    gradient: Array
    reached_maximum: bool
    message: str


class Ends(NamedTuple):
    """Of all starts: their losses, NaN where one failed, and whether the user interrupted them."""

    losses: list[float]
    failures: list[Exception]
    interrupted: bool


class Optimizer(gpflow.optimizers.Scipy):
    """GPflow's optimiser in other coordinates, and without a graph where the loss needs none."""

    def __init__(self, coordinates: Coordinates, loss: ArrayLoss | None) -> None:
        super().__init__()
        self.coordinates, self.loss = coordinates, loss
        self.gradient: Array | None = None
        """Where the loss was evaluated last, in the coordinates."""

    def start(self, variables: Any) -> Array:
        """Where the variables are, in the coordinates."""
        return self.coordinates.inward(self.pack_tensors(variables).numpy())

    # GPflow's is a method of the class, called on the object.
    initial_parameters = start

    def eval_func(self, *args: Any, **kwargs: Any) -> Callable[[Any], tuple[Any, Any]]:
        """The loss and its gradient, from the coordinates."""
        function = super().eval_func(*args, **kwargs) if self.loss is None else self.loss

        def evaluate(z: Array) -> tuple[Any, Any]:
            loss, gradient = function(self.coordinates.outward(z))
            self.gradient = self.coordinates.gradient_inward(z, gradient)
            return loss, self.gradient

        return evaluate


class Minimisation:
    """L-BFGS from wherever the model is, and the best that it has found."""

    def __init__(
        self,
        model: GPModel,
        closure: Callable[[], Any],
        max_iterations: int,
        tolerance: float,
        data: Any = None,
        log_scale: bool = False,
    ) -> None:
        self.variables = tuple(model.trainable_variables)
        self.trained = trained_parameters(model, self.variables)
        self.num_iterations = self.num_evaluations = 0
        self.best: Run | None = None
        self._model, self._closure = model, closure
        self._coordinates = Coordinates()
        if log_scale:
            self._coordinates = Coordinates(
                positive_entries(self.trained.values(), self.variables),
                units_of(model, self.variables, _num_rows(model, data)),
            )
        self.log_scale = log_scale
        self._rows = data if isinstance(data, DataRows) else None
        self._optimizer = self._new_optimizer()
        self.max_iterations, self.tolerance = max_iterations, tolerance

    def begin_again(self, closure: Callable[[], Any]) -> None:
        """Go on with another loss of the same variables: what was best is not comparable."""
        self.best, self._closure, self._optimizer = None, closure, self._new_optimizer()

    def _new_optimizer(self) -> Optimizer:
        model = self._model
        loss = model.loss_on_arrays() if isinstance(model, CollapsedModel) else None
        return Optimizer(self._coordinates, loss)

    def position(self) -> Array:
        """The unconstrained parameters in a row."""
        return np.asarray(self._optimizer.pack_tensors(self.variables), np.float64)

    def move_to(self, x: Array) -> None:
        """Set them."""
        if not np.array_equal(x, self.position()):
            values = self._optimizer.unpack_tensors(self.variables, tf.constant(x))
            self._optimizer.assign_tensors(self.variables, values)
        if self._optimizer.loss is not None:
            self._optimizer.loss.leave_sites()

    def run(self, bar: Any) -> Run:
        """To the end of one start, begun again on a slope as long as that helps."""
        left, before = self.max_iterations, np.inf
        for _ in range(1 + MAX_RESTARTS):
            run, count = self._minimise(left, bar)
            left -= count
            is_steep = np.max(np.abs(run.gradient)) > self.tolerance
            if not is_steep or left < 1 or not run.loss < before:
                break
            before = run.loss
        return run

    def _minimise(self, max_iterations: int, bar: Any) -> tuple[Run, int]:
        def callback(intermediate_result: Any) -> None:
            at = intermediate_result
            bar.set_postfix(loss=f"{at.fun:.4f}", refresh=False)
            bar.update(1)
            if interrupts.is_pending():
                x = self._coordinates.outward(at.x)
                self.keep(Run(x, float(at.fun), np.array([np.nan]), False, ""))
            interrupts.check()
            if self.log_scale and self._is_flat():
                raise StopIteration

        start = self._optimizer.start(self.variables)
        try:
            result = self._optimizer.minimize(
                self._closure,
                self.variables,
                callback=callback,
                bounds=self._coordinates.bounds(start),
                options={"maxiter": max_iterations},
                allow_unused_variables=True,
            )
        except tf.errors.OpError:
            if self._rows is not None and self._rows.failure is not None:
                raise self._rows.failure from None
            raise
        self.num_iterations += int(result.nit)
        self.num_evaluations += int(result.nfev)
        message = result.message if isinstance(result.message, str) else result.message.decode()
        x, gradient = self._coordinates.outward(result.x), result.jac
        gradient = self._coordinates.gradient_outward(result.x, gradient)
        self.move_to(x)
        run = Run(x, float(result.fun), gradient, result.status == 1, message)
        self.keep(run)
        return run, int(result.nit)

    def _is_flat(self) -> bool:
        """Whether no logarithm of a parameter promises more than the tolerance: nats for a factor e."""
        gradient = self._optimizer.gradient
        assert gradient is not None
        return bool(np.max(np.abs(self._coordinates.in_logarithms(gradient))) <= self.tolerance)

    def keep(self, run: Run) -> None:
        """If it is the best so far."""
        if np.isfinite(run.loss) and (self.best is None or run.loss <= self.best.loss):
            self.best = run


def trained_parameters(model: GPModel, variables: Iterable[tf.Variable]) -> dict[str, Any]:
    """Parameters of these variables, by GPflow's path."""
    trained = {id(v) for v in variables}
    return {
        path: parameter
        for path, parameter in parameter_dict(model).items()
        if id(getattr(parameter, "unconstrained_variable", parameter)) in trained
    }


def _num_rows(model: Any, data: Any) -> int:
    """Of data inside or outside of a model; of a stream, what the model was told."""
    if isinstance(data, DataRows):
        return data.num_rows
    if isinstance(data, tf.data.Dataset):
        return int(getattr(model, "num_data", None) or len(next(iter(data))[0]))
    return len((model.data if data is None else data)[0])
