"""SparseCVIModel, collapsed, by ``gh.fit``: L-BFGS on a part of the rows, then on all."""

from __future__ import annotations

import gpflow
import numpy as np

import gpflow_hybrid as gh

from .sparse_gpflow import kernel_for, report, scorer
from .sparse_outcome import Clock, SparseFit, finished


def fit(
    X_train: np.ndarray,
    Y_train: np.ndarray,
    X_test: np.ndarray,
    Y_test: np.ndarray,
    Z: np.ndarray,
    *,
    train_Z: bool,
    regression: bool,
    limit: float,
    objective: str,
    squeezed: bool = False,
) -> SparseFit:
    """Train with one call; ``squeezed`` labels have GPflow's likelihood instead of ours.

    The clock runs through all. Density and ELBO on the way, also while the rows are a part, are those of
    the model as it is: its q(u) is then of the part, its ELBO of all training rows.
    """
    clock, data = Clock(limit), (X_train, Y_train)
    probit = gpflow.likelihoods.Bernoulli if squeezed else gh.likelihoods.ProbitBernoulli
    likelihood = gpflow.likelihoods.StudentT() if regression else probit()
    model = gh.SparseCVIModel(kernel_for(X_train), likelihood, Z.copy(), objective=objective)
    gpflow.set_trainable(model.inducing_variable, bool(train_Z))
    scores = scorer(model, X_test, Y_test, regression)

    def look(step: gh.training.FitStep) -> None:
        clock.look(lambda: (scores()["log_density"], float(model.elbo(data))))
        if clock.is_over and step.num_rows == len(X_train):
            raise StopIteration

    found = gh.fit(model, data=data, callback=look, progress=False)
    trained = {
        "evaluations": found.num_evaluations,
        "part_evaluations": found.part_evaluations,
        "objective": -found.loss,
        **finished(clock, found.converged, found.message),
    }
    return report(model, data, clock, scores, trained)
