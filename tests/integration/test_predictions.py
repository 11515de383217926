"""Mixtures over hyperparameters predict in GPflow's shapes, and survive a file."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf
from scipy.special import logsumexp

import gpflow_hybrid as gh
from gpflow_hybrid.integration.mixtures import moments
from gpflow_hybrid.integration.target import Target
from tests.integration.cases import classifier, labels

X_NEW = np.linspace(-0.5, 3.5, 7)[:, None]
NEW = X_NEW, (np.sin(2.0 * X_NEW) > 0.0).astype(float)


@pytest.fixture(scope="module")
def integrated() -> gh.HyperparameterPosterior:
    return gh.integrate_hyperparameters(classifier(), tolerance=0.1)


@pytest.fixture(scope="module")
def each(integrated: gh.HyperparameterPosterior) -> list[Any]:
    """The same model, inferred anew at every setting."""
    models = []
    for setting in integrated.settings:
        model = classifier()
        gpflow.utilities.multiple_assign(model, setting)
        model.infer(tolerance=1e-9)
        models.append(model)
    return models


def test_the_settings_have_weights(integrated: gh.HyperparameterPosterior) -> None:
    assert len(integrated.settings) == len(integrated.weights) == len(integrated.log_densities)
    assert abs(integrated.weights.sum() - 1.0) < 1e-12
    assert np.all(integrated.weights > 0.0)
    assert set(integrated.settings[0]) == {".kernel.variance", ".kernel.lengthscales"}


def test_predictions_are_those_of_the_mixture(
    integrated: gh.HyperparameterPosterior, each: list[Any]
) -> None:
    w = integrated.weights
    densities = np.stack([m.predict_log_density(NEW) for m in each])
    np.testing.assert_allclose(
        integrated.predict_log_density(NEW), logsumexp(densities, 0, b=w[:, None]), atol=1e-6
    )
    for method in ("predict_f", "predict_y"):
        mean, variance = (
            np.stack(x) for x in zip(*(getattr(m, method)(X_NEW) for m in each), strict=True)
        )
        expected = np.einsum("k,knp->np", w, mean)
        spread = np.einsum("k,knp->np", w, variance + (mean - expected) ** 2)
        found = getattr(integrated, method)(X_NEW)
        np.testing.assert_allclose(found[0], expected, atol=1e-6)
        np.testing.assert_allclose(found[1], spread, atol=1e-6)
    # A mixture of labels' probabilities is a label's probability.
    p, variance = integrated.predict_y(X_NEW)
    np.testing.assert_allclose(variance, p * (1.0 - p), atol=1e-9)


def test_full_covariances(integrated: gh.HyperparameterPosterior, each: list[Any]) -> None:
    w = integrated.weights
    mean, covariance = (
        np.stack(x) for x in zip(*(m.predict_f(X_NEW, full_cov=True) for m in each), strict=True)
    )
    deviation = (mean - np.einsum("k,knp->np", w, mean))[..., 0]
    expected = np.einsum("k,kpnm->pnm", w, covariance)
    expected += np.einsum("k,kn,km->nm", w, deviation, deviation)
    found = integrated.predict_f(X_NEW, full_cov=True)[1]
    assert found.shape == (1, 7, 7)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("flags", "shape"),
    [
        ((False, False), (5, 4, 2)),
        ((True, False), (5, 2, 4, 4)),
        ((False, True), (5, 4, 2, 2)),
        ((True, True), (5, 4, 2, 4, 2)),
    ],
)
def test_moments_in_every_shape(flags: tuple[bool, bool], shape: tuple[int, ...]) -> None:
    """Against the spread of two points, in GPflow's shapes with a leading batch dimension."""
    rng = np.random.default_rng(0)
    means = rng.normal(size=(2, 5, 4, 2))
    zeros = tf.zeros(shape, tf.float64)
    mean, variance = moments(
        np.array([0.25, 0.75]), [(tf.constant(m), zeros) for m in means], *flags
    )
    np.testing.assert_allclose(mean, 0.25 * means[0] + 0.75 * means[1])
    d = means[0] - means[1]
    outer = 0.25 * 0.75 * np.einsum("bnp,bmq->bnpmq", d, d)
    subscripts = {
        (False, False): "bnpnp->bnp",
        (True, False): "bnpmp->bpnm",
        (False, True): "bnpnq->bnpq",
        (True, True): "bnpmq->bnpmq",
    }[flags]
    np.testing.assert_allclose(variance, np.einsum(subscripts, outer), atol=1e-12)


def test_samples(integrated: gh.HyperparameterPosterior) -> None:
    tf.random.set_seed(0)
    assert integrated.predict_f_samples(X_NEW).shape == (7, 1)
    assert integrated.predict_f_samples(np.stack([X_NEW, X_NEW]), 3).shape == (2, 3, 7, 1)
    samples = integrated.predict_f_samples(X_NEW, 4000).numpy()
    assert samples.shape == (4000, 7, 1)
    mean, variance = integrated.predict_f(X_NEW)
    error = np.sqrt(variance / 4000)
    assert np.all(np.abs(samples.mean(0) - mean) < 5.0 * error)
    np.testing.assert_allclose(samples.var(0), variance, rtol=0.25)  # heavy tails
    # Each sample has hyperparameters of its own: neighbours in the row do not share them.
    halves = samples[:2000].mean(0), samples[2000:].mean(0)
    assert np.all(np.abs(halves[0] - halves[1]) < 6.0 * np.sqrt(2.0) * error)


def test_the_posterior_is_cached(integrated: gh.HyperparameterPosterior) -> None:
    posterior = integrated.posterior()
    assert integrated.posterior("tensor") is posterior
    for flag in (False, True):
        expected = integrated.predict_f(X_NEW, full_cov=flag)
        for predict in (posterior.predict_f, posterior.fused_predict_f):
            for one, two in zip(predict(X_NEW, full_cov=flag), expected, strict=True):
                np.testing.assert_allclose(one, two, atol=1e-8)
    with pytest.raises(ValueError, match="precompute_cache must be"):
        integrated.posterior("disk")


def test_what_is_saved_is_loaded(integrated: gh.HyperparameterPosterior, tmp_path: Path) -> None:
    path = tmp_path / "result.npz"
    integrated.save(path)
    model = classifier()
    model.kernel.variance.assign(7.0)
    loaded = gh.HyperparameterPosterior.load(path, model)
    assert str(loaded) == str(integrated)
    np.testing.assert_array_equal(loaded.weights, integrated.weights)
    np.testing.assert_allclose(
        loaded.predict_log_density(NEW), integrated.predict_log_density(NEW), atol=1e-12
    )
    assert model.kernel.variance.numpy() == 7.0
    with pytest.raises(gh.CheckpointError, match="is of a model with other data"):
        gh.HyperparameterPosterior.load(
            path, gh.CVIModel((X_NEW, NEW[1]), model.kernel, model.likelihood)
        )
    dimensions = gpflow.kernels.Matern52(active_dims=[0])
    for parts in ((model.kernel, gpflow.likelihoods.Bernoulli()), (dimensions, model.likelihood)):
        with pytest.raises(gh.CheckpointError, match="is of a model with other data"):
            gh.HyperparameterPosterior.load(path, gh.CVIModel(model.data, *parts))
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(gh.CheckpointError, match="or is damaged"):
        gh.HyperparameterPosterior.load(path, model)
    with pytest.raises(gh.CheckpointError, match="There is no file"):
        gh.HyperparameterPosterior.load(tmp_path / "nothing.npz", model)


def test_a_setting_that_predicts_no_number_is_refused(
    integrated: gh.HyperparameterPosterior,
) -> None:
    broken = pickle.loads(pickle.dumps(integrated.mixture))
    model = next(broken.models())
    bad = broken.values(broken.nodes[-1].x)[".kernel.variance"]
    predict = model.predict_f

    def predict_f(*arguments: Any) -> Any:
        mean, variance = predict(*arguments)
        is_bad = tf.abs(model.kernel.variance - bad) < 1e-9
        return tf.where(is_bad, tf.constant(np.nan, mean.dtype), mean), variance

    model.predict_f = predict_f
    with pytest.raises(gh.NonFiniteError, match="predict_f is not finite at one of the settings"):
        broken.predict_f(X_NEW, False, False)


def test_a_setting_without_a_prediction_has_no_density(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is left out, and the result says so."""
    predict, count = Target._log_predictive, iter(range(1000))

    def sometimes(self: Target) -> Any:
        return np.array([0.0, np.nan]) if next(count) == 3 else predict(self)

    monkeypatch.setattr(Target, "_log_predictive", sometimes)
    found = gh.integrate_hyperparameters(classifier(), tolerance=0.1)
    assert "1 settings have no value and were left out" in found.message
    assert np.isfinite(found.predict_log_density(NEW)).all()


def test_a_result_can_be_pickled(integrated: gh.HyperparameterPosterior) -> None:
    integrated.posterior()
    other = pickle.loads(pickle.dumps(integrated))
    assert str(other) == str(integrated)
    np.testing.assert_allclose(
        other.predict_log_density(NEW), integrated.predict_log_density(NEW), atol=1e-12
    )
    np.testing.assert_allclose(
        other.posterior().predict_f(X_NEW)[0], integrated.predict_f(X_NEW)[0], atol=1e-8
    )


def test_it_prints_and_draws(integrated: gh.HyperparameterPosterior) -> None:
    text = str(integrated)
    for words in (
        "97.5 %",
        "log evidence",
        "prior of kernel.variance",
        "log-normal",
        "(the model's)",
    ):
        assert words in text
    assert "<pre>" in integrated._repr_html_()
    figure = integrated.plot()
    assert sum(axis.has_data() for axis in figure.axes) == 3
    with pytest.raises(KeyError, match="is not a marginal; there are .kernel"):
        integrated["variance"]


def test_bad_labels_are_refused_as_by_the_model(integrated: gh.HyperparameterPosterior) -> None:
    with pytest.raises(gh.InvalidDataError, match="0 or 1"):
        integrated.predict_log_density((X_NEW, NEW[1] + 3.0))
    assert labels()[1].shape == (16, 1)
