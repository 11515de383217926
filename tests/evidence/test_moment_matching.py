"""Sites that match moments, and what happens where there are none."""

from __future__ import annotations

import gpflow
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

import gpflow_hybrid as gh
from gpflow_hybrid.evidence import annealed_batch, annealed_importance_sampling
from gpflow_hybrid.evidence.bases import FactoredPrior, marginal_variance, site_base
from gpflow_hybrid.evidence.moment_matching import MatchedSites, match_moments
from gpflow_hybrid.evidence.settings import jittered_cholesky

from .quadrature import integrate

PROBIT = gh.likelihoods.ProbitBernoulli()


def test_q_has_the_moments_of_the_posterior() -> None:
    # One datum: matching its moments is exact. Two settings, of which one is wide.
    X, Y = np.zeros((1, 1)), np.ones((1, 1))
    variances = np.array([1.0, 100.0])
    chol = tf.constant(np.sqrt(variances)[:, None, None, None])
    prior = FactoredPrior(tf.zeros((2, 1, 1), tf.float64), chol)
    lambda_1, lambda_2, usable = match_moments(PROBIT, tf.constant(X), tf.constant(Y), prior)
    assert np.all(usable)
    base = site_base(prior, lambda_1, lambda_2)
    for g, variance in enumerate(variances):
        truth = integrate(
            np.zeros(1),
            np.full((1, 1), variance),
            lambda f: stats.norm.logcdf(f[:, 0]),
            num=20_001,
        )
        w = np.exp(truth.log_weights)
        mean = w @ truth.f[:, 0]
        # Matching stops at a residual of 1e-3.
        np.testing.assert_allclose(base.mean[g, 0, 0], mean, rtol=2e-3)
        expected = w @ np.square(truth.f[:, 0] - mean)
        np.testing.assert_allclose(marginal_variance(base)[g, 0, 0], expected, rtol=2e-3)


def test_student_t_has_negative_sites() -> None:
    X, Y = np.array([[0.0], [0.3], [0.6]]), np.array([[0.1], [4.0], [0.2]])
    chol = jittered_cholesky(gpflow.kernels.Matern32(1.0)(X))
    prior = FactoredPrior(tf.zeros((1, 1, 3), tf.float64), chol[None, None])
    likelihood = gpflow.likelihoods.StudentT(scale=0.3)
    _, lambda_2, usable = match_moments(likelihood, tf.constant(X), tf.constant(Y), prior)
    assert np.all(usable)
    assert lambda_2[0, 0, 1] < 0


@pytest.mark.parametrize("own_inference_works", [True, False])
def test_any_start_gives_the_right_answer(monkeypatch, own_inference_works: bool) -> None:
    def no_match(likelihood, X, Y, prior: FactoredPrior) -> MatchedSites:
        nan = tf.fill(tf.shape(prior.mean), tf.constant(np.nan, tf.float64))
        return MatchedSites(nan, nan, tf.fill([prior.mean.shape[0]], False))

    def fails(self) -> None:
        raise gh.InvalidPosteriorError("no")

    monkeypatch.setattr(annealed_batch, "match_moments", no_match)
    if not own_inference_works:
        monkeypatch.setattr(gh.CVIModel, "infer", fails)
    X, Y = np.array([[0.0], [0.5]]), np.array([[1.0], [0.0]])
    kernel = gpflow.kernels.Matern52(4.0)
    truth = integrate(
        np.zeros(2),
        kernel(X).numpy(),
        lambda f: stats.norm.logcdf(f[:, 0]) + stats.norm.logcdf(-f[:, 1]),
    )
    result = annealed_importance_sampling(
        gh.CVIModel((X, Y), kernel, PROBIT), num_temperatures=30, num_chains=2000, num_samples=0
    )
    assert result.standard_error < 0.02
    assert abs(result.log_marginal_likelihood - truth.log_marginal) < 3.5 * result.standard_error
