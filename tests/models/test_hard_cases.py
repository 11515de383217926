"""Cases in which an iteration, a quadrature or the arithmetic once failed."""

from __future__ import annotations

import itertools
from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf
from scipy import integrate, stats

import gpflow_hybrid as gh
from gpflow_hybrid.likelihoods.ratios import log_expected_ratio

SQUEEZED = gpflow.likelihoods.Bernoulli()
POISSON = gpflow.likelihoods.Poisson()
COUNTS = np.linspace(0.0, 3.0, 6)[:, None], np.array([[0.0], [3], [10], [2], [0], [1]])


@pytest.mark.parametrize(
    ("num", "variance", "flipped", "value"),
    # The values are those of plain updates of length 0.2 from zero sites, 94 to 229 of them.
    [
        (12, 25.0, [3, 9], -9.1616265),
        (24, 16.0, [12], -7.3130527),
        (24, 25.0, [6, 18], -10.9811717),
    ],
)
def test_ep_converges_where_only_short_steps_do(
    num: int, variance: float, flipped: list[int], value: float
) -> None:
    X = np.linspace(-1.0, 1.0, num)[:, None]
    Y = np.ones_like(X)
    Y[flipped] = 0.0
    kernel = gpflow.kernels.SquaredExponential(variance=variance, lengthscales=2.0)
    model = gh.EPModel((X, Y), kernel, SQUEEZED)
    result = model.infer(max_steps=400)
    assert result.converged, result
    np.testing.assert_allclose(model.log_marginal_likelihood(), value, atol=1e-5)


@pytest.mark.parametrize(("scale", "y"), [(0.5, 3.0), (0.1, 5.0), (0.01, 6.0)])
def test_ep_of_one_datum_is_exact_or_says_that_its_quadrature_is_not(
    scale: float, y: float
) -> None:
    def density(f: float) -> float:
        return float(np.exp(stats.t.logpdf(y, 3.0, f, scale) + stats.norm.logpdf(f)))

    near = [y + k * scale for k in (-100, -10, -3, -1, 0, 1, 3, 10, 100)]
    cuts = sorted([-40.0, -3.0, 0.0, 3.0, 40.0, *near])
    mass = sum(
        integrate.quad(density, a, b, epsabs=0.0, epsrel=1e-10, limit=500)[0]
        for a, b in itertools.pairwise(cuts)
    )
    model = gh.EPModel(
        (np.zeros((1, 1)), np.array([[y]])),
        gpflow.kernels.Matern52(),
        gpflow.likelihoods.StudentT(scale=scale, df=3.0),
    )
    result = model.infer()
    error = abs(float(model.log_marginal_likelihood()) - np.log(mass))
    assert ("quadrature" in result.message) == (error > 1e-5)
    if error > 0.1:
        assert not result.converged


def test_the_sites_of_a_trained_model_follow_alpha() -> None:
    X = np.linspace(0.0, 3.0, 12)[:, None]
    Y = (np.sin(2.0 * X) > 0.0).astype(float)
    kernel = gpflow.kernels.Matern52(variance=9.0)
    model, fresh = (gh.EPModel((X, Y), kernel, SQUEEZED, alpha=a) for a in (1.0, 0.1))
    model.training_loss()
    model.alpha = 0.1
    fresh.infer(tolerance=1e-9)
    np.testing.assert_allclose(model.predict_f(X)[0], fresh.predict_f(X)[0], rtol=1e-5)


@pytest.mark.parametrize("variance", [60.0, 100.0])
def test_an_absurdly_wide_prior_under_an_exponential_link(variance: float) -> None:
    # E[exp(f)] is e³⁰ and more under the prior, and the first natural gradient as large.
    kernel = gpflow.kernels.Matern52(variance=variance)
    cvi, ep = gh.CVIModel(COUNTS, kernel, POISSON), gh.EPModel(COUNTS, kernel, POISSON)
    assert cvi.infer().converged
    assert ep.infer().converged
    assert float(cvi.elbo()) < float(ep.log_marginal_likelihood()) < 0.0
    # Both are close to the truth here, and so to each other.
    assert float(ep.log_marginal_likelihood() - cvi.ep_like_log_marginal()) == pytest.approx(
        0.0, abs=0.05
    )


@pytest.mark.parametrize("variance", [1.0, 60.0, 400.0])
def test_ratios_of_an_exponential_link_under_a_wide_q(variance: float) -> None:
    # E_q[p] itself, without sites: a bounded integrand, whatever E_q[log p] is.
    y = 1.0
    sd = np.sqrt(variance)

    def density(f: float) -> float:
        return float(np.exp(y * f - np.exp(f) + stats.norm.logpdf(f, scale=sd)))

    truth = np.log(sum(integrate.quad(density, a, b)[0] for a, b in ((-40, -5), (-5, 0), (0, 5))))
    m, v, zero, Y = (np.full((1, 1), x) for x in (0.0, variance, 0.0, y))
    value = log_expected_ratio(POISSON, m, *map(tf.constant, (m, v, Y, zero, zero)), 1.0)
    # 121 points reach over ±9 sd, of which the integrand fills ever less.
    np.testing.assert_allclose(value[0], truth, atol=1e-6 if variance < 100.0 else 5e-3)


class TwoWells(gpflow.likelihoods.ScalarLikelihood):
    """``log p = y (½f² − ¼f⁴)``: level at f = 0, where its modes ±1 are not."""

    def _scalar_log_prob(self, X: Any, F: Any, Y: Any) -> Any:
        return Y * (0.5 * F**2 - 0.25 * F**4)

    def _conditional_mean(self, X: Any, F: Any) -> Any:
        return F

    def _conditional_variance(self, X: Any, F: Any) -> Any:
        return tf.ones_like(F)


def test_laplace_says_that_it_stands_on_a_saddle() -> None:
    # The gradient is zero, not small, where the iteration starts: no rounding error leads away.
    X, Y = np.zeros((1, 1)), np.ones((1, 1))
    model = gh.LaplaceModel((X, Y), gpflow.kernels.Matern52(variance=25.0), TwoWells())
    result = model.infer()
    assert not result.converged
    assert result.num_steps < 10
    assert "no mode" in result.message


def test_a_kernel_variance_with_bounds_can_be_annealed() -> None:
    X = np.linspace(0.0, 3.0, 5)[:, None]
    kernel = gpflow.kernels.Matern52()
    low, high = (tf.constant(b, tf.float64) for b in (1.5, 3.0))
    from tensorflow_probability import bijectors

    kernel.variance = gpflow.Parameter(2.0, transform=bijectors.Sigmoid(low, high))
    model = gh.CVIModel((X, np.sin(X)), kernel, gpflow.likelihoods.Gaussian(0.1))
    exact = gpflow.models.GPR((X, np.sin(X)), kernel, noise_variance=0.1)
    result = gh.annealed_importance_sampling(model, num_chains=4, num_temperatures=2)
    np.testing.assert_allclose(
        result.log_marginal_likelihood, float(exact.log_marginal_likelihood()), atol=1e-6
    )
