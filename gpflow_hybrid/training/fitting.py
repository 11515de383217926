"""One call that trains a model, from one or several starts, and says whether the result is a fit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from gpflow.models import GPModel
from gpflow.models.training_mixins import ExternalDataTrainingLossMixin

from .. import interrupts
from ..array_parameters import value_of
from ..display import progress_bar
from ..errors import InvalidDataError
from ..likelihoods.refinement import refined
from ..models import SparseCVIModel
from ..models.sparse_validation import check_data_for
from ..rows import ArrayRows, DataRows
from ..validation import check_count, check_positive, is_integer, prepare_data
from .first_rows import FirstRows, check_first_rows, run_from_parts
from .fit_results import FitResult
from .fit_verdicts import Assessment, Ending, assessment_of, verdict_on
from .minimisation import FAILURES, Callback, Ends, Minimisation, loss_closure
from .parallel import Problem, run_starts_on
from .starts import another_start, start_from_data

Array = npt.NDArray[np.float64]

ENOUGH_ROWS = 10_000
"""Of data that need not fit in memory, to start from."""


def fit(
    model: GPModel,
    *,
    data: Any = None,
    start: Literal["data"] | None = None,
    num_starts: int = 1,
    max_iterations: int = 1000,
    tolerance: float = 1e-2,
    log_scale: bool = False,
    seed: int = 0,
    first_rows: FirstRows = "auto",
    progress: bool | None = None,
    callback: Callback | None = None,
    client: Any = None,
) -> FitResult:
    """Train a model by L-BFGS, and say whether the result is a fit.

    GPflow's ``Scipy().minimize(model.training_loss, model.trainable_variables)``, begun again where
    its line search gave up on a slope: from ℓ = 1 it may try ℓ = 1e-80, come back to where it was and
    report success. The model is left at the best end of all starts. A fit is where the gradient
    vanishes, the E-step and its quadrature are to be trusted, and the objective is higher than that of
    independent data,

        gain = L(λ*, θ) − L(λ*, θ)|_{K∘I}  ≥  1 nat,

    and, where the likelihood is a noise around f, higher by as much than that of a constant f of any size
    with any such noise.

    A sparse model with many rows is first trained on a part of them, inducing points held; L-BFGS goes on
    with all from there, and where these stay held with the part's curvature too: fewer passes over the
    data. The optimum is one of all rows; where there are several it may be another than without parts.

    Where the likelihood's own Gauss–Hermite rule turns out too coarse, it is given more points and the fit
    goes on.

    :param model: any model of this package, or one of GPflow's with a training loss (``GPR``, ``VGP``,
        ``SVGP``).
    :param data: ``(X, Y)`` or a ``tf.data.Dataset``, all of it, for a model that has none of its own.
    :param start: ``"data"`` begins with lengthscales of the size of the distances between inputs, and
        variances of one, or of that of Y where the likelihood is a noise around f; by default with the
        model's present parameters.
    :param num_starts: the first as above; others with positive parameters of kernel and likelihood
        multiplied by ``exp N(0, 1)``.
    :param max_iterations: of L-BFGS, for every start; also on a part, where it takes at most 20.
    :param tolerance: on the largest derivative in an unconstrained parameter, in nats.
    :param log_scale: whether L-BFGS moves positive parameters by their logarithms, from a guess of the
        curvature in them, and stops where no derivative in them is above the tolerance: fewer
        iterations, to fewer digits.
    :param seed: of the other starts, and of the rows of a part.
    :param first_rows: of :class:`~gpflow_hybrid.SparseCVIModel`: rows of the part, drawn at random, and
        of greater ones after it, each of eight times as many, as long as that is at most a fourth of all.
        ``"auto"`` takes two for every inducing point, at least 400, and none where q(u) is inferred for the
        present hyperparameters, as after a fit, which goes on from there; None begins with all rows. Of a
        stream or of shards no part has more than 100,000 rows, also where more are asked for.
    :param progress: a progress bar; by default on a terminal and in a notebook.
    :param callback: is given a :class:`~gpflow_hybrid.training.FitStep` after the first evaluation of a
        loss and after every iteration, with the model at these hyperparameters; during a part with the
        part's q(u), ``num_data`` None and Z not trainable. Where it raises ``StopIteration``, training on
        those rows ends; on all rows the status is ``"interrupted"``. Not with ``client``. After another
        exception, or Ctrl-C, during a part the model is what it was before the parts.
    :param client: a ``distributed.Client``, whose workers take one start each; needs the extra ``dask``.
    """
    _check(model, start, num_starts, max_iterations, tolerance, seed)
    check_first_rows(first_rows, model)
    if client is not None and isinstance(data, DataRows):
        raise InvalidDataError(
            "client must be left out where data are on a cluster already; found both. Every sum over the "
            "rows is taken by its workers."
        )
    if client is not None and callback is not None:
        raise InvalidDataError(
            "callback must be left out with client, whose workers train; found both. Leave one out."
        )
    began = time.perf_counter()
    check_all(model, data)
    rows = model.all_rows(data) if isinstance(model, SparseCVIModel) else data
    closure, arrays = loss_of_all(model, rows)
    if start == "data":
        start_from_data(model, *arrays())
    task = Minimisation(model, closure, max_iterations, tolerance, rows, log_scale, callback)
    if not task.variables:
        return _without_training(model, rows, closure, arrays, began)
    starts = _all_starts(model, task, num_starts, np.random.default_rng(seed))
    if client is None:
        given = (rows, first_rows, seed)
        ends = _run_starts(task, starts, given, progress, num_starts * max_iterations)
    else:
        ends = run_starts_on(client, task, starts, Problem(model, data, first_rows, seed), progress)
    losses, failures, interrupted = ends
    if task.best is None:
        if failures:
            raise failures[0]
        raise KeyboardInterrupt
    arrival = task.arrive(task.best.x)
    found = assessment_of(model, rows, task.best.loss, arrays, arrival)
    remark = ""
    with interrupts.deferred(), progress_bar(progress, total=max_iterations, unit="it") as bar:
        while found.quadrature_error > found.tolerated_error and not interrupted:
            points = refined(model.likelihood)
            if points is None:
                break
            remark = f" The likelihood's quadrature now has {points} points."
            closure, _ = loss_of_all(model, rows)  # another graph, with the finer rule
            task.begin_again(closure)
            try:
                task.run(bar)
            except KeyboardInterrupt:
                interrupted = True
            interrupted = interrupted or task.stopped
            arrival = task.arrive(task.best.x)
            found = assessment_of(model, rows, task.best.loss, arrays, arrival)
    ending = Ending(
        task.best.loss,
        float(np.max(np.abs(task.best.gradient))),
        tolerance,
        task.best.reached_maximum,
        interrupted,
        task.best.message,
    )
    return _result(ending, found, task, tuple(losses), began, remark)


def _all_starts(
    model: GPModel, task: Minimisation, number: int, rng: np.random.Generator
) -> list[Array]:
    """The model's position and others around it; the model stays."""
    first = task.position()
    found = [first]
    for _ in range(number - 1):
        another_start(model, rng)
        found.append(task.position())
        task.move_to(first)
    return found


def _run_starts(
    task: Minimisation,
    starts: Sequence[Array],
    given: tuple[Any, FirstRows, int],
    progress: bool | None,
    total: int,
) -> Ends:
    """One after the other."""
    losses: list[float] = []
    failures: list[Exception] = []
    with interrupts.deferred(), progress_bar(progress, total=total, unit="it") as bar:
        for start in starts:
            task.move_to(start)
            try:
                losses.append(run_from_parts(task, *given, bar).loss)
            except FAILURES as error:
                failures.append(error)
                losses.append(float("nan"))
            except KeyboardInterrupt:
                return Ends(losses, failures, True)
            if task.stopped:
                return Ends(losses, failures, True)
    return Ends(losses, failures, False)


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
    check_all(model, data)
    if not isinstance(model, ExternalDataTrainingLossMixin):
        return model.training_loss, lambda: _as_arrays(model.data)
    if not isinstance(data, (tf.data.Dataset, DataRows)):
        data = prepare_data(data, cast(Any, model).likelihood)
    return loss_closure(model, data), lambda: _rows_in_memory(data)


def check_all(model: Any, data: Any) -> None:
    """Refuse data that are missing, superfluous, or batches."""
    check_data_for(model, data)
    if hasattr(data, "__next__"):
        raise InvalidDataError(
            f"data must be all rows, (X, Y) or a Dataset, for fit; found {type(data).__name__}, an "
            "iterator over batches. Train on batches with an optimiser such as Adam."
        )


def _rows_in_memory(data: Any) -> tuple[Array, Array]:
    if isinstance(data, ArrayRows):
        return data.X, data.Y
    if isinstance(data, DataRows):
        return data.first_rows(ENOUGH_ROWS)
    if not isinstance(data, tf.data.Dataset):
        return _as_arrays(data)
    if len(data.element_spec[0].shape) == 2:
        data = data.unbatch()
    X, Y = zip(*data.take(ENOUGH_ROWS).as_numpy_iterator(), strict=True)
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
        hyperparameters={path: value_of(p) for path, p in task.trained.items()},
        num_iterations=task.num_iterations,
        num_evaluations=task.num_evaluations,
        seconds=time.perf_counter() - began,
        losses=losses,
        part_evaluations=task.part_evaluations,
    )
