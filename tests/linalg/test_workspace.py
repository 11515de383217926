"""Memory that E-steps leave to one another."""

from __future__ import annotations

import collections
import itertools
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gpflow_hybrid import tuning
from gpflow_hybrid.linalg import lapack, workspace
from gpflow_hybrid.linalg.distances import distances_of_rows
from gpflow_hybrid.linalg.workspace import (
    ALIGNMENT,
    MAX_IDLE,
    Workspace,
    empty_matrix,
    leave_workspace,
    take_workspace,
)
from gpflow_hybrid.priors import DensePrior
from gpflow_hybrid.sites import SiteValues
from tests.linalg.problems import make_kernels, make_sites

NAMES = [("factor", 0, 0), ("factor", 0, 1), ("factor", 1, 0), ("covariance", 0), ("squares", 0)]


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> collections.deque[Workspace]:
    """What waits for the next E-step: nothing from elsewhere."""
    waiting: collections.deque[Workspace] = collections.deque(maxlen=MAX_IDLE)
    monkeypatch.setattr(workspace, "_idle", waiting)
    return waiting


def address(A: np.ndarray) -> int:
    return A.ctypes.data


def share(*matrices: np.ndarray) -> bool:
    """Whether any two of them have memory in common."""
    return any(np.shares_memory(A, B) for A, B in itertools.combinations(matrices, 2))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_matrix_is_as_asked_for(dtype: type) -> None:
    for A in (empty_matrix(37, dtype), Workspace(37, dtype).matrix("factor", 0)):
        assert A.shape == (37, 37)
        assert A.dtype == dtype
        assert A.flags.c_contiguous
        assert A.flags.writeable
        assert address(A) % ALIGNMENT == 0


def test_a_name_stands_for_the_same_memory() -> None:
    room = Workspace(64, np.float64)
    first = {name: room.matrix(*name) for name in NAMES}
    for name in reversed(NAMES):
        assert room.matrix(*name) is first[name]


def test_two_names_never_share() -> None:
    room = Workspace(64, np.float64)
    assert not share(*(room.matrix(*name) for name in NAMES))


def test_two_workspaces_taken_at_the_same_time_never_share() -> None:
    first, second = take_workspace(64, np.float64), take_workspace(64, np.float64)
    matrices = [room.matrix(*name) for room in (first, second) for name in NAMES]
    assert not share(*matrices)
    leave_workspace(first)
    third, fourth = take_workspace(64, np.float64), take_workspace(64, np.float64)
    taken = (second, third, fourth)
    assert not share(*(room.matrix(*name) for room in taken for name in NAMES))


def test_memory_is_left_to_the_next() -> None:
    room = take_workspace(64, np.float64)
    A = room.matrix("factor", 0)
    leave_workspace(room)
    assert take_workspace(64, np.float64).matrix("factor", 0) is A


@pytest.mark.parametrize(("n", "dtype"), [(65, np.float64), (64, np.float32)])
def test_another_size_has_its_own(n: int, dtype: type, idle: Any) -> None:
    room = take_workspace(64, np.float64)
    A = room.matrix("factor", 0)
    kept = weakref.ref(A)
    leave_workspace(room)
    B = take_workspace(n, dtype).matrix("factor", 0)
    assert B.shape == (n, n)
    assert B.dtype == dtype
    assert not share(A, B)
    assert not idle  # the old ones go
    del A, room
    assert kept() is None


def test_what_waits_is_little(idle: Any) -> None:
    rooms = [take_workspace(64, np.float64) for _ in range(20)]
    kept = [weakref.ref(room.matrix("factor", 0)) for room in rooms]
    for room in rooms:
        leave_workspace(room)
    del room, rooms
    assert len(idle) == MAX_IDLE
    assert sum(A() is not None for A in kept) == MAX_IDLE


def test_large_matrices_are_new_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 64 * 64 * 8
    monkeypatch.setattr(tuning, "KEPT_BYTES", size - 1)
    room = take_workspace(64, np.float64)
    A, B = room.matrix("factor", 0), room.matrix("factor", 0)
    assert not share(A, B)
    gone = weakref.ref(A)
    del A
    assert gone() is None  # back to the system, although the workspace is still there
    monkeypatch.setattr(tuning, "KEPT_BYTES", size)
    assert room.matrix("factor", 0) is room.matrix("factor", 0)


def test_threads_do_not_share_matrices() -> None:
    def fill(value: int) -> bool:
        for _ in range(200):
            room = take_workspace(40, np.float64)
            matrices = [room.matrix(*name) for name in NAMES]
            for A in matrices:
                A[...] = value
            time.sleep(0.0)  # let another thread write
            if not all(np.all(A == value) for A in matrices):
                return False
            leave_workspace(room)
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(fill, range(8)))


def test_tensorflow_keeps_what_it_was_given() -> None:
    @tf.function
    def filled(value: tf.Tensor) -> tf.Tensor:
        def fill(value: np.ndarray) -> np.ndarray:
            A = empty_matrix(64, np.float64)
            A[...] = value
            return A

        return tf.numpy_function(fill, [value], tf.float64, stateful=False)

    held = [filled(tf.constant(float(i))) for i in range(20)]
    views = [A.numpy() for A in held]
    del held
    for _ in range(20):
        empty_matrix(64, np.float64)[...] = np.nan
        room = take_workspace(64, np.float64)
        room.matrix("factor", 0)[...] = np.nan
        leave_workspace(room)
    for i, view in enumerate(views):
        np.testing.assert_array_equal(view, float(i))


# E-steps


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    """But for the last digits, which are not always those of an identical call."""
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


Problem = tuple[np.ndarray, np.ndarray, list[SiteValues]]


def problem(seed: int, num_kernels: int, L: int, signs: str) -> Problem:
    """K, μ₀ and sites, with more than one block of rows."""
    rng = np.random.default_rng(seed)
    K = make_kernels(rng, 70, num_kernels)
    mean, *_ = make_sites(rng, K, L, "zero")
    sites = []
    for _ in range(2):
        _, lambda_1, lambda_2 = make_sites(rng, K, L, signs)
        lambda_2[:3] = np.minimum(lambda_2[:3], 0.0)
        sites.append(SiteValues(lambda_1, lambda_2))
    return K, mean, sites


@np.errstate(all="ignore")  # as inference runs it
def e_step(prior: DensePrior, sites: list[SiteValues]) -> list[np.ndarray]:
    """Everything that inference takes from a prior, as an iteration asks for it."""
    rng = np.random.default_rng(7)
    num_latents = sites[0].lambda_1.shape[1]
    x, mv, vm, vv = rng.normal(size=(4, num_latents, 70))
    found: list[Any] = []
    kept = prior.posterior(sites[0])
    steps = kept.covariance(for_adjoint=False)
    solve = steps.reduced_solver(0.1 * mv, 0.1 * vm, 0.1 * vv, 1.5)
    found += [*kept.marginals, steps.variance, steps.product(x), steps.squared_product(x)]
    found += [solve(x, transpose) for transpose in (False, True)]
    last = prior.posterior(sites[1], (kept,))
    found += last.marginals
    for posterior, (lambda_1, lambda_2) in zip((last, kept), sites[::-1], strict=True):
        covariance = posterior.covariance(for_adjoint=True)
        beta = (lambda_1 - lambda_2 * posterior.marginals.mean).T
        found += [A.copy() for A in covariance.Sigma]
        found += [covariance.product(x), covariance.squared_product(x)]
        for v_bar in (vv, np.zeros_like(vv)):
            found += covariance.adjoint(beta, mv, v_bar)
    return [np.array(a) for a in found]


@pytest.mark.parametrize("signs", ["positive", "mixed", "negative", "zero"])
@pytest.mark.parametrize(("L", "num_kernels"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("large", [20, 3000])
def test_nothing_reads_what_another_matrix_left(
    large: int, L: int, num_kernels: int, signs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "LARGE_MATRIX", large)
    K, mean, sites = problem(0, num_kernels, L, signs)
    fresh = DensePrior(K, mean)
    expected = e_step(fresh, sites)
    assert all(np.isfinite(x).all() for x in expected)
    room = fresh.workspace
    assert len(room._matrices) >= 3 * L  # two factors and a covariance for each latent
    for A in room._matrices.values():
        A[...] = np.nan
    fresh.close()
    again = DensePrior(K, mean)
    assert again.workspace is room
    for found, value in zip(e_step(again, sites), expected, strict=True):
        assert_same(found, value)


@pytest.mark.parametrize("signs", ["positive", "mixed"])
def test_nothing_reads_fresh_memory(signs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for matrices that are not in a workspace."""
    X = np.random.default_rng(1).normal(size=(70, 3))
    K, mean, sites = problem(0, 2, 2, signs)
    r, lambda_2 = sites[0].lambda_1[:, 0], sites[0].lambda_2[:, 0]

    @np.errstate(all="ignore")
    def everything() -> list[np.ndarray]:
        q = lapack.posterior(K[0], r, lambda_2)
        Sigma = lapack.covariance(K[0], lambda_2, q.chol_inverse, q.variance)
        beta = r - lambda_2 * q.shift
        adjoints = [
            lapack.kernel_adjoint(Sigma, lambda_2, beta, r, v_bar) for v_bar in (r, np.zeros(70))
        ]
        found = [distances_of_rows(X), *q, Sigma, *adjoints]
        return [*found, *e_step(DensePrior(K, mean), sites)]

    def poisoned(n: int, dtype: Any) -> np.ndarray:
        A = empty_matrix(n, dtype)
        A[...] = np.nan
        return A

    expected = everything()
    for module in (lapack, workspace):
        monkeypatch.setattr(module, "empty_matrix", poisoned)
    for found, value in zip(everything(), expected, strict=True):
        assert_same(found, value)
        assert np.isfinite(value).all()


def test_no_warning_is_about_fresh_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training loss outside of graphs takes its adjoint when the gradient is asked for, with NumPy's
    warnings on; fresh memory may hold anything, here signalling NaN."""
    K, mean, sites = problem(0, 1, 1, "mixed")

    def garbage(n: int, dtype: Any) -> np.ndarray:
        A = empty_matrix(n, dtype)
        A.view(np.uint64)[...] = 0x7FF4000000000000
        return A

    for module in (lapack, workspace):
        monkeypatch.setattr(module, "empty_matrix", garbage)
    covariance = DensePrior(K, mean).posterior(sites[0]).covariance(for_adjoint=True)
    K_bar, _ = covariance.adjoint(*np.ones((3, 1, 70)))
    assert np.isfinite(K_bar).all()


def test_nothing_reads_what_sites_without_a_posterior_left() -> None:
    K, mean, sites = problem(0, 1, 2, "mixed")
    expected = e_step(DensePrior(K, mean), sites)
    prior = DensePrior(K, mean)
    invalid = SiteValues(sites[0].lambda_1, np.full_like(sites[0].lambda_2, -1e3))
    for at in (sites[0], invalid):
        prior.posterior(at).covariance(for_adjoint=True)
    prior.close()
    for found, value in zip(e_step(DensePrior(K, mean), sites), expected, strict=True):
        assert_same(found, value)


def test_two_priors_at_the_same_time_do_not_disturb_each_other() -> None:
    problems = [problem(seed, 1, 2, "mixed") for seed in range(2)]
    x = np.random.default_rng(7).normal(size=(2, 70))

    def covariance(K: np.ndarray, mean: np.ndarray, sites: list[SiteValues]) -> Any:
        return DensePrior(K, mean).posterior(sites[0]).covariance(for_adjoint=False)

    expected = [covariance(*each).product(x) for each in problems]
    together = [covariance(*each) for each in problems]
    for found, value in zip(together, expected, strict=True):
        assert_same(found.product(x), value)


def test_threads_infer_what_one_alone_does() -> None:
    problems = [problem(seed, 1, 1, "mixed") for seed in range(4)]
    expected = [e_step(DensePrior(K, mean), sites) for K, mean, sites in problems]

    def check(i: int) -> None:
        K, mean, sites = problems[i]
        for _ in range(20):
            prior = DensePrior(K, mean)
            found = e_step(prior, sites)
            prior.close()
            for a, b in zip(found, expected[i], strict=True):
                assert_same(a, b)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(check, range(4)))
