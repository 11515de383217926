"""TensorBoard, with GPflow's own monitor tasks."""

from __future__ import annotations

import importlib.util
import itertools
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from gpflow.monitor import (
    ImageToTensorBoard,
    ModelToTensorBoard,
    Monitor,
    MonitorTask,
    MonitorTaskGroup,
    ScalarToTensorBoard,
    ToTensorBoard,
)

from ..errors import InvalidDataError
from ..models import SiteModel
from .history import IterationRecord

SCALARS: dict[str, Callable[[IterationRecord], float]] = {
    "objectives/elbo": lambda r: r.elbo,
    "objectives/ep_like": lambda r: r.ep_like,
    "objectives/gap": lambda r: r.ep_like - r.elbo,
    "objectives/trained": lambda r: r.objective,
    "e_step/steps": lambda r: float(r.e_steps),
    "e_step/residual": lambda r: r.e_residual,
    "e_step/min_cavity_precision": lambda r: r.min_cavity_precision,
    "m_step/gradient_norm": lambda r: r.gradient_norm,
    "m_step/gain": lambda r: r.m_gain,
    "predictions/leave_one_out": lambda r: r.leave_one_out,
}


class Monitoring:
    """Writes every iteration of a run; nothing, if no directory was given."""

    def __init__(
        self,
        model: SiteModel,
        log_dir: str | Path | None,
        image_period: int,
        resumed_dir: str | None = None,
        resumed_at: int = 0,
    ) -> None:
        self.log_dir: Path | None = None
        self.resumed_dir = None if resumed_dir is None else Path(resumed_dir)
        """Where a run that is resumed has written before; remembered if it does not write now."""
        self._model = model
        self._image_period = image_period
        self._resumed_at = resumed_at
        self._monitor: Monitor | None = None
        self._record: IterationRecord | None = None
        if log_dir is None:
            return
        if not hasattr(tf.summary, "scalar"):
            raise InvalidDataError(
                "log_dir needs TensorBoard, which is not installed: pip install "
                "'gpflow_hybrid[tensorboard]', or leave log_dir out."
            )
        # Absolute: a run may be resumed from elsewhere.
        self.log_dir = self.resumed_dir or free_directory(Path(log_dir).absolute())

    def _begin(self) -> Monitor:
        """The tasks, with a new file: GPflow would go on with that of an earlier run, deleted or not."""
        directory = str(self.log_dir)
        ToTensorBoard.writers.pop(directory, None)
        groups = [MonitorTaskGroup(self._scalar_tasks(self._model))]
        # Iterations after the checkpoint of a resumed run have been written, and will be again: at a
        # second START, readers drop what they have from its step on.
        step = 0 if self.resumed_dir is None else self._resumed_at + 1
        start = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
        event = tf.compat.v1.Event(wall_time=time.time(), step=step, session_log=start)
        tf.raw_ops.ImportEvent(
            writer=ToTensorBoard.writers[directory]._resource, event=event.SerializeToString()
        )
        num_inputs = int(self._model.data[0].shape[1])
        if num_inputs <= 2 and importlib.util.find_spec("matplotlib") is not None:
            draw = draw_line if num_inputs == 1 else draw_plane
            image = ImageToTensorBoard(
                directory,
                lambda figure, axes: draw(self._model, axes),
                "fit",
                fig_kw={"figsize": (6.0, 4.5), "dpi": 120},
            )
            groups.append(MonitorTaskGroup(image, period=self._image_period))
        return Monitor(*groups)

    def write(self, record: IterationRecord) -> None:
        """All that is known of one iteration."""
        if self.log_dir is None:
            return
        if self._monitor is None:
            self._monitor = self._begin()
        self._record = record
        self._monitor(record.iteration)

    def _scalar_tasks(self, model: SiteModel) -> Collection[MonitorTask]:
        directory = str(self.log_dir)

        def read(value: Callable[[IterationRecord], float]) -> Callable[[], float]:
            def current() -> float:
                assert self._record is not None
                return value(self._record)

            return current

        keywords = ["kernel", "likelihood", "mean_function"]
        parameters = ModelToTensorBoard(directory, model, keywords_to_monitor=keywords, max_size=-1)
        scalars = [
            ScalarToTensorBoard(directory, read(value), name) for name, value in SCALARS.items()
        ]
        return [parameters, *scalars]


def free_directory(wanted: Path) -> Path:
    """The directory itself if it has no event files, else the first of ``-2``, ``-3``, ... without."""
    for i in itertools.count(1):
        candidate = wanted if i == 1 else wanted.with_name(f"{wanted.name}-{i}")
        if not any(candidate.glob("events.out.tfevents.*")):
            return candidate
    raise AssertionError("unreachable")


def _values(data: Any) -> Any:
    return np.asarray(tf.convert_to_tensor(data))


def draw_line(model: SiteModel, axes: Any) -> None:
    """Predictive mean of y with two standard deviations, and the data; one input."""
    X, Y = (_values(d) for d in model.data)
    margin = 0.1 * (X.max() - X.min() + 1e-12)
    grid = np.linspace(X.min() - margin, X.max() + margin, 200)[:, None]
    mean, variance = (np.asarray(a) for a in model.predict_y(grid.astype(X.dtype)))
    for column in range(mean.shape[1]):
        width = 2.0 * np.sqrt(np.maximum(variance[:, column], 0.0))
        axes.plot(grid[:, 0], mean[:, column], color=f"C{column}")
        axes.fill_between(
            grid[:, 0],
            mean[:, column] - width,
            mean[:, column] + width,
            color=f"C{column}",
            alpha=0.2,
        )
    axes.plot(X[:, 0], Y[:, 0], "k.", markersize=4)
    axes.set_xlabel("x")
    axes.set_ylabel("y")


def draw_plane(model: SiteModel, axes: Any) -> None:
    """Contours of the predictive mean of y, and the data coloured by y; two inputs."""
    X, Y = (_values(d) for d in model.data)
    margins = 0.1 * (np.ptp(X, axis=0) + 1e-12)
    low, high = X.min(axis=0) - margins, X.max(axis=0) + margins
    first, second = np.meshgrid(np.linspace(low[0], high[0], 40), np.linspace(low[1], high[1], 40))
    grid = np.stack([first.ravel(), second.ravel()], axis=1).astype(X.dtype)
    mean = np.asarray(model.predict_y(grid)[0])[:, 0].reshape(first.shape)
    axes.contourf(first, second, mean, levels=15, alpha=0.6)
    axes.scatter(X[:, 0], X[:, 1], c=Y[:, 0], s=8, edgecolors="k", linewidths=0.3)
    axes.set_xlabel("x₁")
    axes.set_ylabel("x₂")
