"""L-BFGS as GPflow has it, begun again where it gave up."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import gpflow
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from gpflow.models import GPModel

from .. import interrupts
from ..errors import InvalidPosteriorError, NonFiniteError
from ..models import CollapsedModel, SparseCVIModel
from ..models.array_loss import ArrayLoss, Arrival
from ..rows import DataRows
from .curvatures import inverse_curvature, units_of
from .optimiser_coordinates import Coordinates, positive_entries, trained_parameters

Array = npt.NDArray[np.float64]

MAX_RESTARTS = 5
"""L-BFGS is begun again at most so often where its line search gave up on a slope."""

LEAST_GAIN = 1e7 * float(np.finfo(np.float64).eps)
"""Part of the loss that a restart has to gain for another one: L-BFGS's own ``ftol``."""

FAILURES = (NonFiniteError, InvalidPosteriorError, tf.errors.InvalidArgumentError)
"""What may go wrong at a start that others need not share."""


class FitEnd(NamedTuple):
    """Where one start ended."""

    x: Array
    loss: float
    gradient: Array
    reached_maximum: bool
    message: str


class FitStep(NamedTuple):
    """What a fit tells its ``callback``, with the model where it is."""

    loss: float
    iteration: int
    """Of L-BFGS on these rows; zero after the first evaluation."""
    num_rows: int
    """That the loss is of: first those of a part, then all."""


Callback = Callable[[FitStep], Any]


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
        self.begin: Callable[[Array, float], None] | None = None
        """Is told of the first evaluation."""

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
            if self.begin is not None:
                begin, self.begin = self.begin, None
                begin(z, float(loss))
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
        callback: Callback | None = None,
    ) -> None:
        self.variables = tuple(model.trainable_variables)
        self.trained = trained_parameters(model, self.variables)
        self.num_iterations = self.num_evaluations = 0
        self.part_evaluations = 0.0
        """Of losses of parts of the rows, in units of such of all."""
        self.best: FitEnd | None = None
        self._learnt: Any = None
        self.stopped = False
        """By the callback."""
        self._data = data
        self.model, self._closure, self.callback = model, closure, callback
        self._coordinates = Coordinates()
        self._logarithmic: Any = False
        if log_scale:
            self._logarithmic = positive_entries(self.trained.values(), self.variables)
            units = units_of(model, self.variables, self.num_rows)
            self._coordinates = Coordinates(self._logarithmic, units)
        self._first_coordinates = self._coordinates
        self.log_scale = log_scale
        self._rows = data if isinstance(data, DataRows) else None
        self._optimizer = self._new_optimizer()
        self.max_iterations, self.tolerance = max_iterations, tolerance

    @functools.cached_property
    def num_rows(self) -> int:
        """That the loss is of."""
        return _num_rows(self.model, self._data)

    def begin_again(self, closure: Callable[[], Any]) -> None:
        """Go on with another loss of the same variables: what was best is not comparable."""
        self.best, self._closure, self._optimizer = None, closure, self._new_optimizer()

    @property
    def covariance(self) -> Array | None:
        """The inverse curvature that L-BFGS has ended with, of the numbers that are logarithms or not."""
        found = None if self._learnt is None else inverse_curvature(self._learnt)
        return self._coordinates.covariance(found)

    def expect_curvature(self, covariance: Array | None) -> None:
        """Take the inverse curvature for this, instead of learning it anew; for the first guess if None."""
        coordinates = self._first_coordinates
        if covariance is not None:
            try:
                coordinates = Coordinates(self._logarithmic, np.linalg.cholesky(covariance))
            except np.linalg.LinAlgError:
                return
        if coordinates is not self._coordinates:
            self._coordinates = coordinates
            self._optimizer = self._new_optimizer()

    def _new_optimizer(self) -> Optimizer:
        model = self.model
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

    def arrive(self, x: Array) -> Arrival | None:
        """Move there; what is known without another E-step."""
        self.move_to(x)
        return None if self._optimizer.loss is None else self._optimizer.loss.arrive()

    def run(self, bar: Any) -> FitEnd:
        """To the end of one start, begun again on a slope as long as that helps."""
        left, before = self.max_iterations, np.inf
        for _ in range(1 + MAX_RESTARTS):
            run, count = self.minimise(left, bar)
            left -= count
            is_steep = np.max(np.abs(run.gradient)) > self.tolerance
            if self.stopped or not is_steep or left < 1 or not self._helps(run, before):
                break
            before = run.loss
        return run

    @staticmethod
    def _helps(run: FitEnd, before: float) -> bool:
        """Whether a loss has fallen by more than its own noise."""
        return run.loss < before - LEAST_GAIN * max(1.0, abs(run.loss))

    def minimise(self, max_iterations: int, bar: Any, **options: Any) -> tuple[FitEnd, int]:
        """One call of SciPy's, with options of it."""
        iteration = 0
        at_first: FitEnd | None = None

        def begin(z: Array, loss: float) -> None:
            nonlocal at_first
            assert self._optimizer.gradient is not None
            gradient = self._coordinates.gradient_outward(z, self._optimizer.gradient)
            at_first = FitEnd(self._coordinates.outward(z), loss, gradient, False, "")
            self._tell(loss, 0)

        def callback(intermediate_result: Any) -> None:
            nonlocal iteration
            at = intermediate_result
            iteration += 1
            bar.set_postfix(loss=f"{at.fun:.4f}", refresh=False)
            bar.update(1)
            if interrupts.is_pending():
                x = self._coordinates.outward(at.x)
                self.keep(FitEnd(x, float(at.fun), np.array([np.nan]), False, ""))
            interrupts.check()
            self._tell(float(at.fun), iteration)
            if self.log_scale and self._is_flat():
                raise StopIteration

        start = self._optimizer.start(self.variables)
        self._optimizer.begin = begin
        try:
            result = self._optimizer.minimize(
                self._closure,
                self.variables,
                callback=callback,
                bounds=self._coordinates.bounds(start),
                options={"maxiter": max_iterations, **options},
                compile=not isinstance(self.model, SparseCVIModel),
                allow_unused_variables=True,
            )
        except StopIteration:  # the first evaluation was enough for the callback
            assert at_first is not None
            self.num_evaluations += 1
            self.keep(at_first)
            return at_first, 0
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
        self._learnt = result.hess_inv
        run = FitEnd(x, float(result.fun), gradient, result.status == 1, message)
        self.keep(run)
        return run, int(result.nit)

    def _tell(self, loss: float, iteration: int) -> None:
        if self.callback is None:
            return
        try:
            self.callback(FitStep(loss, iteration, self.num_rows))
        except StopIteration:
            self.stopped = True
            raise

    def _is_flat(self) -> bool:
        """Whether no logarithm of a parameter promises more than the tolerance: nats for a factor e."""
        gradient = self._optimizer.gradient
        assert gradient is not None
        return bool(np.max(np.abs(self._coordinates.in_logarithms(gradient))) <= self.tolerance)

    def keep(self, run: FitEnd) -> None:
        """If it is the best so far."""
        if np.isfinite(run.loss) and (self.best is None or run.loss <= self.best.loss):
            self.best = run


def loss_closure(model: Any, data: Any) -> Callable[[], Any]:
    """The training loss of given data; no graph of a sparse model's, which is computed on the host."""
    if isinstance(model, SparseCVIModel):
        return model.training_loss_closure(data, compile=False)
    closure: Callable[[], Any] = model.training_loss_closure(data)
    return closure


def _num_rows(model: Any, data: Any) -> int:
    """Of data inside or outside of a model; of a stream, what the model was told."""
    if isinstance(data, DataRows):
        return data.num_rows
    if isinstance(data, tf.data.Dataset):
        return int(getattr(model, "num_data", None) or len(next(iter(data))[0]))
    return len((model.data if data is None else data)[0])
