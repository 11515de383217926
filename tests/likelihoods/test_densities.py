"""Densities on arrays against GPflow's own values and automatic differentiation of them."""

from __future__ import annotations

import gpflow
import numpy as np
import pytest
import tensorflow as tf
from scipy import integrate

from gpflow_hybrid.inference.common import FixedPoint, SitePair
from gpflow_hybrid.inference.total_gradient import likelihood_value
from gpflow_hybrid.likelihoods.curvature import curvature
from gpflow_hybrid.likelihoods.densities import density_of, values_of
from gpflow_hybrid.likelihoods.expectations import expectation_gradients
from gpflow_hybrid.likelihoods.node_rules import point_derivatives
from gpflow_hybrid.likelihoods.on_arrays import Observations, on_arrays
from gpflow_hybrid.likelihoods.ratio_gradients import ratio_gradients
from gpflow_hybrid.likelihoods.ratios import log_expected_power
from gpflow_hybrid.linalg import Marginals
from gpflow_hybrid.sites import SiteValues
from gpflow_hybrid.stand_ins import parameters_of, with_values
from tests.likelihood_cases import CASES

N, Q = 7, 5
UNKNOWN = {"switched", "own_log_cosh"}
KNOWN = sorted(set(CASES) - UNKNOWN)
WITH_NOISE = ["gaussian", "bernoulli_probit", "ordinal"]


def problem(name: str) -> tuple[gpflow.likelihoods.Likelihood, np.ndarray, np.ndarray, np.ndarray]:
    case, rng = CASES[name], np.random.default_rng(3)
    X = rng.normal(size=(N, 2))
    Y = case.observe(rng.normal(size=(N, 1)), rng)
    f = rng.normal(size=(Q, N, case.num_latent)) * 1.5
    return case.make(), X, Y, f


@pytest.mark.parametrize("name", KNOWN)
def test_values_and_derivatives_are_those_of_gpflow(name: str) -> None:
    likelihood, X, Y, f = problem(name)
    binding = density_of(likelihood)
    assert binding is not None
    density = binding(Y, *values_of(likelihood))
    expected = point_derivatives(likelihood, X, Y, tf.constant(f), True)
    found = density.at(f)
    assert density.is_scalar == (len(expected.log_prob.shape) == 3)
    np.testing.assert_allclose(found.log_prob, expected.log_prob, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(found.first, expected.first, rtol=1e-8, atol=1e-10)
    for row, expected_row in zip(found.second, expected.second, strict=True):
        np.testing.assert_allclose(row, expected_row, rtol=1e-7, atol=1e-9)
    assert density.at(f, False).second == []


@pytest.mark.parametrize("name", ["gaussian", "student_t", "gamma", "beta", "ordinal"])
def test_derivatives_in_parameters(name: str) -> None:
    likelihood, X, Y, f = problem(name)
    density = density_of(likelihood)(Y, *values_of(likelihood))
    values = [tf.convert_to_tensor(p) for p in parameters_of(likelihood)]
    weights = np.random.default_rng(0).normal(size=f.shape)
    nodes = tf.constant(f)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(values)
        at = point_derivatives(with_values(likelihood, values), X, Y, nodes, False)
        totals = [tf.reduce_sum(weights * x) for x in (at.log_prob, at.first)]
    (found,) = density.in_parameters(f)
    for total, derivative in zip(totals, found, strict=True):
        np.testing.assert_allclose(
            np.sum(weights * derivative), tape.gradient(total, values)[0], rtol=1e-8
        )


@pytest.mark.parametrize("name", ["gaussian", "poisson", "exponential", "gamma"])
def test_expectations_in_closed_form(name: str) -> None:
    likelihood, X, Y, f = problem(name)
    m, v = tf.constant(f[0]), tf.constant(np.abs(f[1]) + 0.1)
    found = density_of(likelihood)(Y, *values_of(likelihood)).expected(m.numpy(), v.numpy())
    with tf.GradientTape(persistent=True) as outer:
        outer.watch((m, v))
        with tf.GradientTape() as inner:
            inner.watch((m, v))
            value = likelihood.variational_expectations(X, m, v, Y)
        d_m, d_v = inner.gradient(value, (m, v))
    np.testing.assert_allclose(np.sum(found.value, -1), value, rtol=1e-10)
    np.testing.assert_allclose(found.m, d_m, rtol=1e-10)
    np.testing.assert_allclose(found.v, d_v, rtol=1e-10)
    zero = tf.UnconnectedGradients.ZERO
    for mine, of, by in [(found.mm, d_m, m), (found.mv, d_m, v), (found.vv, d_v, v)]:
        np.testing.assert_allclose(
            mine, outer.gradient(of, by, unconnected_gradients=zero), rtol=1e-10, atol=1e-12
        )


def robust_max(
    num_classes: int,
) -> tuple[gpflow.likelihoods.Likelihood, np.ndarray, list[tf.Tensor]]:
    """With labels, and m, v, λ₁ and λ₂ such that cavities exist."""
    rng = np.random.default_rng(num_classes)
    shape = (40, num_classes)
    m, lambda_1 = 2.0 * rng.normal(size=shape), rng.normal(size=shape)
    v, lambda_2 = rng.uniform(0.05, 4.0, size=shape), rng.uniform(-0.2, 0.2, size=shape)
    v[0] = 1e-12  # below GPflow's floor, where nothing depends on it
    likelihood = gpflow.likelihoods.MultiClass(num_classes)
    likelihood.invlink.epsilon.assign(0.02)
    likelihood.num_gauss_hermite_points = 11
    Y = rng.integers(num_classes, size=(40, 1))
    return likelihood, Y, [tf.constant(x) for x in (m, v, lambda_1, lambda_2)]


@pytest.mark.parametrize("num_classes", [2, 3, 5])
def test_robust_max(num_classes: int) -> None:
    likelihood, Y, (m, v, lambda_1, lambda_2) = robust_max(num_classes)
    X, form = np.zeros((len(Y), 1)), on_arrays(likelihood)
    assert form is not None
    data = Observations(X, Y, values_of(likelihood))
    arrays = [x.numpy() for x in (m, v, lambda_1, lambda_2)]
    pairs = [
        (form.expectations(data, *arrays[:2]), expectation_gradients(likelihood, X, m, v, Y)),
        (form.curvature(data, *arrays[:2], None), curvature(likelihood, X, Y, m, v, None)),
    ]
    for alpha in (0.3, 1.0):
        expected = ratio_gradients(likelihood, X, Y, m, v, lambda_1, lambda_2, alpha)
        pairs.append((form.ratios(alpha)(data, *arrays), expected))
    for found, expected in pairs:
        for mine, reference in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, reference, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_robust_max_in_its_epsilon(alpha: float) -> None:
    likelihood, Y, at = robust_max(3)
    X, epsilon = np.zeros((len(Y), 1)), likelihood.invlink.epsilon
    weights = [tf.constant(w) for w in np.random.default_rng(0).normal(size=(2, *at[0].shape))]
    fixed = FixedPoint(Marginals(*at[:2], 0.0), SiteValues(*at[2:]), SitePair(*weights))
    with tf.GradientTape() as tape:
        value = tf.convert_to_tensor(epsilon)
        tape.watch(value)
        total = likelihood_value(alpha, with_values(likelihood, [value]), X, Y, fixed)
    if alpha == 0.0:  # the envelope theorem: no weights
        weights = [tf.zeros_like(w) for w in weights]
    data = Observations(X, Y, values_of(likelihood))
    found = on_arrays(likelihood).in_parameters(alpha)(data, *(x.numpy() for x in (*at, *weights)))
    np.testing.assert_allclose(found.in_a_row, [tape.gradient(total, value)], rtol=1e-9)


@pytest.mark.parametrize("name", WITH_NOISE)
def test_noise_is_integrated_in_closed_form(name: str) -> None:
    likelihood, _, Y, f = problem(name)
    bind = density_of(likelihood)
    variance = np.random.default_rng(1).uniform(0.2, 3.0, size=(N, 1))
    found, chain = bind(Y, *values_of(likelihood)).with_noise(variance)
    n, a = 2, f[0, 2, 0]

    def marginal(a: float, k: float, *values: float) -> float:
        one = bind(Y[n : n + 1], *values)

        def integrand(x: float) -> float:
            density = np.exp(one.at(np.full((1, 1, 1), x), False).log_prob[0, 0, 0])
            return density * np.exp(-0.5 * (x - a) ** 2 / k) / np.sqrt(2.0 * np.pi * k)

        reach = 12.0 * np.sqrt(k)
        return np.log(integrate.quad(integrand, a - reach, a + reach, limit=400, epsabs=1e-13)[0])

    values = [float(x) for x in values_of(likelihood)]
    k = float(variance[n, 0])
    np.testing.assert_allclose(found.at(f).log_prob[0, n, 0], marginal(a, k, *values), rtol=1e-8)
    h = 1e-4
    derivatives = chain([x.log_prob for x in found.in_parameters(f)])
    differences = [(marginal(a, k + h, *values) - marginal(a, k - h, *values)) / (2.0 * h)]
    for i, value in enumerate(values):
        ends = [marginal(a, k, *values[:i], value + d, *values[i + 1 :]) for d in (h, -h)]
        differences.append((ends[0] - ends[1]) / (2.0 * h))
    for derivative, difference in zip(derivatives, differences, strict=True):
        np.testing.assert_allclose(derivative[0, n, 0], difference, rtol=1e-5)


def test_an_ordinal_density_is_closed_on_tensors_too() -> None:
    """Also under a cavity so wide that no node falls into a bin."""
    likelihood, X, Y, f = problem("ordinal")
    likelihood.sigma.assign(1e-3)
    m, v = f[0], np.geomspace(1e-2, 1e6, N)[:, None]
    found = density_of(likelihood)(Y, *values_of(likelihood)).expected_power(m, v, 1.0)
    expected = log_expected_power(likelihood, X, tf.constant(m), tf.constant(v), Y, 1.0)
    np.testing.assert_allclose(found.value[:, 0], expected, rtol=1e-10)


@pytest.mark.parametrize("name", sorted(UNKNOWN))
def test_other_likelihoods_are_not_known(name: str) -> None:
    assert density_of(CASES[name].make()) is None


def test_parameters_that_are_functions_are_not_known() -> None:
    linear = gpflow.functions.Linear(A=[[0.1]], b=[1.0])
    assert density_of(gpflow.likelihoods.StudentT(scale=linear)) is None
    # Of one scalar parameter, as a constant scale is.
    constant = gpflow.functions.Constant(0.5)
    for kind, name in (("StudentT", "scale"), ("Beta", "scale"), ("Gamma", "shape")):
        likelihood = getattr(gpflow.likelihoods, kind)(**{name: constant})
        assert density_of(likelihood) is None
    assert density_of(gpflow.likelihoods.Bernoulli(invlink=tf.math.erf)) is None
