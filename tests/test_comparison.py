"""The one-call answer to "which objective?"."""

from __future__ import annotations

import dataclasses

import gpflow
import numpy as np
import pytest

import gpflow_hybrid as gh
from tests.sparse_cases import sparse_problem


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
            fit.loo_log_predictive_density, np.mean(fit.model.loo_log_predictive_density())
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


def test_fits_that_did_not_converge_are_named(template, comparison):
    for fit in comparison.fits:
        assert fit.statuses == ("converged",) * 4  # three folds and all the data
    assert "did not converge" not in comparison.verdict
    hasty = gh.compare_objectives(template, ["ep_like"], num_folds=2, max_iterations=1)
    assert hasty["ep_like"].statuses == ("max_iterations",) * 3
    expected = (
        "ep_like: 3 of 3 fits did not converge: fold 1 (max_iterations), fold 2 (max_iterations), "
        "all data (max_iterations)."
    )
    assert expected in str(hasty)


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


def test_a_sparse_model_is_compared_on_the_data_given() -> None:
    problem = sparse_problem("probit_bernoulli", 60, 5)
    template = problem.model(mean_function=None)
    gpflow.set_trainable(template.inducing_variable, False)
    comparison = gh.compare_objectives(template, data=problem.data, num_folds=2)
    np.testing.assert_array_equal(template.sites.lambda_1, 0.0)
    for fit in comparison.fits:
        assert fit.model.objective == fit.objective
        np.testing.assert_array_equal(fit.model.inducing_variable.Z, problem.Z)
        np.testing.assert_allclose(fit.elbo, fit.model.elbo(problem.data))
        np.testing.assert_allclose(fit.ep_like, fit.model.ep_like_log_marginal(problem.data))
    assert comparison["elbo"].elbo > comparison["ep_like"].elbo
    assert comparison["ep_like"].ep_like > comparison["elbo"].ep_like
    X, Y = problem.data
    train, test = list(gh.datasets.folds(60, 2))[1]
    model = problem.model(mean_function=None)
    gpflow.set_trainable(model.inducing_variable, False)
    gpflow.optimizers.Scipy().minimize(
        model.training_loss_closure((X[train], Y[train])), model.trainable_variables
    )
    np.testing.assert_allclose(
        comparison["ep_like"].log_densities[test],
        model.predict_log_density((X[test], Y[test])),
        atol=1e-5,
    )
    assert "2-fold log predictive density" in str(comparison)
    assert "leave-one-out" not in str(comparison)


def test_data_go_with_sparse_models_only(template) -> None:
    problem = sparse_problem("probit_bernoulli")
    with pytest.raises(gh.InvalidDataError, match=r"Pass data=\(X, Y\)"):
        gh.compare_objectives(problem.model())
    with pytest.raises(gh.InvalidDataError, match="left out for CVIModel, which has its own"):
        gh.compare_objectives(template, data=problem.data)
    with pytest.raises(gh.InvalidDataError, match="Y must be 0 or 1"):
        gh.compare_objectives(problem.model(), data=(problem.X, problem.Y + 1.0))


def test_hyperparameters_integrated_beside_the_optimum():
    rng = np.random.default_rng(0)
    X = rng.uniform(0.0, 4.0, size=(24, 1))
    Y = (np.sin(2 * X) + 0.4 * rng.normal(size=X.shape) > 0).astype(float)
    model = gh.CVIModel((X, Y), gpflow.kernels.Matern52(), gh.likelihoods.ProbitBernoulli())
    comparison = gh.compare_objectives(model, ("ep_like",), num_folds=2, integrate=True)
    (fit,) = comparison.fits
    expected = gh.integrate_hyperparameters(model)
    assert abs(fit.integrated.log_evidence - expected.log_evidence) < 5e-3  # from another start
    (train, test), _ = gh.datasets.folds(24, 2)
    part = gh.CVIModel(
        (X[train], Y[train]), gpflow.kernels.Matern52(), gh.likelihoods.ProbitBernoulli()
    )
    densities = gh.integrate_hyperparameters(part).predict_log_density((X[test], Y[test]))
    np.testing.assert_allclose(fit.integrated_log_densities[test], densities, atol=5e-3)
    difference = np.mean(fit.integrated_log_densities - fit.log_densities)
    assert f"Hyperparameters of ep_like integrated over optimised: {difference:+.4f}" in str(
        comparison
    )
    assert "with integrated hyperparameters" in str(comparison)
