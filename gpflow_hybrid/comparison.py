"""Does the hybrid objective help on these data? One call, an honest answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from gpflow.base import RegressionData

from .datasets import folds
from .display import ShownAsText, values_in_short
from .errors import InvalidDataError
from .evidence.results import standard_error
from .models import CVIModel, SparseCVIModel
from .models.sparse_validation import check_data_for
from .objective_fits import Comparison, ObjectiveFit, run
from .objectives import Objective, power_of
from .rows import DataRows
from .training.fit_results import CONVERGED
from .validation import prepare_data

NOISE_THRESHOLD = 2.0
"""Differences of fewer standard errors than this are called noise."""


@dataclasses.dataclass(frozen=True, repr=False)
class ObjectiveComparison(ShownAsText):
    """What :func:`compare_objectives` found; prints as a table with a verdict."""

    fits: tuple[ObjectiveFit, ...]
    """One for each objective."""
    num_folds: int
    """Of the cross-validation."""

    def __getitem__(self, objective: Objective) -> ObjectiveFit:
        """The fit with this objective."""
        for fit in self.fits:
            if fit.objective == objective:
                return fit
        compared = ", ".join(repr(fit.objective) for fit in self.fits)
        raise KeyError(f"{objective!r} was not compared; compared were {compared}.")

    @property
    def verdict(self) -> str:
        """Which objective predicts best, or that the difference is within the noise."""
        best, *others = sorted(self.fits, key=lambda fit: -fit.log_density)
        lines = []
        for other in others:
            difference = best.log_densities - other.log_densities
            mean, error = np.mean(difference), standard_error(difference)
            text = f"{_name(best)} over {_name(other)}: {mean:+.4f} ± {error:.4f} nats per held-out datum"
            if mean < NOISE_THRESHOLD * error or mean == 0.0:
                lines.append(f"{text}: within the noise, these data do not tell them apart.")
            else:
                lines.append(f"{text}: {_name(best)} predicts better on these data.")
        lines += [_integration_verdict(fit) for fit in self.fits if fit.integrated]
        return "\n".join([*lines, *filter(None, map(_not_converged, self.fits))])

    def __str__(self) -> str:
        columns = []
        for fit in self.fits:
            column = {"": _name(fit)}
            column |= {path: values_in_short(value) for path, value in fit.hyperparameters.items()}
            density = f"{fit.log_density:.4f} ± {fit.standard_error:.4f}"
            column |= {
                "ELBO": f"{fit.elbo:.4f}",
                "EP-like value": f"{fit.ep_like:.4f}",
                f"{self.num_folds}-fold log predictive density": density,
            }
            if fit.integrated is not None:
                each = fit.integrated_log_densities
                assert each is not None
                column["with integrated hyperparameters"] = (
                    f"{np.mean(each):.4f} ± {standard_error(each):.4f}"
                )
                column["log evidence of the model class"] = f"{fit.integrated.log_evidence:.4f}"
            if isinstance(fit.model, CVIModel):
                column["leave-one-out (optimistic)"] = f"{fit.loo_log_predictive_density:.4f}"
            column |= {
                "evaluations of the loss": str(fit.num_evaluations),
                "seconds": f"{fit.seconds:.1f}",
            }
            columns.append(column)
        left = max(map(len, columns[0]))
        width = max(len(cell) for column in columns for cell in column.values())
        table = [
            "  ".join([f"{name:<{left}}", *(f"{column[name]:>{width}}" for column in columns)])
            for name in columns[0]
        ]
        return "\n".join([*table, "", self.verdict])


def compare_objectives(
    model: CVIModel | SparseCVIModel,
    objectives: Sequence[Objective] = ("elbo", "ep_like"),
    *,
    data: RegressionData | None = None,
    num_folds: int = 5,
    seed: int = 42,
    max_iterations: int = 1000,
    integrate: bool = False,
    client: Any = None,
) -> ObjectiveComparison:
    """Fit with each objective and report, side by side, what came out and how it predicts.

    Every fit starts from the hyperparameters of ``model``, which is left untouched. Predictive
    densities are those of k-fold cross-validation, with their standard error over data; the
    leave-one-out densities from the cavities stand beside them as the optimistic diagnostic that
    they are. Differences are judged pairwise, datum by datum; fits that did not converge are named.

    :param model: data, kernel, likelihood, mean function and starting point; of a sparse model the
        inducing points too, but no data.
    :param objectives: any of ``"elbo"``, ``"ep_like"`` and powers in [0, 1].
    :param data: ``(X, Y)`` for a sparse model, which has none of its own.
    :param num_folds: folds of the cross-validation.
    :param seed: of the shuffle behind the folds.
    :param max_iterations: of L-BFGS, for every fit.
    :param integrate: also integrate the hyperparameters out (:func:`integrate_hyperparameters`), in every
        fold and for all the data, and say whether that predicts better than the optimum.
    :param client: a ``distributed.Client``, whose workers take one fit each; needs the extra ``dask``.
    """
    for objective in objectives:
        power_of(objective)
    if len(set(objectives)) != len(objectives) or not objectives:
        raise InvalidDataError(f"objectives must be distinct and not empty; found {objectives!r}.")
    X, Y = _data_of(model, data)
    if not isinstance(num_folds, int) or not 2 <= num_folds <= len(X):
        raise InvalidDataError(
            f"num_folds must be an integer between 2 and the number of data ({len(X)}); found {num_folds}."
        )
    splits = list(folds(len(X), num_folds, seed))
    # One fit to each fold, and one to all data, with every objective.
    jobs = [(objective, split) for objective in objectives for split in (*splits, None)]
    common = Comparison(model, X, Y, max_iterations, integrate)
    if client is None:
        found = [run(common, job) for job in jobs]
    else:
        from .distributed.jobs import run_jobs

        found = run_jobs(client, "fold", run, common, jobs)
    fits = []
    for i in range(len(objectives)):
        *parts, fit = found[i * (num_folds + 1) : (i + 1) * (num_folds + 1)]
        densities, integrated = np.empty(len(X)), np.empty(len(X))
        for (_, test), part in zip(splits, parts, strict=True):
            _, densities[test], over = part
            integrated[test] = over if integrate else np.nan
        statuses = (*(part[0] for part in parts), *fit.statuses)
        fit = dataclasses.replace(fit, log_densities=densities, statuses=statuses)
        if integrate:
            fit = dataclasses.replace(fit, integrated_log_densities=integrated)
        fits.append(fit)
    return ObjectiveComparison(tuple(fits), num_folds)


def _data_of(model: Any, data: RegressionData | None) -> tuple[Any, Any]:
    """The arrays to compare on: the model's own, or those given for a sparse one."""
    check_data_for(model, data)
    if isinstance(data, DataRows):
        raise InvalidDataError(
            "data must be arrays for compare_objectives, which folds are drawn from; found "
            f"{type(data).__name__}. Pass data=(X, Y) and client=client: each fit is a task of its workers."
        )
    data = model.data if data is None else prepare_data(data, model.likelihood)
    X, Y = (np.asarray(tf.convert_to_tensor(d)) for d in data)
    return X, Y


def _integration_verdict(fit: ObjectiveFit) -> str:
    """Whether to integrate, datum by datum."""
    assert fit.integrated_log_densities is not None
    difference = fit.integrated_log_densities - fit.log_densities
    mean, error = np.mean(difference), standard_error(difference)
    text = (
        f"Hyperparameters of {_name(fit)} integrated over optimised: {mean:+.4f} ± {error:.4f} nats per "
        "held-out datum"
    )
    if abs(mean) < NOISE_THRESHOLD * error or mean == 0.0:
        return f"{text}: within the noise."
    return (
        f"{text}: integrate them." if mean > 0.0 else f"{text}: the optimum predicts better here."
    )


def _not_converged(fit: ObjectiveFit) -> str:
    """Which of an objective's fits did not converge, and how they ended; nothing if all did."""
    names = [*(f"fold {i}" for i in range(1, len(fit.statuses))), "all data"]
    ended = [
        f"{name} ({status})"
        for name, status in zip(names, fit.statuses, strict=True)
        if status not in CONVERGED
    ]
    if not ended:
        return ""
    return (
        f"{_name(fit)}: {len(ended)} of {len(fit.statuses)} fits did not converge: {', '.join(ended)}. "
        "Their densities are not those of an optimum."
    )


def _name(fit: ObjectiveFit) -> str:
    return fit.objective if isinstance(fit.objective, str) else f"power {fit.objective:g}"
