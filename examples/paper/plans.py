"""What to compute: plans for the surfaces and the table of a data set, and the jobs they consist of."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from .jobs import Job
from .store import write_atomically

DATASETS = ("sonar", "ionosphere", "diabetes", "usps")

SURFACE_METHODS = ("vi", "ep", "mcmc")

WAYS = ("paper", "vem", "collapsed", "ep", "laplace")
"""Of training: the paper's details to the letter, VEM to convergence, the collapsed objective with L-BFGS;
EP and Laplace for comparison."""

AXIS = (-1.0, 5.0)
"""The paper's range of log ℓ and log σ."""

QUICK_DATA = 40
"""Training and test rows of a quick run."""


@dataclasses.dataclass(frozen=True)
class SurfacePlan:
    """Surfaces of one data set."""

    kind: ClassVar[str] = "surfaces"

    dataset: str
    methods: tuple[str, ...] = SURFACE_METHODS
    num_grid: int = 21
    fold: int = 0
    seed: int = 0
    num_chains: int = 32
    num_temperatures: int = 200
    max_data: int | None = None
    effort: float = 6.0
    """Of MCMC: a row may take so many times the sweeps of one with these temperatures everywhere. Most rows
    take one."""

    @property
    def log_values(self) -> list[float]:
        """The values of log ℓ, and of log σ."""
        low, high = AXIS
        step = (high - low) / (self.num_grid - 1)
        return [round(low + i * step, 10) for i in range(self.num_grid)]

    @property
    def description(self) -> str:
        """The settings in words."""
        size = "" if self.max_data is None else f", {self.max_data} rows only"
        return (
            f"{self.num_grid}×{self.num_grid}, fold {self.fold}; MCMC: {self.num_chains} chains, "
            f"{self.num_temperatures} temperatures, more where weights are uneven, seed {self.seed}{size}"
        )

    def same_settings_as(self, other: SurfacePlan) -> bool:
        """Whether results of both belong together: only the methods differ."""
        return dataclasses.replace(self, methods=other.methods) == other

    def after(self, earlier: SurfacePlan) -> SurfacePlan:
        """What a report looks for after both."""
        return self

    def jobs(self) -> list[Job]:
        """One for each lengthscale and method."""
        return [self.row(method, x) for method in self.methods for x in self.log_values]

    def row(self, method: str, log_lengthscale: float) -> Job:
        """One row."""
        settings: dict[str, Any] = {
            "dataset": self.dataset,
            "fold": self.fold,
            "max_data": self.max_data,
            "method": method,
            "log_lengthscale": log_lengthscale,
            "log_sigmas": self.log_values,
        }
        if method == "mcmc":
            settings |= {
                "seed": self.seed,
                "num_chains": self.num_chains,
                "num_temperatures": self.num_temperatures,
                "effort": self.effort,
            }
        return Job("row", settings)


@dataclasses.dataclass(frozen=True)
class TablePlan:
    """The table's rows of one data set."""

    kind: ClassVar[str] = "table"

    dataset: str
    ways: tuple[str, ...] = WAYS
    folds: tuple[int, ...] = (0, 1, 2, 3, 4)
    max_iterations: int = 1000
    paper_iterations: int = 1000
    max_data: int | None = None

    @property
    def methods(self) -> list[str]:
        """Names of fits: VI and Ours in each way of the paper's."""
        return [m for way in self.ways for m in methods_of(way)]

    @property
    def description(self) -> str:
        """The settings in words."""
        size = "" if self.max_data is None else f", {self.max_data} rows only"
        folds = " ".join(map(str, self.folds))
        return (
            f"folds {folds}, at most {self.max_iterations} iterations, {self.paper_iterations} with the "
            f"paper's training details{size}"
        )

    def same_settings_as(self, other: TablePlan) -> bool:
        """Whether results of both belong together: only the ways of training and their limits differ."""
        limit = other.paper_iterations
        return dataclasses.replace(self, ways=other.ways, paper_iterations=limit) == other

    def after(self, earlier: TablePlan) -> TablePlan:
        """What a report looks for after both: the paper's way to the limit that it was last run with."""
        if "paper" in self.ways:
            return self
        return dataclasses.replace(self, paper_iterations=earlier.paper_iterations)

    def jobs(self) -> list[Job]:
        """One for each method and fold."""
        return [self.fit(method, fold) for method in self.methods for fold in self.folds]

    def fit(self, method: str, fold: int) -> Job:
        """One fit."""
        return Job(
            "fit",
            {
                "dataset": self.dataset,
                "fold": fold,
                "max_data": self.max_data,
                "method": method,
                "max_iterations": self.paper_iterations
                if method.startswith("paper")
                else self.max_iterations,
            },
        )


Plan = SurfacePlan | TablePlan


def methods_of(way: str) -> tuple[str, ...]:
    """The fits that a way of training consists of."""
    return (way,) if way in ("ep", "laplace") else (f"{way}-vi", f"{way}-ours")


def save_plan(directory: Path, plan: Plan, run: dict[str, Any] | None = None) -> None:
    """Remember for the report what was asked for and how it went, with earlier runs of other methods.

    :param run: None where it has not ended.
    """
    runs: list[dict[str, Any]] = []
    for earlier, earlier_runs in load_plans(directory, type(plan)):
        if earlier.same_settings_as(plan):
            plan, runs = plan.after(earlier), earlier_runs
    content = {
        "plan": dataclasses.asdict(plan),
        "runs": [*runs, *([] if run is None else [run])],
    }
    path = directory / f"{plan.kind}-{plan.dataset}.json"
    write_atomically(path, json.dumps(content, indent=1).encode())


def load_plans(directory: Path, kind: type[Plan]) -> list[tuple[Any, list[dict[str, Any]]]]:
    """Plans of one kind with their runs, in the paper's order of data sets."""
    found = []
    for dataset in DATASETS:
        path = directory / f"{kind.kind}-{dataset}.json"
        try:
            content = json.loads(path.read_text())
            values = {k: _as_tuple(v) for k, v in content["plan"].items()}
            found.append((kind(**values), content["runs"]))
        except FileNotFoundError:
            continue
        except (ValueError, KeyError, TypeError, AttributeError):
            print(f"{path.name} is damaged or of another version: ignored.", file=sys.stderr)
    return found


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def title_of(dataset: str) -> str:
    """The data set's name as it is written in a heading."""
    return {"usps": "USPS"}.get(dataset, dataset.capitalize())
