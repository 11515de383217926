"""What a contender reports, and the score of its predictions."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass
class Fit:
    """One training run on one fold, and its test results."""

    seconds: float
    """From building the model until it is trained, tracing and compilation included."""
    log_density: float
    """Mean log predictive density of the test labels."""
    accuracy: float
    log_lengthscale: float
    log_sigma: float
    evaluations: int
    """Evaluations of the objective with its gradient, or iterations of a first-order loop."""
    objective: float
    """The final value of what was maximised: a bound or an approximation of log p(y)."""
    converged: bool
    note: str = ""
    """What the optimiser said if it did not converge."""


def score(probability: np.ndarray, Y_test: np.ndarray) -> dict[str, float]:
    """Mean log density and accuracy of the predicted probabilities p(y = 1) for labels in {0, 1}."""
    probability, is_one = np.ravel(probability), np.ravel(Y_test) > 0.5
    with np.errstate(divide="ignore"):  # a certain prediction that is wrong scores −∞
        log_density = np.log(np.where(is_one, probability, 1.0 - probability))
    return {
        "log_density": float(np.mean(log_density)),
        "accuracy": float(np.mean((probability > 0.5) == is_one)),
    }


def hyperparameters(lengthscale: float, variance: float) -> dict[str, float]:
    """log ℓ and log σ of a kernel."""
    return {
        "log_lengthscale": float(np.log(lengthscale)),
        "log_sigma": 0.5 * float(np.log(variance)),
    }
