"""Small models whose hyperparameters are integrated."""

from __future__ import annotations

from typing import Any

import gpflow
import numpy as np
import tensorflow_probability as tfp

import gpflow_hybrid as gh

Data = tuple[np.ndarray, np.ndarray]


def regression_data() -> Data:
    rng = np.random.default_rng(1)
    X = rng.uniform(0.0, 3.0, (12, 1))
    return X, np.sin(2.0 * X) + 0.3 * rng.normal(size=X.shape)


def labels() -> Data:
    rng = np.random.default_rng(2)
    X = np.sort(rng.uniform(0.0, 3.0, (16, 1)), axis=0)
    return X, (np.sin(2.0 * X) + 0.4 * rng.normal(size=X.shape) > 0.0).astype(float)


def exact_model(variance_transform: Any = None) -> gpflow.models.GPR:
    """Two free scalars: a variance with a prior of its own, a lengthscale without."""
    kernel = gpflow.kernels.Matern32()
    if variance_transform is not None:
        kernel.variance = gpflow.Parameter(1.0, transform=variance_transform)
    kernel.variance.prior = tfp.distributions.Gamma(np.float64(2.0), np.float64(1.0))
    model = gpflow.models.GPR(regression_data(), kernel, noise_variance=0.09)
    gpflow.set_trainable(model.likelihood, False)
    return model


def classifier(kind: Any = gh.CVIModel, **options: Any) -> Any:
    kernel = gpflow.kernels.Matern52()
    kernel.lengthscales.prior = tfp.distributions.LogNormal(np.float64(0.0), np.float64(0.5))
    kernel.variance.prior = tfp.distributions.LogNormal(np.float64(1.0), np.float64(0.8))
    likelihood = gh.likelihoods.ProbitBernoulli()
    if kind is gh.SparseCVIModel:
        Z = np.linspace(0.2, 2.8, 5)[:, None]
        return gh.SparseCVIModel(kernel, likelihood, Z, **options)
    return kind(labels(), kernel, likelihood, **options)
