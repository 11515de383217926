"""TensorBoard, with GPflow's own monitor tasks."""

from __future__ import annotations

import importlib.util
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from gpflow.monitor import (
    ImageToTensorBoard,
    ModelToTensorBoard,
    Monitor,
    MonitorTaskGroup,
    ScalarToTensorBoard,
    ToTensorBoard,
)

from ..errors import InvalidDataError
from .history import IterationRecord
from .subjects import Subject

SCALARS: dict[str, Callable[..., float]] = {
    "objectives/elbo": lambda record: record.elbo,
    "objectives/ep_like": lambda record: record.ep_like,
    "objectives/gap": lambda record: record.ep_like - record.elbo,
    "objectives/trained": lambda record: record.objective,
    "e_step/steps": lambda record: float(record.e_steps),
    "e_step/residual": lambda record: record.e_residual,
    "e_step/min_cavity_precision": lambda record: record.min_cavity_precision,
    "m_step/gradient_norm": lambda record: record.gradient_norm,
    "m_step/gain": lambda record: record.m_gain,
    "predictions/loo_log_predictive_density": lambda record: record.loo_log_predictive_density,
}


class Monitoring:
    """Writes every iteration of a run; nothing, if no directory was given.

    :param user_monitor: called after that.
    """

    def __init__(
        self,
        subject: Subject,
        log_dir: str | Path | None,
        image_period: int,
        user_monitor: Monitor | None = None,
    ) -> None:
        self.log_dir: Path | None = None
        self.resumed_dir: Path | None = None
        """Where a run that is resumed has written before; remembered if it does not write now."""
        self._subject = subject
        self._image_period = image_period
        self._user_monitor = user_monitor
        self._first_step = 0
        self._monitor: Monitor | None = None
        if log_dir is None:
            return
        if not hasattr(tf.summary, "scalar"):
            raise InvalidDataError(
                "log_dir needs TensorBoard, which is not installed: pip install "
                "'gpflow_hybrid[tensorboard]', or leave log_dir out."
            )
        # Absolute: a run may be resumed from elsewhere.
        self.log_dir = free_directory(Path(log_dir).absolute())

    def resume(self, directory: str | None, record: IterationRecord) -> None:
        """Go on in the directory of a run whose checkpoint has this as its last record."""
        if directory is not None:
            self.resumed_dir = Path(directory)
            self._first_step = record.iteration + 1
            self.log_dir = None if self.log_dir is None else self.resumed_dir
        if self.log_dir is not None and not self.log_dir.exists():
            self.write(record)  # killed after the checkpoint and before this

    def report(self, record: IterationRecord) -> None:
        """Write the iteration, and tell the user's own monitor."""
        self.write(record)
        if self._user_monitor is not None:
            self._user_monitor(record.iteration)

    def write(self, record: IterationRecord) -> None:
        """All that is known of one iteration."""
        if self.log_dir is None:
            return
        self._monitor = self._monitor or self._tasks(str(self.log_dir))
        self._monitor(record.iteration, record=record)

    def _tasks(self, directory: str) -> Monitor:
        """The tasks, with a new file: GPflow would go on with that of an earlier run, deleted or not."""
        ToTensorBoard.writers.pop(directory, None)
        scalars = [ScalarToTensorBoard(directory, read, name) for name, read in SCALARS.items()]
        keywords = ["kernel", "likelihood", "mean_function"]
        parameters = ModelToTensorBoard(
            directory, self._subject.model, keywords_to_monitor=keywords, max_size=-1
        )
        groups = [MonitorTaskGroup([parameters, *scalars])]
        # Iterations after the checkpoint of a resumed run have been written, and will be again: at a
        # second START, readers drop what they have from its step on.
        start = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
        event = tf.compat.v1.Event(wall_time=time.time(), step=self._first_step, session_log=start)
        tf.raw_ops.ImportEvent(
            writer=ToTensorBoard.writers[directory]._resource, event=event.SerializeToString()
        )
        num_inputs = self._subject.drawn()[0].shape[1]
        if num_inputs <= 2 and importlib.util.find_spec("matplotlib") is not None:

            def draw(figure: Any, axes: Any, **_: Any) -> None:
                (draw_line if num_inputs == 1 else draw_plane)(self._subject, axes)

            size = {"figsize": (6.0, 4.5), "dpi": 120}
            image = ImageToTensorBoard(directory, draw, "fit", fig_kw=size)
            groups.append(MonitorTaskGroup(image, period=self._image_period))
        return Monitor(*groups)


def free_directory(wanted: Path) -> Path:
    """The directory itself if it has no event files, else the first of ``-2``, ``-3``, ... without."""
    numbered = (wanted.with_name(f"{wanted.name}-{i}") for i in itertools.count(2))
    candidates = itertools.chain([wanted], numbered)
    return next(path for path in candidates if not any(path.glob("events.out.tfevents.*")))


def draw_line(subject: Subject, axes: Any) -> None:
    """Predictive mean of y with two standard deviations, and the data; one input."""
    model, (X, Y) = subject.model, subject.drawn()
    margin = 0.1 * (X.max() - X.min() + 1e-12)
    grid = np.linspace(X.min() - margin, X.max() + margin, 200)[:, None]
    mean, variance = (np.asarray(a).T for a in model.predict_y(grid.astype(X.dtype)))
    for column, (centre, spread) in enumerate(zip(mean, variance, strict=True)):
        width = 2.0 * np.sqrt(np.maximum(spread, 0.0))
        color = f"C{column}"
        axes.plot(grid[:, 0], centre, color=color)
        axes.fill_between(grid[:, 0], centre - width, centre + width, color=color, alpha=0.2)
    axes.plot(X[:, 0], Y[:, 0], "k.", markersize=4)
    axes.set_xlabel("x")
    axes.set_ylabel("y")


def draw_plane(subject: Subject, axes: Any) -> None:
    """Contours of the predictive mean of y, and the data coloured by y; two inputs."""
    model, (X, Y) = subject.model, subject.drawn()
    margins = 0.1 * (np.ptp(X, axis=0) + 1e-12)
    low, high = X.min(axis=0) - margins, X.max(axis=0) + margins
    first, second = np.meshgrid(np.linspace(low[0], high[0], 40), np.linspace(low[1], high[1], 40))
    grid = np.stack([first.ravel(), second.ravel()], axis=1).astype(X.dtype)
    mean = np.asarray(model.predict_y(grid)[0])[:, 0].reshape(first.shape)
    axes.contourf(first, second, mean, levels=15, alpha=0.6)
    axes.scatter(X[:, 0], X[:, 1], c=Y[:, 0], s=8, edgecolors="k", linewidths=0.3)
    axes.set_xlabel("x₁")
    axes.set_ylabel("x₂")
