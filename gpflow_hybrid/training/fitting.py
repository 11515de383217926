"""One call that trains a model, from one or several starts, and says whether the result is a fit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from gpflow.models import GPModel
from gpflow.models.training_mixins import ExternalDataTrainingLossMixin

from ..display import progress_bar
from ..errors import InvalidDataError, InvalidPosteriorError, NonFiniteError
from ..likelihoods.refinement import refined
from ..models.sparse_validation import check_data_for
from ..validation import check_count, check_positive, is_integer, prepare_data
from . import interrupts
from .fit_results import FitResult
from .fit_verdicts import Assessment, Ending, assessment_of, verdict_on
from .minimisation import Minimisation
from .starts import another_start, start_from_data

Array = npt.NDArray[np.float64]

FAILURES = (NonFiniteError, InvalidPosteriorError, tf.errors.InvalidArgumentError)
"""What may go wrong at a start that others need not share."""


def fit(
    model: GPModel,
    *,
    data: Any = None,
    start: Literal["data"] | None = None,
    num_starts: int = 1,
    max_iterations: int = 1000,
    tolerance: float = 1e-2,
    seed: int = 0,
    progress: bool | None = None,
) -> FitResult:
    """Train a model by L-BFGS, and say whether the result is a fit.

    GPflow's ``Scipy().minimize(model.training_loss, model.trainable_variables)``, begun again where
    its line search gave up on a slope: from ℓ = 1 it may try ℓ = 1e-80, come back to where it was and
    report success. The model is left at the best end of all starts. A fit is where the gradient
    vanishes, the E-step and its quadrature are to be trusted, and the objective is higher than that of
    independent data,

        gain = L(λ*, θ) − L(λ*, θ)|_{K∘I}  ≥  1 nat.

    Where the likelihood's own Gauss–Hermite rule turns out too coarse, it is given more points and the fit
    goes on.

    :param model: any model of this package, or one of GPflow's with a training loss (``GPR``, ``VGP``,
        ``SVGP``).
    :param data: ``(X, Y)`` or a ``tf.data.Dataset``, all of it, for a model that has none of its own.
    :param start: ``"data"`` begins with lengthscales of the size of the distances between inputs, and
        variances of one; by default with the model's present parameters.
    :param num_starts: the first as above; others with positive parameters of kernel and likelihood
        multiplied by ``exp N(0, 1)``.
    :param max_iterations: of L-BFGS, for every start.
    :param tolerance: on the largest derivative in an unconstrained parameter, in nats.
    :param seed: of the other starts.
    :param progress: a progress bar; by default on a terminal and in a notebook.
    """
    _check(model, start, num_starts, max_iterations, tolerance, seed)
    began = time.perf_counter()
    closure, arrays = loss_of_all(model, data)
    if start == "data":
        start_from_data(model, *arrays())
    if not model.trainable_variables:
        return _without_training(model, data, closure, arrays, began)
    task = Minimisation(model, closure, max_iterations, tolerance)
    losses: list[float] = []
    failures: list[Exception] = []
    rng = np.random.default_rng(seed)
    interrupted = False
    total = num_starts * max_iterations
    with interrupts.deferred(), progress_bar(progress, total=total, unit="it") as bar:
        first = task.position()
        for index in range(num_starts):
            if index > 0:
                task.move_to(first)
                another_start(model, rng)
            try:
                losses.append(task.run(bar).loss)
            except FAILURES as error:
                failures.append(error)
                losses.append(float("nan"))
            except KeyboardInterrupt:
                interrupted = True
                break
    if task.best is None:
        if failures:
            raise failures[0]
        raise KeyboardInterrupt
    task.move_to(task.best.x)
    found = assessment_of(model, data, task.best.loss, arrays)
    remark = ""
    with interrupts.deferred(), progress_bar(progress, total=max_iterations, unit="it") as bar:
        while found.quadrature_error > found.tolerated_error and not interrupted:
            points = refined(model.likelihood)
            if points is None:
                break
            remark = f" The likelihood's quadrature now has {points} points."
            closure, _ = loss_of_all(model, data)  # another graph, with the finer rule
            task.begin_again(closure)
            try:
                task.run(bar)
            except KeyboardInterrupt:
                interrupted = True
            task.move_to(task.best.x)
            found = assessment_of(model, data, task.best.loss, arrays)
    ending = Ending(
        task.best.loss,
        float(np.max(np.abs(task.best.gradient))),
        tolerance,
        task.best.reached_maximum,
        interrupted,
        task.best.message,
    )
    return _result(ending, found, task, tuple(losses), began, remark)


def _check(model: Any, start: Any, num_starts: Any, max_iterations: Any, *others: Any) -> None:
    tolerance, seed = others
    if not isinstance(model, GPModel) or not hasattr(model, "training_loss"):
        raise InvalidDataError(
            f"model must be a GPflow model with a training loss; found {type(model).__name__}."
        )
    if start not in (None, "data"):
        raise InvalidDataError(
            f'start must be "data" or None, the model\'s present parameters; found {start!r}.'
        )
    check_count(num_starts, "num_starts")
    check_count(max_iterations, "max_iterations")
    check_positive(tolerance, "tolerance")
    if not is_integer(seed) or seed < 0:
        raise InvalidDataError(f"seed must be a non-negative integer; found {seed!r}.")


def loss_of_all(
    model: Any, data: Any
) -> tuple[Callable[[], Any], Callable[[], tuple[Array, Array]]]:
    """The loss of all data, and the data as arrays when they are asked for."""
    needs_data = isinstance(model, ExternalDataTrainingLossMixin)
    check_data_for(model, data)
    if hasattr(data, "__next__"):
        raise InvalidDataError(
            f"data must be all rows, (X, Y) or a Dataset, for fit; found {type(data).__name__}, an "
            "iterator over batches. Train on batches with an optimiser such as Adam."
        )
    if not needs_data:
        return model.training_loss, lambda: _as_arrays(model.data)
    if not isinstance(data, tf.data.Dataset):
        data = prepare_data(data, model.likelihood)
    closure = model.training_loss_closure(data)
    return closure, lambda: _rows_in_memory(data)


def _rows_in_memory(data: Any) -> tuple[Array, Array]:
    if not isinstance(data, tf.data.Dataset):
        return _as_arrays(data)
    if len(data.element_spec[0].shape) == 2:
        data = data.unbatch()
    X, Y = zip(*data.take(10_000).as_numpy_iterator(), strict=True)  # enough to start from
    return np.stack(X), np.stack(Y)


def _as_arrays(data: Any) -> tuple[Array, Array]:
    X, Y = (np.asarray(tf.convert_to_tensor(d)) for d in data)
    return X, Y


def _without_training(
    model: Any, data: Any, closure: Callable[[], Any], arrays: Callable[[], Any], began: float
) -> FitResult:
    loss = float(closure())
    found = assessment_of(model, data, loss, arrays)
    return FitResult(
        status="inferred",
        message="The model has no trainable hyperparameters: only the E-step was run.",
        loss=loss,
        gradient_norm=0.0,
        gain=found.gain,
        residual=found.residual,
        quadrature_error=found.quadrature_error,
        hyperparameters={},
        num_iterations=0,
        num_evaluations=1,
        seconds=time.perf_counter() - began,
        losses=(loss,),
    )


def _result(
    ending: Ending,
    found: Assessment,
    task: Minimisation,
    losses: tuple[float, ...],
    began: float,
    remark: str,
) -> FitResult:
    status, message = verdict_on(ending, found)
    return FitResult(
        status=status,
        message=message + remark,
        loss=ending.loss,
        gradient_norm=ending.gradient_norm,
        gain=found.gain,
        residual=found.residual,
        quadrature_error=found.quadrature_error,
        hyperparameters={path: p.numpy() for path, p in task.trained.items()},
        num_iterations=task.num_iterations,
        num_evaluations=task.num_evaluations,
        seconds=time.perf_counter() - began,
        losses=losses,
    )
