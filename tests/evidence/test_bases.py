"""The Gaussian that annealing starts from, against the package's own algebra and dense inverses."""

from __future__ import annotations

import gpflow
import numpy as np
import pytest
import tensorflow as tf

from gpflow_hybrid.errors import NonFiniteError
from gpflow_hybrid.evidence.bases import FactoredPrior, conditionals, marginal_variance, site_base
from gpflow_hybrid.evidence.settings import jittered_cholesky
from gpflow_hybrid.linalg import marginals

from .. import reference


def problem(num_data: int = 7) -> tuple[np.ndarray, FactoredPrior, np.ndarray, np.ndarray]:
    """Two latents with one kernel, sites of both signs, a prior mean."""
    rng = np.random.default_rng(0)
    X = rng.uniform(0, 5, (num_data, 1))
    K = gpflow.kernels.Matern52(2.0)(X).numpy()
    mean = rng.standard_normal((num_data, 2))
    lambda_1, lambda_2 = rng.standard_normal((2, num_data, 2))
    lambda_2 = np.where(lambda_2 < 0, 0.05 * lambda_2, lambda_2)
    prior = FactoredPrior(tf.constant(mean.T[None]), jittered_cholesky(tf.constant(K))[None, None])
    return K, prior, lambda_1, lambda_2


def test_site_base_is_the_posterior_of_the_sites() -> None:
    K, prior, lambda_1, lambda_2 = problem()
    assert np.any(lambda_2 < 0)
    base = site_base(prior, *(tf.constant(x.T[None]) for x in (lambda_1, lambda_2)))
    expected = reference.posterior(K[None], prior.mean[0].numpy().T, lambda_1, lambda_2)
    np.testing.assert_allclose(base.mean[0], expected.mean.T, rtol=1e-6)
    np.testing.assert_allclose(marginal_variance(base)[0], expected.variance.T, rtol=1e-6)
    np.testing.assert_allclose(base.log_normaliser[0], expected.log_normaliser, rtol=1e-8)
    F = tf.linalg.matrix_transpose(base.factor_t[0])
    np.testing.assert_allclose(F @ base.factor_t[0], expected.covariance, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("block_size", [1, 3, 7, 9])
def test_conditionals(block_size: int) -> None:
    K, prior, _, lambda_2 = problem()
    blocks = conditionals(prior, tf.constant(lambda_2.T[None]), block_size)
    N = len(K)
    if block_size >= N:
        assert blocks.start.shape == (0,)
        return
    starts = blocks.start.numpy()
    covered = np.concatenate([np.arange(s, s + block_size) for s in starts])
    assert set(covered) == set(range(N))
    for i, start in enumerate(starts):
        own = np.arange(start, start + block_size)
        rest = np.setdiff1d(np.arange(N), own)
        for latent in range(2):
            Sigma = np.linalg.inv(np.linalg.inv(K) + np.diag(lambda_2[:, latent]))
            W = np.linalg.solve(Sigma[np.ix_(rest, rest)], Sigma[np.ix_(rest, own)])
            S = Sigma[np.ix_(own, own)] - Sigma[np.ix_(own, rest)] @ W
            found = blocks.weights[i, 0, latent].numpy()
            np.testing.assert_allclose(found[rest], W, rtol=1e-6, atol=1e-9)
            np.testing.assert_array_equal(found[own], 0.0)
            factor_t = blocks.factor_t[i, 0, latent].numpy()
            np.testing.assert_allclose(factor_t.T @ factor_t, S, rtol=1e-6, atol=1e-9)


def test_the_jitter_is_negligible() -> None:
    # 60 points within two lengthscales: K is singular to working precision.
    rng = np.random.default_rng(1)
    X = rng.uniform(0, 2, (60, 1))
    K = 1e4 * gpflow.kernels.SquaredExponential()(X)
    lambda_1, lambda_2 = rng.standard_normal((60, 1)), rng.uniform(0.1, 1, (60, 1))
    zero = tf.zeros((60, 1), tf.float64)
    expected = marginals(K[None], zero, tf.constant(lambda_1), tf.constant(lambda_2))
    prior = FactoredPrior(tf.transpose(zero)[None], jittered_cholesky(K)[None, None])
    base = site_base(prior, *(tf.constant(x.T[None]) for x in (lambda_1, lambda_2)))
    np.testing.assert_allclose(base.log_normaliser[0], expected.log_normaliser, rtol=1e-7)
    np.testing.assert_allclose(base.mean[0, 0], expected.mean[:, 0], rtol=1e-5, atol=1e-6)


def test_matrices_without_a_factor_are_refused() -> None:
    with pytest.raises(NonFiniteError, match="not positive semi-definite"):
        jittered_cholesky(tf.constant([[1.0, 2.0], [2.0, 1.0]], tf.float64))
    with pytest.raises(NonFiniteError, match="not finite"):
        jittered_cholesky(tf.constant([[np.nan]], tf.float64))
