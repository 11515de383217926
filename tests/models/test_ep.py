"""EPModel finds the fixed point of expectation propagation: values from elsewhere, exact cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf
from scipy.special import log_ndtr

import gpflow_hybrid as gh
from tests import reference
from tests.likelihood_cases import CASES

RECORDED = json.loads((Path(__file__).parents[1] / "recorded" / "gpy_ep.json").read_text())

# One instance each: their compiled graphs are reused.
LIKELIHOODS = {name: CASES[name].make() for name in reference.LOG_PROBS}
PROBIT = LIKELIHOODS["probit_bernoulli"]

N = 12

FAST = [("beta", 0.5), ("bernoulli_probit", 1.0)]
"""A trace takes seconds: the other likelihoods and powers are slow tests."""


def make_model(name: str, alpha: float = 1.0, variance: float = 1.5, **kwargs: Any) -> gh.EPModel:
    """Twelve observations of a sine, with a mean function."""
    rng = np.random.default_rng(sorted(CASES).index(name))
    X = np.linspace(-2.0, 2.0, N)[:, None]
    return gh.EPModel(
        (X, CASES[name].observe(np.sin(2.0 * X), rng)),
        gpflow.kernels.Matern52(variance=variance),
        LIKELIHOODS[name],
        gpflow.functions.Constant(0.2),
        alpha=alpha,
        **kwargs,
    )


def prior_of(model: gh.EPModel) -> tuple[np.ndarray, np.ndarray]:
    return tuple(x.numpy() for x in model.prior())


def sites_of(model: gh.EPModel) -> tuple[np.ndarray, np.ndarray]:
    return tuple(x.numpy() for x in model.sites.values)


def gpy_data(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    recorded = RECORDED[name]
    if name == "small":
        return tuple(np.array(recorded[key])[:, None] for key in ("X", "Y", "X_new"))
    X, Y = gh.datasets.load(name)
    train, _ = next(iter(gh.datasets.folds(len(X))))
    X_train, X_new = gh.datasets.standardise(X[train], X[recorded["new_rows"]])
    return X_train, Y[train], X_new


@pytest.mark.parametrize("name", ["small", "sonar", "ionosphere"])
def test_values_and_predictions_are_gpys(name: str) -> None:
    X, Y, X_new = gpy_data(name)
    model = gh.EPModel((X, Y), gpflow.kernels.Matern52(), PROBIT)
    for case in RECORDED[name]["cases"]:
        model.kernel.lengthscales.assign(np.exp(case["log_lengthscale"]))
        model.kernel.variance.assign(np.exp(2.0 * case["log_sigma"]))
        assert model.infer(tolerance=1e-8).converged
        value = case["log_marginal_likelihood"]
        np.testing.assert_allclose(model.log_marginal_likelihood(), value, rtol=0.0, atol=1e-7)
        mean, variance = model.predict_f(X_new)
        np.testing.assert_allclose(mean[:, 0], case["f_mean"], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(variance[:, 0], case["f_variance"], rtol=1e-6)
        probability, _ = model.predict_y(X_new)
        np.testing.assert_allclose(probability[:, 0], case["probability"], atol=1e-7)


@pytest.mark.parametrize(
    ("name", "alpha"), [("probit_bernoulli", 1.0), ("student_t", 1.0), ("poisson", 0.5)]
)
def test_sequential_ep_has_the_same_fixed_point(name: str, alpha: float) -> None:
    model = make_model(name, alpha)
    assert model.infer(tolerance=1e-10).converged
    K, mean = prior_of(model)
    Y, log_prob = model.data[1].numpy(), reference.LOG_PROBS[name]
    expected = reference.expectation_propagation(K, mean, Y, log_prob, alpha)
    for found, site in zip(sites_of(model), expected, strict=True):
        np.testing.assert_allclose(found, site, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(
        model.log_marginal_likelihood(),
        reference.power_ep(K, mean, *expected, Y, log_prob, alpha),
        rtol=1e-9,
    )


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_gaussian_is_gpr_after_one_step(alpha: float) -> None:
    rng = np.random.default_rng(1)
    X = rng.uniform(-2.0, 2.0, (N, 2))
    Y = np.sin(2.0 * X) + 0.2 * rng.normal(size=(N, 2))

    def parts() -> tuple[Any, Any]:
        kernel = gpflow.kernels.Matern52(variance=0.9, lengthscales=[0.7, 1.3])
        return kernel, gpflow.functions.Linear(np.full((2, 2), 0.3), [0.2, -0.2])

    kernel, mean = parts()
    gpr = gpflow.models.GPR((X, Y), kernel, mean, noise_variance=0.1)
    kernel, mean = parts()
    model = gh.EPModel((X, Y), kernel, gpflow.likelihoods.Gaussian(0.1), mean, alpha=alpha)
    result = model.infer()
    assert result.converged
    assert result.num_steps == 1
    assert result.residual < 1e-12
    evidence = gpr.log_marginal_likelihood()
    np.testing.assert_allclose(model.log_marginal_likelihood(), evidence, rtol=1e-10)
    np.testing.assert_allclose(result.elbo, evidence, rtol=1e-10)
    X_new = rng.uniform(-2.0, 2.0, (5, 2))
    for full_cov in (False, True):
        for found, expected in zip(
            model.predict_f(X_new, full_cov), gpr.predict_f(X_new, full_cov), strict=True
        ):
            np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-10)
    if alpha == 1.0:
        return
    gradients = []
    for m in (model, gpr):
        with tf.GradientTape() as tape:
            loss = m.training_loss()
        gradients.append(tape.gradient(loss, m.trainable_variables))
    for found, expected in zip(*gradients, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "alpha"), [("probit_bernoulli", 1.0), ("student_t", 1.0), ("poisson", 0.5)]
)
def test_exact_where_data_do_not_interact(name: str, alpha: float) -> None:
    # A diagonal K: q factorises, the cavities are the prior, and at α = 1 the value is log p(y).
    model = make_model(name, alpha)
    model.kernel.lengthscales.assign(1e-3)
    assert model.infer(tolerance=1e-10).converged
    m, v = (np.full((N, 1), x) for x in (0.2, 1.5))
    Y, log_prob = model.data[1].numpy(), reference.LOG_PROBS[name]
    exact = np.sum(reference.log_expected_power(m, v, Y, log_prob, 1.0))
    value = float(model.log_marginal_likelihood())
    if alpha == 1.0:
        np.testing.assert_allclose(value, exact, rtol=1e-9)
        zero = np.zeros_like(m)
        expected = reference.tilted(m, v, zero, zero, Y, log_prob, 1.0)
        mean, variance = model.predict_f(model.data[0])
        np.testing.assert_allclose(mean, expected.mean, rtol=1e-7, atol=1e-8)
        np.testing.assert_allclose(variance, expected.variance, rtol=1e-7)
    else:
        assert float(model.elbo()) < value < exact - 1e-4


def test_one_probit_datum_in_closed_form() -> None:
    kernel = gpflow.kernels.Matern52(variance=4.0)
    data = np.zeros((1, 1)), np.zeros((1, 1))
    model = gh.EPModel(data, kernel, PROBIT, gpflow.functions.Constant(0.7))
    np.testing.assert_allclose(
        model.maximum_log_likelihood_objective(), log_ndtr(-0.7 / np.sqrt(5.0)), rtol=1e-12
    )


@pytest.mark.parametrize(
    ("name", "alpha"),
    [
        pytest.param(name, alpha, marks=() if (name, alpha) in FAST else pytest.mark.slow)
        for name in LIKELIHOODS
        for alpha in (1.0, 0.5)
    ],
)
def test_q_has_the_moments_of_every_tilted_distribution(name: str, alpha: float) -> None:
    model = make_model(name, alpha, variance=3.0)
    result = model.infer(tolerance=1e-9)
    assert result.converged, result.message
    sites = sites_of(model)
    q = reference.posterior(*prior_of(model), *sites)
    Y, log_prob = model.data[1].numpy(), reference.LOG_PROBS[name]
    expected = reference.tilted(q.mean, q.variance, *sites, Y, log_prob, alpha)
    s = np.sqrt(q.variance)
    np.testing.assert_allclose(q.mean / s, expected.mean / s, rtol=0.0, atol=1e-7)
    np.testing.assert_allclose(q.variance, expected.variance, rtol=1e-7)
    value = q.log_normaliser + np.sum(expected.log_ratio)
    np.testing.assert_allclose(model.log_marginal_likelihood(), value, rtol=1e-8)


def test_small_powers_tend_to_variational_inference() -> None:
    # L_α and the ELBO are stationary in λ, each at its own sites, so that to first order
    # L_α − L_0 = α dL/dα = ½ α Σ Var_q[log p − log t], and the next term is 1 % of that.
    alpha = 0.01
    model = make_model("poisson", alpha)
    assert model.infer(tolerance=1e-9).converged
    cvi = gh.CVIModel(model.data, model.kernel, model.likelihood, model.mean_function)
    assert cvi.infer(tolerance=1e-9).converged
    sites = sites_of(cvi)
    q = reference.posterior(*prior_of(cvi), *sites)
    Y, log_prob = cvi.data[1].numpy(), reference.LOG_PROBS["poisson"]

    def expected(power: int) -> np.ndarray:
        def h(f: np.ndarray, y: np.ndarray) -> np.ndarray:
            return (log_prob(f, y) - (sites[0] - 0.5 * sites[1] * f) * f) ** power

        return reference.expected_log_prob(q.mean, q.variance, Y, h)

    first_order = 0.5 * alpha * np.sum(expected(2) - expected(1) ** 2)
    difference = float(model.log_marginal_likelihood() - cvi.elbo())
    assert first_order > 5e-5
    np.testing.assert_allclose(difference, first_order, rtol=0.02)
    for found, expected_ in zip(
        model.predict_f(model.data[0]), cvi.predict_f(cvi.data[0]), strict=True
    ):
        np.testing.assert_allclose(found, expected_, rtol=0.01)  # the sites differ by O(α)


# What the constructor refuses


@pytest.mark.parametrize("make", [gpflow.likelihoods.Softmax, gpflow.likelihoods.MultiClass])
def test_coupled_latents_are_refused(make: Any) -> None:
    data = np.zeros((3, 1)), np.array([[0], [1], [2]])
    with pytest.raises(gh.InvalidDataError, match=r"ScalarLikelihood for EPModel.*Use CVIModel"):
        gh.EPModel(data, gpflow.kernels.Matern52(), make(3))


@pytest.mark.parametrize(
    ("alpha", "message"),
    [
        (0, r"in \(0, 1\]; found 0, .* use CVIModel"),
        (0.0, r"in \(0, 1\]; found 0, .* use CVIModel"),
        (2, "alpha must be a number in .*found 2"),
        (-0.5, "alpha must be a number in .*found -0.5"),
        (True, "alpha must be a number in .*found True"),
        (np.nan, "alpha must be a number in .*found nan"),
        ("ep", "alpha must be a number in .*found 'ep'"),
    ],
)
def test_powers_outside_the_half_open_interval_are_refused(alpha: Any, message: str) -> None:
    with pytest.raises(gh.InvalidDataError, match=message):
        make_model("probit_bernoulli", alpha)
    model = make_model("probit_bernoulli", 0.5)
    with pytest.raises(gh.InvalidDataError, match=message):
        model.alpha = alpha
    assert model.alpha == 0.5
