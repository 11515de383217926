"""One fold of the table: train by one method, test on the rest."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import gpflow_hybrid as gh

from .problems import Problem, load_problem, make_model

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
    return {**tested(model, problem), **how, "training_seconds": seconds}


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
    result = gh.fit(model, max_iterations=max_iterations, progress=False)
    if result.status == "interrupted":
        raise KeyboardInterrupt
    return model, {
        "iterations": result.num_iterations,
        "converged": result.converged,
        "status": result.status,
        "message": result.message,
    }


def tested(model: gh.SiteModel | gh.SparseCVIModel, problem: Problem) -> dict[str, float]:
    """Scores on the other part, and where the kernel's parameters are."""
    probability, _ = model.predict_y(problem.X_test)
    densities = model.predict_log_density((problem.X_test, problem.Y_test))
    return {
        "accuracy": float(np.mean((probability.numpy() > 0.5) == (problem.Y_test > 0.5))),
        "test_log_density": float(np.mean(densities)),
        "log_lengthscale": float(np.log(model.kernel.lengthscales.numpy())),
        "log_sigma": 0.5 * float(np.log(model.kernel.variance.numpy())),
    }
