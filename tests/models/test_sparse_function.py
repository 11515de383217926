"""A sparse training loss is a function of the hyperparameters, whatever was evaluated before."""

from __future__ import annotations

import warnings
from typing import Any

import gpflow
import numpy as np
import pytest

import gpflow_hybrid as gh


def contradictory() -> tuple[np.ndarray, np.ndarray]:
    """Outliers of either sign, which a narrow Student-t may believe or not."""
    rng = np.random.default_rng(3)
    X = np.sort(rng.uniform(-2.0, 2.0, (80, 1)), 0)
    Y = np.sin(2.0 * X) + 0.1 * rng.normal(size=X.shape)
    Y[::4] += 3.0 * rng.choice([-1.0, 1.0], size=Y[::4].shape)
    return X, Y


def flipped() -> tuple[np.ndarray, np.ndarray]:
    """Three classes along a line, some labels wrong."""
    rng = np.random.default_rng(4)
    X = rng.uniform(-2.0, 2.0, (60, 1))
    Y = np.digitize(np.sin(3.0 * X[:, 0]), [-0.4, 0.4])
    Y[::9] = rng.integers(0, 3, Y[::9].shape)
    return X, Y[:, None]


def separable() -> tuple[np.ndarray, np.ndarray]:
    """Two classes, and a few rows of one among the other."""
    X = np.linspace(-2.0, 2.0, 80)[:, None]
    Y = (X > 0.0).astype(float)
    Y[10:13], Y[60:63] = 1.0, 0.0
    return X, Y


HARD: dict[str, tuple[Any, Any, int]] = {
    "student_t": (contradictory, lambda: gpflow.likelihoods.StudentT(scale=0.05), 1),
    "robust_max": (flipped, lambda: gpflow.likelihoods.MultiClass(3), 3),
    "squeezed": (separable, gpflow.likelihoods.Bernoulli, 1),
}
SETTINGS = [(0.1, 1.0), (0.5, 10.0), (2.0, 1e3), (0.3, 1e4), (1.0, 0.1), (0.2, 100.0)]
"""Lengthscales and variances."""


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        ("student_t", "elbo"),
        ("squeezed", "elbo"),
        ("squeezed", "ep_like"),
        pytest.param("student_t", "ep_like", marks=pytest.mark.slow),
        pytest.param("robust_max", "elbo", marks=pytest.mark.slow),
    ],
)
def test_the_loss_does_not_depend_on_the_way(name: str, objective: str) -> None:
    make_data, make_likelihood, num_latent = HARD[name]
    data = make_data()

    def make() -> gh.SparseCVIModel:
        Z = np.linspace(-2.0, 2.0, 12)[:, None]
        return gh.SparseCVIModel(
            gpflow.kernels.Matern52(),
            make_likelihood(),
            Z,
            num_latent_gps=num_latent,
            objective=objective,
        )

    def loss(model: gh.SparseCVIModel, at: tuple[float, float]) -> float:
        model.kernel.lengthscales.assign(at[0])
        model.kernel.variance.assign(at[1])
        return float(model.training_loss(data))

    first, second = make(), make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gh.ConvergenceWarning)
        for model in (
            first,
            second,
        ):  # what has not converged is a value only at a first evaluation
            model.infer(data)
        there = [loss(first, at) for at in SETTINGS]
        back = [loss(second, at) for at in SETTINGS[::-1]][::-1]
    np.testing.assert_allclose(back, there, rtol=0.0, atol=1e-8)
    assert sum(x < 1e3 * len(data[0]) for x in there) >= 4  # the rest are penalties
