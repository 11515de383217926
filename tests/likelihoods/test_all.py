"""Every likelihood through inference, objectives, predictions and the training loss."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf
from scipy.special import logsumexp, ndtr

import gpflow_hybrid as gh
from gpflow_hybrid.likelihoods import predictions
from gpflow_hybrid.likelihoods.expectations import variational_expectations
from gpflow_hybrid.likelihoods.ratios import (
    log_expected_power,
    log_expected_ratio,
)
from tests import reference
from tests.likelihood_cases import CASES, LogCosh
from tests.selection import by_speed

N = 12


def make_data(name: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(sorted(CASES).index(name))
    X = np.linspace(-2.0, 2.0, N)[:, None]
    return X, CASES[name].observe(np.sin(2.0 * X), rng)


def make_model(name: str, **kwargs: Any) -> gh.CVIModel:
    kernel = gpflow.kernels.Matern52(variance=0.8, lengthscales=1.2)
    mean_function = gpflow.mean_functions.Constant(0.1)
    return gh.CVIModel(make_data(name), kernel, CASES[name].make(), mean_function, **kwargs)


@functools.cache
def inferred(name: str) -> tuple[gh.CVIModel, gh.InferenceResult]:
    """A model after inference; tests read it only."""
    model = make_model(name)
    return model, model.infer(tolerance=1e-6)


def reference_posterior(model: gh.CVIModel) -> reference.Posterior:
    X = model.data[0]
    K = model.kernel(X).numpy()[None]
    mean = np.full(model.sites.lambda_1.shape, 0.1)
    return reference.posterior(K, mean, model.sites.lambda_1.numpy(), model.sites.lambda_2.numpy())


@pytest.mark.parametrize("name", CASES)
def test_inference_converges_to_the_fixed_point(name: str) -> None:
    model, result = inferred(name)
    assert result.converged, result.message
    assert result.residual <= 1e-6
    np.testing.assert_allclose(result.elbo, model.elbo(), rtol=1e-10)
    # λ = g(λ): the natural gradient is zero, λ₁ and λ₂ measured in units of q.
    before = [x.numpy() for x in model.sites.values]
    other = make_model(name)
    other.sites.assign(model.sites.values)
    other.natgrad_step(1.0)
    v = reference_posterior(model).variance
    step_1, step_2 = (x.numpy() - y for x, y in zip(other.sites.values, before, strict=True))
    assert np.max(np.abs(step_2) * v) < 1e-5
    assert np.max(np.abs(step_1) * np.sqrt(v)) < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_elbo_is_a_maximum(name: str) -> None:
    model, result = inferred(name)
    rng = np.random.default_rng(50)
    values = model.sites.values
    other = make_model(name)
    for _ in range(3):
        factor = 1.0 + 0.1 * rng.normal(size=(2, *values.lambda_1.shape))
        other.sites.assign(type(values)(*(x * f for x, f in zip(values, factor, strict=True))))
        assert other.elbo() < result.elbo


@pytest.mark.parametrize("name", CASES)
def test_objectives_are_ordered_and_deterministic(name: str) -> None:
    model, _ = inferred(name)

    def values() -> list[tf.Tensor]:
        return [
            model.elbo(),
            model.power_ep_log_marginal(0.5),
            model.ep_like_log_marginal(),
            tf.reduce_sum(model.loo_log_predictive_density()),
        ]

    first = [v.numpy() for v in values()]
    assert np.all(np.isfinite(first))
    if name == "gaussian":
        np.testing.assert_allclose(first[:3], first[0], rtol=1e-10)
    else:
        assert first[0] < first[1] < first[2]
    # Nothing is drawn. Where an array lies in memory may decide over the last bit of a sum, no more.
    np.testing.assert_allclose(values(), first, rtol=1e-14)


@pytest.mark.parametrize(
    "name", by_speed(zip(CASES), [("gaussian",), ("student_t",), ("switched",), ("softmax",)])
)
def test_objectives_are_the_same_in_a_graph(name: str) -> None:
    model, _ = inferred(name)
    for value in (model.elbo, model.ep_like_log_marginal):
        np.testing.assert_allclose(tf.function(value)(), value(), rtol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_leave_one_out_is_one_finite_value_per_datum(name: str) -> None:
    # An observation is less expected without it in the data.
    model, _ = inferred(name)
    loo = model.loo_log_predictive_density()
    assert loo.shape == (N,)
    assert np.all(np.isfinite(loo))
    tf.random.set_seed(0)
    within = model.predict_log_density(model.data)
    assert tf.reduce_sum(loo) < tf.reduce_sum(within)


@pytest.mark.parametrize("name", CASES)
def test_predictions_at_the_data_follow_from_the_sites(name: str) -> None:
    model, _ = inferred(name)
    X, Y = model.data
    q = reference_posterior(model)
    mean, variance = model.predict_f(X)
    np.testing.assert_allclose(mean, q.mean, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(variance, q.variance, rtol=1e-7)
    _, covariance = model.predict_f(X, full_cov=True)
    np.testing.assert_allclose(covariance, q.covariance, rtol=1e-7, atol=1e-9)
    actual = [*model.predict_y(X), model.predict_log_density((X, Y))]
    expected = [
        *model.likelihood.predict_mean_and_var(X, q.mean, q.variance),
        model.likelihood.predict_log_density(X, q.mean, q.variance, Y),
    ]
    if isinstance(model.likelihood, gpflow.likelihoods.MonteCarloLikelihood):
        # GPflow's draws are random; tests/models/test_predictions.py compares with many.
        at = (model.likelihood, X, *(tf.constant(x) for x in (q.mean, q.variance)))
        expected = [
            *predictions.predict_mean_and_var(*at),
            predictions.predict_log_density(*at, Y),
        ]
    for a, e in zip(actual, expected, strict=True):
        assert np.all(np.isfinite(e))
        np.testing.assert_allclose(a, e, rtol=1e-6, atol=1e-8)


# A trace takes seconds. One for each road to E_q[(p/t)^α] at all times: scalar quadrature, product
# rule, fixed points; the closed form and the ELBO are in models/test_gaussian_exact.py.
TRAINED = [
    ("own_log_cosh", "ep_like"),
    ("heteroskedastic", "ep_like"),
    ("softmax", "ep_like"),
]


@pytest.mark.parametrize(
    ("name", "objective"),
    by_speed(itertools.product(CASES, ["ep_like", "elbo"]), TRAINED),
)
def test_training_loss_and_its_gradient(name: str, objective: str) -> None:
    model = make_model(name, objective=objective)
    variables = model.trainable_variables

    def loss_and_gradient() -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            loss = model.training_loss()
        return loss, tape.gradient(loss, variables)

    compiled = tf.function(loss_and_gradient, autograph=False)
    loss, gradient = compiled()
    gradient = np.concatenate([np.ravel(g) for g in gradient])
    assert len(gradient) == sum(v.numpy().size for v in variables)  # no variable is unconnected

    # The loss is the objective at λ*, to the tolerance of inference there.
    reference_model, _ = inferred(name)
    value = reference_model.power_ep_log_marginal(1.0 if objective == "ep_like" else 0.0)
    np.testing.assert_allclose(loss, -value, rtol=1e-5)

    # The total derivative of θ ↦ L_α(λ*(θ), θ), along a random direction.
    rng = np.random.default_rng(3)
    start = [v.numpy() for v in variables]
    direction = [rng.normal(size=v.shape) for v in start]
    h, ends = 1e-4, []
    for sign in (1.0, -1.0):
        for variable, value, d in zip(variables, start, direction, strict=True):
            variable.assign(value + sign * h * d)
        ends.append(float(compiled()[0]))
    numeric = (ends[0] - ends[1]) / (2.0 * h)
    analytic = gradient @ np.concatenate([np.ravel(d) for d in direction])
    np.testing.assert_allclose(analytic, numeric, rtol=1e-4, atol=1e-5)


def test_training_loss_is_the_same_in_a_graph() -> None:
    eager, graph = (make_model("poisson", objective="elbo") for _ in range(2))
    loss = eager.training_loss()
    np.testing.assert_allclose(tf.function(graph.training_loss)(), loss, rtol=1e-10)


def test_ordinal_of_gpflow_is_used_with_finite_edges() -> None:
    # GPflow's own is NaN in its outer bins where tf.math.erf(±∞) is (tensorflow/tensorflow#108483).
    theirs = gpflow.likelihoods.Ordinal(np.array([-0.4, 0.4]))
    X = np.linspace(-1.0, 1.0, 6)[:, None]
    Y = np.array([[0], [0], [1], [1], [2], [2]])
    model = gh.CVIModel((X, Y), gpflow.kernels.RBF(), theirs)
    assert isinstance(model.likelihood, gh.likelihoods.Ordinal)
    assert model.likelihood.sigma is theirs.sigma
    assert model.infer().converged
    inner = np.array([[1]])
    f = np.array([[0.3]])
    np.testing.assert_allclose(
        model.likelihood.log_prob(f, f, inner), theirs.log_prob(f, f, inner), rtol=1e-12
    )
    # The three bins share what is left of GPflow's squeezed probabilities.
    total = sum(np.exp(model.likelihood.log_prob(f, f, np.array([[k]]))) for k in range(3))
    np.testing.assert_allclose(total, 0.998 + 3e-6, rtol=1e-10)
    mean, variance = model.predict_y(X)
    assert np.all((mean > 0) & (mean < 2) & (variance > 0))


# Softmax, whose expectations GPflow draws at random.


def softmax_expectations(
    m: np.ndarray, v: np.ndarray, y: int, z: np.ndarray, log_w: np.ndarray
) -> tuple[float, float]:
    """``E[log p]`` and ``log E[p]`` for one datum from points ``[Q, C]`` of N(0, I)."""
    f = m + np.sqrt(v) * z
    log_p = f[:, y] - logsumexp(f, axis=1)
    return float(np.exp(log_w) @ log_p), float(logsumexp(log_w + log_p))


def softmax_marginals(C: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(C)
    Y = np.arange(4)[:, None] % C
    return rng.normal(size=(4, C)), rng.uniform(0.1, 1.5, (4, C)), Y


def package_softmax(C: int) -> tuple[np.ndarray, np.ndarray]:
    m, v, Y = softmax_marginals(C)
    likelihood, X = gpflow.likelihoods.Softmax(C), np.zeros((4, 1))
    m, v, zeros = tf.constant(m), tf.constant(v), tf.zeros((4, C), tf.float64)
    return (
        variational_expectations(likelihood, X, m, v, Y).numpy(),
        log_expected_ratio(likelihood, X, m, v, Y, zeros, zeros, 1.0).numpy(),
    )


@pytest.mark.parametrize("C", [2, 3])
def test_softmax_matches_gauss_hermite_product(C: int) -> None:
    x, w = np.polynomial.hermite_e.hermegauss(60)
    z = np.stack(np.meshgrid(*[x] * C, indexing="ij"), -1).reshape(-1, C)
    log_w = functools.reduce(np.add.outer, [np.log(w / w.sum())] * C).ravel()
    m, v, Y = softmax_marginals(C)
    expected = [softmax_expectations(m[n], v[n], Y[n, 0], z, log_w) for n in range(4)]
    # 20 points for each of two latents, 12 for each of three.
    np.testing.assert_allclose(np.transpose(package_softmax(C)), expected, rtol=1e-4)


def test_softmax_with_five_classes_matches_monte_carlo() -> None:
    num = 300_000
    z = np.random.default_rng(0).normal(size=(num, 5))
    m, v, Y = softmax_marginals(5)
    log_w = np.full(num, -np.log(num))
    expected = [softmax_expectations(m[n], v[n], Y[n, 0], z, log_w) for n in range(4)]
    # 1024 quasi-random points on one side; the other's standard error is 2e-3.
    np.testing.assert_allclose(np.transpose(package_softmax(5)), expected, atol=5e-3)


# Closed forms of (1/α) log E[pᵅ].


@pytest.mark.parametrize("alpha", [1e-4, 0.3, 1.0])
def test_gaussian_closed_form_matches_quadrature(alpha: float) -> None:
    rng = np.random.default_rng(4)
    m, Y, X = rng.normal(size=(3, 5, 2))
    v = rng.uniform(0.05, 3.0, (5, 2))

    def noise(x: np.ndarray) -> np.ndarray:
        return 0.1 + 0.05 * x[:, :1] ** 2

    expected = reference.log_expected_power(
        m, v, Y, lambda f, y: reference.log_normal(y, f, noise(X)), alpha
    ).sum(1)

    class Noise(gpflow.functions.Function):
        def __call__(self, X: Any) -> Any:
            return 0.1 + 0.05 * tf.square(X[..., :1])

    likelihood = gpflow.likelihoods.Gaussian(variance=Noise())
    actual = log_expected_power(likelihood, X, m, v, Y, alpha)
    np.testing.assert_allclose(actual, expected, rtol=1e-8)


@pytest.mark.parametrize("alpha", [1e-3, 0.3, 1.0])
def test_multiclass_closed_form_matches_quadrature(alpha: float) -> None:
    # P(y's latent is the largest) = ∫ N(f_y) Π_{c≠y} Φ((f_y − m_c)/s_c), then a two-valued p.
    rng = np.random.default_rng(5)
    m, v = rng.normal(size=(4, 3)), rng.uniform(0.3, 1.5, (4, 3))
    Y = np.array([[0], [1], [2], [0]])
    likelihood = gpflow.likelihoods.MultiClass(3)
    likelihood.num_gauss_hermite_points = 100  # GPflow's 20 leave 1e-4
    epsilon = 1e-3
    expected = []
    for n, y in enumerate(Y[:, 0]):
        f = reference.grid((m[n, y], v[n, y]))
        others = [c for c in range(3) if c != y]
        density = np.exp(reference.log_normal(f, m[n, y], v[n, y]))
        prob = np.sum(
            density * np.prod([ndtr((f - m[n, c]) / np.sqrt(v[n, c])) for c in others], axis=0)
        ) * (f[1] - f[0])
        power = prob * (1.0 - epsilon) ** alpha + (1.0 - prob) * (epsilon / 2.0) ** alpha
        expected.append(np.log(power) / alpha)
    actual = log_expected_power(
        likelihood, np.zeros((4, 1)), tf.constant(m), tf.constant(v), Y, alpha
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_likelihoods_without_a_closed_form_have_none() -> None:
    likelihood = gpflow.likelihoods.StudentT()
    x = tf.ones((2, 1), tf.float64)
    assert log_expected_power(likelihood, x, x, x, x, 0.5) is None


class OwnClosedForm(LogCosh):
    """Counts its calls; the closed form is of another density on purpose, N(y; f, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.alphas: list[float] = []

    def log_expected_power(
        self, X: tf.Tensor, Fmu: tf.Tensor, Fvar: tf.Tensor, Y: tf.Tensor, alpha: float
    ) -> tf.Tensor:
        self.alphas.append(alpha)
        return -0.5 * (
            np.log(2.0 * np.pi)
            + tf.math.log1p(alpha * Fvar) / alpha
            + tf.square(Y - Fmu) / (1.0 + alpha * Fvar)
        )


def test_closed_form_of_the_users_own_likelihood_is_used() -> None:
    X, Y = make_data("own_log_cosh")
    model = gh.CVIModel((X, Y), gpflow.kernels.Matern52(), OwnClosedForm())
    gaussian = gh.CVIModel((X, Y), gpflow.kernels.Matern52(), gpflow.likelihoods.Gaussian(1.0))
    rng = np.random.default_rng(6)
    for m in (model, gaussian):
        m.sites.lambda_1.assign(np.full((N, 1), 0.3))
        m.sites.lambda_2.assign(np.linspace(-0.1, 1.0, N)[:, None])
    alpha = float(rng.uniform(0.2, 0.8))
    np.testing.assert_allclose(
        model.power_ep_log_marginal(alpha), gaussian.power_ep_log_marginal(alpha), rtol=1e-12
    )
    assert model.likelihood.alphas == [alpha]
    np.testing.assert_allclose(
        model.loo_log_predictive_density(), gaussian.loo_log_predictive_density(), rtol=1e-12
    )
