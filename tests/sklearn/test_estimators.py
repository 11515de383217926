"""The estimators: they are the package's models, and neighbours of everything in scikit-learn."""

from __future__ import annotations

import io
import pickle
import warnings
from typing import Any

import gpflow
import joblib
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
from scipy import stats
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_iris
from sklearn.exceptions import NotFittedError
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures

import gpflow_hybrid as gh
from gpflow_hybrid import tuning
from gpflow_hybrid.sklearn import HybridGPClassifier, HybridGPRegressor, base, parts, quantiles


def labelled(num: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(num, 2)) * [1.0, 10.0] + [5.0, 0.0]
    return X, np.where(X[:, 0] - 5.0 + 0.3 * rng.normal(size=num) > 0.0, "yes", "no")


def wave(num: int = 50, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = np.sort(rng.uniform(0.0, 10.0, size=(num, 1)), axis=0)
    return X, 100.0 + 20.0 * np.sin(X[:, 0]) + 2.0 * rng.normal(size=num)


def test_two_classes_are_a_probit_model_of_scaled_inputs() -> None:
    X, y = labelled()
    estimator = HybridGPClassifier().fit(X, y)
    scaled = (X - X.mean(0)) / X.std(0)
    Y = (y == "yes").astype(float)[:, None]
    model = gh.CVIModel((scaled, Y), gpflow.kernels.Matern52(), gh.likelihoods.ProbitBernoulli())
    result = gh.fit(model, start="data")
    new = np.random.default_rng(3).normal(size=(7, 2)) * [1.0, 10.0] + [5.0, 0.0]
    expected = model.predict_y((new - X.mean(0)) / X.std(0))[0].numpy()[:, 0]
    # Both end where a derivative is below the tolerance of a fit, 1e-2 nats.
    np.testing.assert_allclose(estimator.predict_proba(new)[:, 1], expected, atol=1e-3)
    np.testing.assert_allclose(estimator.log_marginal_likelihood_value_, -result.loss, atol=1e-3)
    own = estimator.model_.predict_y((new - X.mean(0)) / X.std(0))[0].numpy()[:, 0]
    # By other routines: on arrays, and by TensorFlow.
    np.testing.assert_allclose(estimator.predict_proba(new)[:, 1], own, rtol=1e-8)
    assert isinstance(estimator.model_, gh.CVIModel)
    assert set(estimator.predict(new)) <= {"yes", "no"}
    assert list(estimator.classes_) == ["no", "yes"]
    a = estimator.decision_function(new)
    np.testing.assert_allclose(stats.norm.cdf(a), estimator.predict_proba(new)[:, 1], rtol=1e-12)
    np.testing.assert_array_equal(estimator.predict(new) == "yes", a > 0.0)
    assert estimator.score(X, y) > 0.9


def test_more_classes_are_each_against_the_rest() -> None:
    X, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    estimator = HybridGPClassifier().fit(X, names)
    assert len(estimator.model_) == 3
    p = estimator.predict_proba(X)
    np.testing.assert_allclose(p.sum(1), 1.0, rtol=1e-12)
    columns = [
        HybridGPClassifier().fit(X, names == name).predict_proba(X)[:, 1]
        for name in estimator.classes_
    ]
    expected = np.stack(columns, 1)
    np.testing.assert_allclose(p, expected / expected.sum(1, keepdims=True), rtol=1e-9)
    losses = [result.loss for result in estimator.fit_result_]
    np.testing.assert_allclose(estimator.log_marginal_likelihood_value_, -np.mean(losses))
    far = estimator.predict_proba(np.full((1, 4), 1e9))
    np.testing.assert_allclose(far.sum(), 1.0)


def test_regression_with_gaussian_noise_is_scikit_learns() -> None:
    X, y = wave()
    kernel = ConstantKernel(1.0) * Matern(1.0, nu=2.5) + WhiteKernel(0.1)
    theirs = GaussianProcessRegressor(kernel, normalize_y=True, n_restarts_optimizer=3)
    scaled = (X - X.mean(0)) / X.std(0)
    theirs.set_params(random_state=0).fit(scaled, y)
    ours = HybridGPRegressor().fit(X, y)
    new = np.linspace(0.0, 10.0, 9)[:, None]
    mean, deviation = ours.predict(new, return_std=True)
    expected = theirs.predict((new - X.mean(0)) / X.std(0), return_std=True)
    # Optima agree to the tolerance of a fit: a thousandth of the spread of y.
    np.testing.assert_allclose(mean, expected[0], atol=0.02)
    np.testing.assert_allclose(deviation, expected[1], rtol=1e-2)
    per_datum = theirs.log_marginal_likelihood_value_ - len(y) * np.log(np.std(y))
    np.testing.assert_allclose(ours.log_marginal_likelihood_value_, per_datum, atol=1e-3)
    np.testing.assert_array_equal(ours.predict(new), mean)
    levels = (0.1, 0.5, 0.8)
    np.testing.assert_allclose(
        ours.predict_quantiles(new, levels),
        stats.norm.ppf(levels, mean[:, None], deviation[:, None]),
        rtol=1e-10,
    )
    assert ours.score(X, y) > 0.9


def counts(num: int = 60) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)
    X = np.sort(rng.uniform(0.0, 6.0, size=(num, 1)), axis=0)
    return X, rng.poisson(30.0 * np.exp(np.sin(X[:, 0]))).astype(float)


def test_counts_have_a_mean_of_their_own() -> None:
    X, y = counts()
    estimator = HybridGPRegressor(likelihood="poisson").fit(X, y)
    assert estimator.fit_result_.converged
    truth = 30.0 * np.exp(np.sin(X[:, 0]))
    assert np.mean(np.abs(estimator.predict(X) / truth - 1.0)) < 0.1
    low, middle, high = estimator.predict_quantiles(X).T
    assert (low == np.round(low)).all()
    assert 0.8 < np.mean((low <= y) & (y <= high)) <= 1.0
    assert np.mean(np.abs(middle - estimator.predict(X))) < 1.5
    mean_function = estimator.model_.mean_function.c.numpy()
    assert abs(mean_function[0] - np.log(30.0)) < 1.5


@pytest.mark.parametrize("likelihood", ["student_t", "gamma", "heteroskedastic"])
def test_likelihoods_by_name(likelihood: str) -> None:
    X, y = wave(60)
    y = np.exp((y - 100.0) / 20.0) if likelihood == "gamma" else y
    if likelihood == "student_t":
        y = y + np.where(np.arange(60) % 15 == 10, 80.0, 0.0)  # outliers
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gh.ConvergenceWarning)  # a noise that hardly varies
        estimator = HybridGPRegressor(likelihood=likelihood).fit(X, y)
    mean, deviation = estimator.predict(X, return_std=True)
    low, middle, high = estimator.predict_quantiles(X, (0.05, 0.5, 0.95)).T
    assert (low < middle).all()
    assert (middle < high).all()
    assert (deviation > 0.0).all()
    assert 0.8 < np.mean((low < y) & (y < high)) <= 1.0
    clean = 100.0 + 20.0 * np.sin(X[:, 0])
    if likelihood != "gamma":
        assert np.sqrt(np.mean((mean - clean) ** 2)) < 3.0


@pytest.mark.parametrize("likelihood", ["student_t", "poisson", "gamma", "heteroskedastic"])
def test_quantiles_are_those_of_samples(likelihood: str) -> None:
    """Against draws of f and of y given f."""
    rng = np.random.default_rng(0)
    num = 400_000
    two = likelihood == "heteroskedastic"
    mean, variance = np.array([[0.7, -0.3]]), np.array([[0.2, 0.1]])
    shape = (1, 2 if two else 1)

    class Model:
        def __init__(self) -> None:
            self.likelihood = parts.make_likelihood(likelihood)

        def predict_f(self, X: Any) -> Any:
            return mean[:, : shape[1]], variance[:, : shape[1]]

    f = mean[0] + np.sqrt(variance[0]) * rng.normal(size=(num, 2))
    draws = {
        "student_t": lambda: f[:, 0] + rng.standard_t(4.0, size=num),
        "poisson": lambda: rng.poisson(np.exp(f[:, 0])),
        "gamma": lambda: rng.gamma(1.0, np.exp(f[:, 0])),
        "heteroskedastic": lambda: f[:, 0] + np.exp(f[:, 1]) * rng.normal(size=num),
    }[likelihood]()
    levels = (0.1, 0.5, 0.9)
    found = quantiles.predictive_quantiles(Model(), np.zeros((1, 1)), levels)[0]
    # Probabilities of samples are within four standard errors of their levels.
    error = 4.0 * np.sqrt(0.25 / num)
    for level, quantile in zip(levels, found, strict=True):
        assert np.mean(draws <= quantile) >= level - error
        assert np.mean(draws < quantile) <= level + error


def test_quantiles_of_some_rows_at_a_time_are_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    mean, variance = rng.normal(size=(7, 1)), rng.uniform(0.1, 1.0, size=(7, 1))

    class Model:
        likelihood = parts.make_likelihood("student_t")

        def predict_f(self, X: Any) -> Any:
            return mean, variance

    expected = quantiles.predictive_quantiles(Model(), mean, (0.2, 0.9))
    monkeypatch.setattr(tuning, "PREDICTED_ELEMENTS", 3 * 2 * quantiles.NUM_NODES)
    found = quantiles.predictive_quantiles(Model(), mean, (0.2, 0.9))
    np.testing.assert_array_equal(found, expected)
    assert found.shape == (7, 2)


def test_a_gpflow_kernel_and_likelihood_are_where_training_starts() -> None:
    X, y = wave()
    kernel = gpflow.kernels.SquaredExponential(lengthscales=0.5)
    gpflow.set_trainable(kernel.lengthscales, False)
    likelihood = gpflow.likelihoods.Gaussian(0.05)
    estimator = HybridGPRegressor(kernel, likelihood=likelihood).fit(X, y)
    assert estimator.model_.kernel is not kernel
    np.testing.assert_allclose(estimator.model_.kernel.lengthscales, 0.5)
    np.testing.assert_allclose(kernel.variance, 1.0)  # the user's own stays as it was
    np.testing.assert_allclose(likelihood.variance, 0.05)
    ard = HybridGPClassifier("rbf_ard").fit(*labelled())
    assert ard.model_.kernel.lengthscales.shape == (2,)


def test_inducing_points_are_chosen_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = labelled(120)
    monkeypatch.setattr(base, "DENSE_ROWS", 100)
    monkeypatch.setattr(base, "AUTOMATIC_POINTS", 15)
    with pytest.warns(gh.LargeModelWarning, match="120 rows, more than 100: the model is sparse"):
        automatic = HybridGPClassifier(random_state=0).fit(X, y)
    assert automatic.approximation_ == "sparse, 15 inducing points"
    assert automatic.inducing_points_.shape == (15, 2)
    assert isinstance(automatic.model_, gh.SparseCVIModel)
    dense = HybridGPClassifier(inducing_points=None).fit(X, y)
    assert dense.approximation_ == "dense"
    assert dense.inducing_points_ is None
    fixed = HybridGPClassifier(inducing_points=15, random_state=0).fit(X, y)
    np.testing.assert_array_equal(fixed.inducing_points_, automatic.inducing_points_)
    new = labelled(50, seed=9)[0]
    np.testing.assert_allclose(fixed.predict_proba(new), dense.predict_proba(new), atol=0.05)


def test_restarts_find_what_one_start_does_not() -> None:
    X, y = wave(30)
    start = gpflow.kernels.SquaredExponential(lengthscales=8.0)
    with pytest.warns(gh.ConvergenceWarning, match="no better than a constant"):
        one = HybridGPRegressor(start).fit(X, y)
    many = HybridGPRegressor(start, n_restarts_optimizer=9, random_state=0).fit(X, y)
    assert len(many.fit_result_.losses) == 10
    assert many.log_marginal_likelihood_value_ > one.log_marginal_likelihood_value_ + 5.0
    again = HybridGPRegressor(start, n_restarts_optimizer=9, random_state=0).fit(X, y)
    assert again.log_marginal_likelihood_value_ == many.log_marginal_likelihood_value_


def test_hyperparameters_are_integrated_out_on_demand() -> None:
    X, y = labelled(40)
    estimator = make_pipeline(HybridGPClassifier(integrate_hyperparameters=True)).fit(X, y)
    scaled = (X - X.mean(0)) / X.std(0)
    Y = (y == "yes").astype(float)[:, None]
    model = gh.CVIModel((scaled, Y), gpflow.kernels.Matern52(), gh.likelihoods.ProbitBernoulli())
    expected = gh.integrate_hyperparameters(model, progress=False)
    p = estimator.predict_proba(X)
    # Both are within the tolerance of an integration, 2e-3, from other starts.
    np.testing.assert_allclose(p[:, 1], np.squeeze(expected.predict_y(scaled)[0]), atol=4e-3)
    np.testing.assert_allclose(p.sum(1), 1.0)
    assert (estimator.predict(X) == np.where(p[:, 1] > 0.5, "yes", "no")).all()
    inner = estimator[-1]
    assert isinstance(inner.model_, gh.HyperparameterPosterior)
    np.testing.assert_allclose(
        inner.log_marginal_likelihood_value_, expected.log_evidence, atol=1e-2
    )
    assert clone(inner).integrate_hyperparameters
    other = pickle.loads(pickle.dumps(estimator))
    np.testing.assert_allclose(other.predict_proba(X), p, atol=1e-10)
    # Far from all data, where a probability has run out of digits, the sign stays.
    assert np.isfinite(inner.decision_function(X + np.array([1e3, 0.0]))).all()


def test_more_classes_and_inducing_points_with_integrated_hyperparameters() -> None:
    X, y = load_iris(return_X_y=True)
    estimator = HybridGPClassifier(
        inducing_points=8, integrate_hyperparameters=True, random_state=0
    )
    estimator.fit(X[::3], y[::3])
    assert [type(m) for m in estimator.model_] == [gh.HyperparameterPosterior] * 3
    p = estimator.predict_proba(X)
    each = [
        np.squeeze(m.predict_y((X - X[::3].mean(0)) / X[::3].std(0))[0]) for m in estimator.model_
    ]
    np.testing.assert_allclose(p, np.stack(each, 1) / np.sum(each, 0)[:, None], atol=1e-6)
    evidence = np.mean([m.log_evidence for m in estimator.model_])
    np.testing.assert_allclose(estimator.log_marginal_likelihood_value_, evidence)


def test_a_regressor_with_integrated_hyperparameters() -> None:
    X, y = wave(20)
    estimator = HybridGPRegressor(integrate_hyperparameters=True).fit(X, y)
    new = np.linspace(0.0, 12.0, 5)[:, None]
    mean, deviation = estimator.predict(new, return_std=True)
    found = estimator.model_
    scaled = (new - X.mean(0)) / X.std(0)
    expected, variance = (np.squeeze(v) for v in found.predict_y(scaled))
    np.testing.assert_allclose(mean, y.mean() + y.std() * expected)
    np.testing.assert_allclose(deviation, y.std() * np.sqrt(variance))
    np.testing.assert_allclose(
        estimator.log_marginal_likelihood_value_, found.log_evidence - 20 * np.log(y.std())
    )
    # Quantiles: where the mixture of normal distributions passes them.
    q = np.array([0.1, 0.5, 0.9])
    t = (estimator.predict_quantiles(new, q) - y.mean()) / y.std()
    passed = 0.0
    for weight, model in zip(found.weights, found.mixture.models(), strict=True):
        m, v = (np.asarray(x) for x in model.predict_y(scaled))
        passed = passed + weight * stats.norm.cdf(t, m, np.sqrt(v))
    np.testing.assert_allclose(passed, np.broadcast_to(q, t.shape), atol=1e-9)


def test_without_standardisation_the_model_has_the_inputs_as_they_are() -> None:
    X, y = labelled()
    estimator = HybridGPClassifier(standardise=False).fit(X, y)
    np.testing.assert_array_equal(estimator.model_.data[0], X)
    constant = np.hstack([X, np.full((len(X), 1), 0.1)])
    assert np.isfinite(HybridGPClassifier().fit(constant, y).predict_proba(constant)).all()


def test_data_frames_keep_their_names() -> None:
    X, y = labelled()
    frame = pd.DataFrame(X, columns=["width", "height"])
    estimator = HybridGPClassifier().fit(frame, pd.Series(y))
    assert list(estimator.feature_names_in_) == ["width", "height"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = estimator.predict_proba(frame)
    np.testing.assert_array_equal(found, HybridGPClassifier().fit(X, y).predict_proba(X))
    with pytest.raises(ValueError, match="feature names should match"):
        estimator.predict(frame[["height", "width"]])
    with pytest.raises(ValueError, match="NaN"):
        HybridGPClassifier().fit(frame.replace(frame.iloc[0, 0], np.nan), y)


def test_in_a_pipeline_a_search_and_a_calibration() -> None:
    X, y = labelled(80)
    search = GridSearchCV(
        make_pipeline(PolynomialFeatures(2), HybridGPClassifier()),
        {"hybridgpclassifier__kernel": ["rbf", gpflow.kernels.Matern12()]},
        cv=2,
        scoring="neg_log_loss",
    ).fit(X, y)
    assert search.best_score_ > -0.5
    scores = cross_val_score(HybridGPClassifier(objective="elbo"), X, y, cv=3)
    assert scores.mean() > 0.85
    calibrated = CalibratedClassifierCV(HybridGPClassifier(), cv=2).fit(X, y)
    assert log_loss(y, calibrated.predict_proba(X)) < 0.4


def _fit_and_predict(estimator: Any, X: np.ndarray, y: np.ndarray) -> np.ndarray:
    return estimator.fit(X, y).predict_proba(X)


def test_copies_by_clone_pickle_and_joblib() -> None:
    X, y = labelled()
    estimator = HybridGPClassifier(gpflow.kernels.Matern32(), random_state=3).fit(X, y)
    expected = estimator.predict_proba(X)
    copy = clone(estimator)
    with pytest.raises(NotFittedError):
        copy.predict(X)
    assert copy.get_params()["random_state"] == 3
    assert copy.set_params(objective="elbo").objective == "elbo"
    np.testing.assert_allclose(clone(estimator).fit(X, y).predict_proba(X), expected)
    np.testing.assert_allclose(
        pickle.loads(pickle.dumps(estimator)).predict_proba(X), expected, rtol=1e-12
    )
    stored = io.BytesIO()
    joblib.dump(estimator, stored)
    stored.seek(0)
    np.testing.assert_allclose(joblib.load(stored).predict_proba(X), expected, rtol=1e-12)
    threads = joblib.Parallel(n_jobs=2, backend="threading")(
        joblib.delayed(_fit_and_predict)(clone(estimator), X, y) for _ in range(2)
    )
    for found in threads:
        np.testing.assert_allclose(found, expected, rtol=1e-8)


@pytest.mark.slow
def test_other_processes_fit_the_same() -> None:
    X, y = labelled()
    arguments = {"cv": 2, "scoring": "neg_log_loss"}
    alone = cross_val_score(HybridGPClassifier(), X, y, **arguments)
    apart = cross_val_score(HybridGPClassifier(), X, y, n_jobs=2, **arguments)
    np.testing.assert_allclose(apart, alone, rtol=1e-8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kernel": "matern"}, "kernel must be a GPflow kernel or one of"),
        ({"inducing_points": 0}, 'inducing_points must be "auto", a positive integer or None'),
        ({"inducing_points": "many"}, "inducing_points must be"),
        ({"n_restarts_optimizer": -1}, "n_restarts_optimizer must be a non-negative integer"),
        ({"objective": "laplace"}, "objective must be"),
    ],
)
def test_parameters_are_refused_in_words(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(gh.InvalidDataError, match=message):
        HybridGPClassifier(**arguments).fit(*labelled())


def test_what_is_not_known_is_refused_in_words() -> None:
    X, y = wave()
    with pytest.raises(gh.InvalidDataError, match="likelihood must be a GPflow likelihood or one"):
        HybridGPRegressor(likelihood="cauchy").fit(X, y)
    with pytest.raises(gh.InvalidDataError, match="at least two classes; found one class"):
        HybridGPClassifier().fit(X, np.zeros(len(X)))
    fitted = HybridGPRegressor().fit(X, y)
    with pytest.raises(gh.InvalidDataError, match="quantiles must be numbers between 0 and 1"):
        fitted.predict_quantiles(X, [0.5, 1.0])
    with pytest.raises(TypeError, match="sample_weight"):
        fitted.fit(X, y, sample_weight=np.ones(len(y)))
    beta = HybridGPRegressor(likelihood=gpflow.likelihoods.Beta())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gh.ConvergenceWarning)
        beta.fit(X, 1.0 / (1.0 + np.exp(-(y - 100.0) / 20.0)))
    with pytest.raises(gh.InvalidDataError, match="for predict_quantiles; found Beta"):
        beta.predict_quantiles(X)


def test_a_fit_that_is_none_is_warned_of() -> None:
    X, _ = labelled()
    y = np.random.default_rng(5).integers(0, 2, size=60)
    with pytest.warns(gh.ConvergenceWarning, match="n_restarts_optimizer"):
        estimator = HybridGPClassifier().fit(X, y)
    assert not estimator.fit_result_.converged


def test_fits_of_one_shape_trace_nothing() -> None:
    """Fits and predictions with kernels and likelihoods known on arrays need no graph."""
    X, y = labelled()
    HybridGPClassifier().fit(X, y).predict_proba(X)
    traced: list[str] = []
    original = tf.function

    def counting(*args: Any, **kwargs: Any) -> Any:
        traced.append("one")
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf, "function", counting)
        for seed in range(3):
            HybridGPClassifier().fit(*labelled(seed=seed))
    assert traced == []
