"""What the tutorials share: the table at the end of each, and how to run them in short."""

from __future__ import annotations

import copy
import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import gpflow
import numpy as np

import gpflow_hybrid as gh

SHORT = "GPFLOW_HYBRID_SHORT_TUTORIALS"

Setting = TypeVar("Setting")
Data = tuple[np.ndarray, np.ndarray]
Model = gpflow.models.VGP | gpflow.models.SVGP | gh.CVIModel | gh.SparseCVIModel


def shortened(full: Setting, short: Setting) -> Setting:
    """``full``, or ``short`` where the environment variable ``GPFLOW_HYBRID_SHORT_TUTORIALS`` is set."""
    return short if os.environ.get(SHORT) else full


def fit(model: Model) -> None:
    """All of training, the same for both classes."""
    gpflow.optimizers.Scipy().minimize(
        model.training_loss, model.trainable_variables, options={"maxiter": 3000}
    )


@dataclasses.dataclass(frozen=True)
class Row:
    """One trained model."""

    name: str
    seconds: float
    elbo: float
    test_log_density: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Models trained on the same data, and how far the ELBO of GPflow's class, VGP or SVGP, is from ours at
    its optimum."""

    rows: tuple[Row, ...]
    vgp_elbo: float
    cvi_elbo: float
    """Of our class with VGP's hyperparameters."""
    classes: tuple[str, str] = ("VGP", "CVIModel")

    @property
    def gap(self) -> float:
        """Our ELBO less GPflow's at the same hyperparameters: what is left for that to gain."""
        return self.cvi_elbo - self.vgp_elbo

    def __str__(self) -> str:
        theirs, ours = self.classes
        lines = [f"{'':<20}{'seconds':>9}{'ELBO':>12}{'test log density':>18}"]
        lines += [
            f"{row.name:<20}{row.seconds:>9.1f}{row.elbo:>12.4f}{row.test_log_density:>18.4f}"
            for row in self.rows
        ]
        return "\n".join(
            [
                *lines,
                f"At {theirs}'s hyperparameters the ELBO is {self.vgp_elbo:.5f} in {theirs} and "
                f"{self.cvi_elbo:.5f} in {ours}.",
            ]
        )

    def __getitem__(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)


def compare(
    models: Mapping[str, Model],
    test_data: Data,
    train: Callable[[Model], object] = fit,
    data: Data | None = None,
) -> Comparison:
    """Train each of ``models``, by name, and put time, ELBO and mean test log density side by side.

    One of them is a VGP, or an SVGP. Seconds are those of training, TensorFlow's tracing included.

    :param data: of models that do not hold them.
    """
    held = () if data is None else (data,)
    rows = []
    for name, model in models.items():
        start = time.perf_counter()
        train(model)
        seconds = time.perf_counter() - start
        density = float(np.mean(model.predict_log_density(test_data)))
        rows.append(Row(name, seconds, float(model.elbo(*held)), density))
    of_gpflow, of_ours = (gpflow.models.VGP, gpflow.models.SVGP), (gh.CVIModel, gh.SparseCVIModel)
    theirs = next(model for model in models.values() if isinstance(model, of_gpflow))
    ours = next(model for model in models.values() if isinstance(model, of_ours))
    return Comparison(
        tuple(rows),
        float(theirs.elbo(*held)),
        elbo_at_hyperparameters_of(theirs, ours, *held),
        (type(theirs).__name__, type(ours).__name__),
    )


def elbo_at_hyperparameters_of(theirs: Model, ours: Model, *data: Data) -> float:
    """The ELBO of a copy of ``ours`` with the hyperparameters of ``theirs``."""
    twin = copy.deepcopy(ours)
    shared = gpflow.utilities.parameter_dict(twin).keys()
    values = gpflow.utilities.read_values(theirs)
    gpflow.utilities.multiple_assign(twin, {k: v for k, v in values.items() if k in shared})
    twin.infer(*data)
    return float(twin.elbo(*data))
