"""Starts of a fit on the workers of a Dask cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from gpflow.models.training_mixins import ExternalDataTrainingLossMixin

from ..display import progress_bar
from ..errors import InvalidDataError
from ..models import SparseCVIModel
from .first_rows import FirstRows, run_from_parts
from .minimisation import FAILURES, Array, Ends, FitEnd, Minimisation, loss_closure


class Problem(NamedTuple):
    """A model and what it is trained on."""

    model: Any
    data: Any
    first_rows: FirstRows
    seed: int


class _Fit(NamedTuple):
    """What all starts share."""

    problem: Problem
    max_iterations: int
    tolerance: float
    log_scale: bool


def run_starts_on(
    client: Any,
    task: Minimisation,
    starts: Sequence[Array],
    problem: Problem,
    progress: bool | None,
) -> Ends:
    """Each by a worker; the task keeps the best of them, as if they had been run here."""
    from ..distributed.jobs import run_jobs

    if isinstance(problem.data, tf.data.Dataset):
        raise InvalidDataError(
            "data must be arrays for a fit on a cluster, which are sent to its workers; found a Dataset. "
            "Pass (X, Y), or gh.distributed.shards of Dask arrays without client."
        )
    common = _Fit(problem, task.max_iterations, task.tolerance, task.log_scale)
    found = run_jobs(client, "fit-start", _run_start, common, starts, progress=progress)
    losses: list[float] = []
    failures: list[Exception] = []
    for end in found:
        if isinstance(end, Exception):
            failures.append(end)
            losses.append(float("nan"))
            continue
        runs, num_iterations, num_evaluations, part_evaluations = end
        task.num_iterations += num_iterations
        task.num_evaluations += num_evaluations
        task.part_evaluations += part_evaluations
        for run in runs:
            task.keep(run)
        losses.append(runs[-1].loss)
    return Ends(losses, failures, False)


def _run_start(common: _Fit, start: Array) -> Exception | tuple[list[FitEnd], int, int, float]:
    model, data, first_rows, seed = common.problem
    rows = model.all_rows(data) if isinstance(model, SparseCVIModel) else data
    needs_data = isinstance(model, ExternalDataTrainingLossMixin)
    closure = loss_closure(model, rows) if needs_data else model.training_loss
    limits = (common.max_iterations, common.tolerance)
    task = Minimisation(model, closure, *limits, rows, common.log_scale)
    task.move_to(start)
    try:
        with progress_bar(False) as bar:
            last = run_from_parts(task, rows, first_rows, seed, bar)
    except FAILURES as error:
        return error
    best = [] if task.best is None else [task.best]
    return [*best, last], task.num_iterations, task.num_evaluations, task.part_evaluations
