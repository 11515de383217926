"""EPModel converges where it can, backs off where it must, and says so."""

from __future__ import annotations

import gpflow
import numpy as np
import pytest
import tensorflow as tf

import gpflow_hybrid as gh
from gpflow_hybrid.sites import SiteValues
from tests import reference
from tests.likelihood_cases import CASES

# One instance each: their compiled graphs are reused.
PROBIT, STUDENT = (CASES[name].make() for name in ("probit_bernoulli", "student_t"))

N = 12


def probit_model(variance: float = 1.5) -> gh.EPModel:
    X = np.linspace(-2.0, 2.0, N)[:, None]
    Y = (np.sin(2.0 * X) + 0.3 * np.random.default_rng(7).normal(size=X.shape) > 0.0).astype(float)
    return gh.EPModel((X, Y), gpflow.kernels.Matern52(variance=variance), PROBIT)


def fold(name: str) -> tuple[np.ndarray, np.ndarray]:
    """The first training fold of a data set."""
    X, Y = gh.datasets.load(name)
    train, _ = next(iter(gh.datasets.folds(len(X))))
    return gh.datasets.standardise(X[train])[0], Y[train]


def student_model(Y: np.ndarray, reach: float) -> gh.EPModel:
    X = np.linspace(0.0, reach, len(Y))[:, None]
    return gh.EPModel((X, Y), gpflow.kernels.SquaredExponential(), STUDENT)


def test_gross_outliers_have_negative_sites() -> None:
    Y = np.sin(np.linspace(0.0, 6.0, N))[:, None]
    outliers = [2, 9]
    Y[outliers] += [[20.0], [-15.0]]
    model = student_model(Y, 6.0)
    result = model.infer()
    assert result.converged, result.message
    lambda_2 = model.sites.lambda_2.numpy()
    assert np.all(lambda_2[outliers] < 0.0)
    assert result.num_negative_sites == np.sum(lambda_2 < 0.0) >= 2
    _, variance = model.predict_f(model.data[0])
    np.testing.assert_allclose(
        result.min_cavity_precision, np.min(1.0 / variance - lambda_2), rtol=1e-6
    )
    assert result.min_cavity_precision > 0.0
    np.testing.assert_allclose(result.elbo, model.elbo(), rtol=1e-10)


def test_a_label_against_all_others_has_a_negative_site() -> None:
    # GPflow's squeezed link is convex where the label is hopeless.
    X = np.linspace(-1.0, 1.0, 40)[:, None]
    Y = np.ones_like(X)
    Y[20] = 0.0
    kernel = gpflow.kernels.SquaredExponential(variance=9.0, lengthscales=2.0)
    model = gh.EPModel((X, Y), kernel, gpflow.likelihoods.Bernoulli())
    result = model.infer()
    assert result.converged, result.message
    np.testing.assert_array_equal(np.flatnonzero(model.sites.lambda_2.numpy() < 0.0), [20])
    assert result.num_negative_sites == 1
    # The value of thirty sweeps of reference.expectation_propagation, which take seconds.
    np.testing.assert_allclose(model.log_marginal_likelihood(), -7.667153747, atol=1e-6)


def outliers_at_one_input(signs: str) -> gh.EPModel:
    """Each alone may widen q; all at once leave K⁻¹ + Λ indefinite."""
    Y = np.full((N, 1), 5.0)
    if signs == "alternating":
        Y[::2] *= -1.0
    return student_model(Y, 0.1)


@pytest.mark.parametrize("signs", ["same", "alternating"])
def test_backs_off_where_a_full_update_leaves_no_posterior(signs: str) -> None:
    model = outliers_at_one_input(signs)
    Y = model.data[1].numpy()
    K, mean = (x.numpy() for x in model.prior())
    v = np.diagonal(K[0])[:, None]
    zero = np.zeros_like(v)
    full = reference.tilted(mean, v, zero, zero, Y, reference.LOG_PROBS["student_t"], 1.0)
    assert reference.smallest_eigenvalue(K, 1.0 / full.variance - 1.0 / v) < 0.0
    result = model.infer()
    assert result.converged, result.message
    taken_back = result.num_evaluations - 1 - result.num_steps
    assert taken_back > 0
    assert f"{taken_back} step" in result.message
    assert "taken back" in result.message
    assert reference.smallest_eigenvalue(K, model.sites.lambda_2.numpy()) > 0.0
    assert result.min_cavity_precision > 0.0


@pytest.mark.parametrize("signs", ["same", "alternating"])
def test_the_best_sites_seen_are_kept(signs: str) -> None:
    # A step may raise the residual on the way: never that of the sites the model is left with.
    model = outliers_at_one_input(signs)
    residuals = []
    for max_steps in range(1, 26):
        model.sites.reset(N)
        residuals.append(model.infer(max_steps=max_steps).residual)
    assert np.all(np.diff(residuals) <= 0.0)
    assert residuals[-1] < 0.1 * residuals[0]


def test_fifty_random_starts_have_one_end() -> None:
    model = probit_model()
    model.infer(tolerance=1e-9)
    expected = np.stack(model.sites.values)
    rng = np.random.default_rng(4)
    for start in range(50):
        sites = rng.normal(scale=3.0, size=(N, 1)), rng.gamma(0.5, 2.0, size=(N, 1))
        model.sites.assign(SiteValues(*(tf.constant(x) for x in sites)))
        result = model.infer(tolerance=1e-9)
        assert result.converged, (start, result)
        assert result.num_evaluations <= 40
        np.testing.assert_allclose(np.stack(model.sites.values), expected, rtol=1e-6, atol=1e-6)


def test_too_few_steps_keep_the_best_sites() -> None:
    model = probit_model(100.0)
    result = model.infer(max_steps=3)
    assert not result.converged
    assert result.num_evaluations == 4
    assert "max_steps" in result.message
    again = model.infer(max_steps=200)
    assert again.converged
    assert again.residual < 1e-6 < result.residual
    finished = model.infer()
    assert (finished.num_steps, finished.num_evaluations) == (0, 1)


def test_impossible_starts_are_refused_in_words() -> None:
    model = probit_model()
    model.sites.lambda_2.assign(np.full((N, 1), -5.0))
    with pytest.raises(gh.InvalidPosteriorError, match=r"no valid q\(f\).*-5 at datum"):
        model.infer()
    lambda_2 = np.full((N, 1), -0.2)
    lambda_2[3] = 50.0  # all that keeps q proper: without it there is none
    model.kernel.lengthscales.assign(5.0)
    model.kernel.variance.assign(0.7)
    model.sites.lambda_2.assign(lambda_2)
    model.elbo()  # q exists
    with pytest.raises(gh.InvalidPosteriorError, match="cavity of datum 3"):
        model.infer()
    np.testing.assert_array_equal(model.sites.lambda_2, lambda_2)


@pytest.mark.parametrize("log_sigma", [-1.0, 0.5, 2.0, 3.5, 5.0])
def test_converges_on_the_grid_of_the_paper(log_sigma: float) -> None:
    data = fold("sonar")
    for log_lengthscale in [-1.0, 0.5, 2.0, 3.5, 5.0]:
        kernel = gpflow.kernels.Matern52(np.exp(2.0 * log_sigma), np.exp(log_lengthscale))
        result = gh.EPModel(data, kernel, PROBIT).infer()
        assert result.converged, (log_lengthscale, result.message)
        assert result.num_evaluations <= 30


@pytest.mark.slow
@pytest.mark.parametrize(("name", "most"), [("sonar", 30), ("ionosphere", 65)])
def test_converges_on_the_whole_grid(name: str, most: int) -> None:
    data = fold(name)
    model = gh.EPModel(data, gpflow.kernels.Matern52(), PROBIT)
    axis = np.exp(np.linspace(-1.0, 5.0, 21))
    for lengthscale, sigma in np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2):
        model.kernel.lengthscales.assign(lengthscale)
        model.kernel.variance.assign(sigma**2)
        model.sites.reset(len(data[0]))
        result = model.infer()
        assert result.converged, (lengthscale, sigma, result.message)
        assert result.num_evaluations <= most
