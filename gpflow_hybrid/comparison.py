"""Does the hybrid objective help on these data? One call, an honest answer."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from gpflow.base import RegressionData
from gpflow.utilities import deepcopy, parameter_dict

from .datasets import folds
from .display import ShownAsText, values_in_short
from .errors import InvalidDataError, InvalidPosteriorError
from .evidence.results import FloatArray, standard_error
from .models import CVIModel, SparseCVIModel
from .models.sparse_validation import check_data_for
from .objectives import Objective, power_of
from .training import fitting
from .validation import prepare_data

NOISE_THRESHOLD = 2.0
"""Differences of fewer standard errors than this are called noise."""


@dataclasses.dataclass(frozen=True)
class ObjectiveFit:
    """One objective: the model fitted to all the data, and how such fits predict held-out folds."""

    objective: Objective
    """What was trained."""
    model: CVIModel | SparseCVIModel
    """Fitted to all the data."""
    hyperparameters: dict[str, Any]
    """Every trainable parameter of the fitted model, by GPflow's path."""
    elbo: float
    """Of the fit to all data."""
    ep_like: float
    """NaN where a cavity does not exist, as :attr:`loo_log_predictive_density`."""
    log_densities: FloatArray
    """Log predictive density of every datum by the fit that did not see it, ``[N]``."""
    loo_log_predictive_density: float
    """Mean leave-one-out density from the cavities of the fit to all data: optimistic. NaN for a sparse
    model, which keeps no site for each datum."""
    num_evaluations: int
    """Evaluations of the training loss for the fit to all data."""
    seconds: float
    """Wall time of the fit to all data, tracing included."""

    @property
    def log_density(self) -> float:
        """Mean of the held-out log predictive densities."""
        return float(np.mean(self.log_densities))

    @property
    def standard_error(self) -> float:
        """Standard error of :attr:`log_density` over data."""
        return float(standard_error(self.log_densities))


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
        return "\n".join(lines)

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
    client: Any = None,
) -> ObjectiveComparison:
    """Fit with each objective and report, side by side, what came out and how it predicts.

    Every fit starts from the hyperparameters of ``model``, which is left untouched. Predictive
    densities are those of k-fold cross-validation, with their standard error over data; the
    leave-one-out densities from the cavities stand beside them as the optimistic diagnostic that
    they are. Differences are judged pairwise, datum by datum.

    :param model: data, kernel, likelihood, mean function and starting point; of a sparse model the
        inducing points too, but no data.
    :param objectives: any of ``"elbo"``, ``"ep_like"`` and powers in [0, 1].
    :param data: ``(X, Y)`` for a sparse model, which has none of its own.
    :param num_folds: folds of the cross-validation.
    :param seed: of the shuffle behind the folds.
    :param max_iterations: of L-BFGS, for every fit.
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
    common = _Comparison(model, X, Y, max_iterations)
    if client is None:
        found = [_run(common, job) for job in jobs]
    else:
        from .distributed.jobs import run_jobs

        found = run_jobs(client, "fold", _run, common, jobs)
    fits = []
    for i in range(len(objectives)):
        *parts, fit = found[i * (num_folds + 1) : (i + 1) * (num_folds + 1)]
        densities = np.empty(len(X))
        for (_, test), part in zip(splits, parts, strict=True):
            densities[test] = part
        fits.append(dataclasses.replace(fit, log_densities=densities))
    return ObjectiveComparison(tuple(fits), num_folds)


class _Comparison(NamedTuple):
    """What all fits share."""

    model: Any
    X: Any
    Y: Any
    max_iterations: int


def _run(common: _Comparison, job: tuple[Objective, Any]) -> Any:
    """Log densities of a fold by a fit to the others; or the fit to all data, without such."""
    model, X, Y, max_iterations = common
    objective, split = job
    if split is not None:
        train, test = split
        part = _copy(model, X[train], Y[train], objective)
        _fit(part, (X[train], Y[train]), max_iterations)
        return np.asarray(part.predict_log_density((X[test], Y[test])))
    start = time.perf_counter()
    fitted = _copy(model, X, Y, objective)
    num_evaluations = _fit(fitted, (X, Y), max_iterations)
    seconds = time.perf_counter() - start
    trained = {id(p) for p in fitted.trainable_parameters}
    parameters = parameter_dict(fitted).items()
    given = ((X, Y),) if isinstance(fitted, SparseCVIModel) else ()
    is_dense = isinstance(fitted, CVIModel)
    return ObjectiveFit(
        objective=objective,
        model=fitted,
        hyperparameters={path: p.numpy() for path, p in parameters if id(p) in trained},
        elbo=float(fitted.elbo(*given)),
        ep_like=_or_nan(fitted.ep_like_log_marginal, *given),
        log_densities=np.empty(0),
        loo_log_predictive_density=_or_nan(fitted.loo_log_predictive_density)
        if is_dense
        else np.nan,
        num_evaluations=num_evaluations,
        seconds=seconds,
    )


def _data_of(model: Any, data: RegressionData | None) -> tuple[Any, Any]:
    """The arrays to compare on: the model's own, or those given for a sparse one."""
    check_data_for(model, data)
    data = model.data if data is None else prepare_data(data, model.likelihood)
    X, Y = (np.asarray(tf.convert_to_tensor(d)) for d in data)
    return X, Y


def _copy(model: Any, X: Any, Y: Any, objective: Objective) -> Any:
    """The same model for other data, with sites at zero; parameters shared between parts stay shared."""
    Z = getattr(model, "inducing_variable", None)
    parts = (model.kernel, model.likelihood, model.mean_function, Z)
    kernel, likelihood, mean, Z = deepcopy(parts)
    L = model.num_latent_gps
    if Z is None:
        return CVIModel((X, Y), kernel, likelihood, mean, L, objective=objective)
    more = {"mean_function": mean, "num_latent_gps": L, "objective": objective}
    return SparseCVIModel(kernel, likelihood, Z, **more)


def _fit(model: Any, data: tuple[Any, Any], max_iterations: int) -> int:
    given = data if isinstance(model, SparseCVIModel) else None
    result = fitting.fit(model, data=given, max_iterations=max_iterations, progress=False)
    return result.num_evaluations


def _or_nan(value: Callable[..., Any], *given: Any) -> float:
    """The mean of a value, NaN where a cavity that it needs does not exist."""
    try:
        return float(np.mean(value(*given)))
    except InvalidPosteriorError:
        return float("nan")


def _name(fit: ObjectiveFit) -> str:
    return fit.objective if isinstance(fit.objective, str) else f"power {fit.objective:g}"
