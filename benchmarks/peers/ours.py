"""CVIModel: collapsed with L-BFGS, and alternating with VEMTrainer."""

from __future__ import annotations

import time

import gpflow
import numpy as np

import gpflow_hybrid as gh
from gpflow_hybrid.training import Drift, ObjectiveTolerance, Patience

from .outcome import Fit, hyperparameters, score
from .stopping import TOLERANCE


def fit(
    X_train: np.ndarray,
    Y_train: np.ndarray,
    X_test: np.ndarray,
    Y_test: np.ndarray,
    *,
    objective: str,
    alternating: bool = False,
) -> Fit:
    """Train with one call to L-BFGS, or with VEM until an iteration gains less than 1e-5 per datum."""
    start = time.perf_counter()
    kernel = gpflow.kernels.Matern52()
    model = gh.CVIModel(
        (X_train, Y_train), kernel, gh.likelihoods.ProbitBernoulli(), objective=objective
    )
    if alternating:
        tolerance = ObjectiveTolerance(TOLERANCE * len(X_train), window=1)
        trainer = gh.VEMTrainer(model, objective, stopping=tolerance | Drift() | Patience())
        trained = trainer.fit(progress=False)
        seconds = time.perf_counter() - start
        evaluations = trained.num_iterations
        value = trained.history["objective"][trained.best_iteration]
        converged = trained.status == "converged"
        note = "" if converged else f"ended with {trained.status!r}, best iteration kept"
    else:
        found = gpflow.optimizers.Scipy().minimize(model.training_loss, model.trainable_variables)
        seconds = time.perf_counter() - start
        evaluations, value = int(found.nfev), -found.fun
        converged = bool(found.success)
        note = "" if converged else str(found.message)
    return Fit(
        seconds=seconds,
        evaluations=evaluations,
        objective=float(value),
        converged=converged,
        note=note,
        **score(model.predict_y(X_test)[0].numpy(), Y_test),
        **hyperparameters(kernel.lengthscales.numpy(), kernel.variance.numpy()),
    )
