"""The E-step converges from anywhere, says how it went, and never leaves a model worse."""

from __future__ import annotations

import gpflow
import numpy as np
import pytest
import tensorflow as tf

import gpflow_hybrid as gh
from gpflow_hybrid.sites import SiteValues

PROBIT = gh.likelihoods.ProbitBernoulli()  # one instance: its compiled graphs are reused


def bernoulli_model(num: int = 40, variance: float = 4.0, likelihood=None, seed: int = 0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(num, 2))
    Y = (np.sin(2 * X[:, :1]) + 0.3 * rng.normal(size=(num, 1)) > 0).astype(float)
    return gh.CVIModel(
        (X, Y),
        gpflow.kernels.Matern52(variance=variance),
        PROBIT if likelihood is None else likelihood,
    )


def student_model():
    rng = np.random.default_rng(1)
    X = np.linspace(0, 6, 50)[:, None]
    Y = np.sin(X) + 0.1 * rng.standard_t(3, size=X.shape)
    Y[::10] += 20.0  # gross outliers
    return gh.CVIModel(
        (X, Y), gpflow.kernels.SquaredExponential(), gpflow.likelihoods.StudentT(scale=0.5)
    )


def poisson_model():
    rng = np.random.default_rng(2)
    X = np.linspace(0, 6, 50)[:, None]
    Y = rng.poisson(np.exp(7.0 + 2.0 * np.sin(X))).astype(float)  # counts up to ten thousand
    return gh.CVIModel(
        (X, Y), gpflow.kernels.SquaredExponential(variance=9.0), gpflow.likelihoods.Poisson()
    )


def squeezed_bernoulli_model():
    rng = np.random.default_rng(3)
    Y = np.repeat([0.0, 1.0], 40)[:, None]
    X = 4.0 * Y - 2.0 + 0.3 * rng.normal(size=(80, 1))
    flipped = [4, 47]  # labels deep on the wrong side: GPflow's squeezed link is convex there
    Y[flipped] = 1 - Y[flipped]
    kernel = gpflow.kernels.SquaredExponential(variance=25.0, lengthscales=2.0)
    return gh.CVIModel((X, Y), kernel, gpflow.likelihoods.Bernoulli())


def assert_stationary(model: gh.CVIModel, atol: float = 1e-4) -> None:
    """The gradient of the ELBO in λ vanishes: an independent check, by automatic differentiation."""
    variables = [p.unconstrained_variable for p in (model.sites.lambda_1, model.sites.lambda_2)]
    with tf.GradientTape() as tape:
        tape.watch(variables)
        elbo = model.elbo()
    for gradient in tape.gradient(elbo, variables):
        np.testing.assert_allclose(gradient, 0.0, atol=atol)


def test_newton_finds_the_optimum_of_plain_damping():
    newton, damped = bernoulli_model(), bernoulli_model()
    assert newton.infer(tolerance=1e-9).converged
    result = damped.infer(tolerance=1e-9, lr=0.5, max_steps=500)
    assert result.converged
    np.testing.assert_allclose(newton.elbo(), damped.elbo(), rtol=1e-10)
    for a, b in zip(newton.sites.values, damped.sites.values, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert_stationary(newton, atol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(student_model, marks=pytest.mark.slow),
        poisson_model,
        squeezed_bernoulli_model,
    ],
)
def test_converges_from_fifty_random_starts(make):
    model = make()
    rng = np.random.default_rng(4)
    shape = model.sites.lambda_1.shape
    num_negative = []
    for start in range(50):
        model.sites.assign(
            SiteValues(
                tf.constant(rng.normal(scale=3.0, size=shape)),
                tf.constant(rng.gamma(0.5, 2.0, size=shape)),
            )
        )
        before = float(model.elbo())
        result = model.infer()
        assert result.converged, (start, result)
        assert result.num_evaluations <= 100
        assert result.elbo >= before
        num_negative.append(result.num_negative_sites)
    assert_stationary(model, atol=1e-3)  # a gradient in λ of a count of ten thousand is not small
    if make is squeezed_bernoulli_model:
        assert min(num_negative) > 0, "the case is meant to have negative sites"


@pytest.mark.parametrize("log_sigma", [-1.0, 2.0, 5.0])
@pytest.mark.parametrize("log_lengthscale", [-1.0, 2.0, 5.0])
def test_converges_over_the_grid_of_the_paper(log_lengthscale, log_sigma):
    X, Y = gh.datasets.load("sonar")
    train, _ = next(iter(gh.datasets.folds(len(X))))
    (X,) = gh.datasets.standardise(X[train])
    kernel = gpflow.kernels.Matern52(
        variance=np.exp(2 * log_sigma), lengthscales=np.exp(log_lengthscale)
    )
    model = gh.CVIModel((X, Y[train]), kernel, PROBIT)
    result = model.infer()
    assert result.converged
    assert result.residual < 1e-6
    assert result.num_evaluations <= 40  # the target is 100, and 60 for 95 of 100 points


def test_gaussian_needs_one_step():
    rng = np.random.default_rng(5)
    X = rng.normal(size=(20, 1))
    model = gh.CVIModel((X, np.sin(X)), gpflow.kernels.Matern52(), gpflow.likelihoods.Gaussian(0.1))
    result = model.infer()
    assert result.converged
    assert result.num_steps == 1


def test_result_reports_what_the_model_has():
    model = squeezed_bernoulli_model()
    result = model.infer()
    np.testing.assert_allclose(result.elbo, model.elbo(), rtol=1e-12)
    lambda_2 = model.sites.lambda_2.numpy()
    assert result.num_negative_sites == (lambda_2 < 0).sum() > 0
    _, variance = model.predict_f(model.data[0])
    np.testing.assert_allclose(
        result.min_cavity_precision, (1 / variance.numpy() - lambda_2).min(), rtol=1e-6
    )
    assert result.message.startswith("Converged")


def test_a_second_call_is_free():
    model = bernoulli_model()
    model.infer()
    again = model.infer()
    assert again.converged
    assert again.num_steps == 0
    assert again.num_evaluations == 1


def test_too_few_steps_keep_the_best_and_say_what_to_do():
    model = bernoulli_model(variance=400.0)
    start = float(model.elbo())
    result = model.infer(max_steps=3)
    assert not result.converged
    assert "max_steps" in result.message
    assert result.num_evaluations == 4
    np.testing.assert_allclose(result.elbo, model.elbo(), rtol=1e-10)
    assert result.elbo > start


def test_full_step_damping_oscillates_and_never_leaves_the_model_worse():
    model = bernoulli_model(variance=np.exp(8.0))
    for _ in range(3):
        before = float(model.elbo())
        result = model.infer(lr=1.0, max_steps=30)
        assert float(model.elbo()) >= before - 1e-9
        np.testing.assert_allclose(result.elbo, model.elbo(), rtol=1e-9)
    assert not result.converged
    assert "leave lr out" in result.message


def test_coarse_quadrature_is_named():
    model = bernoulli_model(variance=np.exp(9.0), likelihood=gpflow.likelihoods.Bernoulli())
    result = model.infer()
    assert "NDiagGHQuadrature" in result.message
    assert not result.converged, "its nodes do not see the data: q = prior is not a result"
    model = bernoulli_model(variance=np.exp(9.0))
    assert "NDiagGHQuadrature" not in model.infer().message


def test_non_finite_expectation_names_the_datum():
    X = np.array([[0.0], [1.0], [2.0]])
    Y = np.array([[1.0], [0.0], [2.0]])
    mean = gpflow.functions.Linear(A=[[500.0]])  # exp(1000) at the third datum
    model = gh.CVIModel((X, Y), gpflow.kernels.Matern52(), gpflow.likelihoods.Poisson(), mean)
    with pytest.raises(gh.NonFiniteError, match="datum 2"):
        model.infer()
    np.testing.assert_array_equal(model.sites.lambda_2, 0.0)


def test_non_finite_kernel_names_the_datum():
    class Broken(gpflow.kernels.Matern52):
        def K_r2(self, r2):
            K = super().K_r2(r2)
            return tf.tensor_scatter_nd_update(
                K, [[2, 0], [0, 2]], tf.constant([np.nan] * 2, K.dtype)
            )

    X = np.array([[0.0], [1.0], [2.0]])
    model = gh.CVIModel((X, np.ones_like(X)), Broken(), PROBIT)
    with pytest.raises(gh.NonFiniteError, match="kernel matrix is not finite at datum 0"):
        model.infer()


class CountingKernel(gpflow.kernels.Matern52):
    calls = 0

    def K_r2(self, r2):
        type(self).calls += 1
        return super().K_r2(r2)


def test_kernel_is_evaluated_once_per_call():
    model = bernoulli_model()
    model.kernel = CountingKernel()
    CountingKernel.calls = 0
    model.infer()
    assert CountingKernel.calls == 1


@pytest.mark.parametrize("method", ["infer", "training_loss"])
def test_no_retracing_when_parameters_change(method):
    traces = 0

    class Traced(gpflow.likelihoods.StudentT):
        def _scalar_log_prob(self, X, F, Y):
            nonlocal traces
            traces += not tf.executing_eagerly()
            return super()._scalar_log_prob(X, F, Y)

    model = bernoulli_model(likelihood=Traced())
    run = getattr(model, method)
    run()
    first = traces
    assert first > 0
    for variance in (0.5, 5.0):
        model.kernel.variance.assign(variance)
        model.likelihood.scale.assign(variance)
        model.sites.reset(40)
        run()
    assert traces == first


def test_a_changed_likelihood_is_traced_anew():
    model = student_model()
    before = model.infer().elbo
    model.likelihood.df = 30.0
    after = model.infer().elbo
    reference = student_model()
    reference.likelihood.df = 30.0
    np.testing.assert_allclose(after, reference.infer().elbo, rtol=1e-8)
    assert abs(after - before) > 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sonar", "ionosphere"])
def test_the_whole_grid(name):
    from benchmarks.inference_grid import run

    results = run(name, 21, 1e-6)
    counts = np.array([r.num_evaluations for r in results])
    assert all(r.converged for r in results)
    assert np.median(counts) <= 12
    assert np.percentile(counts, 95) <= 60
    assert counts.max() <= 100
