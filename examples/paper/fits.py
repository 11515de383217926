"""One fold of the table: train by one method, test on the rest."""

from __future__ import annotations

import time
from typing import Any

import gpflow
import numpy as np

import gpflow_hybrid as gh

from .problems import Problem, load_problem, make_model

STEEP = 0.1
"""Gradient, in nats per unit of an unconstrained parameter, at which nothing has converged."""

MAX_STARTS = 5

LBFGS_STATUS = {0: "converged", 1: "max_iterations"}

OBJECTIVES = {"vi": "elbo", "ours": "ep_like"}


def compute_fit(
    *, dataset: str, fold: int, max_data: int | None, method: str, max_iterations: int
) -> dict[str, Any]:
    """Train on one fold from ℓ = σ = 1.

    :param method: ``paper-vi``, ``paper-ours``: the paper's training details; ``vem-…``: to convergence;
        ``collapsed-…``: the collapsed objective with L-BFGS; ``ep`` and ``laplace``, with L-BFGS too.
    """
    problem = load_problem(dataset, fold, max_data)
    began = time.perf_counter()
    way, _, learner = method.partition("-")
    if way in ("paper", "vem"):
        model, how = _alternating(problem, way, OBJECTIVES[learner], max_iterations)
    else:
        model, how = _by_lbfgs(problem, way, learner, max_iterations)
    seconds = time.perf_counter() - began
    return {**_tested(model, problem), **how, "training_seconds": seconds}


def _alternating(
    problem: Problem, way: str, objective: Any, max_iterations: int
) -> tuple[gh.SiteModel, dict[str, Any]]:
    model = make_model(problem, gh.CVIModel)
    trainer = (
        gh.VEMTrainer.paper(model, objective) if way == "paper" else gh.VEMTrainer(model, objective)
    )
    result = trainer.fit(max_iterations, progress=False)
    if result.status == "interrupted":  # fit() ends in order; this run shall too
        raise KeyboardInterrupt
    return model, {
        "iterations": result.num_iterations,
        "converged": result.status == "converged",
        "status": result.status,
        "message": result.message,
    }


def _by_lbfgs(
    problem: Problem, way: str, learner: str, max_iterations: int
) -> tuple[gh.SiteModel, dict[str, Any]]:
    if way == "collapsed":
        model = make_model(problem, gh.CVIModel, objective=OBJECTIVES[learner])
    else:
        model = make_model(problem, {"ep": gh.EPModel, "laplace": gh.LaplaceModel}[way])
    result = _minimised(model, max_iterations)
    message = result.message
    return model, {
        "iterations": int(result.nit),
        "converged": bool(result.success),
        "status": LBFGS_STATUS.get(int(result.status), "stopped"),
        "message": message if isinstance(message, str) else message.decode(),
    }


def _minimised(model: gh.SiteModel, max_iterations: int) -> Any:
    """L-BFGS as GPflow has it, begun again where its line search gave up on a slope.

    From ℓ = 1 it may try ℓ = 1e-80 and come back to where it was: "relative reduction of F".
    """
    for _ in range(MAX_STARTS):
        result = gpflow.optimizers.Scipy().minimize(
            model.training_loss, model.trainable_variables, options={"maxiter": max_iterations}
        )
        if not result.success or np.max(np.abs(result.jac)) < STEEP:
            break
    return result


def _tested(model: gh.SiteModel, problem: Problem) -> dict[str, float]:
    probability, _ = model.predict_y(problem.X_test)
    densities = model.predict_log_density((problem.X_test, problem.Y_test))
    return {
        "accuracy": float(np.mean((probability.numpy() > 0.5) == (problem.Y_test > 0.5))),
        "test_log_density": float(np.mean(densities)),
        "log_lengthscale": float(np.log(model.kernel.lengthscales.numpy())),
        "log_sigma": 0.5 * float(np.log(model.kernel.variance.numpy())),
    }
