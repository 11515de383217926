"""Expectation propagation by GPy: the reference values in ``gpy_ep.json``.

Run ``python tests/recorded/gpy_ep.py`` where GPy and scikit-learn are installed (``pip install GPy
scikit-learn``; neither TensorFlow nor GPflow is needed) to write the file again. It takes seconds.

Model: zero mean, Matérn-5/2 of variance σ² and one lengthscale ℓ, Bernoulli likelihood with
probit link, labels 0 and 1. Data: fold 0 of Sonar and of Ionosphere, standardised by the training
rows, and 12 points in one dimension whose values are in the file.

Convergence: GPy sweeps over the sites in random order until the mean squared change of their
parameters is below ``epsilon``. Its default, 1e-6, stops after about 5 sweeps and leaves errors as
large as 1e-4 in the log marginal likelihood and, relatively, 1e-3 in the latent predictions.
`EPSILON` takes up to about 25 sweeps, with ``ep_mode="nested"`` and without damping. Every value is
computed a second time, with another order of the sites and with `LOOSER_EPSILON`; the script stops
if the two differ by `TOLERANCE` or more, relative to the value where that is above 1.

Jitter: GPy adds 1e-7 to the diagonal of the covariance that the first sweep starts from. The
covariance is recomputed without it after each sweep, so the fixed point, and with it everything
recorded, is that of the kernel matrix itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import GPy
import numpy as np
import scipy
from GPy.inference.latent_function_inference.expectation_propagation import EP
from sklearn.model_selection import KFold

OUTPUT = Path(__file__).with_suffix(".json")
DATA = Path(__file__).parents[2] / "gpflow_hybrid" / "datasets" / "data"

EPSILON = 1e-22
LOOSER_EPSILON = 1e-18
MAX_SWEEPS = 300
TOLERANCE = 1e-7

NUM_NEW = 10
"""Predictions are recorded for this many rows: the first ones of the test fold."""

BENCHMARK_SETTINGS = [(2.3, 1.7), (2.0, 0.5), (1.0, 1.0), (2.6, 3.0), (0.0, 0.0)]
SMALL_SETTINGS = [(0.0, 0.0), (0.0, 1.0), (0.5, 1.5), (-1.0, 0.5), (-1.0, 2.0), (1.0, 3.0)]
"""Pairs (log ℓ, log σ)."""


class Problem(NamedTuple):
    X: np.ndarray  # [N, D]
    Y: np.ndarray  # [N, 1], 0 or 1
    X_new: np.ndarray  # [NUM_NEW, D]


def benchmark(name: str) -> tuple[Problem, list[int]]:
    """Fold 0 of a data set of the package, and the rows of the file that `X_new` comes from."""
    table = np.loadtxt(DATA / f"{name}.csv", delimiter=",", skiprows=1)
    X, Y = table[:, :-1], table[:, -1:]
    train, test = next(KFold(5, shuffle=True, random_state=42).split(X))
    new = test[:NUM_NEW]
    # As `gpflow_hybrid.datasets.standardise`: a constant column becomes zero.
    constant = np.ptp(X[train], axis=0) == 0
    mean = np.where(constant, X[train][0], X[train].mean(axis=0))
    scale = np.where(constant, 1.0, X[train].std(axis=0))
    return Problem((X[train] - mean) / scale, Y[train], (X[new] - mean) / scale), new.tolist()


def small() -> Problem:
    """Twelve noisy signs of a sine; values are rounded so that the file holds them exactly."""
    rng = np.random.RandomState(0)
    X = np.sort(rng.uniform(-3.0, 3.0, size=12).round(3))[:, None]
    Y = (np.sin(1.5 * X) + 0.5 * rng.normal(size=X.shape) > 0.0).astype(np.float64)
    return Problem(X, Y, np.linspace(-4.5, 4.5, NUM_NEW)[:, None])


def significant(value: float) -> float:
    """Ten digits: what comes after them depends on the order of the sites and on the BLAS."""
    return float(f"{value:.10g}")


def expectation_propagation(
    problem: Problem, log_lengthscale: float, log_sigma: float, epsilon: float, seed: int
) -> dict[str, Any]:
    np.random.seed(seed)  # GPy draws the order of the sites from the global generator
    model = GPy.core.GP(
        problem.X,
        problem.Y,
        kernel=GPy.kern.Matern52(
            problem.X.shape[1],
            variance=np.exp(2.0 * log_sigma),
            lengthscale=np.exp(log_lengthscale),
        ),
        likelihood=GPy.likelihoods.Bernoulli(),
        inference_method=EP(ep_mode="nested", epsilon=epsilon, max_iters=MAX_SWEEPS),
    )
    f_mean, f_variance = model.predict_noiseless(problem.X_new)
    probability, _ = model.predict(problem.X_new)
    return {
        "log_marginal_likelihood": significant(np.squeeze(model.log_likelihood())),
        "f_mean": [significant(value) for value in f_mean[:, 0]],
        "f_variance": [significant(value) for value in f_variance[:, 0]],
        "probability": [significant(value) for value in probability[:, 0]],
    }


def record(problem: Problem, log_lengthscale: float, log_sigma: float) -> dict[str, Any]:
    """The converged values for one setting; raises if they are not converged."""
    setting = {"log_lengthscale": log_lengthscale, "log_sigma": log_sigma}
    values = expectation_propagation(problem, **setting, epsilon=EPSILON, seed=0)
    looser = expectation_propagation(problem, **setting, epsilon=LOOSER_EPSILON, seed=1)
    for key, value in values.items():
        np.testing.assert_array_less(
            np.abs(np.subtract(value, looser[key])) / np.maximum(1.0, np.abs(value)),
            TOLERANCE,
            err_msg=f"{key} has not converged at {setting}",
        )
    return {**setting, **values}


def main() -> None:
    versions = {"GPy": GPy.__version__, "numpy": np.__version__, "scipy": scipy.__version__}
    recorded: dict[str, Any] = {"versions": versions, "epsilon": EPSILON}
    for name in ("sonar", "ionosphere"):
        problem, new_rows = benchmark(name)
        recorded[name] = {
            "new_rows": new_rows,
            "cases": [record(problem, *setting) for setting in BENCHMARK_SETTINGS],
        }
    problem = small()
    recorded["small"] = {
        **{key: value[:, 0].tolist() for key, value in problem._asdict().items()},
        "cases": [record(problem, *setting) for setting in SMALL_SETTINGS],
    }
    OUTPUT.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
