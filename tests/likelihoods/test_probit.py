"""ProbitBernoulli against mpmath, closed forms and GPflow."""

import itertools

import gpflow
import mpmath as mp
import numpy as np
import pytest
import tensorflow as tf
from gpflow.base import AnyNDArray
from scipy.special import log_ndtr, ndtr

from gpflow_hybrid.likelihoods import ProbitBernoulli
from gpflow_hybrid.likelihoods.log_cdf import log_cdf
from gpflow_hybrid.likelihoods.probit_integrals import (
    MODERATE,
    Rule,
    _high_quadrature,
    _low_quadrature,
    high_moments,
    low_moments,
)
from gpflow_hybrid.likelihoods.probit_narrow import NARROW, class_of

# (m, v): E[gₖ(f)], k = 0, …, 4, under f ~ N(m, v) with gₖ = (log Φ)⁽ᵏ⁾; from `mp_expectations`.
EXPECTATIONS = {
    (0.0, 1.0): (
        -1.0,
        0.9031972855686253,
        -0.5956355968473578,
        0.20027082199667207,
        0.05677890832854184,
    ),
    (0.0, 1e-08): (
        -0.6931471837430442,
        0.7978845618929334,
        -0.636619771793728,
        0.2180136141228017,
        0.11477068129092619,
    ),
    (0.0, 1000000.0): (
        -250003.5966738272,
        398.9454259281064,
        -0.5000004990828667,
        0.00039893953381222897,
        9.972495979502446e-13,
    ),
    (0.001, 1000000.0): (
        -250003.19772865128,
        398.94492592780676,
        -0.500000100143333,
        0.0003989395338130267,
        5.983151583859822e-13,
    ),
    (3.0, 20000.0): (
        -4835.554587720535,
        54.94830004591791,
        -0.49156454310750275,
        0.002819625803913564,
        -4.20305752873098e-07,
    ),
    (0.3, 9.2): (
        -2.829215456312591,
        1.3434748751708692,
        -0.4962078396531617,
        0.11392107673812653,
        0.001798337546203894,
    ),
    (1000.0, 1000000.0): (
        -37670.95510378725,
        83.31716076561489,
        -0.15865710221104673,
        0.00024197112403545354,
        -2.419676694417177e-07,
    ),
    (1000.0, 10000.0): (
        -7.480902769988848e-22,
        7.693541712843187e-23,
        -7.839448806370614e-24,
        7.912626238034701e-25,
        -7.908857286640474e-26,
    ),
    (30.0, 1.0): (
        -3.6064970862256034e-100,
        5.4217144408074695e-99,
        -8.132571661211204e-98,
        1.217174891961277e-96,
        -1.817629766280704e-95,
    ),
    (5.0, 1e-08): (
        -2.8665165013177524e-07,
        1.4867201193114732e-06,
        -7.433602732558605e-06,
        3.568131529004718e-05,
        -0.00016353958596293045,
    ),
    (-8.0, 0.0001): (
        -35.013486443668995,
        8.121368276830543,
        -0.9856750612917343,
        0.0032919006697433397,
        0.0011053048934795754,
    ),
    (-9.9, 1e-06): (
        -52.22642879559078,
        9.999046788405378,
        -0.9903734619727843,
        0.0018371083875642214,
        0.0005164436770357004,
    ),
    (-14.0, 9.5): (
        -106.28760800940712,
        14.0745512677699,
        -0.9941578817667237,
        0.0009709966727739816,
        0.0002584916661055374,
    ),
    (-1000.0, 1e-08): (
        -500007.82669481717,
        1000.000999998,
        -0.999999000006,
        1.999976000300116e-09,
        5.999880002100563e-12,
    ),
    (-1000.0, 1.0): (
        -500008.3266943122,
        1000.000999999,
        -0.999999000003,
        1.9999880000300002e-09,
        5.999940000210001e-12,
    ),
    (-1000.0, 17000.0): (
        -508507.81796457915,
        1000.0010179488982,
        -0.9999989440582313,
        2.2351377108624823e-09,
        7.2510995857725175e-12,
    ),
    (-1000.0, 1000000.0): (
        -962336.6642076818,
        1083.3178844313225,
        -0.8413431730100457,
        0.00024197012626040699,
        2.4196722210795945e-07,
    ),
}

# (m, v, α): ℓ = (1/α) log E[Φᵅ], ∂ℓ/∂m, ∂ℓ/∂v; from `mp_power`.
POWERS = {
    (0.0, 1.0, 0.5): (-0.8109302162163288, 0.6881013226783417, -0.0881139170080505),
    (-3.0, 10000.0, 0.5): (-1.423261873549439, 0.016249844656786017, 1.8649529571508378e-06),
    (-3.0, 10000.0, 0.001): (-447.4653172515504, 5.7379231825697365, -0.00997040569466836),
    (-1000.0, 1.0, 0.3): (-384623.38621955144, 769.2317692290792, 88757.24260381029),
    (-1000.0, 1000000.0, 0.9): (-2.0454146852732187, 0.0016945072414603088, 8.471707114015154e-07),
    (1000.0, 1000000.0, 0.5): (-0.34510307200335816, 0.000574678588666863, -2.875412217041052e-07),
    (-1.0, 1e-08, 0.5): (-1.8410216431986812, 1.5251352706382153, 0.18105823346873842),
    (-6.0, 4.0, 1e-06): (-22.681101035138727, 6.176796918570511, -0.4835941062138724),
    (-100.0, 50.0, 0.0001): (-5005.5787773620295, 99.51253651233117, -0.0023244500709279636),
    (8.0, 2.0, 0.7): (-1.939823215665935e-06, 5.403180021685188e-06, -7.215594524970622e-06),
    (-40.0, 100000.0, 0.02): (-38.79953874434031, 0.13635627301449602, 2.1516522454419224e-05),
    (2.0, 0.3, 1e-08): (-0.041948689340392364, 0.0825147688293515, -0.06886969071018076),
}


def mp_derivatives(f: mp.mpf) -> list[mp.mpf]:
    """g₀, …, g₄ by the elementary formulas, which cost 8 log₁₀|f| of mpmath's digits."""
    h = mp.npdf(f) / mp.ncdf(f)
    d = f + h
    e = d * (d + h) - 1
    return [
        mp.log(mp.ncdf(f)) if f < 0 else mp.log1p(-mp.ncdf(-f)),
        h,
        -h * d,
        h * e,
        -h * d * e + h * ((1 - h * d) * (d + h) + d * (1 - 2 * h * d)),
    ]


def mp_nodes(m: mp.mpf, v: mp.mpf, damping: mp.mpf) -> list[tuple[mp.mpf, mp.mpf]]:
    """30-point Gauss–Legendre on many pieces around all scales of the integrands.

    Not ``mp.quad``: its tanh-sinh stops at an absolute error, which is no digit of 1e-100.
    """
    n = 30
    rule = []
    for start in np.polynomial.legendre.leggauss(n)[0]:
        x = mp.mpf(float(start))
        for _ in range(5):
            p = mp.legendre(n, x)
            slope = n * (x * p - mp.legendre(n - 1, x)) / (x * x - 1)
            x -= p / slope
        rule.append((x, 2 / ((1 - x * x) * slope**2)))

    s = mp.sqrt(v)
    lower = m - s * mp.sqrt((m / s) ** 2 + 256) if m > 0 else m - 16 * s
    upper = max(m, 0) + 16 * s
    cuts = {lower, upper}
    for c in (0, 1, damping):
        centre, scale = m / (1 + c * v), s / mp.sqrt(1 + c * v)
        for t in (0, 0.5, 1, 2, 3, 4, 5.5, 7, 9, 12):
            cuts |= {centre - t * scale, centre + t * scale}
    for x in (0, 0.5, 1, 2, 3, 4, 6, 8, 10, 13, 20, 30, 50, 100, 200, 400, 800, 1600, 3200):
        cuts |= {mp.mpf(x), mp.mpf(-x)}
    if m > 0:
        cuts |= {-v / m * 2**i for i in range(-2, 8)}
    pieces = sorted(c for c in cuts if lower <= c <= upper)
    return [
        ((a + b) / 2 + (b - a) / 2 * x, (b - a) / 2 * w)
        for a, b in itertools.pairwise(pieces)
        for x, w in rule
    ]


def mp_expectations(m: float, v: float) -> list[mp.mpf]:
    m, v = mp.mpf(m), mp.mpf(v)
    total = [mp.mpf(0)] * 5
    for f, w in mp_nodes(m, v, mp.mpf(0)):
        weight = w * mp.npdf(f, m, mp.sqrt(v))
        total = [t + weight * g for t, g in zip(total, mp_derivatives(f), strict=True)]
    return total


def mp_power(m: float, v: float, alpha: float) -> list[mp.mpf]:
    m, v, alpha = mp.mpf(m), mp.mpf(v), mp.mpf(alpha)
    norm = slope = curvature = mp.mpf(0)
    for f, w in mp_nodes(m, v, alpha):
        g0, g1, g2, *_ = mp_derivatives(f)
        weight = w * mp.npdf(f, m, mp.sqrt(v)) * mp.exp(alpha * g0)
        norm += weight
        slope += weight * g1
        curvature += weight * (g2 + alpha * g1**2)
    return [mp.log(norm) / alpha, slope / norm, curvature / norm / 2]


@pytest.mark.slow
def test_reference_tables() -> None:
    with mp.workdps(45):
        for (m, v), stored in EXPECTATIONS.items():
            np.testing.assert_allclose(
                stored, [float(x) for x in mp_expectations(m, v)], rtol=1e-15, err_msg=f"{m}, {v}"
            )
        for (m, v, alpha), stored in POWERS.items():
            computed = [float(x) for x in mp_power(m, v, alpha)]
            np.testing.assert_allclose(stored, computed, rtol=1e-15, err_msg=f"{m}, {v}, {alpha}")


def column(*values: float) -> tf.Tensor:
    return tf.constant(np.array(values)[:, None])


def no_inputs(F: tf.Tensor) -> tf.Tensor:
    return tf.zeros([*F.shape[:-1], 0], F.dtype)


def expectation_and_derivatives(m: tf.Tensor, v: tf.Tensor, Y: tf.Tensor) -> list[tf.Tensor]:
    """E, ∂E/∂m, ∂E/∂v, ∂²E/∂m², ∂²E/∂m∂v, ∂²E/∂v∂m, ∂²E/∂v²."""
    likelihood = ProbitBernoulli()
    with tf.GradientTape(persistent=True) as outer:
        outer.watch([m, v])
        with tf.GradientTape() as inner:
            inner.watch([m, v])
            E = likelihood.variational_expectations(no_inputs(m), m, v, Y)
        dm, dv = inner.gradient(E, [m, v])
    return [E, dm, dv, *outer.gradient(dm, [m, v]), *outer.gradient(dv, [m, v])]


@pytest.fixture(name="table")
def _table() -> tuple[tf.Tensor, tf.Tensor, AnyNDArray]:
    m, v = np.array(list(EXPECTATIONS)).T
    return column(*m), column(*v), np.array(list(EXPECTATIONS.values())).T[..., None]


@pytest.mark.parametrize("label", [0.0, 1.0])
@pytest.mark.parametrize("compiled", [False, True])
def test_variational_expectations(
    table: tuple[tf.Tensor, tf.Tensor, AnyNDArray], label: float, compiled: bool
) -> None:
    m, v, (E0, E1, E2, E3, E4) = table
    sign = 2 * label - 1
    fn = tf.function(expectation_and_derivatives) if compiled else expectation_and_derivatives
    E, *derivatives = fn(sign * m, v, tf.fill(m.shape, label))
    np.testing.assert_allclose(E, E0[:, 0], rtol=1e-10)
    expected = [sign * E1, E2 / 2, E2, sign * E3 / 2, sign * E3 / 2, E4 / 4]
    names = ["m", "v", "mm", "mv", "vm", "vv"]
    for name, got, want in zip(names, derivatives, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, err_msg=name)


def test_expected_log_of_a_uniform() -> None:
    # Φ(f) is uniform under f ~ N(0, 1), and ∫₀¹ log u du = −1.
    E, *_ = expectation_and_derivatives(column(0.0), column(1.0), column(0.0))
    np.testing.assert_allclose(E, [-1.0], rtol=1e-12)


def test_variational_expectations_agree_with_gpflow_where_gauss_hermite_is_exact() -> None:
    rng = np.random.default_rng(1)
    m, v = rng.uniform(-1, 1, [20, 2]), rng.uniform(0, 0.05, [20, 2])
    Y = rng.integers(0, 2, [20, 2]).astype(float)
    X = np.zeros([20, 1])
    unsqueezed = gpflow.likelihoods.Bernoulli(
        invlink=lambda f: 0.5 * tf.math.erfc(-f / np.sqrt(2.0))
    )
    np.testing.assert_allclose(
        ProbitBernoulli().variational_expectations(X, m, v, Y),
        unsqueezed.variational_expectations(X, m, v, Y),
        rtol=1e-11,
    )


def test_zero_variance_is_the_pointwise_value() -> None:
    f = column(-1e3, -2.0, 0.0, 3.0)
    E, dm, dv, *_ = expectation_and_derivatives(f, tf.zeros_like(f), tf.ones_like(f))
    np.testing.assert_allclose(E, log_cdf(f)[:, 0], rtol=1e-10)
    np.testing.assert_allclose(dm, log_cdf(f, 1), rtol=1e-10)
    np.testing.assert_allclose(dv, log_cdf(f, 2) / 2, rtol=1e-10)


def test_negative_variance_is_not_hidden() -> None:
    E, dm, dv, *_ = expectation_and_derivatives(column(0.5), column(-1e-3), column(1.0))
    assert np.isnan([E[0], dm[0, 0], dv[0, 0]]).all()


def test_log_prob_and_its_derivatives_pointwise() -> None:
    f = np.array(
        [-200.0, -30.0, -10.5, -9.0, -8.0, -6.5, -5.0, -3.0, -1.0, 0.0, 0.4, 2.0, 6.0, 20.0]
    )
    with mp.workdps(60):
        expected = np.array([[float(g) for g in mp_derivatives(mp.mpf(x))] for x in f])
    for order in range(5):
        np.testing.assert_allclose(log_cdf(tf.constant(f), order), expected[:, order], rtol=2e-12)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_log_prob_far_out(label: float) -> None:
    x = 1e4
    F, Y = column(-x, x), column(label, label)
    with tf.GradientTape() as outer:
        outer.watch(F)
        with tf.GradientTape() as inner:
            inner.watch(F)
            value = ProbitBernoulli().log_prob(no_inputs(F), F, Y)
        first = inner.gradient(value, F)
    second = outer.gradient(first, F)
    # Order the rows as (unlikely, likely); Mills' ratio is 1/(x + 1/x − 2/x³ + …).
    order, sign = ([0, 1], 1.0) if label else ([1, 0], -1.0)
    np.testing.assert_allclose(np.take(value, order), [log_ndtr(-x), 0.0], rtol=1e-15)
    np.testing.assert_allclose(
        np.take(first, order), [sign * (x + 1 / x - 2 / x**3), 0.0], rtol=1e-15
    )
    # TensorFlow 2.16 rounds this difference of large numbers otherwise than later versions, to 1.7e-14.
    rtol = 1e-14 if tf.__version__ >= "2.17" else 2e-14
    np.testing.assert_allclose(np.take(second, order), [-1 + 1 / x**2, 0.0], rtol=rtol)


def test_conditional_moments_keep_both_tails() -> None:
    F = column(-37.0, -9.0, 0.0, 1.5, 9.0, 37.0)
    likelihood, f = ProbitBernoulli(), F.numpy()
    # exp(log Φ(−37)) multiplies the rounding of −688 by 688.
    np.testing.assert_allclose(likelihood.conditional_mean(no_inputs(F), F), ndtr(f), rtol=1e-12)
    np.testing.assert_allclose(
        likelihood.conditional_variance(no_inputs(F), F), ndtr(f) * ndtr(-f), rtol=1e-12
    )


def test_predictions_are_the_closed_form() -> None:
    rng = np.random.default_rng(2)
    m, v = 4 * rng.normal(size=[30, 2]), rng.gamma(1.0, 3.0, size=[30, 2])
    Y = rng.integers(0, 2, [30, 2]).astype(float)
    X = np.zeros([30, 1])
    p = ndtr(m / np.sqrt(1 + v))
    mean, variance = ProbitBernoulli().predict_mean_and_var(X, m, v)
    np.testing.assert_allclose(mean, p, rtol=1e-12)
    np.testing.assert_allclose(variance, p * ndtr(-m / np.sqrt(1 + v)), rtol=1e-12)
    np.testing.assert_allclose(
        ProbitBernoulli().predict_log_density(X, m, v, Y),
        np.sum(log_ndtr((2 * Y - 1) * m / np.sqrt(1 + v)), -1),
        rtol=1e-12,
    )


def test_predictive_density_gradients_far_out() -> None:
    m, v = column(-1e4, -50.0, 1e4), column(3.0, 99.0, 3.0)
    with tf.GradientTape() as tape:
        tape.watch([m, v])
        density = ProbitBernoulli().predict_log_density(no_inputs(m), m, v, tf.ones_like(m))
    dm, dv = tape.gradient(density, [m, v])
    a = (m / tf.sqrt(1 + v)).numpy()
    with mp.workdps(60):
        hazard = np.array([[float(mp_derivatives(mp.mpf(x))[1])] for x in a[:, 0]])
    np.testing.assert_allclose(density, log_ndtr(a)[:, 0], rtol=1e-13)
    np.testing.assert_allclose(dm, hazard / np.sqrt(1 + v), rtol=1e-13)
    np.testing.assert_allclose(dv, -0.5 * hazard * a / (1 + v), rtol=1e-13)


@pytest.mark.parametrize("label", [0.0, 1.0])
@pytest.mark.parametrize("key", POWERS, ids=str)
def test_log_expected_power(key: tuple[float, float, float], label: float) -> None:
    sign = 2 * label - 1
    m, v, alpha = column(sign * key[0]), column(key[1]), key[2]
    with tf.GradientTape() as tape:
        tape.watch([m, v])
        value = ProbitBernoulli().log_expected_power(no_inputs(m), m, v, column(label), alpha)
    dm, dv = tape.gradient(value, [m, v])
    expected, slope, curvature = POWERS[key]
    # Relative accuracy of E[Φᵅ] is absolute accuracy of α ℓ, up to the rounding of a large α ℓ.
    np.testing.assert_allclose(alpha * value, [[alpha * expected]], rtol=1e-15, atol=1e-10)
    np.testing.assert_allclose(value, [[expected]], rtol=1e-10)
    np.testing.assert_allclose(dm, [[sign * slope]], rtol=1e-10)
    np.testing.assert_allclose(dv, [[curvature]], rtol=1e-10)


@pytest.fixture(name="marginals")
def _marginals() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """m, v and Y over all scales, [40, 1] each, with E[Φᵅ] from nearly 0 to nearly 1."""
    rng = np.random.default_rng(3)
    v = 10 ** rng.uniform(-4, 5, [40, 1])
    m = rng.uniform(-3, 3, [40, 1]) * np.sqrt(1 + v)
    return tf.constant(m), tf.constant(v), tf.constant(rng.integers(0, 2, [40, 1]).astype(float))


def test_power_one_is_the_predictive_density(
    marginals: tuple[tf.Tensor, tf.Tensor, tf.Tensor],
) -> None:
    m, v, Y = marginals
    likelihood, X = ProbitBernoulli(), no_inputs(m)
    density = likelihood.predict_log_density(X, m, v, Y)
    closed = likelihood.log_expected_power(X, m, v, Y, 1.0)
    np.testing.assert_array_equal(closed[:, 0], density)

    @tf.function
    def by_quadrature(alpha: tf.Tensor) -> tf.Tensor:
        # The graph does not know that alpha is 1.
        return likelihood.log_expected_power(X, m, v, Y, alpha)

    np.testing.assert_allclose(by_quadrature(tf.constant(1.0, tf.float64)), closed, rtol=1e-9)


def test_power_to_zero_is_the_variational_expectation(
    marginals: tuple[tf.Tensor, tf.Tensor, tf.Tensor],
) -> None:
    m, v, Y = marginals
    likelihood, X = ProbitBernoulli(), no_inputs(m)
    E = likelihood.variational_expectations(X, m, v, Y)
    # The distance is ½ α Var[log Φ] + O(α²), and Var[log Φ] < 1e12 here.
    limit = likelihood.log_expected_power(X, m, v, Y, 1e-22)
    np.testing.assert_allclose(limit[:, 0], E, rtol=2e-10)


def test_power_is_increasing(marginals: tuple[tf.Tensor, tf.Tensor, tf.Tensor]) -> None:
    m, v, Y = marginals
    likelihood, X = ProbitBernoulli(), no_inputs(m)
    values = [likelihood.variational_expectations(X, m, v, Y)[:, None]]
    values += [
        likelihood.log_expected_power(X, m, v, Y, alpha)
        for alpha in (1e-3, 0.1, 0.3, 0.7, 0.99, 1.0)
    ]
    assert np.all(np.diff(np.concatenate(values, 1), axis=1) > 0)


def test_power_second_derivatives_against_finite_differences() -> None:
    m, v = column(-2.0, 0.3, 1.0, -4.0), column(0.5, 2.0, 30.0, 300.0)
    Y, alpha = column(1.0, 0.0, 1.0, 0.0), 0.4

    def gradients(m: tf.Tensor, v: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch([m, v])
            value = ProbitBernoulli().log_expected_power(no_inputs(m), m, v, Y, alpha)
        return tf.concat(tape.gradient(value, [m, v]), 1)

    with tf.GradientTape() as tape:
        tape.watch([m, v])
        first = gradients(m, v)
    # Rows are independent: summing over them loses nothing.
    by_m, by_v = (tf.reduce_sum(j, [2, 3]) for j in tape.jacobian(first, [m, v]))
    step = 1e-5
    differences = [
        (gradients(m + step, v) - gradients(m - step, v)) / (2 * step),
        (gradients(m, v + step) - gradients(m, v - step)) / (2 * step),
    ]
    np.testing.assert_allclose(by_m, differences[0], rtol=1e-6, atol=1e-10)
    np.testing.assert_allclose(by_v, differences[1], rtol=1e-6, atol=1e-10)


def test_power_is_not_rounded_through_float32() -> None:
    m, v, Y = column(-1e3), column(1.0), column(1.0)
    likelihood, X = ProbitBernoulli(), no_inputs(m)
    as_float = likelihood.log_expected_power(X, m, v, Y, 0.3)
    as_tensor = likelihood.log_expected_power(X, m, v, Y, tf.constant(0.3, tf.float64))
    np.testing.assert_array_equal(as_float, as_tensor)
    np.testing.assert_allclose(as_float, [[POWERS[-1e3, 1.0, 0.3][0]]], rtol=1e-14)


@pytest.mark.parametrize("compiled", [False, True])
def test_float32(table: tuple[tf.Tensor, tf.Tensor, AnyNDArray], compiled: bool) -> None:
    gpflow.config.set_default_float(np.float32)
    m64, v64, (E0, E1, E2, *_) = table
    m, v = tf.cast(m64, tf.float32), tf.cast(v64, tf.float32)
    Y = tf.ones_like(m)
    fn = tf.function(expectation_and_derivatives) if compiled else expectation_and_derivatives
    results = fn(m, v, Y)
    assert {r.dtype for r in results} == {tf.float32}
    assert all(np.isfinite(r).all() for r in results)
    # Single precision: 1e-4 of the value, and nothing below the smallest normal number.
    for got, want in zip(results[:3], [E0[:, 0], E1, E2 / 2], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-35)

    likelihood, X = ProbitBernoulli(), no_inputs(m)
    power = likelihood.log_expected_power(X, m, v, Y, 0.5)
    assert power.dtype == tf.float32
    power64 = likelihood.log_expected_power(no_inputs(m64), m64, v64, tf.ones_like(m64), 0.5)
    # α ℓ = log E[Φᵅ] carries the rounding of E[Φᵅ] ≈ 1, a few 1e-7.
    np.testing.assert_allclose(power, power64, rtol=1e-4, atol=1e-6)
    for got in likelihood.predict_mean_and_var(X, m, v):
        assert got.dtype == tf.float32
    assert likelihood.predict_log_density(X, m, v, Y).dtype == tf.float32


def test_batches_and_broadcasting() -> None:
    rng = np.random.default_rng(4)
    Fmu = rng.normal(size=[3, 2, 5, 2])
    Fvar = rng.gamma(1.0, size=[5, 2])
    Y = rng.integers(0, 2, [5, 2])
    X = np.zeros([5, 1])
    likelihood = ProbitBernoulli()

    def one_by_one(method: str, *args: float) -> AnyNDArray:
        fn = getattr(likelihood, method)
        rows = [fn(X, Fmu[i, j], Fvar, Y, *args) for i in range(3) for j in range(2)]
        return np.reshape(np.stack(rows), [3, 2, *rows[0].shape])

    expectation = likelihood.variational_expectations(X, Fmu, Fvar, Y)
    assert expectation.shape == [3, 2, 5]
    np.testing.assert_allclose(expectation, one_by_one("variational_expectations"), rtol=1e-13)
    power = likelihood.log_expected_power(X, Fmu, Fvar, Y, 0.5)
    assert power.shape == [3, 2, 5, 2]
    np.testing.assert_allclose(power, one_by_one("log_expected_power", 0.5), rtol=1e-13)
    np.testing.assert_allclose(
        tf.reduce_sum(likelihood.log_expected_power(X, Fmu, Fvar, Y, 1.0), -1),
        likelihood.predict_log_density(X, Fmu, Fvar, Y),
        rtol=1e-13,
    )


def test_gradients_through_broadcast_arguments() -> None:
    rng = np.random.default_rng(5)
    m, v = tf.constant(rng.normal(size=[4, 3, 1])), tf.constant(rng.gamma(1.0, size=[3, 1]))
    Y = tf.constant(rng.integers(0, 2, [3, 1]))
    with tf.GradientTape() as tape:
        tape.watch([m, v])
        E = ProbitBernoulli().variational_expectations(no_inputs(v), m, v, Y)
    dm, dv = tape.gradient(E, [m, v])
    each = [expectation_and_derivatives(m[i], v, Y)[1:3] for i in range(4)]
    np.testing.assert_allclose(dm, np.stack([e[0] for e in each]), rtol=1e-13)
    np.testing.assert_allclose(dv, np.sum([e[1] for e in each], 0), rtol=1e-13)


def test_unknown_shapes_in_a_compiled_function(
    marginals: tuple[tf.Tensor, tf.Tensor, tf.Tensor],
) -> None:
    m, v, Y = marginals
    likelihood = ProbitBernoulli()
    spec = tf.TensorSpec([None, 1], tf.float64)

    @tf.function(input_signature=[spec, spec, spec])
    def both(m: tf.Tensor, v: tf.Tensor, Y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return (
            likelihood.variational_expectations(m, m, v, Y),
            likelihood.log_expected_power(m, m, v, Y, 0.5),
        )

    for n in (40, 7):
        expectation, power = both(m[:n], v[:n], Y[:n])
        np.testing.assert_allclose(
            expectation, likelihood.variational_expectations(m, m, v, Y)[:n], rtol=1e-12
        )
        np.testing.assert_allclose(
            power, likelihood.log_expected_power(m, m, v, Y, 0.5)[:n], rtol=1e-12
        )


@pytest.mark.parametrize("edge", [*(narrow.variance for narrow in NARROW), 1.1, 10.0, MODERATE])
def test_few_nodes_are_enough_for_narrow_and_moderate_marginals(edge: float) -> None:
    m = np.concatenate([np.linspace(-12.0, 12.0, 481), np.linspace(-300.0, 300.0, 61)])
    v = np.full_like(m, edge)
    finest = Rule(80, 11.0)
    expected = [*_low_quadrature(m, v, finest), *_high_quadrature(m, v, finest)]
    for order, found, other in zip(
        range(5), [*low_moments(m, v), *high_moments(m, v)], expected, strict=True
    ):
        error = np.abs(found - other) / np.maximum(np.abs(other), 1.0)
        assert np.max(error) < 1e-11, order
    # A little wider, another rule: the same numbers but for their slope in v.
    wider = np.full_like(m, edge * (1.0 + 1e-12))
    for found, other in zip(low_moments(m, wider), low_moments(m, v), strict=True):
        np.testing.assert_allclose(found, other, rtol=1e-9, atol=1e-9)


def test_marginals_of_all_widths_do_not_change_with_their_neighbours() -> None:
    rng = np.random.default_rng(0)
    m, v = rng.normal(size=500), 10.0 ** rng.uniform(-5.0, 5.0, 500)
    assert len(np.unique(class_of(v))) == len(NARROW) + 1
    for moments in (low_moments, high_moments):
        together = np.stack(moments(m, v))
        alone = np.stack([np.concatenate(moments(m[[n]], v[[n]])) for n in range(500)], 1)
        np.testing.assert_allclose(together, alone, rtol=1e-12, atol=1e-14)
        assert all(len(x) == 0 for x in moments(m[:0], v[:0]))


def test_a_rough_curvature_has_three_digits() -> None:
    v = np.array([*10.0 ** np.arange(-6, 7), 1.1, 30.0, MODERATE])
    near, far = np.linspace(-40, 40, 41)[:, None], np.linspace(-10, 10, 41)[:, None] * np.sqrt(v)
    m, v = (x.reshape(-1, 1) for x in np.broadcast_arrays(np.vstack([near + 0.0 * v, far]), v))
    likelihood, Y = ProbitBernoulli(), np.ones_like(m)
    fine, rough = (
        np.hstack(likelihood.expectation_curvature(None, m, v, Y, rough=r)) for r in (False, True)
    )
    # in units of the marginal; what is much smaller than one changes no step
    units = np.hstack([v**1.5, v**2])
    np.testing.assert_allclose(rough * units, fine * units, rtol=1e-3, atol=1e-5)
    assert np.any(rough != fine)
