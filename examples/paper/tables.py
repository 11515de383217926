"""The table: means, deviations and paired tests over folds, beside what was published."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import ttest_rel

from .plans import WAYS, TablePlan, methods_of
from .published import SIGNIFICANT, TABLE_1
from .store import ResultStore

SIGNIFICANCE = 0.05

NUM_FOLDS = 5
"""Of the paper's cross-validation."""

WAY_TITLES = {
    "published": "the paper's numbers",
    "paper": "its training details",
    "vem": "VEM to convergence",
    "collapsed": "collapsed, L-BFGS",
    "ep": "EP, L-BFGS",
    "laplace": "Laplace, L-BFGS",
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One quantity of one method over the folds."""

    mean: float
    deviation: float
    is_better: bool = False
    """Better than its counterpart, by a paired t-test at 0.05."""
    digits: int = 3

    def __str__(self) -> str:
        text = f"{self.mean:.{self.digits}f} ± {self.deviation:.{self.digits}f}"
        return f"**{text}**" if self.is_better else text


@dataclasses.dataclass(frozen=True)
class Line:
    """One data set and way of training."""

    dataset: str
    way: str
    accuracy: tuple[Cell, ...]
    """VI and Ours; or the only one."""
    log_density: tuple[Cell, ...]
    p_values: tuple[float, float] | None
    """Of the paired t-tests: accuracy, log density."""
    num_folds: int
    endings: str
    """How training ended, with counts."""
    seconds: float
    """Of one fit, on average."""


def lines(plan: TablePlan, store: ResultStore) -> list[Line]:
    """What is there, whatever run it is from; the published line first."""
    found = [_published(plan.dataset)]
    for way in WAYS:
        fits = {m: _folds(plan, m, store) for m in methods_of(way)}
        if all(len(f) == len(plan.folds) for f in fits.values()):
            found.append(_line(plan, way, list(fits.values())))
    return found


def incomplete(plan: TablePlan, store: ResultStore) -> list[str]:
    """Fits of which some folds are there, not all."""
    methods = (m for way in WAYS for m in methods_of(way))
    return [m for m in methods if 0 < len(_folds(plan, m, store)) < len(plan.folds)]


def _folds(plan: TablePlan, method: str, store: ResultStore) -> list[dict[str, Any]]:
    loaded = (store.load(plan.fit(method, fold)) for fold in plan.folds)
    return [found["result"] for found in loaded if found is not None]


def _line(plan: TablePlan, way: str, fits: Sequence[list[dict[str, Any]]]) -> Line:
    accuracy, p_accuracy = cells(fits, "accuracy")
    density, p_density = cells(fits, "test_log_density")
    every = [fit for method in fits for fit in method]
    limit = plan.paper_iterations if way == "paper" else plan.max_iterations
    return Line(
        _title(plan),
        way,
        accuracy,
        density,
        None if p_accuracy is None or p_density is None else (p_accuracy, p_density),
        len(fits[0]),
        ending_counts(every, limit),
        float(np.mean([fit["training_seconds"] for fit in every])),
    )


def ending_counts(fits: Sequence[dict[str, Any]], limit: int) -> str:
    """How fits ended, with counts; ``limit`` is that of their iterations."""
    words = {"max_iterations": f"at the limit of {limit}"}
    counts = collections.Counter(fit["status"] for fit in fits)
    return ", ".join(f"{count} {words.get(status, status)}" for status, count in counts.items())


def _title(plan: TablePlan) -> str:
    """The data set, and what is there less than in the paper."""
    parts = [plan.dataset]
    if plan.max_data is not None:
        parts.append(f"{plan.max_data} rows")
    if len(plan.folds) < NUM_FOLDS:
        parts.append(f"{len(plan.folds)} of {NUM_FOLDS} folds")
    return ", ".join(parts)


def cells(
    fits: Sequence[list[dict[str, Any]]], quantity: str, digits: int = 3
) -> tuple[tuple[Cell, ...], float | None]:
    """A quantity of one or two methods over the folds, and the p-value of two on several folds."""
    values = [np.array([fit[quantity] for fit in method]) for method in fits]
    found = [Cell(float(v.mean()), float(v.std()), digits=digits) for v in values]
    if len(values) == 1 or len(values[0]) == 1:  # nothing to be tested
        return tuple(found), None
    p = paired_p_value(*values)
    if p < SIGNIFICANCE:
        better = int(found[1].mean > found[0].mean)
        found[better] = dataclasses.replace(found[better], is_better=True)
    return tuple(found), p


def paired_p_value(a: np.ndarray, b: np.ndarray) -> float:
    """Two-sided, of a paired t-test; 1 where nothing differs or there is one fold only."""
    if len(a) < 2 or np.array_equal(a, b):
        return 1.0
    p = float(ttest_rel(a, b).pvalue)
    return 1.0 if math.isnan(p) else p


def _published(dataset: str) -> Line:
    vi, ours = TABLE_1[dataset]["vi"], TABLE_1[dataset]["ours"]
    accuracy, density = SIGNIFICANT[dataset]
    return Line(
        dataset,
        "published",
        (Cell(*vi[:2]), Cell(*ours[:2], accuracy)),
        (Cell(*vi[2:]), Cell(*ours[2:], density)),
        None,
        5,
        "",
        math.nan,
    )


HEADER = (
    "data set",
    "training",
    "accuracy: VI, EP, Laplace",
    "accuracy: Ours",
    "log density: VI, EP, Laplace",
    "log density: Ours",
    "p accuracy",
    "p density",
    "training ended",
    "seconds per fit",
)


def as_rows(found: Sequence[Line]) -> list[tuple[str, ...]]:
    """Texts for a table."""
    rows = []
    for line in found:
        accuracy, density = (
            [str(c) for c in cells] if len(cells) == 2 else [str(cells[0]), ""]
            for cells in (line.accuracy, line.log_density)
        )
        p = ("", "") if line.p_values is None else tuple(rounded_p(p) for p in line.p_values)
        seconds = "" if math.isnan(line.seconds) else f"{line.seconds:.1f}"
        rows.append(
            (
                line.dataset,
                WAY_TITLES[line.way],
                *accuracy,
                *density,
                *p,
                line.endings,
                seconds,
            )
        )
    return rows


def rounded_p(p: float) -> str:
    """A p-value in three digits."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
