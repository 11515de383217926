"""The E-step and the collapsed objective on arrays: the same as in TensorFlow's graphs."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf

import gpflow_hybrid as gh
from gpflow_hybrid.inference import collapsed_host, newton_host, variational, variational_host
from gpflow_hybrid.inference.common import EXHAUSTED, INVALID_START
from gpflow_hybrid.inference.variational_host import HostProblem, works_on_host
from gpflow_hybrid.likelihoods import probit_integrals
from gpflow_hybrid.likelihoods.ratios import closed_ratio_gradients, log_expected_ratio
from gpflow_hybrid.linalg import lapack
from gpflow_hybrid.sites import SiteValues
from tests.gradients import check_gradient, loss_gradient

BOTH = ("lapack", "tensorflow")
PROBIT = gh.likelihoods.ProbitBernoulli()


def binary(num: int = 60, num_outputs: int = 1) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(num, 3))
    noise = 0.5 * rng.normal(size=(num, num_outputs))
    return X, (X[:, :num_outputs] + noise > 0.0).astype(float)


def problem(
    variance: float, lengthscale: float, num_outputs: int = 1, num: int = 60
) -> tuple[np.ndarray, ...]:
    """``K, μ₀, X, Y`` with a mean that is not zero."""
    X, Y = binary(num, num_outputs)
    kernel = gpflow.kernels.Matern52(variance=variance, lengthscales=lengthscale)
    mean = np.full_like(Y, 0.3)
    return kernel(X).numpy()[None], mean, X, Y


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> list[SiteValues]:
    """Where a posterior is evaluated from now on."""
    seen: list[SiteValues] = []
    evaluate = HostProblem.evaluate

    def noted(self: HostProblem, sites: SiteValues) -> Any:
        seen.append(sites)
        return evaluate(self, sites)

    monkeypatch.setattr(HostProblem, "evaluate", noted)
    return seen


# The formulas on arrays


@pytest.mark.parametrize("num", [0, 1, 500, 501, 1200])  # 500 of the finest rule go at a time
def test_moments_of_arrays_are_those_of_tensors(num: int) -> None:
    rng = np.random.default_rng(1)
    m, v = 10.0 * rng.normal(size=num), np.exp(rng.uniform(-30.0, 11.0, size=num))
    m[: num // 8], v[: num // 16] = -1e4, 0.0
    tensors = tf.constant(m), tf.constant(v)
    for found, expected in [
        (probit_integrals.low_moments(m, v), probit_integrals.low_moments(*tensors)),
        (probit_integrals.high_moments(m, v), probit_integrals.high_moments(*tensors)),
        (probit_integrals.high_moments(m, v, True), probit_integrals.high_moments(*tensors, True)),
    ]:
        for x, y in zip(found, expected, strict=True):
            assert isinstance(x, np.ndarray)
            assert x.shape == (num,)
            np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("as_array", [True, False])
def test_ratio_gradients_are_those_of_automatic_differentiation(as_array: bool) -> None:
    rng = np.random.default_rng(2)
    X, Y = binary(50, 2)
    m, v = 3.0 * rng.normal(size=(50, 2)), np.exp(rng.uniform(-5.0, 5.0, size=(50, 2)))
    lambda_1 = rng.normal(size=(50, 2))
    lambda_2 = rng.uniform(-1.0, 0.95, size=(50, 2)) / v  # signed
    arguments = [tf.constant(x) for x in (m, v, lambda_1, lambda_2)]
    with tf.GradientTape() as tape:
        tape.watch(arguments)
        m_, v_, *sites = arguments
        value = tf.reduce_sum(log_expected_ratio(PROBIT, X, m_, v_, Y, *sites, 1.0))
    expected = tape.gradient(value, arguments)
    m_, v_, *sites = [x.numpy() for x in arguments] if as_array else arguments
    found = closed_ratio_gradients(PROBIT, X, m_, v_, Y, *sites)
    assert isinstance(found.m, np.ndarray) == as_array
    np.testing.assert_allclose(found.value, value, rtol=1e-12)
    for x, y in zip(found[1:], expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12 * np.max(np.abs(y)))


@pytest.mark.parametrize("as_array", [True, False])
def test_labels_of_any_type(as_array: bool) -> None:
    X, Y = binary(20)
    m = np.linspace(-2.0, 2.0, 20)[:, None]
    m, v = (m, np.ones_like(m)) if as_array else (tf.constant(m), tf.ones_like(m))
    expected = PROBIT.expectation_derivatives(X, m, v, Y)
    for found, value in zip(
        PROBIT.expectation_derivatives(X, m, v, Y.astype(np.int32)), expected, strict=True
    ):
        np.testing.assert_array_equal(found, value)


# The iteration


@pytest.mark.parametrize(
    ("variance", "lengthscale"), [(1.0, 1.0), (1e-6, 1.0), (1e2, 3.0), (1e4, 20.0), (1e4, 0.1)]
)
@pytest.mark.parametrize("num_outputs", [1, 2])
def test_the_same_steps_as_in_a_graph(
    variance: float, lengthscale: float, num_outputs: int
) -> None:
    arrays = problem(variance, lengthscale, num_outputs)
    zeros = np.zeros_like(arrays[1])
    limits = (tf.constant(1e-9, tf.float64), tf.constant(200))
    tensors = [*(tf.constant(x) for x in (*arrays, zeros, zeros)), *limits]
    with gh.linear_algebra("lapack"):
        graph = tf.function(lambda: variational.infer_newton(PROBIT, *tensors), autograph=False)()
    solution, at = HostProblem(PROBIT, *arrays).newton(SiteValues(zeros, zeros), 1e-9, 200)
    assert int(solution.status) == int(graph.status)
    # In a wide prior rounding decides on a last step.
    may_differ = 0 if variance < 1e4 else 1
    assert abs(int(solution.num_steps) - int(graph.num_steps)) <= may_differ
    assert abs(int(solution.num_evaluations) - int(graph.num_evaluations)) <= may_differ
    np.testing.assert_allclose(solution.value, graph.value, rtol=1e-10)
    for x, y in zip(solution.sites, graph.sites, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-9)
    assert solution.residual <= 1e-9
    np.testing.assert_array_equal(at.sites.lambda_2, solution.sites.lambda_2)


def test_steps_run_out() -> None:
    arrays = problem(1e4, 1.0)
    zeros = np.zeros_like(arrays[1])
    solution, _ = HostProblem(PROBIT, *arrays).newton(SiteValues(zeros, zeros), 1e-9, 2)
    assert solution.status == EXHAUSTED
    assert solution.num_evaluations == 3  # the first, and one for each step
    assert np.isfinite(solution.value)


def test_no_start() -> None:
    K, *others = problem(1.0, 1.0)
    zeros = np.zeros_like(others[0])
    solution, _ = HostProblem(PROBIT, np.full_like(K, np.nan), *others).newton(
        SiteValues(zeros, zeros), 1e-9, 200
    )
    assert solution.status == INVALID_START
    assert solution.num_evaluations == 1


def test_a_bad_warm_start_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostProblem, "_newton_step", lambda *_: (np.float64(1e20), _[2].sites))
    arrays = problem(1.0, 1.0)
    warm = SiteValues(np.full_like(arrays[1], 5.0), np.full_like(arrays[1], 30.0))
    stuck, _ = HostProblem(PROBIT, *arrays).newton(warm, 1e-6, 50)
    found, _ = variational_host.from_warm_start(HostProblem(PROBIT, *arrays), warm, 1e-6, 50)
    assert found.value > stuck.value + 1.0


@pytest.mark.parametrize("kept", [0, 3000])
def test_a_step_that_fails_is_shortened(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newton_host, "LARGE", kept)
    dampings: list[float] = []
    systems = 0
    take, build = HostProblem._newton_step, HostProblem.step_system

    def seen(self: HostProblem, system: Any, at: Any, mu: Any) -> Any:
        dampings.append(float(mu))
        return take(self, system, at, mu)

    def counted(self: HostProblem, at: Any) -> Any:
        nonlocal systems
        systems += 1
        return build(self, at)

    # The first Newton step, and the second of its tries, are said to have failed.
    monkeypatch.setattr(
        variational_host,
        "improves",
        lambda *x: variational.improves(*x) and len(dampings) not in (1, 2),
    )
    monkeypatch.setattr(HostProblem, "_newton_step", seen)
    monkeypatch.setattr(HostProblem, "step_system", counted)
    arrays = problem(4.0, 2.0)
    zeros = np.zeros_like(arrays[1])
    solution, _ = HostProblem(PROBIT, *arrays).newton(SiteValues(zeros, zeros), 1e-9, 200)
    # A success after failures keeps the damping; the next one lowers it, to nothing in the end.
    assert dampings[:4] == [0.0, pytest.approx(0.1), pytest.approx(0.4), pytest.approx(0.4)]
    assert dampings[-1] == 0.0
    assert solution.num_evaluations - 1 == solution.num_steps + 2
    assert solution.residual <= 1e-9
    assert systems == len(dampings) - (0 if kept == 0 else 2)


# The collapsed objective


@pytest.mark.parametrize("objective", ["elbo", "ep_like"])
@pytest.mark.parametrize("num_outputs", [1, 2])
def test_value_and_gradient_are_those_of_a_graph(objective: str, num_outputs: int) -> None:
    found: list[Any] = []
    for choice in BOTH:
        with gh.linear_algebra(choice):
            model = gh.CVIModel(
                binary(60, num_outputs),
                gpflow.kernels.Matern52(variance=4.0, lengthscales=2.0),
                gh.likelihoods.ProbitBernoulli(),
                gpflow.functions.Constant(np.full(num_outputs, 0.2)),
                objective=objective,
            )
            gradients = np.concatenate([g.ravel() for g in loss_gradient(model)])
            found.append((float(model.training_loss()), gradients, *model.sites.values))
    (loss, gradients, *sites), (expected, expected_gradients, *expected_sites) = found
    np.testing.assert_allclose(loss, expected, rtol=1e-12)
    # Σ of the step before the last: its relative error is that step's size, below 1e-6
    np.testing.assert_allclose(gradients, expected_gradients, rtol=1e-6)
    for x, y in zip(sites, expected_sites, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("objective", ["elbo", "ep_like"])
@pytest.mark.parametrize("num", [60, 320])
def test_gradient_against_differences(objective: str, num: int) -> None:
    kernel = gpflow.kernels.Matern52(variance=4.0, lengthscales=2.0)
    model = gh.CVIModel(binary(num), kernel, PROBIT, objective=objective)
    check_gradient(model)


def test_the_last_step_needs_no_factorisation() -> None:
    arrays = problem(4.0, 2.0)
    host = HostProblem(PROBIT, *arrays)
    zeros = np.zeros_like(arrays[1])
    exact, _ = host.newton(SiteValues(zeros, zeros), 1e-12, 200)
    near = SiteValues(*(x * (1.0 + 3e-7) for x in exact.sites))
    at = host.evaluate(near)
    assert 1e-8 < host.measure(at) < collapsed_host.POLISHED_FROM
    polished = collapsed_host._polished(host, host.system(at, rough=False), at)
    again = host.evaluate(polished.sites)
    assert host.measure(again) < 1e-9
    for x, y in zip(polished.q, again.q, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(polished.elbo, exact.value, rtol=1e-13)


def test_evaluations_of_a_loss_near_the_last(evaluations: list[SiteValues]) -> None:
    """Three factorisations, the first of them at the sites of the last loss."""
    kernel = gpflow.kernels.Matern52(variance=4.0, lengthscales=2.0)
    model = gh.CVIModel(binary(), kernel, PROBIT)
    model.training_loss()
    evaluations.clear()
    kernel.lengthscales.assign(2.0 * 1.01)
    model.training_loss()
    assert len(evaluations) == 3


# Where it is taken


def test_only_on_a_host_with_a_likelihood_on_arrays() -> None:
    with gh.linear_algebra("lapack"):
        assert works_on_host(PROBIT)
        assert not works_on_host(gpflow.likelihoods.Bernoulli())
    with gh.linear_algebra("tensorflow"):
        assert not works_on_host(PROBIT)


class Steep(gh.likelihoods.ProbitBernoulli):
    """``Φ(2f)``, in the methods that a graph asks."""

    def _scalar_log_prob(self, X: Any, F: Any, Y: Any) -> Any:
        return super()._scalar_log_prob(X, 2.0 * F, Y)

    def _variational_expectations(self, X: Any, Fmu: Any, Fvar: Any, Y: Any) -> Any:
        return super()._variational_expectations(X, 2.0 * Fmu, 4.0 * Fvar, Y)

    def expectation_derivatives(self, X: Any, Fmu: Any, Fvar: Any, Y: Any) -> Any:
        value, mean, variance = super().expectation_derivatives(X, 2.0 * Fmu, 4.0 * Fvar, Y)
        return value, 2.0 * mean, 4.0 * variance

    def expectation_curvature(
        self, X: Any, Fmu: Any, Fvar: Any, Y: Any, *, rough: bool = False
    ) -> Any:
        mv, vv = super().expectation_curvature(X, 2.0 * Fmu, 4.0 * Fvar, Y, rough=rough)
        return 8.0 * mv, 16.0 * vv

    def log_expected_power(self, X: Any, Fmu: Any, Fvar: Any, Y: Any, alpha: Any) -> Any:
        return super().log_expected_power(X, 2.0 * Fmu, 4.0 * Fvar, Y, alpha)


class SteepOnArrays(Steep):
    """The same, which says that it has changed all that it had to."""

    works_on_arrays = True

    def log_expected_derivatives(self, X: Any, Fmu: Any, Fvar: Any, Y: Any) -> Any:
        value, mean, variance = super().log_expected_derivatives(X, 2.0 * Fmu, 4.0 * Fvar, Y)
        return value, 2.0 * mean, 4.0 * variance


class Unfinished(gpflow.likelihoods.Bernoulli):
    works_on_arrays = True


class WithParameter(gh.likelihoods.ProbitBernoulli):
    def __init__(self) -> None:
        super().__init__()
        self.scale = gpflow.Parameter(1.0)


def test_a_subclass_must_say_so_itself() -> None:
    assert not works_on_host(Steep())
    assert works_on_host(SteepOnArrays())
    assert not works_on_host(Unfinished())
    assert not works_on_host(WithParameter())
    losses = []
    for likelihood in (Steep(), SteepOnArrays()):
        kernel = gpflow.kernels.Matern52(variance=4.0, lengthscales=2.0)
        model = gh.CVIModel(binary(), kernel, likelihood)
        losses.append(float(model.training_loss()))
        np.testing.assert_allclose(losses[-1], -model.ep_like_log_marginal(), rtol=1e-9)
    np.testing.assert_allclose(*losses, rtol=1e-9)


def test_graphs_do_not_keep_a_likelihood_alive() -> None:
    likelihood = gh.likelihoods.ProbitBernoulli()
    model = gh.CVIModel(binary(20), gpflow.kernels.Matern52(), likelihood)
    model.infer()
    model.training_loss()
    gone = weakref.ref(likelihood)
    del model, likelihood
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("objective", ["elbo", "ep_like"])
def test_a_kernel_for_each_latent(objective: str) -> None:
    kernels = [gpflow.kernels.Matern52(variance=v, lengthscales=2.0) for v in (1.0, 5.0)]
    model = gh.CVIModel(
        binary(40, 2), gpflow.kernels.SeparateIndependent(kernels), PROBIT, objective=objective
    )
    check_gradient(model)


@pytest.mark.parametrize("num_negative", [0, 3])
@pytest.mark.parametrize("weak", [1e-12, 1.0])
def test_half_a_covariance_is_enough(num_negative: int, weak: float) -> None:
    """Nothing above the diagonal is read: it is poisoned here."""
    rng = np.random.default_rng(3)
    N = 90  # more than one block of rows
    K = gpflow.kernels.Matern32()(rng.normal(size=(N, 2))).numpy()
    lambda_2 = rng.uniform(0.1, 1.0, size=N)
    lambda_2[10:20] *= weak
    lambda_2[:num_negative] = -0.05
    found = lapack.posterior(K, rng.normal(size=N), lambda_2)
    arguments = (K, lambda_2, found.chol_inverse, found.variance)
    whole = lapack.covariance(*arguments)
    half = lapack.covariance(*arguments, mirrored=False)
    np.testing.assert_array_equal(np.tril(half), np.tril(whole))
    half[np.triu_indices(N, 1)] = np.nan
    hessian = tuple(0.05 * rng.normal(size=(N, 1, 1)) for _ in range(3))
    hessian = (-lambda_2[:, None, None], *hessian)
    r = rng.normal(size=(2, 1, N))
    for small in (0, 300):  # by GMRES, and by factors
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(newton_host, "SMALL", small)
            systems = [
                newton_host.HostSystem(S[None], hessian, lambda_2[None], 0.3, False)
                for S in (whole, half)
            ]
            np.testing.assert_array_equal(*(s.solve(r, 1e-8) for s in systems))


@pytest.mark.parametrize(("objective", "rtol"), [("elbo", 1e-7), ("ep_like", 3e-6)])
def test_what_a_last_step_changes_in_the_gradient(
    objective: str,
    rtol: float,
    evaluations: list[SiteValues],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step of 5e-5: what remains of it is of second order, and smaller than the step for EP-like."""

    def model() -> gh.CVIModel:
        return gh.CVIModel(
            binary(),
            gpflow.kernels.Matern52(variance=4.0, lengthscales=2.0),
            PROBIT,
            gpflow.functions.Constant([0.2]),
            objective=objective,
        )

    exact = model()
    expected = np.concatenate([g.ravel() for g in loss_gradient(exact)])
    monkeypatch.setattr(collapsed_host, "POLISHED_FROM", 1e-4)
    monkeypatch.setattr(collapsed_host, "LONG_STEP", 1e-3)
    monkeypatch.setattr(collapsed_host, "LAST_STEP_TOLERANCE", 1e-6)
    near = model()
    lambda_1, lambda_2 = exact.sites.values
    near.sites.assign(SiteValues(lambda_1 * (1.0 + 5e-5), lambda_2 * (1.0 + 5e-5)))
    evaluations.clear()
    found = np.concatenate([g.ravel() for g in loss_gradient(near)])
    assert len(evaluations) == 1
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol * np.max(np.abs(expected)))


def test_a_last_step_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newton's iteration goes on to the tolerance that was asked for."""
    kernel = gpflow.kernels.Matern52(variance=4.0, lengthscales=2.0)
    model = gh.CVIModel(binary(), kernel, PROBIT)
    expected, gradients = float(model.training_loss()), loss_gradient(model)
    monkeypatch.setattr(collapsed_host, "LONG_STEP", 0.0)
    again = gh.CVIModel(binary(), kernel, PROBIT)
    np.testing.assert_allclose(again.training_loss(), expected, rtol=1e-12)
    for x, y in zip(loss_gradient(again), gradients, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-7)


def test_single_precision() -> None:
    gpflow.config.set_default_float(np.float32)
    X, Y = binary()
    kernel = gpflow.kernels.Matern52(variance=4.0, lengthscales=2.0)
    data = X.astype(np.float32), Y.astype(np.float32)
    model = gh.CVIModel(data, kernel, gh.likelihoods.ProbitBernoulli())
    found = model.training_loss()
    assert found.dtype == tf.float32
    assert all(np.isfinite(g).all() for g in loss_gradient(model))
    gpflow.config.set_default_float(np.float64)
    exact = gh.CVIModel(
        (X, Y), gpflow.kernels.Matern52(variance=4.0, lengthscales=2.0), PROBIT
    ).training_loss()
    np.testing.assert_allclose(found, exact, rtol=1e-4)  # 24 bits
