"""Small models, and comparisons to the last bit, for the tests of training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import gpflow
import numpy as np
from gpflow.utilities import parameter_dict

import gpflow_hybrid as gh
from gpflow_hybrid.training import (
    AnyOf,
    GradientSteps,
    History,
    NaturalGradientSteps,
    StoppingRule,
    VEMTrainer,
)
from gpflow_hybrid.training.stopping import Verdict

PROBIT = gh.likelihoods.ProbitBernoulli()  # one instance: its compiled E-step is reused
NEVER = AnyOf(())


def binary(seed: int = 0, num: int = 15, num_inputs: int = 1) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.uniform(0.0, 3.0, size=(num, num_inputs))
    noise = 0.4 * rng.normal(size=(num, 1))
    return X, (np.sin(2.0 * X[:, :1]) + noise > 0.0).astype(float)


def build(seed: int = 0, num: int = 15, num_inputs: int = 1, **kwargs: Any) -> gh.CVIModel:
    return gh.CVIModel(binary(seed, num, num_inputs), gpflow.kernels.Matern32(), PROBIT, **kwargs)


def cheap_trainer(model: gh.CVIModel | None = None, lr: Any = 0.1) -> VEMTrainer:
    """Without state in the optimiser, quick to trace and to run."""
    return VEMTrainer(
        build() if model is None else model,
        "elbo",
        e_step=NaturalGradientSteps(5, 0.5),
        m_step=GradientSteps(2, "sgd", lr),
        stopping=NEVER,
    )


def restart(trainer: VEMTrainer, stopping: StoppingRule = NEVER) -> VEMTrainer:
    """The same compiled trainer on the model as it was built: ℓ = σ = 1, λ = 0."""
    trainer.stopping = stopping
    for parameter in (trainer.model.kernel.lengthscales, trainer.model.kernel.variance):
        parameter.assign(np.ones_like(parameter.numpy()))
    trainer.model.sites.reset(len(trainer.model.sites.lambda_1.numpy()))
    return trainer


def values(model: gh.SiteModel) -> dict[str, np.ndarray]:
    """Every parameter, λ included."""
    return {path: np.array(p.numpy()) for path, p in parameter_dict(model).items()}


def hyperparameters(model: gh.SiteModel) -> dict[str, np.ndarray]:
    return {path: v for path, v in values(model).items() if not path.startswith(".sites")}


def sites(model: gh.SiteModel) -> dict[str, np.ndarray]:
    return {path: v for path, v in values(model).items() if path.startswith(".sites")}


def assert_identical(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Equal to the last bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
        assert np.asarray(found[name]).dtype == np.asarray(value).dtype


def columns(history: History) -> dict[str, np.ndarray]:
    """Every column that does not depend on the clock."""
    names = [f.name for f in dataclasses.fields(history[0])]
    names = [n for n in names if n not in ("seconds", "hyperparameters", "measurements")]
    names += [*history[-1].hyperparameters, *history[-1].measurements]
    return {name: history[name] for name in names}


class Calling(gpflow.monitor.MonitorTask):
    """Calls back with the iteration."""

    def __init__(self, callback: Callable[[int], Any]) -> None:
        super().__init__()
        self.callback = callback

    def run(self, **kwargs: Any) -> None:
        self.callback(int(self.current_step))


def calling(callback: Callable[[int], Any]) -> gpflow.monitor.Monitor:
    """A user's monitor."""
    return gpflow.monitor.Monitor(gpflow.monitor.MonitorTaskGroup(Calling(callback)))


def raising(error: type[BaseException], at: int) -> gpflow.monitor.Monitor:
    """A monitor that raises after this iteration, before it is saved."""

    def callback(iteration: int) -> None:
        if iteration == at:
            raise error(f"at {at}")

    return calling(callback)


@dataclasses.dataclass(frozen=True)
class Measuring(StoppingRule):
    """Never stops; keeps the iteration at which ``measure`` is largest."""

    measure: Callable[[gh.SiteModel], float]

    def check(self, history: History) -> Verdict | None:
        return None

    @property
    def measurements(self) -> dict[str, Callable[[gh.SiteModel], float]]:
        return {"measured": self.measure}

    @property
    def best_by(self) -> str:
        return "measured"
