"""Sweeps of all the data and of blocks leave the posterior where it is."""

from __future__ import annotations

import gpflow
import numpy as np
import tensorflow as tf
from scipy import stats

from gpflow_hybrid.evidence.bases import FactoredPrior, conditionals, prior_base
from gpflow_hybrid.evidence.chains import NUM_KNOTS, AnnealedTarget, Chains, Path, advance
from gpflow_hybrid.evidence.schedules import NO_WARP
from gpflow_hybrid.evidence.settings import jittered_cholesky


def test_exact_draws_stay_exact_draws() -> None:
    # Strongly correlated data and blocks of two, the last of which overlaps with the one before.
    rng = np.random.default_rng(0)
    X = np.array([[0.0], [0.1], [0.3], [0.4], [0.7]])
    Y = np.array([[0.5], [1.0], [0.0], [-1.0], [0.3]])
    noise = 0.3
    K = gpflow.kernels.Matern52(2.0)(X).numpy()
    gain = np.linalg.solve(K + noise * np.eye(5), K).T
    mean, covariance = gain @ Y[:, 0], K - gain @ K

    num_chains = 20_000
    f = rng.multivariate_normal(mean, covariance, num_chains)
    prior = FactoredPrior(
        tf.zeros((1, 1, 5), tf.float64), jittered_cholesky(tf.constant(K))[None, None]
    )
    base = prior_base(prior)
    blocks = conditionals(prior, base.lambda_2, 2)
    likelihood = gpflow.likelihoods.Gaussian(noise)
    target = AnnealedTarget(likelihood, tf.constant(X), tf.constant(Y), base, blocks)
    chains = Chains(
        f[None, None],
        stats.norm.logpdf(Y[:, 0], f, np.sqrt(noise))[None],
        np.zeros((1, num_chains)),
        np.zeros((1, NUM_KNOTS)),
    )
    path = Path(1.0, 1.0, 5, 1.0, NO_WARP[None])
    after = advance(target, chains, path, 0, 5, 7)
    np.testing.assert_array_equal(after.log_weights, 0.0)
    moved = after.x[0, 0]
    np.testing.assert_allclose(
        after.values[0], stats.norm.logpdf(Y[:, 0], moved, np.sqrt(noise)), rtol=1e-8
    )
    assert np.all(moved != f)
    # Whitened, 20 000 draws: 0.007 standard deviations of a mean or a correlation, 0.01 of a variance.
    white = np.linalg.solve(np.linalg.cholesky(covariance), (moved - mean).T)
    np.testing.assert_allclose(white.mean(1), 0.0, atol=0.03)
    np.testing.assert_allclose(np.cov(white), np.eye(5), atol=0.04)
