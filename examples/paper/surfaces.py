"""One row of a surface: a lengthscale, every σ, one method of inference."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import gpflow_hybrid as gh
from gpflow_hybrid.evidence import annealed_importance_sampling, grid

from .problems import load_problem, make_model

TOLERANCE = 1e-8
"""Residual to which sites are inferred."""

Row = dict[str, Any]


def compute_row(method: str, **settings: Any) -> Row:
    """Log marginal likelihood and mean test log predictive density for every σ, by one method.

    ``vi`` has the ELBO and the EP-like value, of the same posterior; ``mcmc`` a standard error.
    """
    row = {"vi": _vi_row, "ep": _ep_row, "mcmc": _mcmc_row}[method](**settings)
    problem = load_problem(settings["dataset"], settings["fold"], settings["max_data"])
    return {**row, "num_data": len(problem.X_train)}


def _vi_row(**settings: Any) -> Row:
    return _inferred_row(gh.CVIModel, _vi_values, ("elbo", "ep_like"), **settings)


def _vi_values(model: gh.CVIModel) -> tuple[tf.Tensor, ...]:
    return model.elbo(), model.ep_like_log_marginal()


def _ep_row(**settings: Any) -> Row:
    return _inferred_row(gh.EPModel, _ep_values, ("ep",), **settings)


def _ep_values(model: gh.EPModel) -> tuple[tf.Tensor, ...]:
    return (model.log_marginal_likelihood(),)


def _inferred_row(
    kind: type[gh.CollapsedModel],
    values: Callable[..., tuple[tf.Tensor, ...]],
    names: Sequence[str],
    *,
    dataset: str,
    fold: int,
    max_data: int | None,
    log_lengthscale: float,
    log_sigmas: Sequence[float],
) -> Row:
    model, evaluate = _compiled(kind, values, dataset, fold, max_data)
    model.kernel.lengthscales.assign(np.exp(log_lengthscale))
    model.sites.reset(len(model.data[0]))  # a row does not depend on the row before it
    columns = []
    for log_sigma in log_sigmas:
        model.kernel.variance.assign(np.exp(2.0 * log_sigma))
        result = model.infer(tolerance=TOLERANCE)  # from the sites of the σ before
        if not result.converged:
            model.sites.reset(len(model.data[0]))
            result = model.infer(tolerance=TOLERANCE)
        columns.append(
            [float(x) for x in evaluate()] + [float(result.residual), float(result.converged)]
        )
    table = np.array(columns).T.tolist()
    return dict(zip((*names, "test_log_density", "residual", "converged"), table, strict=True))


@functools.lru_cache(maxsize=2)
def _compiled(
    kind: type[gh.CollapsedModel],
    values: Callable[..., tuple[tf.Tensor, ...]],
    dataset: str,
    fold: int,
    max_data: int | None,
) -> tuple[gh.CollapsedModel, Callable[[], tuple[tf.Tensor, ...]]]:
    """A model for all rows that this process computes, and everything that is read from it as one graph."""
    problem = load_problem(dataset, fold, max_data)
    model = make_model(problem, kind)
    test = tuple(tf.constant(x) for x in (problem.X_test, problem.Y_test))

    @tf.function(autograph=False)
    def evaluate() -> tuple[tf.Tensor, ...]:
        return *values(model), tf.reduce_mean(model.predict_log_density(test))

    return model, evaluate


def _mcmc_row(
    *,
    dataset: str,
    fold: int,
    max_data: int | None,
    log_lengthscale: float,
    log_sigmas: Sequence[float],
    seed: int,
    num_chains: int,
    num_temperatures: int,
    effort: float,
) -> Row:
    problem = load_problem(dataset, fold, max_data)
    result = annealed_importance_sampling(
        make_model(problem, gh.CVIModel),
        hyperparameters=grid(
            {
                ".kernel.lengthscales": [np.exp(log_lengthscale)],
                ".kernel.variance": np.exp(2.0 * np.array(log_sigmas)),
            }
        ),
        num_chains=num_chains,
        num_temperatures=num_temperatures,
        effort=effort,
        test_data=(problem.X_test, problem.Y_test),
        seed=seed,
        progress=False,
    )
    return {
        "mcmc": result.log_marginal_likelihood.tolist(),
        "standard_error": result.standard_error.tolist(),
        "effective_sample_size": result.effective_sample_size.tolist(),
        "test_log_density": result.test_log_density.tolist(),
    }
