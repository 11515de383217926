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
from .minimisation import FAILURES, Minimisation, loss_closure

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
"""Of a part that is brought here from a stream or other machines."""
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
    """Random rows, those of a part in the next too; of a sparse model."""
    if not isinstance(model, SparseCVIModel):
        return []
    num_inducing = int(model.inducing_variable.num_inducing)
    sizes = sizes_of_parts(rows.num_rows, num_inducing, first_rows)
    if not isinstance(rows, ArrayRows):
        sizes = [size for size in sizes if size <= MOST_ROWS]
    if not sizes:
        return []
    X, Y = rows.random_rows(sizes[-1], np.random.default_rng(seed))
    return [ArrayRows(X[:size], Y[:size]) for size in sizes]


def approach(task: Minimisation, parts: Sequence[DataRows], bar: Any) -> None:
    """From where the model is to near the optimum, on one part after the other; the task goes on from
    there, with what was learnt of the curvature.

    Inducing points stay: trained on few rows they would go to these.
    """
    model, covariance = task.model, None
    sizes = [*(part.num_rows for part in parts[1:]), task.num_rows] if parts else []
    for part, following in zip(parts, sizes, strict=True):
        start = task.position()
        with _as_all_rows(model):
            given = (MAX_ITERATIONS, task.tolerance, part, task.log_scale, task.callback)
            stage = Minimisation(model, loss_closure(model, part), *given)
            if covariance is not None:
                stage.expect_curvature(covariance / part.num_rows)
            try:
                stage.minimise(MAX_ITERATIONS, bar, ftol=RELATIVE_GAIN)
            except FAILURES:  # what all rows need not share
                task.move_to(start)
                return
            finally:
                task.part_evaluations += stage.num_evaluations * part.num_rows / task.num_rows
                if stage.best is not None:
                    stage.move_to(stage.best.x)
        model.repeat_sites(following / part.num_rows)
        if stage.covariance is not None:
            covariance = stage.covariance * part.num_rows
    if covariance is not None and len(covariance) == len(task.position()):
        task.expect_curvature(covariance / task.num_rows)


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
