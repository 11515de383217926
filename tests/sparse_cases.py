"""Small sparse problems with every kind of likelihood."""

from __future__ import annotations

from typing import Any, NamedTuple

import gpflow
import numpy as np

import gpflow_hybrid as gh
from tests.likelihood_cases import CASES


class SparseProblem(NamedTuple):
    """Data, inducing points, and a model of them."""

    X: np.ndarray
    Y: np.ndarray
    Z: np.ndarray
    num_latent: int
    name: str

    @property
    def data(self) -> tuple[np.ndarray, np.ndarray]:
        return self.X, self.Y

    def arguments(self, **fine: Any) -> dict[str, Any]:
        """Of a sparse model, new at every call."""
        return {
            "kernel": gpflow.kernels.Matern52(variance=1.3, lengthscales=1.2),
            "likelihood": CASES[self.name].make(**fine),
            "inducing_variable": self.Z.copy(),
            "mean_function": gpflow.functions.Linear(A=np.full((2, 1), 0.1), b=np.full(1, 0.05)),
            "num_latent_gps": self.num_latent,
        }

    def model(self, objective: Any = "ep_like", **more: Any) -> gh.SparseCVIModel:
        return gh.SparseCVIModel(**(self.arguments() | more), objective=objective)


def sparse_problem(name: str, N: int = 40, M: int = 6) -> SparseProblem:
    case, rng = CASES[name], np.random.default_rng(1)
    X = rng.uniform(-2.0, 2.0, size=(N, 2))
    f = np.sin(2.0 * X[:, :1]) + 0.5 * X[:, 1:]
    return SparseProblem(X, case.observe(f, rng), X[:M].copy(), case.num_latent, name)
