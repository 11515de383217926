"""Predictions take what constructors take, refuse what these refuse, and are the same every time."""

from __future__ import annotations

import tracemalloc
from typing import Any

import gpflow
import numpy as np
import pandas
import pytest
import tensorflow as tf

import gpflow_hybrid as gh
from gpflow_hybrid import memory, tuning

PROBIT = gh.likelihoods.ProbitBernoulli()
RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 2)).round(1)
Y = (X[:, :1] > 0.0).astype(float)
XNEW = np.arange(10).reshape(5, 2)


class Table:
    """What pandas makes of columns: ``to_numpy`` has objects where a type knows missing values."""

    def __init__(self, values: Any, nullable: bool = False) -> None:
        self.values = np.asarray(values, dtype=object if nullable else None)

    def to_numpy(self, dtype: Any = None, na_value: Any = None) -> np.ndarray:
        if dtype is None:
            return self.values
        filled = [[na_value if x is None else x for x in row] for row in self.values]
        return np.asarray(filled, dtype=dtype)


class Column(Table):
    """As a table, with a type that TensorFlow does not know."""

    dtype = object()


def dense(likelihood: Any = PROBIT, data: Any = (X, Y)) -> Any:
    model = gh.CVIModel(data, gpflow.kernels.Matern52(), likelihood)
    model.infer()
    return model


def sparse() -> Any:
    model = gh.SparseCVIModel(gpflow.kernels.Matern52(), PROBIT, X[:6].copy() + 0.01)
    model.infer((X, Y))
    return model


both = pytest.mark.parametrize("make", [dense, sparse])
FORMS = {
    "integers": lambda a: np.asarray(a).astype(int),
    "list": lambda a: np.asarray(a).tolist(),
    "table": Table,
    "nullable table": lambda a: Table(a, nullable=True),
    "nullable column": lambda a: Column(a, nullable=True),
    "tensor": tf.constant,
    "variable": lambda a: tf.Variable(np.asarray(a, float)),
    "masked": lambda a: np.ma.masked_array(a, mask=False),
}


@both
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_of_new_inputs(make: Any, form: Any) -> None:
    model = make()
    labels = np.array([[0], [1], [1], [0], [1]])
    given, expected = form(XNEW), XNEW.astype(float)
    for method in ("predict_f", "predict_y"):
        np.testing.assert_array_equal(
            getattr(model, method)(given), getattr(model, method)(expected)
        )
    np.testing.assert_array_equal(
        model.predict_log_density((given, form(labels))),
        model.predict_log_density((expected, labels.astype(float))),
    )
    assert model.predict_f_samples(given, 3).shape == (3, 5, 1)
    for cache in ("tensor", None):
        posterior = model.posterior(cache)
        for name in ("predict_f", "fused_predict_f")[cache is None :]:
            predict = getattr(posterior, name)
            np.testing.assert_array_equal(predict(given), predict(expected))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_of_training_data(form: Any) -> None:
    data = (np.arange(8).reshape(4, 2), np.array([[0], [1], [1], [0]]))
    found = dense(data=tuple(form(d) for d in data))
    expected = dense(data=tuple(d.astype(float) for d in data))
    np.testing.assert_allclose(found.elbo(), expected.elbo(), rtol=1e-12)


def test_missing_values_of_tables_and_masked_arrays_are_refused() -> None:
    missing = Table([[1, None]], nullable=True)
    with pytest.raises(gh.InvalidDataError, match="X must be finite; found nan at row 0, column 1"):
        dense(data=(missing, np.ones((1, 1))))
    masked = np.ma.masked_array([[1.0], [0.0]], mask=[[False], [True]])
    with pytest.raises(gh.InvalidDataError, match="Y must be finite; found nan at row 1"):
        dense(data=(np.ones((2, 1)), masked))


@both
def test_tables_of_pandas(make: Any) -> None:
    table = pandas.DataFrame({"a": pandas.array([1, 2, 3], "Int64"), "b": [2.0, 3.0, 4.0]})
    model = make()
    expected = model.predict_f(table.to_numpy(float))
    np.testing.assert_array_equal(model.predict_f(table), expected)
    np.testing.assert_array_equal(model.posterior().fused_predict_f(table), expected)
    scores = model.predict_log_density((table.to_numpy(float), [[0.0], [1.0], [1.0]]))
    for kind in ("Int64", "Float64", "boolean", "int8"):
        labels = pandas.DataFrame({"y": pandas.array([0, 1, 1], kind)})
        np.testing.assert_array_equal(model.predict_log_density((table, labels)), scores)
    with pytest.raises(gh.InvalidDataError, match=r"Y\.reshape.*, \[\['name'\]\] of a table"):
        model.predict_log_density((table, labels["y"]))
    table.loc[1, "a"] = pandas.NA
    with pytest.raises(gh.InvalidDataError, match="finite; found nan at row 1, column 0"):
        model.predict_f(table)


@both
def test_times_are_not_taken_for_numbers(make: Any) -> None:
    """Beside a column of numbers they would be nanoseconds since 1970."""
    table = pandas.DataFrame({"a": [1, 2], "on": pandas.to_datetime(["2020", "2021"])})
    with pytest.raises(gh.InvalidDataError, match="Xnew must be numeric; found times.*'on'"):
        make().predict_f(table)
    table["on"] -= table["on"][0]
    with pytest.raises(gh.InvalidDataError, match="X must be numeric; found times.*'on'"):
        dense(data=(table, Y[:2]))


def test_text_is_refused_with_a_remedy() -> None:
    labels = np.array([["cat"], ["dog"]])
    for given in (labels, labels.tolist(), Table(labels, nullable=True)):
        with pytest.raises(
            gh.InvalidDataError, match="Y must be numeric.* Number the classes: np.unique"
        ):
            dense(data=(X[:2], given))


@both
def test_scores_with_wrong_labels_are_refused(make: Any) -> None:
    model = make()
    with pytest.raises(
        gh.InvalidDataError, match=r"Y must be 0 or 1.*found -1.*Pass \(Y \+ 1\) / 2"
    ):
        model.predict_log_density((X, 2.0 * Y - 1.0))
    with pytest.raises(gh.InvalidDataError, match="Y must be finite"):
        model.predict_log_density((X[:1], [[np.nan]]))
    with pytest.raises(gh.InvalidDataError, match="data must be a pair"):
        model.predict_log_density(X)
    batch = tf.constant(np.stack([2.0 * Y - 1.0, Y]))
    with pytest.raises(gh.InvalidDataError, match="Y must be 0 or 1"):
        model.predict_log_density((tf.constant(np.stack([X, X])), batch))


@both
def test_a_compiled_score_refuses_them_too(make: Any) -> None:
    model = make()
    score = tf.function(lambda X, Y: model.predict_log_density((X, Y)), autograph=False)
    expected = model.predict_log_density((X, Y))
    np.testing.assert_allclose(score(tf.constant(X), tf.constant(Y)), expected, rtol=1e-12)
    with pytest.raises(tf.errors.InvalidArgumentError, match="has no density for"):
        score(tf.constant(X), tf.constant(2.0 * Y - 1.0))


def test_labels_of_a_switched_likelihood_are_checked_in_graphs_and_out() -> None:
    parts = [gpflow.likelihoods.Poisson(), gpflow.likelihoods.Gaussian()]
    likelihood = gpflow.likelihoods.SwitchedLikelihood(parts)
    good = np.array([[2.0, 0.0], [0.5, 1.0]])
    assert np.all(gh.labels.has_density(good, likelihood))
    for bad in ([[0.5, 0.0]], [[0.5, 2.0]], [[0.5, 0.5]]):
        for kind in (np.asarray, tf.constant):
            assert not np.any(gh.labels.has_density(kind(bad), likelihood))


@both
def test_inputs_of_another_shape_are_refused_in_words(make: Any) -> None:
    model = make()
    for method in ("predict_f", "predict_y", "predict_f_samples"):
        with pytest.raises(gh.InvalidDataError, match=r"Xnew must have the shape \[N, D\]"):
            getattr(model, method)(np.ones(3))
        with pytest.raises(gh.InvalidDataError, match="Xnew must have the 2 column.*found 3"):
            getattr(model, method)(np.ones((1, 3)))
    with pytest.raises(
        gh.InvalidDataError, match="Xnew is float32, but GPflow computes in float64"
    ):
        model.predict_f(np.ones((1, 2), np.float32))
    with pytest.raises(gh.InvalidDataError, match="Y must have two dimensions"):
        model.predict_log_density((X, Y[:, 0]))


@both
def test_what_would_be_broadcast_into_other_scores_is_refused(make: Any) -> None:
    """A label for all inputs, an input for all labels, and the sum of two columns of labels."""
    model = make()
    for data in ((X, Y[:1]), (X[:1], Y), (X, Y[:-1]), (tf.Variable(X), tf.Variable(Y[:1]))):
        with pytest.raises(gh.InvalidDataError, match="X and Y must have the same number of rows"):
            model.predict_log_density(data)
    with pytest.raises(gh.InvalidDataError, match=r"Y must have 1 column\(s\).*found 2"):
        model.predict_log_density((X, np.hstack([Y, Y])))


@both
def test_new_inputs_that_are_not_finite_are_refused_by_name(make: Any) -> None:
    model = make()
    for value in (np.nan, np.inf):
        new = np.stack([X, X])
        new[1, 3, 1] = value
        predictions = [model.predict_f, model.predict_y, model.predict_f_samples]
        for predict in (*predictions, model.posterior().predict_f):
            with pytest.raises(gh.InvalidDataError, match="Xnew must be finite.* row 3, column 1"):
                predict(new[1])
        with pytest.raises(gh.InvalidDataError, match="X must be finite.* row 3, column 1"):
            model.predict_log_density((new[1], Y))
        with pytest.raises(gh.InvalidDataError, match="Xnew must be finite.* row 3, column 1"):
            model.predict_f(new)


# Softmax


def softmax(labels: Any) -> Any:
    return dense(gpflow.likelihoods.Softmax(3), (X, labels))


def test_softmax_predicts_the_same_every_time_and_takes_float_labels() -> None:
    labels = np.digitize(X[:, :1], [-0.5, 0.5])
    model, other = softmax(labels), softmax(labels.astype(float))
    mean, variance = model.predict_y(XNEW)
    for again in (model, other):
        np.testing.assert_array_equal(again.predict_y(XNEW), [mean, variance])
    np.testing.assert_allclose(tf.reduce_sum(mean, -1), 1.0, rtol=1e-12)
    np.testing.assert_allclose(variance, mean * (1.0 - mean), rtol=1e-10)
    density = model.predict_log_density((X, labels))
    np.testing.assert_array_equal(model.predict_log_density((X, labels.astype(float))), density)
    by_class = [model.predict_log_density((XNEW, np.full((5, 1), c))) for c in range(3)]
    np.testing.assert_allclose(np.exp(by_class).T, mean, rtol=1e-10)
    with pytest.raises(gh.InvalidDataError, match="Y must be a class number from 0 to 2"):
        model.predict_log_density((X, labels + 0.5))
    in_batch = model.predict_y(tf.constant(np.stack([XNEW, XNEW]).astype(float)))
    np.testing.assert_allclose(in_batch[0][1], mean, rtol=1e-12)


def test_softmax_predictions_agree_with_many_samples() -> None:
    labels = np.digitize(X[:, :1], [-0.5, 0.5])
    model = softmax(labels)
    f = model.predict_f_samples(X[:4], 200_000, full_cov=False).numpy()
    p = np.exp(f) / np.exp(f).sum(-1, keepdims=True)
    # Three standard errors of the samples, whose deviations are below a half.
    np.testing.assert_allclose(
        model.predict_y(X[:4])[0], p.mean(0), atol=3 * 0.5 / np.sqrt(200_000)
    )


def test_a_scalar_monte_carlo_likelihood_has_its_closed_form() -> None:
    targets = RNG.normal(size=X.shape)[:, :1]
    random = dense(gpflow.likelihoods.GaussianMC(0.3), (X, targets))
    exact = dense(gpflow.likelihoods.Gaussian(0.3), (X, targets))
    np.testing.assert_allclose(random.predict_y(XNEW), exact.predict_y(XNEW), rtol=1e-6)
    data = (X, targets)
    np.testing.assert_allclose(
        random.predict_log_density(data), exact.predict_log_density(data), rtol=1e-6
    )


# Size


@both
def test_predictions_in_batches_are_those_at_once(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, many = make(), RNG.normal(size=(101, 2))
    labels = (many[:, :1] > 0.0).astype(float)
    whole = [
        *model.predict_f(many),
        *model.predict_y(many),
        model.predict_log_density((many, labels)),
    ]
    monkeypatch.setattr(tuning, "PREDICTED_ELEMENTS", 500)
    parts = [
        *model.predict_f(many),
        *model.predict_y(many),
        model.predict_log_density((many, labels)),
    ]
    for found, expected in zip(parts, whole, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    cached = model.posterior().predict_f(many)
    np.testing.assert_allclose(cached, whole[:2], rtol=1e-8)


def test_many_predictions_take_little_memory() -> None:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(300, 2))
    model = gh.CVIModel(
        (inputs, (inputs[:, :1] > 0).astype(float)), gpflow.kernels.Matern52(), PROBIT
    )
    largest = [0]
    covariance = gh.posteriors.covariance

    def counted(kernel: Any, X: Any, Xnew: Any = None) -> Any:
        found = covariance(kernel, X, Xnew)
        largest[0] = max(largest[0], int(np.prod(found.shape)))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gh.posteriors, "covariance", counted)
        model.predict_f(rng.normal(size=(100_000, 2)))
    assert largest[0] <= tuning.PREDICTED_ELEMENTS  # 34 MB; all at once 240 MB, several times


def test_a_dense_model_that_cannot_fit_is_refused_before_anything_is_computed() -> None:
    num = int(np.sqrt(memory.machine_memory() / 8)) + 1  # one matrix alone is too large
    tracemalloc.start()
    rows, labels = np.zeros((num, 1)), np.zeros((num, 1))
    with pytest.raises(gh.InvalidDataError, match=r"too many rows for a dense.*SparseCVIModel"):
        gh.CVIModel((rows, labels), gpflow.kernels.Matern52(), PROBIT)
    assert tracemalloc.get_traced_memory()[1] < 100 * num
    tracemalloc.stop()


def test_more_inducing_points_than_the_machine_can_hold_are_refused() -> None:
    num = int(np.sqrt(memory.machine_memory() / 8)) + 1
    Z = np.arange(float(num)).reshape(-1, 1)
    with pytest.raises(gh.InvalidDataError, match=rf"too many points: {num:,} need more than"):
        gh.SparseCVIModel(gpflow.kernels.Matern52(), PROBIT, Z)


def test_a_dense_model_that_fills_the_machine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "machine_memory", lambda: 30_000)
    with pytest.warns(
        gh.LargeModelWarning, match=r"24 rows takes about .* 5 matrices of 24² numbers"
    ):
        dense()
    monkeypatch.setattr(memory, "machine_memory", lambda: 20_000)
    with pytest.raises(gh.InvalidDataError, match="too many rows"):
        dense()
    variables = tf.Variable(X[:4], shape=[None, 2]), tf.Variable(Y[:4], shape=[None, 1])
    model = dense(data=variables)
    with pytest.raises(gh.InvalidDataError, match="too many rows"):
        model.update_data((X, Y))
    with pytest.raises(gh.InvalidDataError, match="full_cov=True for 1,000 points takes about"):
        model.predict_f(np.ones((1000, 2)), full_cov=True)


# Parts


@pytest.mark.parametrize("cls", [gh.CVIModel, gh.EPModel, gh.LaplaceModel])
def test_classes_in_the_place_of_objects_are_refused(cls: Any) -> None:
    kernel = gpflow.kernels.Matern52
    with pytest.raises(gh.InvalidDataError, match=r"kernel must be an object.*Matern52\(\)"):
        cls((X, Y), kernel, PROBIT)
    with pytest.raises(gh.InvalidDataError, match=r"likelihood must be an object.*ProbitBernoulli"):
        cls((X, Y), kernel(), gh.likelihoods.ProbitBernoulli)
    with pytest.raises(gh.InvalidDataError, match="mean_function must be an object"):
        cls((X, Y), kernel(), PROBIT, gpflow.mean_functions.Zero)
    with pytest.raises(gh.InvalidDataError, match="kernel must be one of GPflow's"):
        cls((X, Y), "rbf", PROBIT)


def test_a_sparse_model_refuses_them_too() -> None:
    with pytest.raises(gh.InvalidDataError, match="kernel must be an object"):
        gh.SparseCVIModel(gpflow.kernels.Matern52, PROBIT, X[:3].copy())
