"""With a Gaussian likelihood CVIModel is gpflow.models.GPR, number for number."""

from __future__ import annotations

from collections.abc import Callable

import gpflow
import numpy as np
import pytest
from gpflow.mean_functions import Constant, Linear, MeanFunction, Zero

import gpflow_hybrid as gh

MEANS: dict[str, Callable[[int], MeanFunction]] = {
    "zero": lambda P: Zero(),
    "constant": lambda P: Constant(np.linspace(0.4, 0.9, P)),
    "linear": lambda P: Linear(np.full((2, P), 0.3), np.linspace(-0.2, 0.2, P)),
}


def make_data(seed: int, P: int, N: int = 14) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2.0, 2.0, (N, 2))
    # Not linear in either input: every lengthscale has an optimum.
    Y = np.sin(2.0 * X[:, :1] + np.arange(P)) + np.cos(1.5 * X[:, 1:])
    Y = Y + 0.3 * X[:, 1:] + 0.2 * rng.normal(size=(N, P))
    return X, Y


def make_models(
    data: tuple[np.ndarray, np.ndarray], mean: str, objective: str = "ep_like"
) -> tuple[gpflow.models.GPR, gh.CVIModel]:
    """The same model twice, nothing shared."""
    P = data[1].shape[1]

    def kernel() -> gpflow.kernels.Kernel:
        return gpflow.kernels.Matern52(variance=0.9, lengthscales=[0.7, 1.3])

    gpr = gpflow.models.GPR(data, kernel(), MEANS[mean](P), noise_variance=0.15)
    likelihood = gpflow.likelihoods.Gaussian(0.15)
    return gpr, gh.CVIModel(data, kernel(), likelihood, MEANS[mean](P), objective=objective)


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("P", [1, 3])
def test_one_natural_gradient_step_is_exact(mean: str, P: int) -> None:
    data = make_data(P, P)
    gpr, model = make_models(data, mean)
    model.natgrad_step(1.0)

    evidence = gpr.log_marginal_likelihood()
    np.testing.assert_allclose(model.elbo(), evidence, rtol=1e-9)
    np.testing.assert_allclose(model.ep_like_log_marginal(), evidence, rtol=1e-9)
    np.testing.assert_allclose(model.power_ep_log_marginal(0.5), evidence, rtol=1e-9)

    Xnew, Ynew = make_data(100 + P, P, N=5)
    for actual, expected in [
        (model.predict_f(Xnew), gpr.predict_f(Xnew)),
        (model.predict_f(Xnew, full_cov=True), gpr.predict_f(Xnew, full_cov=True)),
        (model.posterior().predict_f(Xnew), gpr.posterior().predict_f(Xnew)),
        (model.predict_y(Xnew), gpr.predict_y(Xnew)),
    ]:
        for a, e in zip(actual, expected, strict=True):
            assert a.shape == e.shape
            np.testing.assert_allclose(a, e, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(
        model.predict_log_density((Xnew, Ynew)), gpr.predict_log_density((Xnew, Ynew)), rtol=1e-8
    )


def test_half_a_step_is_not_exact() -> None:
    # The equalities above hold because λ is at its optimum, not whatever λ is.
    gpr, model = make_models(make_data(7, 1), "zero")
    model.natgrad_step(0.5)
    assert model.elbo() < gpr.log_marginal_likelihood() - 0.1


def test_infer_finds_the_exact_posterior() -> None:
    gpr, model = make_models(make_data(8, 2), "linear")
    result = model.infer()
    assert result.converged
    np.testing.assert_allclose(result.elbo, gpr.log_marginal_likelihood(), rtol=1e-9)


@pytest.mark.parametrize(
    ("objective", "mean", "P"), [("ep_like", "linear", 1), ("elbo", "constant", 2)]
)
def test_training_ends_where_gpr_does(objective: str, mean: str, P: int) -> None:
    gpr, model = make_models(make_data(20 + P, P, N=30), mean, objective)
    results = [
        gpflow.optimizers.Scipy().minimize(
            m.training_loss, m.trainable_variables, options={"gtol": 1e-7, "ftol": 1e-14}
        )
        for m in (gpr, model)
    ]
    np.testing.assert_allclose(results[1].fun, results[0].fun, rtol=1e-8)
    trained = gpflow.utilities.parameter_dict(model)
    for name, parameter in gpflow.utilities.parameter_dict(gpr).items():
        np.testing.assert_allclose(
            trained[name].numpy(), parameter.numpy(), rtol=1e-4, atol=1e-5, err_msg=name
        )


@pytest.mark.parametrize(
    ("backend", "variance", "lengthscale"),
    [("lapack", 1e10, 100.0), ("lapack", 1e8, 1.0), ("tensorflow", 1e10, 100.0)],
)
def test_observations_far_from_the_mean_function_keep_their_digits(
    backend: str, variance: float, lengthscale: float
) -> None:
    """Beside y²/σ² = 10¹⁴: rounding errors of the mean under a wide prior, 10⁻³ for the widest, would be
    thousands of nats in units of y/σ²."""
    X, Y = make_data(9, 1, N=20)
    data = (3.0 * X, 1e5 + Y)

    def kernel() -> gpflow.kernels.Kernel:
        return gpflow.kernels.Matern52(variance=variance, lengthscales=lengthscale)

    expected = gpflow.models.GPR(data, kernel(), noise_variance=0.01).log_marginal_likelihood()
    with gh.linear_algebra(backend):
        model = gh.CVIModel(data, kernel(), gpflow.likelihoods.Gaussian(0.01))
        model.infer()
        values = [model.elbo(), -model.training_loss()]
        if backend == "lapack":  # whose variances are never more than 1/λ₂
            values.append(model.ep_like_log_marginal())
    np.testing.assert_allclose(values, np.full(len(values), expected), atol=0.1)
