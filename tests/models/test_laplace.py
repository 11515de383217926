"""LaplaceModel finds the mode, and its value and gradient are Laplace's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpflow
import numpy as np
import pytest
import scipy.optimize
import tensorflow as tf
from scipy.special import expit
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import ConstantKernel, Matern

import gpflow_hybrid as gh
from tests import reference
from tests.gradients import loss_gradient
from tests.likelihood_cases import CASES

N = 12

# One instance each: their compiled graphs are reused.
LIKELIHOODS = {name: CASES[name].make() for name in reference.LOG_PROBS}
LOGIT, STUDENT = LIKELIHOODS["bernoulli_logit"], LIKELIHOODS["student_t"]


def student_derivatives(f: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    u, width = y - f, 4.0 * 0.5**2
    return 5.0 * u / (width + u**2), 5.0 * (u**2 - width) / (width + u**2) ** 2


DERIVATIVES: dict[str, Callable[..., tuple[np.ndarray, np.ndarray]]] = {
    "bernoulli_logit": lambda f, y: (y - expit(f), -expit(f) * expit(-f)),
    "poisson": lambda f, y: (y - np.exp(f), -np.exp(f)),
    "student_t": student_derivatives,
}
"""``∂ log p/∂f`` and ``∂² log p/∂f²``."""


def make_model(name: str, variance: float = 1.5, columns: int = 1) -> gh.LaplaceModel:
    rng = np.random.default_rng(sorted(CASES).index(name))
    X = np.linspace(-2.0, 2.0, N)[:, None]
    Y = CASES[name].observe(np.sin(2.0 * X + np.arange(columns)), rng)
    kernel = gpflow.kernels.Matern52(variance=variance)
    return gh.LaplaceModel((X, Y), kernel, LIKELIHOODS[name], gpflow.functions.Constant(0.2))


def mean_at_data(model: gh.LaplaceModel) -> np.ndarray:
    return model.predict_f(model.data[0])[0].numpy()


# Values from elsewhere


def sonar() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    X, Y = gh.datasets.load("sonar")
    train, test = next(iter(gh.datasets.folds(len(X))))
    return *gh.datasets.standardise(X[train], X[test]), Y[train]


@pytest.mark.parametrize(
    ("log_lengthscale", "log_sigma"), [(2.3, 1.7), (2.0, 0.5), (1.0, 1.0), (2.6, 3.0), (0.0, 0.0)]
)
def test_value_gradient_and_mode_are_scikit_learns(
    log_lengthscale: float, log_sigma: float
) -> None:
    X, X_new, Y = sonar()
    variance, lengthscale = np.exp(2.0 * log_sigma), np.exp(log_lengthscale)
    theirs = GaussianProcessClassifier(
        ConstantKernel(variance) * Matern(lengthscale, nu=2.5),
        optimizer=None,
        max_iter_predict=1000,
    ).fit(X, Y[:, 0])
    kernel = gpflow.kernels.Matern52(variance, lengthscale)
    model = gh.LaplaceModel((X, Y), kernel, LOGIT)
    assert model.infer(tolerance=1e-9).converged
    # Theirs is off by as much as 1e-8: it returns the value of the step before the last.
    expected, gradient = theirs.log_marginal_likelihood(
        theirs.kernel_.theta, eval_gradient=True, clone_kernel=False
    )
    np.testing.assert_allclose(model.log_marginal_likelihood(), expected, rtol=0.0, atol=1e-7)
    np.testing.assert_allclose(
        theirs.log_marginal_likelihood_value_, model.log_marginal_likelihood(), atol=1e-6
    )
    mode = theirs.base_estimator_.f_cached
    np.testing.assert_allclose(mean_at_data(model)[:, 0], mode, rtol=0.0, atol=1e-8)
    if hasattr(theirs, "latent_mean_and_variance"):  # from 1.7 on
        for found, latent in zip(
            model.predict_f(X_new), theirs.latent_mean_and_variance(X_new), strict=True
        ):
            np.testing.assert_allclose(found[:, 0], latent, rtol=1e-6, atol=1e-6)
    # d/d log σ² and d/d log ℓ, from ours in u: σ² = softplus(u), dσ²/du = 1 − exp(−σ²).
    parameters = (kernel.variance, kernel.lengthscales)
    by_name = dict(
        zip([v.ref() for v in model.trainable_variables], loss_gradient(model), strict=True)
    )
    found = [
        -by_name[p.unconstrained_variable.ref()] * p.numpy() / -np.expm1(-p.numpy())
        for p in parameters
    ]
    np.testing.assert_allclose(found, gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "columns"), [("bernoulli_logit", 1), ("student_t", 1), ("poisson", 2)]
)
def test_mode_and_value_are_the_references(name: str, columns: int) -> None:
    model = make_model(name, columns=columns)
    assert model.infer(tolerance=1e-10).converged
    K, mean = (x.numpy() for x in model.prior())
    expected = reference.laplace(
        K, mean, model.data[1].numpy(), reference.LOG_PROBS[name], DERIVATIVES[name]
    )
    np.testing.assert_allclose(mean_at_data(model), expected.mode, rtol=1e-7, atol=1e-8)
    np.testing.assert_allclose(model.sites.lambda_2, expected.W, rtol=1e-7, atol=1e-8)
    np.testing.assert_allclose(
        model.log_marginal_likelihood(), expected.log_marginal_likelihood, rtol=1e-10
    )
    np.testing.assert_allclose(-model.training_loss(), expected.log_marginal_likelihood, rtol=1e-10)


def test_gaussian_is_gpr_after_one_step() -> None:
    rng = np.random.default_rng(1)
    X = rng.uniform(-2.0, 2.0, (N, 2))
    Y = np.sin(2.0 * X) + 0.2 * rng.normal(size=(N, 2))

    def parts() -> tuple[Any, Any]:
        kernel = gpflow.kernels.Matern52(variance=0.9, lengthscales=[0.7, 1.3])
        return kernel, gpflow.functions.Linear(np.full((2, 2), 0.3), [0.2, -0.2])

    kernel, mean = parts()
    gpr = gpflow.models.GPR((X, Y), kernel, mean, noise_variance=0.1)
    kernel, mean = parts()
    model = gh.LaplaceModel((X, Y), kernel, gpflow.likelihoods.Gaussian(0.1), mean)
    result = model.infer()
    assert result.converged
    assert result.num_steps == 1
    evidence = gpr.log_marginal_likelihood()
    np.testing.assert_allclose(model.log_marginal_likelihood(), evidence, rtol=1e-10)
    X_new = rng.uniform(-2.0, 2.0, (5, 2))
    for full_cov in (False, True):
        for found, expected in zip(
            model.predict_f(X_new, full_cov), gpr.predict_f(X_new, full_cov), strict=True
        ):
            np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-10)
    with tf.GradientTape() as tape:
        loss = gpr.training_loss()
    for found, expected in zip(
        loss_gradient(model), tape.gradient(loss, gpr.trainable_variables), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-9)


def test_one_count_by_hand() -> None:
    # f̂ = μ + v (y − e^f̂), and log p(y) ≈ ℓ(f̂) − ½ (f̂ − μ)²/v − ½ log(1 + v e^f̂).
    v, mu, y = 2.0, 0.3, 7.0
    f = scipy.optimize.brentq(lambda f: mu + v * (y - np.exp(f)) - f, -5.0, 5.0, xtol=1e-14)
    log_prob = reference.LOG_PROBS["poisson"](np.array(f), np.array(y))
    expected = log_prob - 0.5 * (f - mu) ** 2 / v - 0.5 * np.log1p(v * np.exp(f))
    model = gh.LaplaceModel(
        (np.zeros((1, 1)), np.array([[y]])),
        gpflow.kernels.Matern52(variance=v),
        LIKELIHOODS["poisson"],
        gpflow.functions.Constant(mu),
    )
    np.testing.assert_allclose(model.maximum_log_likelihood_objective(), expected, rtol=1e-12)
    np.testing.assert_allclose(mean_at_data(model), [[f]], rtol=1e-10)


# The fixed point


def test_sites_are_the_curvature_at_the_mode() -> None:
    model = make_model("bernoulli_logit", variance=9.0)
    result = model.infer(tolerance=1e-10)
    f, Y = mean_at_data(model), model.data[1].numpy()
    slope, curvature = DERIVATIVES["bernoulli_logit"](f, Y)
    lambda_1, lambda_2 = (x.numpy() for x in model.sites.values)
    np.testing.assert_allclose(lambda_2, -curvature, rtol=1e-8)
    np.testing.assert_allclose(lambda_1, slope - curvature * f, rtol=1e-8)
    # ∇ψ = 0: the mode is where K ∇ℓ = f − μ₀.
    K = model.prior().K.numpy()[0]
    np.testing.assert_allclose(K @ slope, f - 0.2, rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(result.elbo, model.elbo(), rtol=1e-10)
    assert result.num_negative_sites == 0
    assert model.infer().num_steps == 0


OUTLIERS = np.sin(np.linspace(0.0, 6.0, N))[:, None]
OUTLIERS[[2, 9]] += [[20.0], [-15.0]]


@pytest.mark.parametrize(
    ("Y", "reach", "variance", "definite"),
    [
        (OUTLIERS, 6.0, 1.0, True),
        (5.0 * (-1.0) ** np.arange(N)[:, None], 3.0, 25.0, False),
        (10.0 * np.random.default_rng(0).standard_t(1, size=(N, 1)), 6.0, 100.0, False),
    ],
    ids=["outliers", "contradictory", "cauchy"],
)
def test_line_search_reaches_a_mode_of_a_heavy_tailed_posterior(
    Y: np.ndarray, reach: float, variance: float, definite: bool
) -> None:
    X = np.linspace(0.0, reach, N)[:, None]
    model = gh.LaplaceModel((X, Y), gpflow.kernels.Matern52(variance=variance), STUDENT)
    K = model.prior().K.numpy()

    def log_joint(f: np.ndarray) -> float:
        prior = np.sum(f * np.linalg.solve(K[0], f))
        return float(np.sum(reference.LOG_PROBS["student_t"](f, Y)) - 0.5 * prior)

    # Newton's full step from cold, with the positive part of W where W is no use, is too long.
    start = np.zeros_like(Y)
    slope, curvature = student_derivatives(start, Y)
    assert (reference.smallest_eigenvalue(K, -curvature) > 0.0) == definite
    W = -curvature if definite else np.maximum(-curvature, 0.0)
    full = np.linalg.solve(np.eye(N) + K[0] * W[:, 0], K[0] @ slope)
    assert log_joint(full) < log_joint(start)

    result = model.infer(tolerance=1e-9)
    assert result.converged, result.message
    f = mean_at_data(model)
    assert log_joint(f) > log_joint(start) + 5.0
    slope, curvature = student_derivatives(f, Y)
    np.testing.assert_allclose(K[0] @ slope, f, rtol=1e-7, atol=1e-7)
    np.testing.assert_allclose(model.sites.lambda_2, -curvature, rtol=1e-6, atol=1e-6)
    assert reference.smallest_eigenvalue(K, -curvature) > 0.0  # a maximum, not a saddle
    assert result.num_negative_sites == np.sum(curvature > 0.0) > 0


@pytest.mark.parametrize("variance", [1.0, 2.8, 3.4])
def test_narrow_peaks_are_found_from_their_flanks(variance: float) -> None:
    """A noise of 3e-5: on a flank of its peak the log density is steep and convex, and so narrow that no
    step of the prior's size can be shortened to it."""
    rng = np.random.default_rng(0)
    X = np.linspace(-2.0, 2.0, N)[:, None]
    Y = 2.0 * np.sign(X) + 0.3 * rng.normal(size=X.shape)
    likelihood = gpflow.likelihoods.StudentT(scale=3e-5, df=4.0)
    kernel = gpflow.kernels.Matern52(variance=variance, lengthscales=0.5)
    model = gh.LaplaceModel((X, Y), kernel, likelihood)
    assert model.infer().converged


def test_huge_counts_from_cold() -> None:
    # A full step from f = 0 asks for exp(9000).
    model = make_model("poisson")
    Y = 1e4 * (1.0 + np.arange(N)[:, None] % 3)
    model = gh.LaplaceModel((model.data[0], Y), model.kernel, model.likelihood)
    result = model.infer()
    assert result.converged, result.message
    assert result.num_evaluations <= 40
    f = mean_at_data(model)
    np.testing.assert_allclose(f, np.log(Y), atol=0.05)  # the prior pulls by less
    np.testing.assert_allclose(model.sites.lambda_2, np.exp(f), rtol=1e-5)


def test_converges_on_the_grid_of_the_paper() -> None:
    X, _, Y = sonar()
    kernel = gpflow.kernels.Matern52()
    model = gh.LaplaceModel((X, Y), kernel, LOGIT)
    for log_lengthscale in (-1.0, 2.0, 5.0):
        for log_sigma in (-1.0, 2.0, 5.0):
            kernel.lengthscales.assign(np.exp(log_lengthscale))
            kernel.variance.assign(np.exp(2.0 * log_sigma))
            model.sites.reset(len(X))
            result = model.infer()
            assert result.converged, (log_lengthscale, log_sigma, result.message)
            assert result.num_evaluations <= 25
