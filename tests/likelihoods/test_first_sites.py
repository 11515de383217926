"""Where inference starts that must not depend on what came before."""

from __future__ import annotations

import gpflow
import numpy as np
import pytest
import tensorflow as tf

import gpflow_hybrid as gh
from gpflow_hybrid.likelihoods.first_sites import first_sites
from tests.likelihood_cases import CASES


def test_student_t_starts_with_its_curvature_where_y_is() -> None:
    likelihood = gpflow.likelihoods.StudentT(scale=0.5, df=4.0)
    Y = np.array([[-1.0], [0.3], [7.0]])
    found = first_sites(likelihood, tf.constant(Y), tf.zeros([3, 1], tf.float64))
    f = tf.constant(Y)
    with tf.GradientTape() as outer:
        outer.watch(f)
        with tf.GradientTape() as inner:
            inner.watch(f)
            log_prob = likelihood.log_prob(np.zeros_like(Y), f, Y)
        slope = inner.gradient(log_prob, f)
    np.testing.assert_allclose(found.lambda_2, -outer.gradient(slope, f), rtol=1e-12)
    np.testing.assert_allclose(found.lambda_1, found.lambda_2 * Y, rtol=1e-12)


def test_multi_class_starts_with_signs() -> None:
    like = tf.zeros([3, 3], tf.float64)
    found = first_sites(gpflow.likelihoods.MultiClass(3), tf.constant([[2], [0], [1]]), like)
    expected = [[-1.0, -1.0, 1.0], [1.0, -1.0, -1.0], [-1.0, 1.0, -1.0]]
    np.testing.assert_array_equal(found.lambda_1, expected)
    np.testing.assert_array_equal(found.lambda_2, np.ones((3, 3)))


def test_bernoulli_starts_with_its_taylor_series() -> None:
    """``log Φ(±f)`` has the slope ``±2φ(0) = ±√(2/π)`` and the curvature ``−2/π`` at f = 0."""
    Y, like = tf.constant([[0.0], [1.0]], tf.float64), tf.ones([2, 1], tf.float64)
    found = first_sites(gpflow.likelihoods.Bernoulli(), Y, like)
    squeezed = 1.0 - 2e-3  # GPflow keeps probabilities from 0 and 1
    slope = squeezed * np.sqrt(2.0 / np.pi)
    np.testing.assert_allclose(found.lambda_1, [[-slope], [slope]], rtol=1e-12)
    np.testing.assert_allclose(found.lambda_2, np.full((2, 1), slope**2), rtol=1e-12)


def test_bernoulli_starts_near_under_a_wide_prior() -> None:
    """From zero sites 17 evaluations at these hyperparameters."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-2.0, 2.0, (200, 2))
    Y = (np.sin(2.0 * X[:, :1]) + 0.4 * rng.normal(size=(200, 1)) > 0.0).astype(float)
    kernel = gpflow.kernels.Matern52(lengthscales=2.0, variance=30.0)
    model = gh.CVIModel((X, Y), kernel, gpflow.likelihoods.Bernoulli())
    from_zero = model.infer()
    model.sites.assign(
        first_sites(model.likelihood, tf.constant(Y), tf.zeros([200, 1], tf.float64))
    )
    found = model.infer()
    assert found.num_evaluations < 0.6 * from_zero.num_evaluations
    np.testing.assert_allclose(found.elbo, from_zero.elbo, rtol=1e-8)


def test_others_start_from_zero() -> None:
    like = tf.ones([2, 1], tf.float64)
    found = first_sites(gpflow.likelihoods.Poisson(), tf.constant([[0.0], [1.0]]), like)
    assert not np.any(found.lambda_1)
    assert not np.any(found.lambda_2)


@pytest.mark.parametrize("name", ["student_t", "multiclass", "bernoulli_probit", "bernoulli_logit"])
def test_a_loss_does_not_depend_on_what_came_before(name: str) -> None:
    case, rng = CASES[name], np.random.default_rng(0)
    X = np.linspace(0.0, 3.0, 30)[:, None]
    data = (X, case.observe(np.sin(2.0 * X), rng))
    kernel = gpflow.kernels.Matern52(lengthscales=0.7)
    model = gh.CVIModel(data, kernel, case.make(), num_latent_gps=case.num_latent)
    first = float(model.training_loss())
    kernel.lengthscales.assign(0.1)
    model.training_loss()
    kernel.lengthscales.assign(0.7)
    np.testing.assert_allclose(float(model.training_loss()), first, rtol=1e-10)
