"""L_α, the ELBO and leave-one-out densities against brute-force integrals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf
from gpflow.quadrature import NDiagGHQuadrature
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.special import gammaln, log_ndtr

import gpflow_hybrid as gh
from gpflow_hybrid import objectives
from gpflow_hybrid.errors import InvalidDataError, InvalidPosteriorError
from gpflow_hybrid.likelihoods import ProbitBernoulli
from gpflow_hybrid.linalg import Marginals, marginals
from gpflow_hybrid.sites import SiteValues
from tests import reference
from tests.likelihood_cases import CASES

N = 6
NOISE = 0.2


def student_t_log_prob(f: np.ndarray, y: np.ndarray) -> np.ndarray:
    scale, df = 0.5, 4.0
    constant = gammaln(0.5 * (df + 1.0)) - gammaln(0.5 * df) - 0.5 * np.log(np.pi * df)
    return constant - np.log(scale) - 0.5 * (df + 1.0) * np.log1p(((y - f) / scale) ** 2 / df)


# The likelihood, its log density in NumPy, and observations.
EXACT: dict[str, tuple[Callable[[], Any], reference.LogProb, np.ndarray]] = {
    "gaussian": (
        lambda: gpflow.likelihoods.Gaussian(NOISE),
        lambda f, y: reference.log_normal(y, f, NOISE),
        np.array([0.3, -1.2, 0.8, 2.0, -0.1, 0.5]),
    ),
    "probit": (
        ProbitBernoulli,
        lambda f, y: log_ndtr((2.0 * y - 1.0) * f),
        np.array([1.0, 0.0, 1.0, 1.0, 0.0, 0.0]),
    ),
    "poisson": (
        gpflow.likelihoods.Poisson,
        lambda f, y: y * f - np.exp(f) - gammaln(y + 1.0),
        np.array([1.0, 0.0, 4.0, 2.0, 0.0, 3.0]),
    ),
    "student_t": (
        # E[log p] by GPflow's 20 points is off by 1e-4 here: its poles at f = y ± i√(df) scale are
        # within a standard deviation of q. 100 points leave 1e-9.
        lambda: gpflow.likelihoods.StudentT(
            scale=0.5, df=4.0, quadrature=NDiagGHQuadrature(1, 100)
        ),
        student_t_log_prob,
        np.array([0.3, -1.2, 0.8, 6.0, -0.1, 0.5]),
    ),
}


def make_problem(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """``K [1, N, N]``, a mean that is not zero, and signed sites with valid q and cavities."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2.0, 2.0, N)
    K = 0.8 * np.exp(-0.5 * (X[:, None] - X) ** 2)[None]
    mean, lambda_1, lambda_2 = rng.normal(size=(3, N, 1))
    lambda_2 = np.abs(lambda_2)
    lambda_2[[1, 4]] = [[-0.25], [-0.1]]
    assert reference.smallest_eigenvalue(K, lambda_2) > 0.2
    assert np.all(reference.cavities(K, mean, lambda_1, lambda_2)[1] > 0.0)
    return K, 0.5 * mean, lambda_1, lambda_2


def value_of(
    objective: Callable[..., tf.Tensor],
    problem: tuple[np.ndarray, ...],
    likelihood: gpflow.likelihoods.Likelihood,
    Y: np.ndarray,
    *args: Any,
) -> np.ndarray:
    K, mean, *sites = problem
    data = (tf.zeros((len(Y), 1), tf.float64), tf.constant(Y))
    sites = SiteValues(*(tf.constant(s) for s in sites))
    return objective(marginals(K, mean, *sites), sites, likelihood, data, *args).numpy()


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("seed", [0, 1])
def test_power_ep_matches_brute_force(name: str, alpha: float, seed: int) -> None:
    make, log_prob, y = EXACT[name]
    problem, Y = make_problem(seed), y[:, None]
    actual = value_of(objectives.power_ep, problem, make(), Y, alpha)
    expected = reference.power_ep(*problem, Y, log_prob, alpha)
    np.testing.assert_allclose(actual, expected, rtol=1e-8)


@pytest.mark.parametrize("name", EXACT)
def test_leave_one_out_matches_removing_each_site(name: str) -> None:
    make, log_prob, y = EXACT[name]
    problem, Y = make_problem(2), y[:, None]
    actual = value_of(objectives.loo_log_predictive_density, problem, make(), Y)
    expected = reference.loo(*problem, Y, log_prob)
    np.testing.assert_allclose(actual, expected, rtol=1e-8, atol=1e-8)


def test_several_outputs_add_up() -> None:
    # P = 2 with separate kernels is the sum of two problems.
    make, log_prob, y = EXACT["student_t"]
    problems, Ys = [make_problem(s) for s in (3, 4)], [y[:, None], -y[:, None]]
    K = np.concatenate([p[0] for p in problems])
    rest = [np.hstack(columns) for columns in list(zip(*problems, strict=True))[1:]]
    for alpha in (0.0, 0.5):
        actual = value_of(objectives.power_ep, (K, *rest), make(), np.hstack(Ys), alpha)
        expected = sum(
            reference.power_ep(*p, Y, log_prob, alpha) for p, Y in zip(problems, Ys, strict=True)
        )
        np.testing.assert_allclose(actual, expected, rtol=1e-8)


@pytest.mark.parametrize("name", EXACT)
def test_power_zero_is_the_elbo_exactly(name: str) -> None:
    make, _, y = EXACT[name]
    problem, Y = make_problem(5), y[:, None]
    likelihood = make()
    zero = value_of(objectives.power_ep, problem, likelihood, Y, 0.0)
    assert zero == value_of(objectives.elbo, problem, likelihood, Y)


@pytest.mark.parametrize("name", EXACT)
def test_continuous_as_the_power_vanishes(name: str) -> None:
    make, _, y = EXACT[name]
    problem, Y = make_problem(6), y[:, None]
    likelihood = make()
    elbo = value_of(objectives.elbo, problem, likelihood, Y)
    slope = (value_of(objectives.power_ep, problem, likelihood, Y, 1e-4) - elbo) / 1e-4
    for alpha in (1e-6, 1e-10):
        # L_α − L_0 = ½ α Σ Var_q[h] + O(α²), without digits lost to the division by α.
        value = value_of(objectives.power_ep, problem, likelihood, Y, alpha)
        assert abs(value - elbo - slope * alpha) < 1e-8


@st.composite
def site_problems(draw: st.DrawFn) -> tuple[np.ndarray, ...]:
    """Marginals and signed sites of four data, wherever every cavity exists."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    mean, lambda_1 = draw(st.sampled_from([0.3, 1.0, 3.0])) * rng.normal(size=(2, 4, 1))
    variance = np.exp(rng.uniform(-6.0, 2.0, (4, 1)))
    # λ₂v < 0.98: the cavity is at most fifty times as wide as q, or narrower if λ₂ < 0.
    lambda_2 = rng.uniform(-2.0, 0.98, (4, 1)) / variance
    return mean, variance, lambda_1, lambda_2


@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    site_problems(),
    st.sampled_from(
        ["gaussian", "bernoulli_probit", "probit_bernoulli", "student_t", "poisson", "switched"]
    ),
    st.integers(0, 1000),
)
def test_non_decreasing_in_the_power(problem: tuple[np.ndarray, ...], name: str, seed: int) -> None:
    mean, variance, lambda_1, lambda_2 = (tf.constant(a) for a in problem)
    case = CASES[name]
    Y = tf.constant(case.observe(problem[0], np.random.default_rng(seed)))
    q = Marginals(mean, variance, tf.zeros((), tf.float64))
    sites, data = SiteValues(lambda_1, lambda_2), (tf.zeros((4, 1), tf.float64), Y)
    likelihood = case.make(**case.fine)
    powers = [1e-6, 0.1, 0.5, 0.9, 1.0]
    values = np.array([objectives.power_ep(q, sites, likelihood, data, a).numpy() for a in powers])
    assert np.all(np.isfinite(values))
    assert np.all(np.diff(values) >= -1e-9 * np.abs(values[1:]))


def model_with(
    data: tuple[np.ndarray, np.ndarray],
    likelihood: gpflow.likelihoods.Likelihood,
    lambda_1: Any,
    lambda_2: Any,
    variance: float = 1.0,
) -> gh.CVIModel:
    model = gh.CVIModel(
        data,
        gpflow.kernels.Matern52(variance=variance),
        likelihood,
        mean_function=gpflow.mean_functions.Constant(0.3),
    )
    model.sites.lambda_1.assign(np.reshape(lambda_1, (len(data[0]), -1)))
    model.sites.lambda_2.assign(np.reshape(lambda_2, (len(data[0]), -1)))
    return model


def one_datum_evidence(
    likelihood: gpflow.likelihoods.Likelihood, Y: np.ndarray, prior_variance: float
) -> float:
    """``log ∫ N(f; 0.3, k) p(y|f) df`` by brute force, from the likelihood's own density."""

    def log_prob(f: np.ndarray) -> np.ndarray:
        rows = np.repeat(Y, len(f), axis=0)
        return likelihood.log_prob(np.zeros((len(f), 1)), f, rows).numpy()

    if likelihood.latent_dim == 2:
        return reference.log_evidence_2d(np.full(2, 0.3), np.full(2, prior_variance), log_prob)
    f = reference.grid((np.array([0.3]), np.array([prior_variance])))
    log_values = reference.log_normal(f[:, 0], 0.3, prior_variance) + log_prob(f)
    return float(reference.log_integral(log_values, f[:, 0]))


@pytest.mark.parametrize("lambda_2", [2.0, -0.6])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.num_latent <= 2])
def test_ep_like_and_leave_one_out_are_exact_for_one_datum(name: str, lambda_2: float) -> None:
    # Z E_q[p/t] = ∫ N(f; μ₀, k) p(y|f) df whatever the site; the only cavity is the prior.
    case = CASES[name]
    likelihood = case.make(**case.fine)
    Y = case.observe(np.array([[0.7]]), np.random.default_rng(8))
    L = case.num_latent
    model = model_with((np.zeros((1, 1)), Y), likelihood, [0.5] * L, [lambda_2] * L, variance=0.5)
    expected = one_datum_evidence(likelihood, Y, 0.5)
    # 41 × 41 nodes miss the peak of p where its noise is smaller than their spacing.
    rtol = 1e-5 if L == 2 else 1e-8
    np.testing.assert_allclose(model.ep_like_log_marginal(), expected, rtol=rtol)
    np.testing.assert_allclose(model.loo_log_predictive_density(), [expected], rtol=rtol)


def test_leave_one_out_of_a_gaussian_is_the_exact_formula() -> None:
    # GPR: log p(yₙ|y₋ₙ) with variance 1/(C⁻¹)ₙₙ and mean yₙ − (C⁻¹(y − μ₀))ₙ/(C⁻¹)ₙₙ, C = K + σ²I.
    rng = np.random.default_rng(9)
    X = rng.uniform(-2.0, 2.0, (8, 1))
    Y = np.sin(2.0 * X) + 0.3 * rng.normal(size=(8, 1))
    model = model_with((X, Y), gpflow.likelihoods.Gaussian(NOISE), np.zeros(8), np.zeros(8))
    model.natgrad_step(1.0)
    C_inv = np.linalg.inv(model.kernel(X).numpy() + NOISE * np.eye(8))
    variance = 1.0 / np.diag(C_inv)
    mean = Y[:, 0] - variance * (C_inv @ (Y[:, 0] - 0.3))
    expected = reference.log_normal(Y[:, 0], mean, variance)
    np.testing.assert_allclose(model.loo_log_predictive_density(), expected, rtol=1e-10)


def test_missing_cavity_is_refused_by_datum() -> None:
    # Datum 2's positive site is what keeps q valid: without it datum 0's λ₂ = −1.1 leaves none.
    X = np.array([[0.0], [50.0], [0.1]])
    model = model_with(
        (X, np.ones((3, 1))), ProbitBernoulli(), np.zeros(3), np.array([-1.1, 0.5, 3.0])
    )
    assert np.isfinite(model.elbo())
    message = r"cavity of datum 2 \(latent 0\) does not exist.*α = 1 \(1 such data\)"
    for value in (model.ep_like_log_marginal, model.loo_log_predictive_density):
        with pytest.raises(InvalidPosteriorError, match=message):
            value()
    with pytest.raises(InvalidPosteriorError, match=r"datum 2 .*α = 0\.99"):
        model.power_ep_log_marginal(0.99)
    # A smaller power leaves more of the site in the cavity.
    assert model.power_ep_log_marginal(0.2) >= model.elbo()


def test_missing_cavity_is_refused_in_a_graph() -> None:
    X = np.array([[0.0], [0.1]])
    model = model_with((X, np.ones((2, 1))), ProbitBernoulli(), np.zeros(2), [-1.1, 3.0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="cavity 1/v − αλ₂ is not positive"):
        tf.function(model.ep_like_log_marginal)()


@pytest.mark.parametrize("name", ["probit", "student_t", "gaussian"])
def test_missing_cavity_is_nan_in_the_pure_function(name: str) -> None:
    make, _, y = EXACT[name]
    q = Marginals(*(tf.constant(x, tf.float64) for x in ([[0.0]], [[1.0]], 0.0)))
    sites = SiteValues(tf.zeros((1, 1), tf.float64), tf.constant([[1.5]], tf.float64))
    data = (tf.zeros((1, 1), tf.float64), tf.constant(y[:1, None]))
    assert np.isnan(objectives.power_ep(q, sites, make(), data, 1.0))
    assert np.isnan(objectives.loo_log_predictive_density(q, sites, make(), data)[0])
    assert np.isfinite(objectives.power_ep(q, sites, make(), data, 0.5))


@pytest.fixture
def small_model() -> gh.CVIModel:
    X = np.linspace(0.0, 1.0, 3)[:, None]
    return gh.CVIModel((X, np.ones((3, 1))), gpflow.kernels.RBF(), ProbitBernoulli())


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan"), "x", None])
def test_power_outside_the_unit_interval_is_refused(small_model: gh.CVIModel, alpha: Any) -> None:
    with pytest.raises(InvalidDataError, match=r"alpha must be a number in \[0, 1\].*found"):
        small_model.power_ep_log_marginal(alpha)


@pytest.mark.parametrize("objective", ["vi", "x", "ELBO", None, True, [0.5]])
def test_unknown_objective_is_refused(small_model: gh.CVIModel, objective: Any) -> None:
    message = r'objective must be "elbo", "ep_like" or a power alpha in \[0, 1\]; found'
    with pytest.raises(InvalidDataError, match=message):
        small_model.objective = objective
    assert small_model.objective == "ep_like"
    X, Y = small_model.data
    with pytest.raises(InvalidDataError, match=message):
        gh.CVIModel((X, Y), gpflow.kernels.RBF(), ProbitBernoulli(), objective=objective)


@pytest.mark.parametrize("objective", [-0.1, 1.1])
def test_objective_outside_the_unit_interval_is_refused(
    small_model: gh.CVIModel, objective: float
) -> None:
    with pytest.raises(InvalidDataError, match=r"objective must be a number in \[0, 1\].*found"):
        small_model.objective = objective


@pytest.mark.parametrize(
    ("objective", "alpha"), [("elbo", 0.0), ("ep_like", 1.0), (0.25, 0.25), (1, 1.0), (0, 0.0)]
)
def test_power_of_an_objective(objective: Any, alpha: float) -> None:
    assert objectives.power_of(objective) == alpha


def test_objective_setter_changes_what_training_maximises() -> None:
    X = np.linspace(0.0, 1.0, 3)[:, None]
    likelihood = gpflow.likelihoods.Poisson()
    model = gh.CVIModel((X, np.array([[0.0], [3.0], [1.0]])), gpflow.kernels.RBF(), likelihood)
    losses = {}
    for objective in (0.5, "elbo"):
        model.objective = objective
        losses[objective] = float(model.training_loss())
        expected = model.power_ep_log_marginal(objectives.power_of(objective))
        np.testing.assert_allclose(losses[objective], -expected, rtol=1e-10)
    assert losses["elbo"] > losses[0.5]
