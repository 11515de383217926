"""The one-call answer to "which objective?"."""

from __future__ import annotations

import dataclasses

import gpflow
import numpy as np
import pytest

import gpflow_hybrid as gh


@pytest.fixture(scope="module")
def template() -> gh.CVIModel:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 2))
    Y = (np.sin(2 * X[:, :1]) + 0.4 * rng.normal(size=(60, 1)) > 0).astype(float)
    return gh.CVIModel((X, Y), gpflow.kernels.Matern52(), gh.likelihoods.ProbitBernoulli())


@pytest.fixture(scope="module")
def comparison(template) -> gh.ObjectiveComparison:
    return gh.compare_objectives(template, num_folds=3)


def test_template_is_untouched(template, comparison):
    np.testing.assert_array_equal(template.sites.lambda_1, 0.0)
    assert float(template.kernel.variance.numpy()) == pytest.approx(1.0)


def test_numbers_are_those_of_the_fitted_models(comparison):
    for objective in ("elbo", "ep_like"):
        fit = comparison[objective]
        assert fit.model.objective == objective
        np.testing.assert_allclose(fit.elbo, fit.model.elbo())
        np.testing.assert_allclose(fit.ep_like, fit.model.ep_like_log_marginal())
        np.testing.assert_allclose(
            fit.hyperparameters[".kernel.variance"], fit.model.kernel.variance
        )
        np.testing.assert_allclose(
            fit.leave_one_out, np.mean(fit.model.loo_log_predictive_density())
        )
    # Each objective is best at its own optimum.
    assert comparison["elbo"].elbo > comparison["ep_like"].elbo
    assert comparison["ep_like"].ep_like > comparison["elbo"].ep_like


def test_cross_validation_is_held_out(template, comparison):
    X, Y = (d.numpy() for d in template.data)
    train, test = list(gh.datasets.folds(len(X), 3))[1]
    model = gh.CVIModel(
        (X[train], Y[train]), gpflow.kernels.Matern52(), gh.likelihoods.ProbitBernoulli()
    )
    gpflow.optimizers.Scipy().minimize(model.training_loss, model.trainable_variables)
    np.testing.assert_allclose(
        comparison["ep_like"].log_densities[test],
        model.predict_log_density((X[test], Y[test])),
        atol=1e-5,
    )


def test_prints_a_table_and_a_verdict(comparison):
    text = str(comparison)
    for word in ("ELBO", "EP-like", "3-fold", "optimistic", ".kernel.lengthscales", "seconds"):
        assert word in text
    difference = comparison["elbo"].log_densities - comparison["ep_like"].log_densities
    error = np.std(difference, ddof=1) / np.sqrt(len(difference))
    assert ("within the noise" in text) == (abs(np.mean(difference)) < 2 * error)


def test_verdict_names_a_clear_winner(comparison):
    elbo, ep_like = comparison.fits
    worse = dataclasses.replace(elbo, log_densities=ep_like.log_densities - 1.0)
    verdict = gh.ObjectiveComparison((worse, ep_like), 3).verdict
    assert "ep_like predicts better" in verdict
    assert "+1.0000" in verdict


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"objectives": ["elbo", "map"]}, "objective must be"),
        ({"objectives": []}, "objectives must be distinct"),
        ({"objectives": ["elbo", "elbo"]}, "objectives must be distinct"),
        ({"num_folds": 1}, "num_folds must be an integer between 2"),
        ({"num_folds": 61}, "num_folds must be an integer between 2"),
    ],
)
def test_bad_arguments(template, arguments, match):
    with pytest.raises(gh.InvalidDataError, match=match):
        gh.compare_objectives(template, **arguments)


def test_unknown_objective_of_a_result(comparison):
    with pytest.raises(KeyError, match="was not compared"):
        comparison[0.5]
