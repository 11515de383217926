"""Surfaces put together from their rows."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from .plans import SURFACE_METHODS, SurfacePlan
from .store import ResultStore

METHODS = {"mcmc": "MCMC", "ep": "EP", "elbo": "VI", "ep_like": "Ours"}
"""Titles of the estimates of the log marginal likelihood, in the paper's order."""

INFERENCE = {"mcmc": "mcmc", "ep": "ep", "elbo": "vi", "ep_like": "vi"}
"""The method of inference behind each: VI and Ours share theirs."""


TRUSTED = 0.3
"""Part of the chains that an effective sample size must have for a standard error to be believed."""


class Optimum(NamedTuple):
    """Where a surface is largest, and the log predictive density there."""

    log_lengthscale: float
    log_sigma: float
    value: float
    log_density: float


@dataclasses.dataclass(frozen=True)
class Surfaces:
    """Arrays ``[log ℓ, log σ]``; a method is absent unless all of its rows are there."""

    plan: SurfacePlan
    num_data: int
    log_marginal: dict[str, np.ndarray]
    """Per datum, by estimate."""
    log_density: dict[str, np.ndarray]
    """Mean test log predictive density, by method of inference."""
    standard_error: np.ndarray | None
    """Of MCMC's estimate, per datum."""
    trusted: np.ndarray | None
    """Where MCMC's effective sample size is at least ``TRUSTED`` of its chains."""
    not_converged: dict[str, int]
    """Points whose inference did not, by method of inference."""
    incomplete: list[str]
    """Methods of which some rows are there, not all."""

    def optimum(self, estimate: str) -> Optimum:
        """The largest value of an estimate on the grid; of MCMC's, among those that are trusted."""
        values = self.log_marginal[estimate]
        if estimate == "mcmc" and self.trusted is not None and self.trusted.any():
            values = np.where(self.trusted, values, np.nan)
        i, j = np.unravel_index(np.nanargmax(values), values.shape)
        axis = self.plan.log_values
        density = self.log_density[INFERENCE[estimate]]
        return Optimum(axis[i], axis[j], float(values[i, j]), float(density[i, j]))

    def error(self, estimate: str) -> np.ndarray | None:
        """An estimate less MCMC's, per datum; None without MCMC."""
        if "mcmc" not in self.log_marginal:
            return None
        return np.asarray(self.log_marginal[estimate] - self.log_marginal["mcmc"])

    def mean_error(self, estimate: str) -> float:
        """The mean |error| over the points at which MCMC is trusted; NaN if there is none."""
        error = self.error(estimate)
        if error is None or self.trusted is None or not self.trusted.any():
            return float("nan")
        return float(np.nanmean(np.abs(error[self.trusted])))

    @property
    def estimates(self) -> list[str]:
        """Those that are there, in the paper's order."""
        return [name for name in METHODS if name in self.log_marginal]


def load_surfaces(plan: SurfacePlan, store: ResultStore) -> Surfaces | None:
    """Every method that is complete, whatever run it is from; None if none is."""
    log_marginal, log_density, not_converged = {}, {}, {}
    error = trusted = None
    num_data, incomplete = 0, []
    for method in SURFACE_METHODS:
        loaded = [store.load(plan.row(method, x)) for x in plan.log_values]
        rows = [found["result"] for found in loaded if found is not None]
        if len(rows) < len(loaded):
            incomplete += [method] if rows else []
            continue
        num_data = rows[0]["num_data"]
        stacked = {
            name: np.array([row[name] for row in rows], float)
            for name, value in rows[0].items()
            if isinstance(value, list)
        }
        for name in METHODS:
            if name in stacked:
                log_marginal[name] = stacked[name] / num_data
        log_density[method] = stacked["test_log_density"]
        if method == "mcmc":
            error = stacked["standard_error"] / num_data
            trusted = stacked["effective_sample_size"] >= TRUSTED * plan.num_chains
        else:
            not_converged[method] = int((stacked["converged"] == 0.0).sum())
    if not log_marginal:
        return None
    return Surfaces(
        plan, num_data, log_marginal, log_density, error, trusted, not_converged, incomplete
    )
