"""GPR against brute-force quadrature over its hyperparameters."""

from __future__ import annotations

from typing import NamedTuple

import gpflow
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from gpflow.base import PriorOn
from scipy.spatial.distance import pdist
from scipy.special import logsumexp
from scipy.stats import norm

import gpflow_hybrid as gh
from tests.integration.cases import exact_model, regression_data

X_NEW = np.linspace(-1.0, 4.0, 9)[:, None]
NEW = X_NEW, np.sin(2.0 * X_NEW)


class BruteForce(NamedTuple):
    log_evidence: float
    densities: np.ndarray
    mean: np.ndarray
    variance: np.ndarray
    quantiles: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def brute_force() -> BruteForce:
    """``p(y|θ) p(θ)`` summed over 121 × 121 settings, 14 standard deviations wide."""
    model = exact_model()
    log_v = np.linspace(-7.0, 5.0, 121)
    centre = np.log(np.median(pdist(regression_data()[0])))
    log_l = centre + np.linspace(-6.5, 6.5, 121)

    @tf.function
    def at(lengthscale: tf.Tensor, variance: tf.Tensor) -> tuple[tf.Tensor, ...]:
        model.kernel.lengthscales.assign(lengthscale)
        model.kernel.variance.assign(variance)
        moments = model.predict_f(X_NEW)
        return model.log_marginal_likelihood(), model.predict_log_density(NEW), *moments

    found = [at(tf.constant(np.exp(b)), tf.constant(np.exp(a))) for a in log_v for b in log_l]
    likelihood, each, mean, variance = (
        np.stack([np.squeeze(x) for x in p]) for p in zip(*found, strict=True)
    )
    gamma = tfp.distributions.Gamma(np.float64(2.0), np.float64(1.0))
    # Densities in the logarithms: those of the parameters times the parameters.
    prior_v = np.asarray(gamma.log_prob(np.exp(log_v))) + log_v
    prior_l = norm.logpdf(log_l, centre, 1.5)
    joint = likelihood + np.add.outer(prior_v, prior_l).ravel()
    total = logsumexp(joint)
    w = np.exp(joint - total)
    area = (log_v[1] - log_v[0]) * (log_l[1] - log_l[0])
    m = w @ mean
    table = w.reshape(121, 121)
    levels = [0.025, 0.25, 0.5, 0.75, 0.975]

    def quantiles(values: np.ndarray, mass: np.ndarray) -> np.ndarray:
        return np.interp(levels, np.cumsum(mass) - 0.5 * mass, np.exp(values))

    return BruteForce(
        float(total + np.log(area)),
        np.exp(logsumexp(each + (joint - total)[:, None], axis=0)),
        m,
        w @ (variance + (mean - m) ** 2),
        {
            ".kernel.variance": quantiles(log_v, table.sum(1)),
            ".kernel.lengthscales": quantiles(log_l, table.sum(0)),
        },
    )


@pytest.fixture(scope="module")
def integrated() -> gh.HyperparameterPosterior:
    return gh.integrate_hyperparameters(exact_model(), tolerance=1e-3)


def test_predictive_densities_and_moments(
    integrated: gh.HyperparameterPosterior, brute_force: BruteForce
) -> None:
    assert integrated.converged
    densities = np.exp(integrated.predict_log_density(NEW))
    np.testing.assert_allclose(densities, brute_force.densities, atol=2e-4)
    # What is asked for is had: a tolerance of 1e-4 gives 1e-4.
    finer = gh.integrate_hyperparameters(exact_model(), tolerance=1e-4)
    densities = np.exp(finer.predict_log_density(NEW))
    np.testing.assert_allclose(densities, brute_force.densities, atol=1e-4)
    mean, variance = (np.squeeze(x) for x in finer.predict_f(X_NEW))
    np.testing.assert_allclose(mean, brute_force.mean, atol=1e-4)
    np.testing.assert_allclose(variance, brute_force.variance, atol=1e-4, rtol=1e-3)  # a far tail
    assert finer.num_evaluations > integrated.num_evaluations


def test_log_evidence(integrated: gh.HyperparameterPosterior, brute_force: BruteForce) -> None:
    assert abs(integrated.log_evidence - brute_force.log_evidence) < 1e-3  # its tolerance


def test_quantiles_of_the_marginals(
    integrated: gh.HyperparameterPosterior, brute_force: BruteForce
) -> None:
    for name, expected in brute_force.quantiles.items():
        # Draws from an interpolated density: a few per cent in the far tails.
        found = list(integrated[name].quantiles.values())
        np.testing.assert_allclose(found, expected, rtol=0.03)


def test_the_bijector_does_not_matter(integrated: gh.HyperparameterPosterior) -> None:
    other = gh.integrate_hyperparameters(exact_model(tfp.bijectors.Exp()), tolerance=1e-3)
    assert abs(other.log_evidence - integrated.log_evidence) < 1e-6
    np.testing.assert_allclose(
        other.predict_log_density(NEW), integrated.predict_log_density(NEW), atol=1e-5
    )
    for one, two in zip(integrated.marginals, other.marginals, strict=True):
        np.testing.assert_allclose(
            list(one.quantiles.values()), list(two.quantiles.values()), rtol=1e-4
        )


def test_a_prior_of_the_unconstrained_value_is_the_same_as_that_of_the_parameter() -> None:
    """``log θ ~ N`` on the unconstrained variable of an exp bijector is ``θ ~ log-normal``."""
    models = []
    for prior_on, kind in (
        (PriorOn.CONSTRAINED, tfp.distributions.LogNormal),
        (PriorOn.UNCONSTRAINED, tfp.distributions.Normal),
    ):
        model = exact_model(tfp.bijectors.Exp())
        model.kernel.variance.prior = kind(np.float64(0.3), np.float64(0.7))
        model.kernel.variance.prior_on = prior_on
        gpflow.set_trainable(model.kernel.lengthscales, False)
        models.append(gh.integrate_hyperparameters(model))
    one, two = models
    assert abs(one.log_evidence - two.log_evidence) < 1e-8
    assert "unconstrained" in two.priors[".kernel.variance"]


def test_chains_agree_with_the_lattice(integrated: gh.HyperparameterPosterior) -> None:
    chains = gh.integrate_hyperparameters(exact_model(), method="hmc", num_samples=300)
    assert chains.converged
    assert chains.chains is not None
    assert np.max(chains.chains.r_hat) < 1.05
    assert chains.chains.num_divergences == 0
    size = chains.chains.effective_sample_size
    for one, two, n in zip(integrated.marginals, chains.marginals, size, strict=True):
        assert abs(one.mean - two.mean) < 4.0 * two.deviation / np.sqrt(n)
        np.testing.assert_allclose(one.quantiles[0.5], two.quantiles[0.5], rtol=0.15)
    assert abs(chains.log_evidence - integrated.log_evidence) < 4.0 * chains.log_evidence_error
    assert 0.0 < chains.log_evidence_error < 0.1
    # A hundred settings of equal weight: their error is a tenth of the spread over settings.
    each = np.stack([np.exp(m.predict_log_density(NEW)) for m in chains.mixture.models()])
    error = each.std(0) / np.sqrt(len(each))
    difference = np.exp(chains.predict_log_density(NEW)) - np.exp(
        integrated.predict_log_density(NEW)
    )
    assert np.all(np.abs(difference) < 4.0 * error + 2e-4)


def test_the_model_is_left_untouched(integrated: gh.HyperparameterPosterior) -> None:
    model = exact_model()
    prior = model.kernel.variance.prior
    gh.integrate_hyperparameters(model, tolerance=0.1)
    assert model.kernel.variance.prior is prior
    assert model.kernel.lengthscales.prior is None
    assert model.kernel.lengthscales.numpy() == 1.0
