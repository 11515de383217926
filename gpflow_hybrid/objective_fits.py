"""The fits behind a comparison of objectives, each a job of its own."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from gpflow.utilities import parameter_dict

from .copying import copied
from .errors import InvalidPosteriorError
from .evidence.results import FloatArray, standard_error
from .integration import HyperparameterPosterior, integrate_hyperparameters
from .models import CVIModel, SparseCVIModel
from .objectives import Objective
from .training import fitting
from .training.fit_results import FitResult


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
    statuses: tuple[str, ...] = ()
    """How every fold's fit ended, then that to all the data: see :attr:`FitResult.status`."""
    integrated: HyperparameterPosterior | None = None
    """The posterior over hyperparameters given all the data, if it was asked for."""
    integrated_log_densities: FloatArray | None = None
    """As :attr:`log_densities`, with hyperparameters integrated out in every fold."""

    @property
    def log_density(self) -> float:
        """Mean of the held-out log predictive densities."""
        return float(np.mean(self.log_densities))

    @property
    def standard_error(self) -> float:
        """Standard error of :attr:`log_density` over data."""
        return float(standard_error(self.log_densities))


class Comparison(NamedTuple):
    """What all fits share."""

    model: Any
    X: Any
    Y: Any
    max_iterations: int
    integrate: bool


def run(common: Comparison, job: tuple[Objective, Any]) -> Any:
    """How a fit to the other folds ended and its log densities of this one, of the optimum and integrated;
    or the fit to all data, without such."""
    model, X, Y, max_iterations, integrate = common
    objective, split = job
    if split is not None:
        train, test = split
        part = _copy(model, X[train], Y[train], objective)
        status = _fit(part, (X[train], Y[train]), max_iterations).status
        held_out = (X[test], Y[test])
        densities = np.asarray(part.predict_log_density(held_out))
        if not integrate:
            return status, densities, None
        over = _integrate(part, (X[train], Y[train]))
        return status, densities, np.asarray(over.predict_log_density(held_out))
    start = time.perf_counter()
    fitted = _copy(model, X, Y, objective)
    result = _fit(fitted, (X, Y), max_iterations)
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
        num_evaluations=result.num_evaluations,
        seconds=seconds,
        statuses=(result.status,),
        integrated=_integrate(fitted, (X, Y)) if integrate else None,
    )


def _copy(model: Any, X: Any, Y: Any, objective: Objective) -> Any:
    """The same model for other data, with sites at zero; parameters shared between parts stay shared."""
    Z = getattr(model, "inducing_variable", None)
    parts = (model.kernel, model.likelihood, model.mean_function, Z)
    kernel, likelihood, mean, Z = copied(parts)
    L = model.num_latent_gps
    if Z is None:
        return CVIModel((X, Y), kernel, likelihood, mean, L, objective=objective)
    more = {"mean_function": mean, "num_latent_gps": L, "objective": objective}
    return SparseCVIModel(kernel, likelihood, Z, **more)


def _fit(model: Any, data: tuple[Any, Any], max_iterations: int) -> FitResult:
    given = data if isinstance(model, SparseCVIModel) else None
    return fitting.fit(model, data=given, max_iterations=max_iterations, progress=False)


def _integrate(model: Any, data: tuple[Any, Any]) -> HyperparameterPosterior:
    given = data if isinstance(model, SparseCVIModel) else None
    return integrate_hyperparameters(model, data=given, progress=False)


def _or_nan(value: Callable[..., Any], *given: Any) -> float:
    """The mean of a value, NaN where a cavity that it needs does not exist."""
    try:
        return float(np.mean(value(*given)))
    except InvalidPosteriorError:
        return float("nan")
