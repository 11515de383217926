"""The prior with its kernel matrix, against dense inverses and finite differences."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from gpflow_hybrid import tuning
from gpflow_hybrid.priors import DensePrior
from gpflow_hybrid.priors.dense import DenseCovariance, DensePosterior
from gpflow_hybrid.sites import SiteValues
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

LATENTS = [(1, 1), (2, 1), (3, 3)]
"""How many, and how many kernels they have."""

N = 90
"""More than one block of rows."""


class Problem(NamedTuple):
    K: np.ndarray
    mean: np.ndarray
    sites: SiteValues

    @property
    def prior(self) -> DensePrior:
        return DensePrior(self.K, self.mean)

    @property
    def reference(self) -> reference.Posterior:
        return reference.posterior(self.K, self.mean, *self.sites)


def problem(num: int, L: int, num_kernels: int, signs: str) -> Problem:
    rng = np.random.default_rng(100 * num + 10 * L + num_kernels)
    K = make_kernels(rng, num, num_kernels)
    mean, *sites = make_sites(rng, K, L, signs)
    return Problem(K, mean, SiteValues(*sites))


def other_sites(given: Problem, seed: int) -> SiteValues:
    """Valid ones for the same prior."""
    rng = np.random.default_rng(seed)
    _, *sites = make_sites(rng, given.K, given.mean.shape[1], "mixed")
    return SiteValues(*sites)


@pytest.fixture(params=[20, 3000], ids=["spares_memory", "keeps_squares"])
def _large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "LARGE_MATRIX", request.param)


def assert_close(found: object, expected: object) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-10)


def assert_is(q: DensePosterior, expected: reference.Posterior) -> None:
    """Marginals and covariance are those expected."""
    assert_close(q.marginals.mean, expected.mean)
    np.testing.assert_allclose(q.marginals.variance, expected.variance, rtol=1e-8)
    assert_close(q.marginals.log_normaliser, expected.log_normaliser)
    assert_close(np.stack(q.covariance(for_adjoint=True).Sigma), expected.covariance)


def assert_acts_as(covariance: DenseCovariance, Sigma: np.ndarray) -> None:
    """Every product and solution is that with Σ ``[L, N, N]`` written out."""
    rng = np.random.default_rng(3)
    x, mv, vm, vv = rng.normal(size=(4, *Sigma.shape[:2]))
    assert_close(covariance.variance, np.einsum("lii->li", Sigma))
    assert_close(covariance.product(x), np.einsum("lij,lj->li", Sigma, x))
    assert_close(covariance.squared_product(x), np.einsum("lij,lj->li", Sigma**2, x))
    for c in (1.0, 3.5):
        M = reduced_matrix(Sigma, 0.1 * mv, 0.1 * vm, 0.1 * vv, c)
        solve = covariance.reduced_solver(0.1 * mv, 0.1 * vm, 0.1 * vv, c)
        assert_close(solve(x, False), np.linalg.solve(M, x[..., None])[..., 0])
        M_transpose = np.swapaxes(M, 1, 2)
        assert_close(solve(x, True), np.linalg.solve(M_transpose, x[..., None])[..., 0])
    # Factorising has left Σ and Σ∘Σ as they were.
    assert_close(covariance.product(x), np.einsum("lij,lj->li", Sigma, x))
    assert_close(covariance.squared_product(x), np.einsum("lij,lj->li", Sigma**2, x))


def reduced_matrix(
    Sigma: np.ndarray, mv: np.ndarray, vm: np.ndarray, vv: np.ndarray, c: float
) -> np.ndarray:
    """``M = c I − 2 E_vv (Σ∘Σ) − (2/c) E_vm Σ E_mv (Σ∘Σ)``."""
    found = []
    for S, *diagonals in zip(Sigma, mv, vm, vv, strict=True):
        E_mv, E_vm, E_vv = (np.diag(d) for d in diagonals)
        through_a = (2.0 / c) * E_vm @ S @ E_mv @ S**2
        found.append(c * np.eye(len(S)) - 2.0 * E_vv @ S**2 - through_a)
    return np.stack(found)


def adjoint(covariance: DenseCovariance, *vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return covariance.adjoint(*vectors)


# The posterior


@pytest.mark.parametrize("signs", SIGNS)
@pytest.mark.parametrize(("L", "num_kernels"), LATENTS)
@pytest.mark.parametrize("num", [1, 7, N])
def test_posterior_is_the_dense_inverse(num: int, L: int, num_kernels: int, signs: str) -> None:
    given = problem(num, L, num_kernels, signs)
    assert_is(given.prior.posterior(given.sites), given.reference)


@pytest.mark.parametrize(("L", "num_kernels"), LATENTS)
def test_zero_sites_give_the_prior(L: int, num_kernels: int) -> None:
    K, mean, _ = given = problem(N, L, num_kernels, "zero")
    zeros = np.zeros((N, L))
    q = given.prior.posterior(SiteValues(zeros, zeros))
    np.testing.assert_array_equal(q.marginals.mean, mean)
    diagonals = np.broadcast_to(np.diagonal(K, axis1=1, axis2=2), (L, N))
    np.testing.assert_array_equal(q.marginals.variance, diagonals.T)
    assert q.marginals.log_normaliser == 0.0
    Sigma = np.stack(q.covariance(for_adjoint=True).Sigma)
    np.testing.assert_array_equal(Sigma, np.broadcast_to(K, (L, N, N)))


@pytest.mark.parametrize("strength", [1e-13, 1e-9, 1e-7, 1e-3, 1e4])
@pytest.mark.parametrize("num_negative", [0, 3])
def test_weak_and_strong_sites(strength: float, num_negative: int) -> None:
    """Each way to a variance and to a covariance, side by side."""
    rng = np.random.default_rng(1)
    X = rng.normal(size=(N, 2))
    distance = np.sqrt(((X[:, None] - X[None]) ** 2).sum(-1))
    K = np.exp(-distance)[None]  # well conditioned, for the reference's sake
    lambda_2 = strength * rng.uniform(0.1, 1.0, size=(N, 1))
    lambda_2[10:20] = rng.uniform(0.1, 1.0, size=(10, 1))  # always some ordinary ones
    lambda_2[20:24] = 0.0
    lambda_2[:num_negative] = -0.1
    mean, lambda_1 = rng.normal(size=(2, N, 1))
    given = Problem(K, mean, SiteValues(lambda_1, lambda_2))
    q, expected = given.prior.posterior(given.sites), given.reference
    np.testing.assert_allclose(q.marginals.mean, expected.mean, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(q.marginals.variance, expected.variance, rtol=1e-8)
    np.testing.assert_allclose(q.marginals.log_normaliser, expected.log_normaliser, rtol=1e-8)
    Sigma = q.covariance(for_adjoint=True).Sigma[0]
    # Between sites at the limit 1e-8 from which they are weak, eight digits are lost.
    np.testing.assert_allclose(Sigma, expected.covariance[0], rtol=1e-7, atol=1e-8)


def test_what_rounding_errors_are_relative_to() -> None:
    K = np.stack([np.diag([1.0, 2.0]), np.diag([5.0, 3.0])])
    assert DensePrior(K, np.zeros((2, 2))).largest_variance == 5.0


def test_kernel_matrices_are_shared_or_each_latents_own() -> None:
    K = make_kernels(np.random.default_rng(0), 4, 2)
    own, shared = DensePrior(K, np.zeros((4, 2))), DensePrior(K[:1], np.zeros((4, 2)))
    for i in range(2):
        np.testing.assert_array_equal(own.kernel_matrix(i), K[i])
        np.testing.assert_array_equal(shared.kernel_matrix(i), K[0])


@pytest.mark.parametrize("num", [20, 21])
def test_memory_is_spared_above_the_limit(num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "LARGE_MATRIX", 20)
    assert problem(num, 1, 1, "zero").prior.spares_memory == (num > 20)


# Its covariance


@pytest.mark.usefixtures("_large")
@pytest.mark.parametrize("for_adjoint", [False, True])
@pytest.mark.parametrize("signs", SIGNS)
@pytest.mark.parametrize(("L", "num_kernels"), LATENTS)
def test_covariance_acts_as_the_matrix_written_out(
    L: int, num_kernels: int, signs: str, for_adjoint: bool
) -> None:
    given = problem(N, L, num_kernels, signs)
    covariance = given.prior.posterior(given.sites).covariance(for_adjoint=for_adjoint)
    assert_acts_as(covariance, given.reference.covariance)


@pytest.mark.parametrize("signs", SIGNS)
@pytest.mark.parametrize(("L", "num_kernels"), LATENTS)
def test_one_for_steps_reads_nothing_above_the_diagonal(
    L: int, num_kernels: int, signs: str
) -> None:
    given = problem(N, L, num_kernels, signs)
    covariance = given.prior.posterior(given.sites).covariance(for_adjoint=False)
    for Sigma in covariance.Sigma:
        Sigma[np.triu_indices(N, 1)] = np.nan
    assert_acts_as(covariance, given.reference.covariance)


@pytest.mark.usefixtures("_large")
@pytest.mark.parametrize("signs", SIGNS)
def test_one_for_the_adjoint_is_symmetric_with_the_variances_on_its_diagonal(signs: str) -> None:
    given = problem(N, 2, 1, signs)
    q = given.prior.posterior(given.sites)
    covariance = q.covariance(for_adjoint=True)
    np.testing.assert_array_equal(covariance.variance, q.marginals.variance.T)
    for Sigma in covariance.Sigma:
        np.testing.assert_allclose(Sigma, Sigma.T, rtol=0.0, atol=1e-14)


@pytest.mark.usefixtures("_large")
def test_an_exactly_singular_system_is_moved_off_by_a_rounding_error() -> None:
    covariance = DensePrior(np.eye(N)[None], np.zeros((N, 1)))
    zeros = SiteValues(np.zeros((N, 1)), np.zeros((N, 1)))
    nothing = np.zeros((1, N))
    solve = (
        covariance.posterior(zeros)
        .covariance(for_adjoint=False)
        .reduced_solver(nothing, nothing, np.full((1, N), 0.5), 1.0)
    )  # M = I − I
    for transpose in (False, True):
        found = solve(np.ones((1, N)), transpose)
        np.testing.assert_allclose(found, 1.0 / np.finfo(float).eps, rtol=1e-12)


def test_single_precision_stays_single() -> None:
    K, mean, sites = given = problem(N, 2, 1, "mixed")
    expected = given.reference
    single = [x.astype(np.float32) for x in (K, mean, *sites)]
    q = DensePrior(*single[:2]).posterior(SiteValues(*single[2:]))
    covariance = q.covariance(for_adjoint=True)
    beta, x = np.ones((2, 2, N), np.float32)
    solve = covariance.reduced_solver(beta, beta, beta, 4.0)
    results = [
        q.marginals.mean,
        q.marginals.variance,
        *covariance.Sigma,
        covariance.product(x),
        covariance.squared_product(x),
        solve(x, False),
        *adjoint(covariance, beta, x, x),
    ]
    assert {a.dtype for a in results} == {np.dtype(np.float32)}
    np.testing.assert_allclose(q.marginals.mean, expected.mean, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(q.marginals.log_normaliser, expected.log_normaliser, rtol=1e-4)
    np.testing.assert_allclose(covariance.Sigma, expected.covariance, atol=1e-4)


# Several posteriors


@pytest.mark.parametrize(("L", "num_kernels"), LATENTS)
def test_what_is_kept_keeps_its_factors(L: int, num_kernels: int) -> None:
    given = problem(N, L, num_kernels, "mixed")
    prior = given.prior
    sites = [given.sites, *(other_sites(given, seed) for seed in range(4))]
    expected = [reference.posterior(given.K, given.mean, *s) for s in sites]
    first = prior.posterior(sites[0])
    second = prior.posterior(sites[1], (first,))
    third = prior.posterior(sites[2], (first, second))
    for q, value in zip((first, second, third), expected[:3], strict=True):
        assert_is(q, value)
    fourth = prior.posterior(sites[3], (third, first))  # where the second was
    for q, value in [(first, expected[0]), (third, expected[2]), (fourth, expected[3])]:
        assert_is(q, value)
    fifth = prior.posterior(sites[4], (fourth,))
    for q, value in [(fourth, expected[3]), (fifth, expected[4])]:
        assert_is(q, value)


def test_what_is_not_kept_leaves_its_memory() -> None:
    given = problem(N, 2, 1, "mixed")
    prior = given.prior
    first = prior.posterior(given.sites)
    second = prior.posterior(given.sites, (first,))
    third = prior.posterior(given.sites, (second,))
    for i in range(2):
        factors = [q.parts[i].chol_inverse for q in (first, second, third)]
        assert np.shares_memory(factors[0], factors[2])
        assert not np.shares_memory(factors[0], factors[1])


def test_a_posterior_of_another_prior_may_be_kept() -> None:
    one, other = problem(N, 1, 1, "mixed"), problem(N, 1, 1, "positive")
    kept = other.prior.posterior(other.sites)
    assert_is(one.prior.posterior(one.sites, (kept,)), one.reference)
    assert_is(kept, other.reference)


def test_marginals_outlive_the_memory() -> None:
    given = problem(N, 2, 2, "mixed")
    prior = given.prior
    q = prior.posterior(given.sites)
    covariance = q.covariance(for_adjoint=True)
    bars = adjoint(covariance, *np.ones((3, 2, N)))
    results = [*q.marginals, covariance.variance, *bars]
    before = [np.array(x) for x in results]
    room = prior.workspace
    prior.close()
    for A in room._matrices.values():
        A[...] = np.nan
    for found, value in zip(results, before, strict=True):
        np.testing.assert_array_equal(found, value)


# Sites without a posterior


@pytest.mark.usefixtures("_large")
@pytest.mark.parametrize(("L", "num_kernels"), LATENTS)
def test_invalid_sites_give_nan(L: int, num_kernels: int) -> None:
    given = problem(N, L, num_kernels, "positive")
    lambda_1, lambda_2 = given.sites
    lambda_2 = lambda_2.copy()
    lambda_2[:2] = -1e3
    for i in range(L):
        K = given.K[i : i + 1] if num_kernels > 1 else given.K
        assert reference.smallest_eigenvalue(K, lambda_2[:, i : i + 1]) < 0.0
    q = given.prior.posterior(SiteValues(lambda_1, lambda_2))
    assert all(np.all(np.isnan(x)) for x in q.marginals)


@pytest.mark.parametrize("excess", [1e-8, 1e-3, 0.5])
def test_nan_on_the_wrong_side_of_the_boundary(excess: float) -> None:
    given = problem(N, 1, 1, "positive")
    lambda_1, positive = given.sites
    positive = positive.copy()
    positive[:2] = 0.0
    Sigma = reference.posterior(given.K, given.mean, lambda_1, positive).covariance[0]
    boundary = 1.0 / np.linalg.eigvalsh(Sigma[:2, :2])[-1]
    prior = given.prior
    for factor, is_valid in [(1.0 - excess, True), (1.0 + excess, False)]:
        lambda_2 = positive.copy()
        lambda_2[:2] = -boundary * factor
        q = prior.posterior(SiteValues(lambda_1, lambda_2)).marginals
        check = np.isfinite if is_valid else np.isnan
        assert all(np.all(check(x)) for x in q)


def test_one_invalid_latent_makes_the_log_normaliser_nan() -> None:
    given = problem(N, 3, 3, "positive")
    lambda_1, lambda_2 = given.sites
    lambda_2 = lambda_2.copy()
    lambda_2[4, 1] = -1e3
    prior = given.prior
    q = prior.posterior(SiteValues(lambda_1, lambda_2))
    assert np.isnan(q.marginals.log_normaliser)
    assert np.all(np.isnan(q.marginals.mean[:, 1]))
    assert np.all(np.isnan(q.marginals.variance[:, 1]))
    for i in (0, 2):
        assert_close(q.marginals.mean[:, i], given.reference.mean[:, i])
        assert_close(q.marginals.variance[:, i], given.reference.variance[:, i])
    assert_is(prior.posterior(given.sites), given.reference)  # and nothing of it stays


@pytest.mark.parametrize("at", [0, 4, N - 1])
def test_sites_that_are_not_numbers_have_no_posterior(at: int) -> None:
    given = problem(N, 1, 1, "positive")
    lambda_1, lambda_2 = given.sites
    lambda_2 = lambda_2.copy()
    lambda_2[at] = np.nan
    q = given.prior.posterior(SiteValues(lambda_1, lambda_2)).marginals
    assert np.isnan(q.log_normaliser)
    assert np.all(np.isnan(q.mean))


def test_two_negative_eigenvalues_are_invalid_although_the_determinant_is_positive() -> None:
    lambda_2 = np.array([[-2.0], [-3.0], [1.0]])
    q = DensePrior(np.eye(3)[None], np.zeros((3, 1))).posterior(
        SiteValues(np.ones((3, 1)), lambda_2)
    )
    assert all(np.all(np.isnan(x)) for x in q.marginals)


# The adjoint


@pytest.mark.usefixtures("_large")
@pytest.mark.parametrize("signs", SIGNS)
@pytest.mark.parametrize(("num", "L", "num_kernels"), [(1, 1, 1), (4, 1, 1), (4, 2, 1), (4, 2, 2)])
def test_adjoint_matches_finite_differences(num: int, L: int, num_kernels: int, signs: str) -> None:
    K, mean, sites = given = problem(num, L, num_kernels, signs)
    rng = np.random.default_rng(5)
    m_bar, v_bar = rng.normal(size=(2, num, L))

    def value(K: np.ndarray, mean: np.ndarray) -> float:
        q = reference.posterior(K, mean, *sites)
        return np.sum(m_bar * q.mean) + np.sum(v_bar * q.variance) + q.log_normaliser

    q = given.prior.posterior(sites)
    beta = (sites.lambda_1 - sites.lambda_2 * q.marginals.mean).T
    K_bar, mean_bar = adjoint(q.covariance(for_adjoint=True), beta, m_bar.T, v_bar.T)
    assert K_bar.shape == K.shape
    assert mean_bar.shape == mean.shape
    np.testing.assert_allclose(K_bar, np.swapaxes(K_bar, 1, 2), atol=1e-12)
    moves = symmetric_moves(K)
    numeric = finite_differences(lambda x: value(x, mean), K, moves)
    np.testing.assert_allclose(along(K_bar, moves), numeric, rtol=1e-6, atol=1e-7)
    moves = single_moves(mean)
    numeric = finite_differences(lambda x: value(K, x), mean, moves)
    np.testing.assert_allclose(along(mean_bar, moves), numeric, rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("_large")
@pytest.mark.parametrize("signs", SIGNS)
@pytest.mark.parametrize(("L", "num_kernels"), LATENTS)
@pytest.mark.parametrize("bars", ["of_both_signs", "positive", "negative", "zero"])
def test_adjoint_is_the_formula_written_out(
    L: int, num_kernels: int, signs: str, bars: str
) -> None:
    """``K̄ = A diag(v̄) Aᵀ + sym[(A m̄) βᵀ] + ½ ββᵀ − ½ AΛ`` and ``μ̄₀ = A m̄ + β``, ``A = I − ΛΣ``."""
    K, mean, sites = given = problem(N, L, num_kernels, signs)
    m_bar, v_bar = np.random.default_rng(6).normal(size=(2, L, N))
    scale = {"of_both_signs": v_bar, "positive": np.abs(v_bar), "negative": -np.abs(v_bar)}
    v_bar = scale.get(bars, np.zeros((L, N)))
    expected = given.reference
    beta = (sites.lambda_1 - sites.lambda_2 * expected.mean).T
    K_bars, mean_bars = [], []
    for Sigma, lam, b, m, v in zip(
        expected.covariance, sites.lambda_2.T, beta, m_bar, v_bar, strict=True
    ):
        A = np.eye(N) - lam[:, None] * Sigma
        outer = np.outer(A @ m, b)
        K_bars.append(A * v @ A.T + 0.5 * (outer + outer.T + np.outer(b, b) - A * lam))
        mean_bars.append(A @ m + b)
    K_bar = np.stack(K_bars) if num_kernels > 1 else np.sum(K_bars, 0)[None]
    covariance = given.prior.posterior(sites).covariance(for_adjoint=True)
    found_K_bar, found_mean_bar = adjoint(covariance, beta, m_bar, v_bar)
    assert_close(found_K_bar, K_bar)
    assert_close(found_mean_bar, np.stack(mean_bars, 1))
    assert found_K_bar.shape == K.shape
    assert found_mean_bar.shape == mean.shape
