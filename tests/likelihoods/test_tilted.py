"""Tilted moments and normalisers against integrals on a dense grid."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from gpflow_hybrid.likelihoods.ratios import log_expected_ratio
from gpflow_hybrid.likelihoods.tilted import TiltedSites, tilted_sites
from tests import reference
from tests.likelihood_cases import CASES

LIKELIHOODS = {name: CASES[name].make() for name in reference.LOG_PROBS}

Y = {
    "gaussian": [0.3, -2.0, 4.0, 0.0],
    "bernoulli_probit": [1.0, 0.0, 0.0, 1.0],
    "bernoulli_logit": [1.0, 0.0, 0.0, 1.0],
    "probit_bernoulli": [1.0, 0.0, 0.0, 1.0],
    "student_t": [0.3, 4.0, -3.0, 1.5],
    "poisson": [0.0, 3.0, 20.0, 1.0],
    "exponential": [0.1, 1.0, 10.0, 0.0],
    "gamma": [0.1, 1.0, 10.0, 3.0],
    "beta": [0.1, 0.9, 0.5, 0.99],
    "ordinal": [0.0, 1.0, 2.0, 0.0],
    "own_log_cosh": [0.3, -2.0, 4.0, 0.0],
}
"""Four observations each; the second and third are surprising under the marginals below."""


class Marginal(NamedTuple):
    """q and its sites, ``[N, 1]`` each."""

    m: np.ndarray
    v: np.ndarray
    lambda_1: np.ndarray
    lambda_2: np.ndarray


def marginals(num: int = 8) -> Marginal:
    """q of various widths, positive and then negative sites."""
    m = np.tile([0.3, -1.5, 2.0, 0.7], 2)[:, None]
    v = np.tile([1.0, 0.2, 3.0, 0.05], 2)[:, None]
    lambda_2 = np.repeat([0.6, -0.3], 4)[:, None] / v
    lambda_1 = lambda_2 * m + np.tile([0.2, -0.1, 0.05, 0.3], 2)[:, None]
    return Marginal(*(x[:num] for x in (m, v, lambda_1, lambda_2)))


def matching(name: str, y: np.ndarray, m: np.ndarray, v: np.ndarray, alpha: float) -> Marginal:
    """q with the tilted moments of the cavity ``N(m, v)``, and the sites that take one to the other."""
    zero = np.zeros_like(m)
    found = reference.tilted(m, v, zero, zero, y, reference.LOG_PROBS[name], alpha)
    lambda_1 = (found.mean / found.variance - m / v) / alpha
    lambda_2 = (1.0 / found.variance - 1.0 / v) / alpha
    return Marginal(found.mean, found.variance, lambda_1, lambda_2)


def sites_by_quadrature(name: str, y: np.ndarray, q: Marginal, alpha: float) -> TiltedSites:
    arguments = (np.zeros_like(y), *(tf.constant(x) for x in (q.m, q.v, y)), q.lambda_1, q.lambda_2)
    found = tilted_sites(LIKELIHOODS[name], *arguments, alpha)
    alone = log_expected_ratio(LIKELIHOODS[name], *arguments, alpha, blend=False)
    np.testing.assert_allclose(alone, found.log_ratio, rtol=1e-13, atol=1e-13)
    return found


def assert_sites(
    found: TiltedSites, name: str, y: np.ndarray, q: Marginal, alpha: float, atol: float
) -> None:
    """``atol`` is in nats, and for the sites in units of q."""
    expected = reference.tilted(*q, y, reference.LOG_PROBS[name], alpha)
    lambda_2 = q.lambda_2 + (1.0 / expected.variance - 1.0 / q.v) / alpha
    lambda_1 = q.lambda_1 + (expected.mean / expected.variance - q.m / q.v) / alpha
    np.testing.assert_allclose(found.log_ratio, expected.log_ratio[:, 0], rtol=1e-10, atol=atol)
    assert_equal_sites(found, q, lambda_1, lambda_2, atol)


def assert_equal_sites(
    found: TiltedSites, q: Marginal, lambda_1: np.ndarray, lambda_2: np.ndarray, atol: float
) -> None:
    np.testing.assert_allclose(found.precision * q.v, lambda_2 * q.v, rtol=1e-9, atol=atol)
    slope = (lambda_1 - lambda_2 * q.m) * np.sqrt(q.v)
    np.testing.assert_allclose(found.slope * np.sqrt(q.v), slope, rtol=1e-9, atol=atol)


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.1])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_away_from_the_fixed_point(name: str, alpha: float) -> None:
    y, q = np.tile(Y[name], 2)[:, None], marginals()
    # An outlier three deviations away meets a coarser part of the rule.
    atol = 5e-6 if name == "student_t" else 1e-9
    assert_sites(sites_by_quadrature(name, y, q, alpha), name, y, q, alpha, atol)


@pytest.mark.parametrize("alpha", [1.0, 0.1])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_fixed_point_under_wide_cavities(name: str, alpha: float) -> None:
    # A cavity up to a hundred times as wide as q: the sites that match are those q has.
    y = np.array(Y[name])[:, None]
    m = np.array([[0.0], [0.5], [-1.0], [2.0]])
    v = np.array([[1.0], [10.0], [30.0], [100.0]])
    q = matching(name, y, m, v, alpha)
    found = sites_by_quadrature(name, y, q, alpha)
    # 121 nodes for q as wide as 10, where a link bends over a width of 1; sites magnify by 1/α.
    atol = 3e-6 / alpha
    assert_equal_sites(found, q, q.lambda_1, q.lambda_2, atol)
    assert_sites(found, name, y, q, alpha, atol)


@pytest.mark.parametrize("alpha", [1.0, 0.1])
def test_a_count_of_ten_thousand(alpha: float) -> None:
    # The likelihood is a hundredth wide, the cavity up to five.
    y = np.full((4, 1), 1e4)
    m = np.array([[9.0], [5.0], [0.0], [0.0]])
    v = np.array([[0.1], [1.0], [9.0], [25.0]])
    q = matching("poisson", y, m, v, alpha)
    assert np.all(q.v < 2.0 / alpha * 1e-4)
    found = sites_by_quadrature("poisson", y, q, alpha)
    # Sites of size 1e4, and nats of terms of size 1e5.
    assert_sites(found, "poisson", y, q, alpha, atol=1e-7)


def test_a_probit_label_deep_on_the_wrong_side() -> None:
    # Φ underflows at the cavity's mean: only logarithms survive.
    y = np.array([[1.0], [0.0], [1.0]])
    m = np.array([[-50.0], [60.0], [-9.0]])
    v = np.array([[0.1], [0.05], [400.0]])
    q = matching("probit_bernoulli", y, m, v, 1.0)
    found = sites_by_quadrature("probit_bernoulli", y, q, 1.0)
    assert_sites(found, "probit_bernoulli", y, q, 1.0, atol=1e-8)


def test_several_latents_add_up() -> None:
    name, alpha = "student_t", 0.5
    y = np.array(Y[name]).reshape(2, 2)
    q = Marginal(*(x.reshape(2, 2) for x in marginals(4)))
    arguments = (np.zeros((2, 1)), *(tf.constant(x) for x in (q.m, q.v, y)), q.lambda_1, q.lambda_2)
    found = tilted_sites(LIKELIHOODS[name], *arguments, alpha)
    rows = [Marginal(*(x[:, i : i + 1] for x in q)) for i in range(2)]
    single = [sites_by_quadrature(name, y[:, i : i + 1], row, alpha) for i, row in enumerate(rows)]
    np.testing.assert_allclose(found.log_ratio, sum(s.log_ratio for s in single), rtol=1e-13)
    np.testing.assert_allclose(found.slope, np.hstack([s.slope for s in single]), rtol=1e-11)
    np.testing.assert_allclose(
        found.precision, np.hstack([s.precision for s in single]), rtol=1e-11
    )


@pytest.mark.parametrize("alpha", [1.0, 0.5])
@pytest.mark.parametrize("name", ["probit_bernoulli", "bernoulli_probit", "student_t", "gaussian"])
def test_no_cavity_is_nan_for_that_datum_only(name: str, alpha: float) -> None:
    y, q = np.array(Y[name])[:, None], marginals(4)
    lambda_2 = q.lambda_2.copy()
    lambda_2[2] = 1.01 / alpha / q.v[2]
    found = sites_by_quadrature(name, y, q._replace(lambda_2=lambda_2), alpha)
    np.testing.assert_array_equal(np.isnan(found.log_ratio), [False, False, True, False])
    proper = sites_by_quadrature(name, y, q, alpha)
    for with_nan, without in zip(found, proper, strict=True):
        np.testing.assert_allclose(
            np.delete(with_nan, 2, axis=0), np.delete(without, 2, axis=0), rtol=1e-12
        )
