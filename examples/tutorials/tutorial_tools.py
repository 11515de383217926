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
Model = gpflow.models.VGP | gh.CVIModel


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
    """Models trained on the same data, and how far VGP's ELBO is from CVIModel's at VGP's optimum."""

    rows: tuple[Row, ...]
    vgp_elbo: float
    cvi_elbo: float
    """Of a CVIModel that has VGP's hyperparameters."""

    @property
    def gap(self) -> float:
        """CVIModel's ELBO less VGP's at the same hyperparameters: what is left for VGP to gain."""
        return self.cvi_elbo - self.vgp_elbo

    def __str__(self) -> str:
        lines = [f"{'':<20}{'seconds':>9}{'ELBO':>12}{'test log density':>18}"]
        lines += [
            f"{row.name:<20}{row.seconds:>9.1f}{row.elbo:>12.4f}{row.test_log_density:>18.4f}"
            for row in self.rows
        ]
        return "\n".join(
            [
                *lines,
                f"At VGP's hyperparameters the ELBO is {self.vgp_elbo:.5f} in VGP and "
                f"{self.cvi_elbo:.5f} in CVIModel.",
            ]
        )

    def __getitem__(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)


def compare(
    models: Mapping[str, Model],
    test_data: tuple[np.ndarray, np.ndarray],
    train: Callable[[Model], object] = fit,
) -> Comparison:
    """Train each of ``models``, by name, and put time, ELBO and mean test log density side by side.

    One of them is a VGP. Seconds are those of training, TensorFlow's tracing included.
    """
    rows = []
    for name, model in models.items():
        start = time.perf_counter()
        train(model)
        seconds = time.perf_counter() - start
        density = float(np.mean(model.predict_log_density(test_data)))
        rows.append(Row(name, seconds, float(model.elbo()), density))
    vgp = next(model for model in models.values() if isinstance(model, gpflow.models.VGP))
    cvi = next(model for model in models.values() if isinstance(model, gh.CVIModel))
    return Comparison(tuple(rows), float(vgp.elbo()), elbo_at_hyperparameters_of(vgp, cvi))


def elbo_at_hyperparameters_of(vgp: gpflow.models.VGP, cvi: gh.CVIModel) -> float:
    """The ELBO of a copy of ``cvi`` with the hyperparameters of ``vgp``."""
    twin = copy.deepcopy(cvi)
    shared = gpflow.utilities.parameter_dict(twin).keys()
    values = gpflow.utilities.read_values(vgp)
    gpflow.utilities.multiple_assign(twin, {k: v for k, v in values.items() if k in shared})
    twin.infer()
    return float(twin.elbo())
