"""The damped Newton iteration on arrays, and what the collapsed objective makes of it."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Generator
from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf

import gpflow_hybrid as gh
from gpflow_hybrid.inference import bound, questions, total_gradient, variational
from gpflow_hybrid.inference.bound import BoundEvaluation, evaluate
from gpflow_hybrid.inference.common import EXHAUSTED, INVALID_START, from_warm_start
from gpflow_hybrid.inference.options import COLLAPSE, NEWTON
from gpflow_hybrid.inference.servers import run
from gpflow_hybrid.inference.variational import newton, newton_system
from gpflow_hybrid.likelihoods import probit_integrals
from gpflow_hybrid.likelihoods.on_arrays import on_arrays, works_on_arrays
from gpflow_hybrid.likelihoods.ratio_gradients import closed_ratio_gradients
from gpflow_hybrid.likelihoods.ratios import log_expected_ratio
from gpflow_hybrid.priors import DensePrior
from gpflow_hybrid.priors.dense import DensePosterior
from gpflow_hybrid.sites import SiteValues
from tests.gradients import check_gradient, loss_gradient

PROBIT = gh.likelihoods.ProbitBernoulli()


def binary(num: int = 60, num_outputs: int = 1) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(num, 3))
    noise = 0.5 * rng.normal(size=(num, num_outputs))
    return X, (X[:, :num_outputs] + noise > 0.0).astype(float)


class Case:
    """A prior with a mean that is not zero, data, and zero sites."""

    def __init__(
        self, variance: float, lengthscale: float, num_outputs: int = 1, num: int = 60
    ) -> None:
        X, Y = binary(num, num_outputs)
        kernel = gpflow.kernels.Matern52(variance=variance, lengthscales=lengthscale)
        self.K, self.mean = kernel(X).numpy()[None], np.full_like(Y, 0.3)
        self.data = (tf.constant(X), tf.constant(Y))
        self.zeros = SiteValues(np.zeros_like(Y), np.zeros_like(Y))
        self.prior = DensePrior(self.K, self.mean)

    def run(self, iteration: Generator[Any, Any, Any], likelihood: Any = PROBIT) -> Any:
        return run(iteration, likelihood, self.data)


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> list[SiteValues]:
    """Where a posterior is evaluated from now on."""
    seen: list[SiteValues] = []
    posterior = DensePrior.posterior

    def noted(self: DensePrior, sites: SiteValues, *others: Any) -> Any:
        seen.append(sites)
        return posterior(self, sites, *others)

    monkeypatch.setattr(DensePrior, "posterior", noted)
    return seen


# The formulas on arrays


@pytest.mark.parametrize("num", [0, 1, 500, 501, 1200])  # 500 of the finest rule go at a time
def test_moments_of_arrays_are_those_of_tensors(num: int) -> None:
    rng = np.random.default_rng(1)
    m, v = 10.0 * rng.normal(size=num), np.exp(rng.uniform(-30.0, 11.0, size=num))
    m[: num // 8], v[: num // 16] = -1e4, 0.0
    tensors = tf.constant(m), tf.constant(v)
    # Arrays of marginals that are not wide have rules of their own: to 1e-11, of rough moments to three
    # digits.
    own = v <= probit_integrals.MODERATE
    for found, expected, error in [
        (probit_integrals.low_moments(m, v), probit_integrals.low_moments(*tensors), 1e-11),
        (probit_integrals.high_moments(m, v), probit_integrals.high_moments(*tensors), 1e-11),
        (
            probit_integrals.high_moments(m, v, True),
            probit_integrals.high_moments(*tensors, True),
            1e-3,
        ),
    ]:
        for x, tensor in zip(found, expected, strict=True):
            y = tensor.numpy()
            assert isinstance(x, np.ndarray)
            assert x.shape == (num,)
            np.testing.assert_allclose(x[~own], y[~own], rtol=1e-11, atol=1e-14)
            np.testing.assert_allclose(x[own], y[own], rtol=1e-11, atol=error)


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
    found = closed_ratio_gradients(
        lambda M, V: PROBIT.log_expected_derivatives(X, M, V, Y), (m_, v_, *sites)
    )
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
def test_it_ends_where_the_elbo_is_stationary(
    variance: float, lengthscale: float, num_outputs: int
) -> None:
    """And in few evaluations; by automatic differentiation of another way to the ELBO."""
    case = Case(variance, lengthscale, num_outputs)
    solution, at = case.run(newton(case.prior, case.zeros, 1e-9, 200))
    assert solution.residual <= 1e-9
    assert solution.num_evaluations <= 22
    np.testing.assert_array_equal(at.sites.lambda_2, solution.sites.lambda_2)
    sites = [tf.constant(x) for x in solution.sites]
    X, Y = case.data
    with tf.GradientTape() as tape, gh.linear_algebra("tensorflow"):
        tape.watch(sites)
        q = gh.linalg.marginals(tf.constant(case.K), tf.constant(case.mean), *sites)
        elbo = gh.objectives.elbo(q, SiteValues(*sites), PROBIT, (X, Y))
    np.testing.assert_allclose(solution.value, elbo, rtol=1e-9)
    d_1, d_2 = tape.gradient(elbo, sites)
    # ∂L/∂λ is Σa and −½(Σ∘Σ)b of the residual, relative to what the data say
    np.testing.assert_allclose(d_1 / np.sqrt(q.variance), 0.0, atol=1e-7)
    np.testing.assert_allclose(d_2 / q.variance, 0.0, atol=1e-5)


def test_steps_run_out() -> None:
    case = Case(1e4, 1.0)
    solution, _ = case.run(newton(case.prior, case.zeros, 1e-9, 2))
    assert solution.status == EXHAUSTED
    assert solution.num_evaluations == 3  # the first, and one for each step
    assert np.isfinite(solution.value)


def test_no_start() -> None:
    case = Case(1.0, 1.0)
    prior = DensePrior(np.full_like(case.K, np.nan), case.mean)
    solution, _ = case.run(newton(prior, case.zeros, 1e-9, 200))
    assert solution.status == INVALID_START
    assert solution.num_evaluations == 1


def test_a_bad_warm_start_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(1.0, 1.0)
    monkeypatch.setattr(variational, "_newton_step", lambda *_: case.zeros)
    warm = SiteValues(np.full_like(case.mean, 5.0), np.full_like(case.mean, 30.0))
    stuck, _ = case.run(newton(case.prior, warm, 1e-6, 50))
    found, at = case.run(
        from_warm_start(
            lambda start, keeping: newton(case.prior, start, 1e-6, 50, keeping), warm, by_value=True
        )
    )
    assert found.value > stuck.value + 1.0
    # What is known there is of these sites, although another iteration ran on the same memory.
    again = DensePrior(case.K, case.mean).posterior(found.sites)
    for x, y in zip(
        at.posterior.covariance(for_adjoint=True).Sigma,
        again.covariance(for_adjoint=True).Sigma,
        strict=True,
    ):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("spares_memory", [True, False])
def test_a_step_that_fails_is_shortened(
    spares_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dampings: list[float] = []
    systems = 0
    take, build, accepted = variational._newton_step, newton_system, bound.is_accepted

    def seen(system: Any, at: BoundEvaluation, mu: float) -> Any:
        dampings.append(mu)
        return take(system, at, mu)

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal systems
        systems += 1
        return build(*args, **kwargs)

    # The first Newton step, and the second of its tries, are said to have failed.
    monkeypatch.setattr(
        variational, "is_accepted", lambda *x: accepted(*x) and len(dampings) not in (1, 2)
    )
    monkeypatch.setattr(variational, "_newton_step", seen)
    monkeypatch.setattr(variational, "newton_system", counted)
    case = Case(4.0, 2.0)
    case.prior.spares_memory = spares_memory
    solution, _ = case.run(newton(case.prior, case.zeros, 1e-9, 200))
    # A success after failures keeps the damping; the next one lowers it, to nothing in the end.
    assert dampings[:4] == [0.0, pytest.approx(0.1), pytest.approx(0.4), pytest.approx(0.4)]
    assert dampings[-1] == 0.0
    assert solution.num_evaluations - 1 == solution.num_steps + 2
    assert solution.residual <= 1e-9
    assert systems == len(dampings) - (0 if spares_memory else 2)


def test_no_posterior_stays_that_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a matrix of the size of K: while Σ is made of one, and after a step, there is no other."""
    posteriors: list[weakref.ref[DensePosterior]] = []
    living: list[int] = []
    covariance, post = DensePosterior.covariance, DensePrior.posterior

    def seen(self: DensePosterior, **options: Any) -> Any:
        living.append(sum(x() is not None for x in posteriors))
        return covariance(self, **options)

    def remembered(self: DensePrior, *args: Any) -> DensePosterior:
        found = post(self, *args)
        posteriors.append(weakref.ref(found))
        return found

    monkeypatch.setattr(DensePosterior, "covariance", seen)
    monkeypatch.setattr(DensePrior, "posterior", remembered)
    case = Case(4.0, 2.0)
    case.run(total_gradient.collapse(1.0, case.prior, case.zeros, 1e-9, 200))
    assert len(living) > 3
    assert set(living) == {1}


def test_far_from_the_optimum_natural_gradients_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    X = rng.uniform(-2.0, 2.0, size=(60, 1))
    Y = np.sin(2.0 * X) + np.exp(-1.5 + 0.5 * X) * rng.normal(size=X.shape)
    likelihood = gpflow.likelihoods.HeteroskedasticTFPConditional()
    K, zeros = gpflow.kernels.Matern52()(X).numpy()[None], np.zeros((60, 2))
    build, bounds, systems = newton_system, [], []

    def seen(*args: Any) -> Generator[Any, Any, Any]:
        at, taken, tried = yield from approach(*args)
        bounds.append((args[1], at, taken, tried))
        return at, taken, tried

    def counted(*args: Any, **kwargs: Any) -> Any:
        systems.append(args)
        return build(*args, **kwargs)

    approach = variational._approach
    monkeypatch.setattr(variational, "_approach", seen)
    monkeypatch.setattr(variational, "newton_system", counted)

    def found() -> Any:
        systems.clear()
        iteration = newton(DensePrior(K, zeros), SiteValues(zeros, zeros), 1e-9, 200)
        solution, _ = run(iteration, likelihood, (tf.constant(X), tf.constant(Y)))
        return solution, len(systems)

    solution, built = found()
    ((before, after, taken, tried),) = bounds  # once
    assert before.residual_norm > NEWTON.near
    assert after.elbo > before.elbo
    assert 3 <= taken <= tried
    assert solution.num_evaluations >= built + tried
    # The end is the same without them, and far more systems are built.
    monkeypatch.setattr(variational, "NEWTON", dataclasses.replace(NEWTON, near=np.inf))
    alone, built_alone = found()
    assert len(bounds) == 1
    assert built_alone >= built + 3
    assert solution.residual <= 1e-9
    assert solution.value == pytest.approx(alone.value, abs=1e-9)


def test_steps_of_coupled_latents_have_as_many_digits_as_the_residual(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that convergence is still quadratic; one latent, whose systems are cheap, always has more."""
    asked = []
    direction = variational.newton_direction

    def noted(system: Any, at: BoundEvaluation, tolerance: float, **options: Any) -> Any:
        asked.append((at.residual_norm, tolerance))
        return direction(system, at, tolerance, **options)

    monkeypatch.setattr(variational, "newton_direction", noted)
    X, Y = binary()
    model = gh.CVIModel(
        (X, Y), gpflow.kernels.Matern52(), gpflow.likelihoods.Softmax(2), num_latent_gps=2
    )
    assert model.infer(tolerance=1e-9).num_evaluations < 9
    for residual, tolerance in asked:
        expected = max(NEWTON.step_tolerance, min(residual, NEWTON.far_tolerance))
        assert tolerance == pytest.approx(expected)
    tolerances = {tolerance for _, tolerance in asked}
    assert len(tolerances) >= 3
    asked.clear()
    gh.CVIModel((X, Y), gpflow.kernels.Matern52(), PROBIT).infer()
    assert {tolerance for _, tolerance in asked} == {NEWTON.step_tolerance}


# The collapsed objective


@pytest.mark.parametrize("objective", ["elbo", "ep_like"])
@pytest.mark.parametrize("num", [60, 320])
def test_gradient_against_differences(objective: str, num: int) -> None:
    kernel = gpflow.kernels.Matern52(variance=4.0, lengthscales=2.0)
    model = gh.CVIModel(binary(num), kernel, PROBIT, objective=objective)
    check_gradient(model)


def test_the_last_step_needs_no_factorisation() -> None:
    case = Case(4.0, 2.0)
    exact, _ = case.run(newton(case.prior, case.zeros, 1e-12, 200))
    near = SiteValues(*(x * (1.0 + 3e-7) for x in exact.sites))
    at = case.run(evaluate(case.prior, near))
    assert 1e-8 < at.residual_norm < COLLAPSE.polished_from
    system = case.run(newton_system(at, rough=False, for_adjoint=True))
    end = total_gradient._last_step(case.prior, system, at, 1e-9)
    assert end is not None
    again = case.run(evaluate(DensePrior(case.K, case.mean), end.sites))
    assert again.residual_norm < 1e-9
    for x, y in zip(end.q, again.q, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(end.elbo, exact.value, rtol=1e-13)


@pytest.mark.parametrize("kept", [1.0, 0.5, 0.0])
def test_a_last_step_that_was_solved_for_badly_is_none(
    kept: float, evaluations: list[SiteValues], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(4.0, 2.0)
    exact, _ = case.run(newton(case.prior, case.zeros, 1e-12, 200))
    near = SiteValues(*(x * (1.0 + 3e-7) for x in exact.sites))
    direction = total_gradient.newton_direction

    def short(*args: Any, **kwargs: Any) -> Any:
        found = direction(*args, **kwargs)
        return type(found)(*(kept * x for x in found))

    monkeypatch.setattr(total_gradient, "newton_direction", short)
    evaluations.clear()
    found = case.run(total_gradient.collapse(0.0, case.prior, near, 1e-9, 200))
    assert found.solution.residual <= 1e-9
    assert found.solution.value == pytest.approx(exact.value, rel=1e-12)
    # One more where Newton's method has to go on, from what is evaluated already.
    assert len(evaluations) == found.solution.num_evaluations == (1 if kept == 1.0 else 2)


def test_evaluations_of_a_loss_near_the_last(evaluations: list[SiteValues]) -> None:
    """Three factorisations, the first of them at the sites of the last loss."""
    kernel = gpflow.kernels.Matern52(variance=4.0, lengthscales=2.0)
    model = gh.CVIModel(binary(), kernel, PROBIT)
    model.training_loss()
    evaluations.clear()
    kernel.lengthscales.assign(2.0 * 1.01)
    model.training_loss()
    assert len(evaluations) == 3


def test_the_gradient_does_not_use_the_rough_curvature(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss_and_gradient() -> list[Any]:
        kernel = gpflow.kernels.Matern52(variance=4.0, lengthscales=2.0)
        model = gh.CVIModel(binary(), kernel, PROBIT)
        return [float(model.training_loss()), *loss_gradient(model)]

    with monkeypatch.context() as exact:
        exact.setattr(questions, "has_rough_curvature", lambda likelihood: False)
        expected = loss_and_gradient()
    monkeypatch.setattr(probit_integrals, "ROUGH", probit_integrals.Rule(3, 3.0))  # very rough
    found = loss_and_gradient()
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-9)
    for x, y in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)


# Where it is taken


def test_likelihoods_on_arrays() -> None:
    assert on_arrays(PROBIT) is not None
    assert on_arrays(gpflow.likelihoods.Bernoulli()) is not None
    assert on_arrays(gpflow.likelihoods.SwitchedLikelihood([PROBIT])) is None


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
    assert not works_on_arrays(Steep())
    assert works_on_arrays(SteepOnArrays())
    assert not works_on_arrays(Unfinished())
    assert not works_on_arrays(WithParameter())
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
    options = dataclasses.replace(
        COLLAPSE, polished_from=1e-4, long_step=1e-3, last_step_tolerance=1e-6
    )
    monkeypatch.setattr(total_gradient, "COLLAPSE", options)
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
    monkeypatch.setattr(total_gradient, "COLLAPSE", dataclasses.replace(COLLAPSE, long_step=0.0))
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
