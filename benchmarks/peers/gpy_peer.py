"""GPy: expectation propagation, run anew for all hyperparameters (nested), and Laplace."""

from __future__ import annotations

import time

import GPy
import numpy as np
from GPy.inference.latent_function_inference import EP, Laplace

from .outcome import Fit, hyperparameters, score


def fit(
    X_train: np.ndarray,
    Y_train: np.ndarray,
    X_test: np.ndarray,
    Y_test: np.ndarray,
    *,
    inference: str,
) -> Fit:
    """Train with GPy's own L-BFGS; ``inference`` is ``"ep"`` or ``"laplace"``."""
    start = time.perf_counter()
    kernel = GPy.kern.Matern52(X_train.shape[1], variance=1.0, lengthscale=1.0)
    model = GPy.core.GP(
        X_train,
        Y_train,
        kernel=kernel,
        likelihood=GPy.likelihoods.Bernoulli(),
        inference_method=EP(ep_mode="nested") if inference == "ep" else Laplace(),
    )
    model.optimize("lbfgsb")
    seconds = time.perf_counter() - start
    run = model.optimization_runs[-1]
    converged = run.status == "Converged"
    return Fit(
        seconds=seconds,
        evaluations=int(run.funct_eval),
        objective=float(model.log_likelihood()),
        converged=converged,
        note="" if converged else str(run.status),
        **score(model.predict(X_test)[0], Y_test),
        **hyperparameters(kernel.lengthscale.values.item(), kernel.variance.values.item()),
    )
