"""The paper's data: a fold of a benchmark, standardised with its training rows' statistics."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import gpflow
import numpy as np

import gpflow_hybrid as gh


class Problem(NamedTuple):
    """Training and test part of one fold."""

    X_train: np.ndarray
    Y_train: np.ndarray
    X_test: np.ndarray
    Y_test: np.ndarray


@functools.cache
def load_problem(dataset: str, fold: int, max_data: int | None) -> Problem:
    """One of five folds; for a quick look, at most ``max_data`` training and test rows each."""
    X, Y = gh.datasets.load(dataset)
    train, test = list(gh.datasets.folds(len(X)))[fold]
    train, test = (_thinned(rows, max_data) for rows in (train, test))
    X_train, X_test = gh.datasets.standardise(X[train], X[test])
    return Problem(X_train, Y[train], X_test, Y[test])


def _thinned(rows: np.ndarray, max_data: int | None) -> np.ndarray:
    """Evenly spread: the benchmarks' rows are sorted by class."""
    if max_data is None or len(rows) <= max_data:
        return rows
    return rows[np.linspace(0, len(rows) - 1, max_data).astype(int)]


def make_model(problem: Problem, model: type[gh.SiteModel], **options: Any) -> gh.SiteModel:
    """Matérn-5/2 with ℓ = σ = 1, where the paper starts, and a probit likelihood."""
    return model(
        (problem.X_train, problem.Y_train),
        gpflow.kernels.Matern52(),
        gh.likelihoods.ProbitBernoulli(),
        **options,
    )
