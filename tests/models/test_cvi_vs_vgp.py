"""At the fixed point of the E-step CVIModel is a converged gpflow.models.VGP."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import gpflow
import numpy as np
import pytest
import tensorflow as tf
from gpflow.base import AnyNDArray
from gpflow.likelihoods import Likelihood, scalar_discrete

from gpflow_hybrid import CVIModel
from gpflow_hybrid.likelihoods import ProbitBernoulli
from tests.selection import by_speed

N = 16


@pytest.fixture(autouse=True)
def _small_jitter() -> None:
    # VGP adds the jitter to K, in its ELBO and in its predictions; CVIModel adds none. At GPflow's
    # 1e-6 the two are different models to about 1e-6/λ_min(K); at 1e-10 that is below every
    # tolerance here, and a Matérn kernel on spread inputs stays factorisable.
    gpflow.config.set_default_jitter(1e-10)


@pytest.fixture(autouse=True)
def _finite_probit(monkeypatch: pytest.MonkeyPatch) -> None:
    # GPflow's Ordinal puts its outer bin edges at ±inf, and TensorFlow's erf(±inf) is NaN in
    # float64 (tensorflow/tensorflow#108483): without this neither model can use the outer classes.
    original = scalar_discrete.inv_probit

    def inv_probit(x: tf.Tensor) -> tf.Tensor:
        return original(tf.clip_by_value(x, -1e3, 1e3))

    monkeypatch.setattr(scalar_discrete, "inv_probit", inv_probit)


class Case(NamedTuple):
    """A model: how to draw Y from a latent function ``[N, L]``, and its parts."""

    likelihood: Callable[[], Likelihood]
    draw: Callable[[np.random.Generator, AnyNDArray], AnyNDArray]
    num_latent: int = 1
    mean: Callable[[], gpflow.functions.MeanFunction] | None = None


def linear_mean() -> gpflow.functions.MeanFunction:
    return gpflow.functions.Linear(A=[[0.7]], b=[-0.4])


def binary(rng: np.random.Generator, f: AnyNDArray) -> AnyNDArray:
    return (rng.normal(size=f.shape) < f).astype(float)


def logit() -> Likelihood:
    return gpflow.likelihoods.Bernoulli(invlink=tf.math.sigmoid)


def counts(rng: np.random.Generator, f: AnyNDArray) -> AnyNDArray:
    return rng.poisson(np.exp(f)).astype(float)


CASES = {
    "bernoulli_probit": Case(gpflow.likelihoods.Bernoulli, binary),
    "bernoulli_logit": Case(logit, binary, mean=linear_mean),
    "probit_bernoulli": Case(ProbitBernoulli, binary, mean=linear_mean),
    "student_t": Case(
        lambda: gpflow.likelihoods.StudentT(scale=0.3, df=4.0),
        lambda rng, f: f + 0.3 * rng.standard_t(4, size=f.shape),
        mean=lambda: gpflow.functions.Constant(0.3),
    ),
    "poisson": Case(gpflow.likelihoods.Poisson, counts, mean=linear_mean),
    "exponential_two_latents": Case(
        gpflow.likelihoods.Exponential, lambda rng, f: rng.exponential(np.exp(f)), num_latent=2
    ),
    "gamma": Case(
        lambda: gpflow.likelihoods.Gamma(shape=2.0),
        lambda rng, f: rng.gamma(2.0, np.exp(f)),
    ),
    "beta": Case(
        lambda: gpflow.likelihoods.Beta(scale=5.0),
        lambda rng, f: np.clip(rng.beta(2.0 + f**2, 2.0), 0.01, 0.99),
    ),
    "ordinal": Case(
        lambda: gpflow.likelihoods.Ordinal(np.array([-0.6, 0.6])),
        lambda rng, f: np.digitize(f + 0.3 * rng.normal(size=f.shape), [-0.6, 0.6]).astype(float),
    ),
    "multiclass": Case(
        lambda: gpflow.likelihoods.MultiClass(3),
        lambda rng, f: np.argmax(f, axis=1)[:, None].astype(float),
        num_latent=3,
    ),
}


# The tutorials have these in both classes as well.
ALSO_IN_TUTORIALS = {"poisson", "gamma", "ordinal"}
NAMES = by_speed(zip(CASES), [(name,) for name in CASES if name not in ALSO_IN_TUTORIALS])


class Pair(NamedTuple):
    """Both models, which share kernel, likelihood and mean function, and test data."""

    cvi: CVIModel
    vgp: gpflow.models.VGP
    X: AnyNDArray
    Y: AnyNDArray


@functools.cache
def converged(name: str) -> Pair:
    case = CASES[name]
    rng = np.random.default_rng(sorted(CASES).index(name))
    X = np.sort(rng.uniform(0.0, 4.0, size=(N, 1)), axis=0)
    phase = np.arange(case.num_latent)
    Y = case.draw(rng, np.sin(2.0 * X + 2.0 * phase))
    parts = (
        gpflow.kernels.Matern32(variance=1.3, lengthscales=0.8),
        case.likelihood(),
        case.mean() if case.mean else None,
    )
    cvi = CVIModel((X, Y), *parts, num_latent_gps=case.num_latent)
    result = cvi.infer(tolerance=1e-8)
    assert result.converged, result.message

    vgp = gpflow.models.VGP((X, Y), *parts, num_latent_gps=case.num_latent)
    outcome = gpflow.optimizers.Scipy().minimize(
        vgp.training_loss,
        [vgp.q_mu.unconstrained_variable, vgp.q_sqrt.unconstrained_variable],
        options={"maxiter": 5000, "maxfun": 10000, "ftol": 0.0, "gtol": 1e-7, "maxcor": 50},
    )
    assert np.max(np.abs(outcome.jac)) < 1e-5, outcome.message
    X_new = np.linspace(-1.0, 5.0, 7)[:, None]
    return Pair(cvi, vgp, X_new, case.draw(rng, np.sin(2.0 * X_new + 2.0 * phase)))


@pytest.mark.parametrize("name", NAMES)
def test_elbo_is_vgps_at_its_optimum(name: str) -> None:
    cvi, vgp, *_ = converged(name)
    # The optimum is a maximum: errors of q enter the ELBO to second order.
    np.testing.assert_allclose(cvi.elbo(), vgp.elbo(), rtol=1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_predictions_are_vgps(name: str) -> None:
    cvi, vgp, X, Y = converged(name)
    for full_cov in (False, True):
        for found, expected in zip(
            cvi.predict_f(X, full_cov=full_cov), vgp.predict_f(X, full_cov=full_cov), strict=True
        ):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    for found, expected in zip(cvi.predict_y(X), vgp.predict_y(X), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        cvi.predict_log_density((X, Y)), vgp.predict_log_density((X, Y)), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", NAMES)
def test_hyperparameter_gradients_of_the_elbo_are_vgps(name: str) -> None:
    """λ held fixed on one side, the whitened q on the other: both are total at the optimum."""
    cvi, vgp, *_ = converged(name)
    variables = cvi.trainable_variables
    gradients = []
    for model in (cvi, vgp):
        with tf.GradientTape() as tape:
            value = model.elbo()
        gradients.append(tape.gradient(value, variables))
    assert len(variables) >= 2
    for found, expected in zip(*gradients, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
