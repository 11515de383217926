"""The marginalised model's EP-like value against its evidence, SVGP's bound, and zero."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import gpflow
import numpy as np
import pytest
import tensorflow as tf
from scipy import special, stats

import gpflow_hybrid as gh
from tests.sparse_cases import sparse_problem

# The evidence, known from sampling and from a sum over nodes


def hermite(num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of a standard normal."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
    return nodes, weights / np.sum(weights)


class Observed(NamedTuple):
    """A likelihood, how to draw from it at f, and its log density without TensorFlow."""

    likelihood: Callable[[], gpflow.likelihoods.ScalarLikelihood]
    draw: Callable[[np.ndarray, np.random.Generator], np.ndarray]
    log_density: Callable[[np.ndarray, np.ndarray], np.ndarray]


OBSERVED = {
    "probit": Observed(
        gh.likelihoods.ProbitBernoulli,
        lambda f, rng: (f + rng.normal(size=f.shape) > 0.0).astype(float),
        lambda f, y: special.log_ndtr((2.0 * y - 1.0) * f),
    ),
    "poisson": Observed(
        gpflow.likelihoods.Poisson,
        lambda f, rng: rng.poisson(np.exp(f)).astype(float),
        lambda f, y: stats.poisson.logpmf(y, np.exp(f)),
    ),
    "student_t": Observed(
        lambda: gpflow.likelihoods.StudentT(scale=0.5, df=4.0),
        lambda f, rng: f + 0.5 * rng.standard_t(4.0, size=f.shape),
        lambda f, y: stats.t.logpdf(y, 4.0, loc=f, scale=0.5),
    ),
}


class Projected(gpflow.kernels.Kernel):
    """``A(x)ᵀA(x')`` with ``A = L⁻¹ k(Z, x)``: the covariance of projections, of the first column."""

    def __init__(self, kernel: gpflow.kernels.Kernel, Z: np.ndarray) -> None:
        super().__init__()
        self.of_f, self.Z = kernel, Z

    def root(self, X: Any) -> tf.Tensor:
        Kuu = self.of_f(self.Z) + 1e-6 * np.eye(len(self.Z))
        return tf.linalg.triangular_solve(tf.linalg.cholesky(Kuu), self.of_f(self.Z, X[:, :1]))

    def K(self, X: tf.Tensor, X2: tf.Tensor | None = None) -> tf.Tensor:
        A = self.root(X)
        return tf.matmul(A, A if X2 is None else self.root(X2), transpose_a=True)

    def K_diag(self, X: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.square(self.root(X)), 0)


class Marginalised(gpflow.likelihoods.ScalarLikelihood):
    """``p̃(a) = ∫ N(f; a, k̃) p(y|f) df``, closed or as a sum over nodes; k̃ is the second column of X."""

    def __init__(self, of_f: gpflow.likelihoods.ScalarLikelihood) -> None:
        super().__init__(quadrature=gpflow.quadrature.NDiagGHQuadrature(1, 40))
        self.of_f = of_f

    def _scalar_log_prob(self, X: Any, F: Any, Y: Any) -> tf.Tensor:
        rest = tf.convert_to_tensor(X)[:, 1:]
        if isinstance(self.of_f, gh.likelihoods.ProbitBernoulli):
            return self.of_f._scalar_log_prob(X, F / tf.sqrt(1.0 + rest), Y)
        nodes, weights = hermite(20)
        terms = [
            np.log(w) + self.of_f._scalar_log_prob(X, F + tf.sqrt(rest) * t, Y)
            for t, w in zip(nodes, weights, strict=True)
        ]
        return tf.reduce_logsumexp(terms, 0)

    def _conditional_mean(self, X: Any, F: Any) -> tf.Tensor:
        return F

    def _conditional_variance(self, X: Any, F: Any) -> tf.Tensor:
        return F


def evidence_by_nodes(
    model: gh.SparseCVIModel, observed: Observed, A: np.ndarray, rest: np.ndarray, Y: np.ndarray
) -> float:
    """``log ∫ N(w; 0, I) Π p̃(Aᵀw) dw``, by a product rule of nodes that q(u) places and not weighs."""
    nodes, weights = (list(itertools.product(x, repeat=len(A))) for x in hermite(10))
    t, S = np.array(nodes), model.q_sqrt.numpy()[0]
    w = model.q_mu.numpy()[:, 0] + t @ S.T
    log_p = np.zeros(len(w))
    inner, inner_weights = hermite(24)
    for a, k, y in zip((w @ A).T, rest, Y[:, 0], strict=True):
        f = a[:, None] + np.sqrt(k) * inner
        log_p += special.logsumexp(observed.log_density(f, y), b=inner_weights, axis=1)
    log_ratio = 0.5 * np.sum(t**2 - w**2, 1) + np.sum(np.log(np.diag(S)))
    return float(special.logsumexp(log_p + log_ratio, b=np.prod(weights, 1)))


@pytest.mark.parametrize(
    ("name", "N", "M"),
    [
        ("probit", 300, 3),
        ("poisson", 400, 2),
        pytest.param("student_t", 300, 3, marks=pytest.mark.slow),
    ],
)
def test_the_ep_like_value_is_the_marginalised_models_evidence(name: str, N: int, M: int) -> None:
    """Which annealed importance sampling knows: it is a model with N(0, AᵀA) and the likelihood p̃.

    With so few inducing variables for the data q(u) is nearly Gaussian, and EP-like nearly exact.
    """
    rng, observed = np.random.default_rng(3), OBSERVED[name]
    X = rng.uniform(-2.0, 2.0, (N, 1))
    Y = observed.draw(np.sin(2.0 * X), rng)
    Z = np.linspace(-1.5, 1.5, M)[:, None]
    kernel = gpflow.kernels.Matern52(variance=1.5, lengthscales=1.5)
    sparse = gh.SparseCVIModel(kernel, observed.likelihood(), Z)
    sparse.infer((X, Y))
    value = float(sparse.ep_like_log_marginal((X, Y)))

    projected = Projected(kernel, Z)
    rest = kernel(X, full_cov=False).numpy() - projected.K_diag(X).numpy()
    assert np.max(rest) > 0.1  # p̃ is not p
    data = np.column_stack([X, rest]), Y
    dense = gh.CVIModel(data, projected, Marginalised(observed.likelihood()))
    dense.infer()
    np.testing.assert_allclose(value, dense.ep_like_log_marginal(), rtol=1e-6)
    means = projected.root(X).numpy().T @ sparse.q_mu.numpy()
    np.testing.assert_allclose(means, dense.predict_f(data[0])[0], atol=1e-4)

    sampled = gh.annealed_importance_sampling(
        dense, num_chains=64, num_temperatures=30, block_size=0, seed=0
    )
    estimate, error = float(sampled.log_marginal_likelihood), float(sampled.standard_error)
    assert error < 3e-3
    assert abs(value - estimate) <= 3.0 * error
    exact = evidence_by_nodes(sparse, observed, projected.root(X).numpy(), rest, Y)
    assert abs(estimate - exact) <= 3.0 * error
    assert abs(value - exact) < 1e-3
    assert exact - float(sparse.elbo((X, Y))) > 10.0 * error  # SVGP's bound would be seen


# Bounds


@pytest.mark.parametrize("M", [3, 12])
def test_the_marginalised_value_is_above_svgps_bound_and_below_zero(M: int) -> None:
    problem = sparse_problem("probit_bernoulli", 200, M)
    models = [problem.model(objective) for objective in ("elbo", "ep_like")]
    for log_sigma in (-1.0, 2.0, 5.0, 20.0):
        for lengthscale in (0.3, 1.2, 5.0):
            for model in models:
                model.sites.reset()
                model.kernel.variance.assign(np.exp(2.0 * log_sigma))
                model.kernel.lengthscales.assign(lengthscale)
            bound, value = (-float(m.training_loss(problem.data)) for m in models)
            assert bound <= value <= 0.0, (log_sigma, lengthscale)
