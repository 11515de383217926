"""Parts of the rows, on which a fit of a sparse model begins where there are many of them.

A loss is a dozen sums over the rows, at the start as at the end, and the way from a start is long. A part
of the rows shows it at the price of a part: where hyperparameters are good, how the objective curves there,
and, times the rows that each stands for, what q(u) is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import gpflow
import numpy as np

from ..errors import InvalidDataError
from ..models import SparseCVIModel
from ..rows import ArrayRows, DataRows
from ..validation import check_count
from .minimisation import FAILURES, FitEnd, Minimisation, loss_closure

FirstRows = int | Literal["auto"] | None

ROWS_PER_POINT = 2
"""Rows of the first part for every inducing point: with fewer a loss costs what does not depend on them,"""
FEWEST_ROWS = 400
"""but so many at least: fewer say little of several hyperparameters;"""
GROWTH = 8
"""how many times as many the next has,"""
LARGEST = 0.25
"""and the part of all rows that none has more than: more is not worth it."""
MOST_ROWS = 100_000
"""Of a part that is brought here from a stream or other machines, also where more are asked for."""
MAX_ITERATIONS = 20
"""Of L-BFGS on a part, which ends"""
RELATIVE_GAIN = 1e-4
"""where one gains no more than this part of the loss: the optimum of a part is not that of all."""


def check_first_rows(first_rows: Any, model: Any) -> None:
    """Refuse what is no number of rows, or one for a model that needs all of its rows."""
    if first_rows is None or (isinstance(first_rows, str) and first_rows == "auto"):
        return
    if isinstance(first_rows, str):
        raise InvalidDataError(
            f'first_rows must be "auto", None or a number of rows; found {first_rows!r}.'
        )
    check_count(first_rows, "first_rows")
    if not isinstance(model, SparseCVIModel):
        raise InvalidDataError(
            f"first_rows is for SparseCVIModel; found {first_rows} for {type(model).__name__}, which "
            "is trained on all of its rows. Leave it out."
        )
    num_inducing = int(model.inducing_variable.num_inducing)
    if first_rows < num_inducing:
        raise InvalidDataError(
            f"first_rows must be at least the number of inducing points, {num_inducing}; found "
            f"{first_rows}. Leave it out for {ROWS_PER_POINT} rows a point."
        )


def sizes_of_parts(num_rows: int, num_inducing: int, first_rows: FirstRows) -> list[int]:
    """Rows of each part, growing; none where all rows are not many more."""
    if first_rows is None:
        return []
    fewest = max(ROWS_PER_POINT * num_inducing, FEWEST_ROWS)
    size = fewest if first_rows == "auto" else int(first_rows)
    found = []
    while size <= LARGEST * num_rows:
        found.append(size)
        size *= GROWTH
    if not found and first_rows != "auto" and size < num_rows:
        found.append(size)  # as asked for
    return found


def parts_of(model: Any, rows: Any, first_rows: FirstRows, seed: int) -> list[DataRows]:
    """Random rows, those of a part in the next too; of a sparse model. None where no part moves anything,
    nor by default where the model has been trained."""
    if not isinstance(model, SparseCVIModel) or not _has_more_than_inducing_points(model):
        return []
    if first_rows == "auto" and model.is_inferred_for_present():
        return []
    is_here = isinstance(rows, ArrayRows)
    if not (is_here or first_rows is None or first_rows == "auto"):
        first_rows = min(first_rows, MOST_ROWS)
    num_inducing = int(model.inducing_variable.num_inducing)
    sizes = sizes_of_parts(rows.num_rows, num_inducing, first_rows)
    if not is_here:
        sizes = [size for size in sizes if size <= MOST_ROWS]
    if not sizes:
        return []
    X, Y = rows.random_rows(sizes[-1], np.random.default_rng(seed))
    return [ArrayRows(X[:size], Y[:size]) for size in sizes]


def run_from_parts(
    task: Minimisation, rows: Any, first_rows: FirstRows, seed: int, bar: Any
) -> FitEnd:
    """One start: on parts of the rows, then on all; on all alone, from where the model was, if that fails.

    Where a part is left by any other exception, the model is what it was before.
    """
    model = task.model
    task.expect_curvature(None)
    parts = parts_of(model, rows, first_rows, seed)
    if not parts:
        return task.run(bar)
    start, put_sites_back = task.position(), model.memory_of_sites()
    try:
        approach(task, parts, bar)
        return task.run(bar)
    except FAILURES:  # what all rows need not share, or another start
        task.move_to(start)
        put_sites_back()
        model.sites.release()
        task.expect_curvature(None)
    except BaseException:
        if not model.is_inferred_from(rows):  # no loss of all rows was taken
            task.move_to(start)
            put_sites_back()
        raise
    return task.run(bar)


def approach(task: Minimisation, parts: Sequence[DataRows], bar: Any) -> None:
    """From where the model is to near the optimum, on one part after the other; the task goes on from
    there, with what was learnt of the curvature, if its variables are the same.

    Inducing points stay: trained on few rows they would go to these. No q(u) counts as inferred before the
    first loss of a part, or of all: where that has no value it is an error, and not what a line search
    backs away from.
    """
    model, covariance = task.model, None
    most = min(MAX_ITERATIONS, task.max_iterations)
    model.sites.release()
    sizes = [*(part.num_rows for part in parts[1:]), task.num_rows]
    for part, following in zip(parts, sizes, strict=True):
        with _as_all_rows(model):
            given = (most, task.tolerance, part, task.log_scale, task.callback)
            stage = Minimisation(model, loss_closure(model, part), *given)
            if covariance is not None:
                stage.expect_curvature(covariance / part.num_rows)
            try:
                stage.minimise(most, bar, ftol=RELATIVE_GAIN, maxcor=most)
            finally:
                task.part_evaluations += stage.num_evaluations * part.num_rows / task.num_rows
            if stage.best is not None:
                stage.move_to(stage.best.x)
        model.repeat_sites(part, following / part.num_rows)
        learnt = stage.covariance
        if learnt is not None:
            covariance = learnt * part.num_rows
    if covariance is not None and len(covariance) == len(task.position()):
        task.expect_curvature(covariance / task.num_rows)


def _has_more_than_inducing_points(model: SparseCVIModel) -> bool:
    """To train."""
    inducing = {id(v) for v in model.inducing_variable.trainable_variables}
    return any(id(v) not in inducing for v in model.trainable_variables)


@contextlib.contextmanager
def _as_all_rows(model: SparseCVIModel) -> Iterator[None]:
    """As if there were no more rows than those it is given; inducing points stay."""
    num_data, Z = model.num_data, model.inducing_variable
    trained = [p for p in Z.parameters if p.trainable]
    model.num_data = None
    for parameter in trained:
        gpflow.set_trainable(parameter, False)
    try:
        yield
    finally:
        model.num_data = num_data
        for parameter in trained:
            gpflow.set_trainable(parameter, True)
