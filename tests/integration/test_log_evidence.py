"""The evidence of a model class against sampling, θ included."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import multivariate_t

import gpflow_hybrid as gh
from tests.integration.cases import classifier


@pytest.mark.slow
def test_against_annealed_importance_sampling_over_f_and_hyperparameters() -> None:
    """``∫ p(y|θ) p(θ) dθ`` with ``p(y|θ)`` by AIS and θ from a wide Student-t: unbiased for it."""
    model = classifier()
    found = gh.integrate_hyperparameters(model)
    x = found.draws.x
    mean = found.draws.weights @ x
    covariance = (x - mean).T @ (found.draws.weights[:, None] * (x - mean))
    proposal = multivariate_t(mean, 1.3 * covariance, df=6, seed=0)
    draws = proposal.rvs(120)
    values = found.mixture.values(draws)
    settings = [{path: v[i] for path, v in values.items()} for i in range(len(draws))]
    sampled = gh.annealed_importance_sampling(
        model, hyperparameters=settings, num_chains=32, seed=0
    )
    log_v, log_l = (np.log(values[p]) for p in (".kernel.variance", ".kernel.lengthscales"))
    prior = np.asarray(model.kernel.variance.prior.log_prob(np.exp(log_v))) + log_v
    prior += np.asarray(model.kernel.lengthscales.prior.log_prob(np.exp(log_l))) + log_l
    logs = sampled.log_marginal_likelihood + prior - proposal.logpdf(draws)
    estimate = logsumexp(logs) - np.log(len(logs))
    weights = np.exp(logs - logs.max())
    error = np.std(weights) / np.mean(weights) / np.sqrt(len(weights))
    assert error < 0.1
    # EP-like values are a few thousandths of a nat per datum from AIS, here 16 data.
    assert abs(found.log_evidence - estimate) < 3.0 * error + 0.05
