"""Predictions on arrays are those of ``predict_f``."""

from __future__ import annotations

from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf

import gpflow_hybrid as gh

K = gpflow.kernels


def labelled(num: int = 40) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(num, 2)) + 50.0
    return X, (X[:, :1] + 0.3 * rng.normal(size=(num, 1)) > 50.0).astype(float)


@pytest.mark.parametrize(
    "kernel",
    [
        K.Matern52(variance=30.0),
        K.Matern12(lengthscales=[0.7, 3.0]),
        K.SquaredExponential(variance=4.0, active_dims=[1]),
        K.SharedIndependent(K.Matern32(variance=2.0), 1),
    ],
)
@pytest.mark.parametrize("model_class", [gh.CVIModel, gh.EPModel, gh.LaplaceModel])
def test_moments_are_those_of_predict_f(kernel: Any, model_class: Any) -> None:
    X, Y = labelled()
    model = model_class((X, Y), kernel, gh.likelihoods.ProbitBernoulli())
    model.infer()
    new = np.concatenate([X[:5], X[:5] + 0.3, X[:2] + 100.0])
    mean, variance = model.predict_f_on_arrays(new)
    expected = model.predict_f(new)
    np.testing.assert_allclose(mean, expected[0], rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(variance, expected[1], rtol=1e-9, atol=1e-10)


def test_several_latents_and_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    X = rng.normal(size=(30, 1))
    Y = rng.integers(0, 3, size=(30, 1)).astype(float)
    kernel = K.SeparateIndependent([K.Matern52(lengthscales=s) for s in (0.3, 1.0, 3.0)])
    for k in (kernel, K.Matern52()):
        model = gh.CVIModel((X, Y), k, gpflow.likelihoods.Softmax(3), num_latent_gps=3)
        model.sites.assign(gh.sites.SiteValues(rng.normal(size=(30, 3)), rng.uniform(size=(30, 3))))
        expected = model.predict_f(X + 0.1)
        monkeypatch.setattr("gpflow_hybrid.tuning.PREDICTED_ELEMENTS", 7 * 90)  # 7 rows
        for found, moment in zip(model.predict_f_on_arrays(X + 0.1), expected, strict=True):
            np.testing.assert_allclose(found, moment, rtol=1e-9, atol=1e-11)
        monkeypatch.undo()


def test_sites_follow_the_hyperparameters() -> None:
    X, Y = labelled()
    model = gh.CVIModel((X, Y), K.Matern52(), gh.likelihoods.ProbitBernoulli())
    model.training_loss()
    model.kernel.lengthscales.assign(2.0)
    expected = gh.CVIModel((X, Y), model.kernel, model.likelihood)
    expected.infer(tolerance=1e-9)
    for found, moment in zip(model.predict_f_on_arrays(X), expected.predict_f(X), strict=True):
        np.testing.assert_allclose(found, moment, rtol=1e-6)


class Doubled(gh.CVIModel):
    """Predictions that are not the base class'."""

    def predict_f(self, Xnew: Any, *args: Any, **kwargs: Any) -> Any:
        mean, variance = super().predict_f(Xnew, *args, **kwargs)
        return 2.0 * mean, variance


def test_what_is_not_known_on_arrays_is_none() -> None:
    X, Y = labelled()
    probit = gh.likelihoods.ProbitBernoulli()
    assert gh.CVIModel((X, Y), K.Linear(), probit).predict_f_on_arrays(X) is None
    mean = gpflow.functions.Constant(1.0)
    assert gh.CVIModel((X, Y), K.Matern52(), probit, mean).predict_f_on_arrays(X) is None
    variable = tuple(tf.Variable(x, shape=[None, x.shape[1]]) for x in (X, Y))
    assert gh.CVIModel(variable, K.Matern52(), probit).predict_f_on_arrays(X) is None
    assert Doubled((X, Y), K.Matern52(), probit).predict_f_on_arrays(X) is None
    model = gh.CVIModel((X, Y), K.Matern52(), probit)
    lambda_2 = np.ones_like(Y)
    lambda_2[3] = -0.1
    model.sites.assign(gh.sites.SiteValues(np.zeros_like(Y), lambda_2))
    assert model.predict_f_on_arrays(X) is None
    model.sites.assign(gh.sites.SiteValues(np.zeros_like(Y), np.full_like(Y, np.nan)))
    assert model.predict_f_on_arrays(X) is None


@pytest.mark.parametrize("variance", [10.0, 1000.0])
def test_hardly_any_noise_loses_no_digits(variance: float) -> None:
    """Precise sites: ``r − ΛΣr`` would be a difference of numbers a million times as large."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-3.0, 3.0, size=(150, 1))
    data, kernel = (X, np.sin(3.0 * X)), K.Matern52(variance=variance, lengthscales=2.0)
    exact = gpflow.models.GPR(data, kernel, noise_variance=1.1e-6)
    model = gh.CVIModel(data, kernel, exact.likelihood)
    precision = np.full_like(X, 1.0 / 1.1e-6)
    model.sites.assign(gh.sites.SiteValues(precision * data[1], precision))
    new = np.linspace(-3.5, 3.5, 40)[:, None]
    mean, _ = exact.predict_f(new)
    # Both are off by rounding times the condition of K + σ²I, up to 1e11.
    np.testing.assert_allclose(model.predict_f(new)[0], mean, atol=1e-6)
    np.testing.assert_allclose(model.posterior().predict_f(new)[0], mean, atol=1e-6)
    np.testing.assert_allclose(model.predict_f_on_arrays(new)[0], mean, atol=1e-6)


def test_inputs_are_those_of_predict_f() -> None:
    X, Y = labelled()
    model = gh.CVIModel((X, Y), K.Matern52(), gh.likelihoods.ProbitBernoulli())
    model.infer()
    expected = model.predict_f_on_arrays(X[:3])
    for found, moment in zip(model.predict_f_on_arrays(X[:3].tolist()), expected, strict=True):
        np.testing.assert_array_equal(found, moment)
    for wrong in (X[:, :1], np.hstack([X, X])):
        with pytest.raises(gh.InvalidDataError, match=r"must have the 2 column\(s\)"):
            model.predict_f_on_arrays(wrong)
    assert model.predict_f_on_arrays(X[:0]) is None
    assert model.predict_f_on_arrays(X[None]) is None
