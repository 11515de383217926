"""Covariances with inducing points on arrays are those of GPflow, and so are their derivatives."""

from __future__ import annotations

import gpflow
import numpy as np
import pytest
import tensorflow as tf
from gpflow.inducing_variables import InducingPoints

from gpflow_hybrid.priors.inducing import InducingPrior, ProjectionBar
from gpflow_hybrid.priors.inducing_kernels import StationaryKernel, TapedKernel
from gpflow_hybrid.stand_ins import parameters_of, with_values

KERNELS = [
    gpflow.kernels.SquaredExponential,
    gpflow.kernels.Exponential,
    gpflow.kernels.Matern12,
    gpflow.kernels.Matern32,
    gpflow.kernels.Matern52,
]
SEEN = {
    "all columns": (None, 0.7),
    "lengthscales": (None, [0.7, 1.3, 0.4]),
    "some columns": ([2, 0], [0.7, 1.3]),
    "a slice": (slice(1, 3), 0.7),
}


class Parts(gpflow.base.Module):
    def __init__(self, kernel: gpflow.kernels.Kernel, points: InducingPoints) -> None:
        super().__init__()
        self.kernel, self.points = kernel, points


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("kind", KERNELS)
def test_stationary_kernels_on_arrays_are_those_of_a_tape(kind: type, seen: str) -> None:
    rng = np.random.default_rng(1)
    columns, lengthscales = SEEN[seen]
    kernel = kind(variance=1.7, lengthscales=lengthscales, active_dims=columns)
    X, Z = 5.0 + rng.normal(size=(30, 3)), 5.0 + rng.normal(size=(7, 3))
    parts = Parts(kernel, InducingPoints(Z))
    parameters = parameters_of(parts)
    sources = [tf.convert_to_tensor(p) for p in parameters]
    read = with_values(parts, sources)
    taped = TapedKernel(read.kernel, read.points, sources)
    assert StationaryKernel.serves(kernel, parts.points)
    arrays = StationaryKernel(kernel, parts.points, parameters, [x.numpy() for x in sources])
    np.testing.assert_allclose(arrays.at_inducing(), taped.at_inducing(), rtol=1e-8)
    for found, expected in zip(arrays.at_data(X), taped.at_data(X), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-8)
    K_bar = rng.normal(size=(7, 7))
    cross_bar, diagonal_bar = rng.normal(size=(7, 30)), rng.normal(size=30)
    for found, expected in (
        (arrays.pull_back_inducing(K_bar + K_bar.T), taped.pull_back_inducing(K_bar + K_bar.T)),
        (
            arrays.pull_back_data(X, cross_bar, diagonal_bar),
            taped.pull_back_data(X, cross_bar, diagonal_bar),
        ),
    ):
        for x, y in zip(found, expected, strict=True):
            assert np.shape(x) == y.shape
            np.testing.assert_allclose(x, y, rtol=1e-7, atol=1e-8)


def test_inputs_far_from_zero_keep_their_digits() -> None:
    rng = np.random.default_rng(2)
    X, Z = rng.normal(size=(20, 2)), rng.normal(size=(4, 2))
    found = []
    for offset in (0.0, 2.0**20):
        kernel, points = gpflow.kernels.Matern32(lengthscales=0.5), InducingPoints(Z + offset)
        parameters = parameters_of(Parts(kernel, points))
        values = [p.numpy() for p in parameters]
        at = StationaryKernel(kernel, points, parameters, values)
        found.append(at.at_data(X + offset)[0])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-8)


def test_inputs_at_inducing_points_have_finite_derivatives() -> None:
    Z = np.array([[0.0], [1.0]])
    for kind in KERNELS:
        kernel, points = kind(), InducingPoints(Z)
        parameters = parameters_of(Parts(kernel, points))
        at = StationaryKernel(kernel, points, parameters, [p.numpy() for p in parameters])
        np.testing.assert_allclose(np.diag(at.at_data(Z)[0]), 1.0, rtol=1e-12)
        for found in (
            at.pull_back_data(Z, np.ones((2, 2)), np.ones(2)),
            at.pull_back_inducing(np.ones((2, 2))),
        ):
            assert all(np.isfinite(x).all() for x in found)


class _Squares(gpflow.kernels.SquaredExponential):
    """A kernel that only a tape knows."""


@pytest.mark.parametrize("kernel", [gpflow.kernels.SquaredExponential, _Squares])
@pytest.mark.parametrize("mean", [None, gpflow.functions.Linear])
def test_derivatives_of_projections(kernel: type, mean: type | None) -> None:
    """By way of ``K_uu``'s factor, ``K_uf``, ``K_ff`` and the mean: against a tape through all of them."""
    rng = np.random.default_rng(3)
    X, k = rng.normal(size=(12, 2)), kernel(lengthscales=0.9)
    points = InducingPoints(rng.normal(size=(5, 2)))
    function = gpflow.functions.Zero() if mean is None else mean(A=np.ones((2, 1)), b=np.ones(1))
    variables = [*k.trainable_variables, *points.trainable_variables, *function.trainable_variables]
    prior = InducingPrior(k, points, function, 1, variables)
    (projection,), mu = prior.project(X)
    A_bar, residual_bar = rng.normal(size=(5, 12)), rng.normal(size=12)
    mean_bar = rng.normal(size=(12, 1))
    bars = [ProjectionBar(A_bar, residual_bar)]
    found = prior.in_variables(*prior.pull_back_rows(X, [projection.A], bars, mean_bar))
    with tf.GradientTape() as tape:
        Kuu = gpflow.covariances.Kuu(points, k, jitter=gpflow.config.default_jitter())
        L = tf.linalg.cholesky(Kuu)
        A = tf.linalg.triangular_solve(L, gpflow.covariances.Kuf(points, k, X))
        residual = k(X, full_cov=False) - tf.reduce_sum(A * A, 0)
        total = tf.reduce_sum(A * A_bar) + tf.reduce_sum(residual * residual_bar)
        total += tf.reduce_sum(function(X) * mean_bar)
    np.testing.assert_allclose(projection.A, A, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(projection.residual, residual, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(mu, np.broadcast_to(function(X), mu.shape), rtol=1e-12)
    expected = tape.gradient(total, variables)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-8)
