"""(K, μ₀, λ) → (m, v, log Z) and its adjoint, against dense NumPy and finite differences."""

from __future__ import annotations

from collections.abc import Iterator

import gpflow
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gpflow_hybrid.linalg import (
    covariance_from_factors,
    factorise,
    linear_algebra,
    marginals,
    site_posterior,
    weights_from_factors,
)
from tests import reference
from tests.linalg.problems import (
    SIGNS,
    along,
    finite_differences,
    make_kernels,
    make_sites,
    single_moves,
    symmetric_moves,
)


@pytest.fixture(scope="module", params=["lapack", "tensorflow"], autouse=True)
def _linear_algebra(request: pytest.FixtureRequest) -> Iterator[None]:
    with linear_algebra(request.param):
        yield


def assert_matches_reference(*problem: np.ndarray, rtol: float = 1e-8) -> None:
    actual, expected = marginals(*problem), reference.posterior(*problem)
    np.testing.assert_allclose(actual.mean, expected.mean, rtol=rtol, atol=rtol)
    np.testing.assert_allclose(actual.variance, expected.variance, rtol=rtol)
    np.testing.assert_allclose(actual.log_normaliser, expected.log_normaliser, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("signs", SIGNS)
@pytest.mark.parametrize(("L", "num_kernels"), [(1, 1), (2, 1), (2, 2), (3, 3)])
@pytest.mark.parametrize("N", [1, 7])
def test_marginals_match_dense_inverse(N: int, L: int, num_kernels: int, signs: str) -> None:
    rng = np.random.default_rng(100 * N + 10 * L + num_kernels)
    K = make_kernels(rng, N, num_kernels)
    sites = make_sites(rng, K, L, signs)
    if signs == "mixed" and N > 1:
        counts = np.count_nonzero(sites[2] < 0.0, axis=0)
        assert len(set(counts)) == L  # every latent has its own number of negative sites
    assert_matches_reference(K, *sites)


@pytest.mark.parametrize("signs", SIGNS)
def test_covariance_matches_dense_inverse(signs: str) -> None:
    rng = np.random.default_rng(0)
    K = make_kernels(rng, 6, 2)
    mean, lambda_1, lambda_2 = make_sites(rng, K, 2, signs)
    Sigma = covariance_from_factors(K, factorise(K, tf.transpose(lambda_2)))
    expected = reference.posterior(K, mean, lambda_1, lambda_2).covariance
    np.testing.assert_allclose(Sigma, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("signs", SIGNS)
def test_weights_match_a_dense_solution(signs: str) -> None:
    rng = np.random.default_rng(3)
    K = make_kernels(rng, 6, 2)
    r = rng.normal(size=(2, 6))
    lambda_2 = make_sites(rng, K, 2, signs)[2].T
    found = weights_from_factors(tf.constant(K), factorise(K, lambda_2), r, lambda_2)
    I_KL = np.eye(6) + lambda_2[:, :, None] * K
    np.testing.assert_allclose(found, np.linalg.solve(I_KL, r[..., None])[..., 0], rtol=1e-8)


def test_zero_sites_give_the_prior() -> None:
    rng = np.random.default_rng(1)
    K, mean = make_kernels(rng, 5, 2), rng.normal(size=(5, 2))
    q = marginals(K, mean, np.zeros((5, 2)), np.zeros((5, 2)))
    np.testing.assert_array_equal(q.mean, mean)
    np.testing.assert_array_equal(q.variance, np.diagonal(K, axis1=1, axis2=2).T)
    assert float(q.log_normaliser) == 0.0


def test_log_normaliser_is_an_integral() -> None:
    # N = 1: log ∫ N(f; μ₀, k) exp(λ₁f − ½λ₂f²) df by brute force.
    k, mean, lambda_1, lambda_2 = 1.3, 0.4, -0.7, -0.5
    f = np.linspace(-40.0, 40.0, 100_001)
    log_values = reference.log_normal(f, mean, k) + lambda_1 * f - 0.5 * lambda_2 * f**2
    expected = reference.log_integral(log_values, f)
    q = marginals(
        *(np.full(s, x) for s, x in [((1, 1, 1), k), ((1, 1), mean)]),
        np.full((1, 1), lambda_1),
        np.full((1, 1), lambda_2),
    )
    np.testing.assert_allclose(q.log_normaliser, expected, rtol=1e-10)


def test_singular_kernel_needs_no_jitter() -> None:
    # K = uuᵀ: Σ = uuᵀ / (1 + uᵀΛu), and |I + KΛ| = 1 + uᵀΛu.
    rng = np.random.default_rng(2)
    u = rng.normal(size=6)
    lambda_2 = np.array([5.0, 0.0, -0.3, 1e6, 2.0, -0.1])
    r = rng.normal(size=6)
    shift, variance, log_Z = site_posterior(np.outer(u, u)[None], r[None], lambda_2[None])
    s = 1.0 + u @ (lambda_2 * u)
    # v = k − VᵀV + WᵀW cancels: k λ₂ = 1e6 costs six of sixteen digits.
    np.testing.assert_allclose(variance[0], u**2 / s, rtol=1e-8)
    np.testing.assert_allclose(shift[0], u * (u @ r) / s, rtol=1e-8)
    np.testing.assert_allclose(log_Z[0], 0.5 * (u @ r) ** 2 / s - 0.5 * np.log(s), rtol=1e-10)


@pytest.mark.parametrize("signs", ["positive", "mixed", "zero"])
@pytest.mark.parametrize(("N", "L", "num_kernels"), [(1, 1, 1), (4, 1, 1), (4, 2, 1), (4, 2, 2)])
def test_adjoint_matches_finite_differences(N: int, L: int, num_kernels: int, signs: str) -> None:
    rng = np.random.default_rng(7 * N + L + num_kernels)
    K = make_kernels(rng, N, num_kernels)
    arguments = [K, *make_sites(rng, K, L, signs)]
    m_bar, v_bar, z_bar = rng.normal(size=(N, L)), rng.normal(size=(N, L)), rng.normal()

    def value(*problem: np.ndarray) -> float:
        q = reference.posterior(*problem)
        return np.sum(m_bar * q.mean) + np.sum(v_bar * q.variance) + z_bar * q.log_normaliser

    tensors = [tf.constant(a) for a in arguments]
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        q = marginals(*tensors)
        total = (
            tf.reduce_sum(m_bar * q.mean)
            + tf.reduce_sum(v_bar * q.variance)
            + z_bar * q.log_normaliser
        )
    gradients = [g.numpy() for g in tape.gradient(total, tensors)]

    for i, (argument, gradient) in enumerate(zip(arguments, gradients, strict=True)):
        if i == 0:  # K moves symmetrically
            np.testing.assert_allclose(gradient, np.swapaxes(gradient, 1, 2), atol=1e-12)
        moves = symmetric_moves(argument) if i == 0 else single_moves(argument)
        numeric = finite_differences(
            lambda x, i=i: value(*arguments[:i], x, *arguments[i + 1 :]), argument, moves
        )
        np.testing.assert_allclose(along(gradient, moves), numeric, rtol=1e-6, atol=1e-7)


def boundary_problem(
    seed: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, float]:
    """``K, μ₀, λ₁, λ₊, λ₋`` and s: ``λ₂ = λ₊ − c λ₋`` is valid iff ``c < s``."""
    rng = np.random.default_rng(seed)
    K = make_kernels(rng, 5, 1)
    mean, lambda_1, lambda_2 = rng.normal(size=(3, 5, 1))
    negative = np.array([[1.0], [0.0], [0.5], [0.0], [0.0]])
    positive = np.where(negative > 0.0, 0.0, np.abs(lambda_2))
    Sigma = reference.posterior(K, mean, lambda_1, positive).covariance[0]
    root = np.sqrt(negative[:, 0])
    largest = np.linalg.eigvalsh(root[:, None] * Sigma * root)[-1]
    return K, mean, lambda_1, positive, negative, 1.0 / largest


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("excess", [1e-8, 1e-3, 0.5])
def test_nan_on_the_wrong_side_of_the_boundary(seed: int, excess: float) -> None:
    K, mean, lambda_1, positive, negative, boundary = boundary_problem(seed)
    inside = positive - boundary * (1.0 - excess) * negative
    outside = positive - boundary * (1.0 + excess) * negative
    assert np.isfinite(marginals(K, mean, lambda_1, inside).log_normaliser)
    assert all(np.all(np.isnan(x)) for x in marginals(K, mean, lambda_1, outside))


def test_two_negative_eigenvalues_are_invalid_although_the_determinant_is_positive() -> None:
    K = np.eye(3)[None]
    lambda_2 = np.array([[-2.0], [-3.0], [1.0]])
    assert np.linalg.det(np.eye(3) + K[0] * lambda_2[:, 0]) > 0.0
    q = marginals(K, np.zeros((3, 1)), np.ones((3, 1)), lambda_2)
    assert all(np.all(np.isnan(x)) for x in q)


def test_one_invalid_latent_makes_the_log_normaliser_nan() -> None:
    lambda_2 = np.array([[1.0, -2.0], [1.0, 0.5]])
    q = marginals(np.eye(2)[None], np.zeros((2, 2)), np.ones((2, 2)), lambda_2)
    assert np.isnan(q.log_normaliser)
    assert np.all(np.isnan(q.variance[:, 1]))


@pytest.mark.parametrize("seed", range(3))
def test_close_to_the_boundary_stays_exact(seed: int) -> None:
    K, mean, lambda_1, positive, negative, boundary = boundary_problem(seed)
    lambda_2 = positive - boundary * (1.0 - 1e-4) * negative
    # 1e4 in the condition number, the same for the reference.
    assert_matches_reference(K, mean, lambda_1, lambda_2, rtol=1e-9)


@pytest.mark.parametrize("gap", [1e-1, 1e-6, 1e-12])
def test_close_to_the_boundary_with_one_datum(gap: float) -> None:
    # v = k / (1 + kλ₂), exactly representable with k = 4.
    k, lambda_2 = 4.0, -0.25 * (1.0 - gap)
    s = 1.0 + k * lambda_2
    shift, variance, log_Z = site_posterior(
        np.full((1, 1, 1), k), np.full((1, 1), 0.5), np.full((1, 1), lambda_2)
    )
    # N Σ₊ N takes a square root and squares it again: one rounding, magnified by 1/s.
    rtol = 1e-15 / s + 1e-14
    np.testing.assert_allclose(variance[0, 0], k / s, rtol=rtol)
    np.testing.assert_allclose(shift[0, 0], 0.5 * k / s, rtol=rtol)
    np.testing.assert_allclose(log_Z[0], 0.125 * k / s - 0.5 * np.log(s), rtol=rtol)


@pytest.mark.parametrize("compiled", [False, True])
def test_second_derivative_is_refused(compiled: bool) -> None:
    K = tf.eye(2, batch_shape=[1], dtype=tf.float64)
    r = tf.ones([1, 2], tf.float64)

    def hessian(lambda_2: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as outer:
            outer.watch(lambda_2)
            with tf.GradientTape() as inner:
                inner.watch(lambda_2)
                value = tf.reduce_sum(site_posterior(K, r, lambda_2).log_normaliser)
            gradient = inner.gradient(value, lambda_2)
        return outer.gradient(gradient, lambda_2)

    function = tf.function(hessian, autograph=False) if compiled else hessian
    with pytest.raises(NotImplementedError, match="Second derivatives through the posterior"):
        function(tf.ones([1, 2], tf.float64))


def test_second_derivatives_in_the_kernel_are_refused_too() -> None:
    r, lambda_2 = tf.ones([1, 2], tf.float64), tf.ones([1, 2], tf.float64)
    scale = tf.Variable(1.5, dtype=tf.float64)

    def slope() -> tf.Tensor:
        with tf.GradientTape() as tape:
            K = scale * tf.eye(2, batch_shape=[1], dtype=tf.float64)
            value = tf.reduce_sum(site_posterior(K, r, lambda_2).variance)
        return tape.gradient(value, scale)

    with tf.GradientTape() as outer:
        first = slope()
    # v = Σ 1/(1/s + 1): v' = 2/(1 + s)²
    np.testing.assert_allclose(first, 2.0 / 2.5**2, rtol=1e-12)
    with pytest.raises(NotImplementedError, match="Second derivatives through the posterior"):
        outer.gradient(first, scale)


@pytest.mark.parametrize("signs", ["positive", "mixed"])
def test_compiled_equals_eager_also_when_the_number_of_data_changes(signs: str) -> None:
    function = tf.function(
        marginals,
        input_signature=[
            tf.TensorSpec([1, None, None], tf.float64),
            *[tf.TensorSpec([None, 2], tf.float64)] * 3,
        ],
        autograph=False,
    )
    for N in (1, 4, 6):
        rng = np.random.default_rng(N)
        K = make_kernels(rng, N, 1)
        sites = make_sites(rng, K, 2, signs)
        for actual, expected in zip(function(K, *sites), marginals(K, *sites), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-12)


@pytest.mark.parametrize("signs", SIGNS)
@pytest.mark.parametrize(("L", "num_kernels"), [(1, 1), (3, 1), (3, 3)])
def test_xla_equals_eager(L: int, num_kernels: int, signs: str) -> None:
    """Values and gradients of a function that a user compiles, with whatever computes eagerly."""
    rng = np.random.default_rng(10 * L + num_kernels)
    K = make_kernels(rng, 7, num_kernels)
    tensors = [tf.constant(x) for x in (K, *make_sites(rng, K, L, signs))]
    bars = [rng.normal(size=(7, L)), rng.normal(size=(7, L)), rng.normal()]

    def with_gradients(*tensors: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            q = marginals(*tensors)
            total = sum(tf.reduce_sum(bar * x) for bar, x in zip(bars, q, strict=True))
        return [*q, *tape.gradient(total, tensors)]

    with linear_algebra("auto"):
        compiled = tf.function(with_gradients, jit_compile=True, autograph=False)(*tensors)
    for found, expected in zip(compiled, with_gradients(*tensors), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("excess", [1e-8, 0.5])
def test_xla_gives_nan_on_the_wrong_side_of_the_boundary(excess: float) -> None:
    K, mean, lambda_1, positive, negative, boundary = boundary_problem(0)
    with linear_algebra("auto"):
        compiled = tf.function(marginals, jit_compile=True, autograph=False)
        inside = compiled(K, mean, lambda_1, positive - boundary * (1.0 - excess) * negative)
        outside = compiled(K, mean, lambda_1, positive - boundary * (1.0 + excess) * negative)
    assert np.isfinite(inside.log_normaliser)
    assert all(np.all(np.isnan(x)) for x in outside)


KERNELS = {
    "rbf": lambda: gpflow.kernels.RBF(variance=1.3, lengthscales=0.8),
    "matern": lambda: gpflow.kernels.Matern32(variance=0.6),
    "linear": lambda: gpflow.kernels.Linear() + gpflow.kernels.Constant(0.5),
}


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Kernel matrices, mean and sites of any sign, valid or not."""
    N, L = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    X = rng.normal(size=(N, 1))
    if draw(st.booleans()):  # duplicate inputs: a singular kernel matrix
        X[N // 2 :] = X[: N - N // 2]
    names = draw(st.lists(st.sampled_from(sorted(KERNELS)), min_size=1, max_size=1))
    if draw(st.booleans()):
        names = [draw(st.sampled_from(sorted(KERNELS))) for _ in range(L)]
    K = np.stack([KERNELS[name]()(X).numpy() for name in names])
    signs = draw(st.lists(st.sampled_from([-1.0, 0.0, 1.0, 1.0]), min_size=N * L, max_size=N * L))
    scale = draw(st.sampled_from([0.03, 0.3, 1.0, 10.0]))
    mean, lambda_1, size = rng.normal(size=(3, N, L))
    return K, mean, lambda_1, scale * np.reshape(signs, (N, L)) * np.abs(size)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(problems())
def test_valid_iff_the_spectrum_is_positive(problem: tuple[np.ndarray, ...]) -> None:
    K, _, _, lambda_2 = problem
    smallest = reference.smallest_eigenvalue(K, lambda_2)
    assume(abs(smallest) > 1e-6)  # rounding decides there
    q = marginals(*problem)
    assert np.isfinite(q.log_normaliser) == (smallest > 0.0)
    if smallest > 0.0:
        assert np.all(q.variance > 0.0)
        # Digits that the condition number of I + KΛ takes from the reference itself.
        assert_matches_reference(*problem, rtol=max(1e-8, 1e-12 / smallest))
