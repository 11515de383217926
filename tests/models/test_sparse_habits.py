"""SparseCVIModel does what users of GPflow's SVGP expect of a model."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpflow
import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
import tf_keras
from gpflow.utilities import (
    multiple_assign,
    parameter_dict,
    print_summary,
    read_values,
    set_trainable,
)

import gpflow_hybrid as gh
from gpflow_hybrid import InvalidDataError, InvalidPosteriorError
from gpflow_hybrid.inference import inducing
from gpflow_hybrid.inference.options import INDUCING
from gpflow_hybrid.inference.row_sums import RowSums
from tests.sparse_cases import sparse_problem

PROBLEM = sparse_problem("probit_bernoulli")
DATA = PROBLEM.data
XNEW = np.random.default_rng(3).normal(size=(5, 2))


def inferred(**more: Any) -> gh.SparseCVIModel:
    model = PROBLEM.model(**more)
    model.infer(DATA, tolerance=1e-9)
    return model


def prediction(model: Any) -> np.ndarray:
    return np.stack([x.numpy() for x in model.predict_f(XNEW)])


def refreshed(model: gh.SparseCVIModel) -> np.ndarray:
    """Predictions of a new model with q(u) inferred at the same hyperparameters."""
    other = PROBLEM.model(model.objective)
    values = read_values(model)
    multiple_assign(other, {k: v for k, v in values.items() if not k.startswith(".sites")})
    other.infer(DATA, tolerance=1e-9)
    return prediction(other)


def dataset(num_rows: int = 40) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(tuple(x[:num_rows] for x in DATA))


# Predictions


@pytest.mark.parametrize("name", ["probit_bernoulli", "heteroskedastic"])
def test_predictions_are_those_of_svgp_with_the_same_q(name: str) -> None:
    problem = sparse_problem(name)
    model = problem.model()
    model.infer(problem.data)
    arguments = problem.arguments() | {"likelihood": model.likelihood}
    q = {"q_mu": model.q_mu.numpy(), "q_sqrt": model.q_sqrt.numpy()}
    svgp = gpflow.models.SVGP(**arguments, **q)
    batch = np.stack([problem.X[:5], problem.X[5:10]])
    calls: list[Callable[[Any], Any]] = [
        lambda m: m.predict_f(XNEW),
        lambda m: m.predict_f(XNEW, full_cov=True),
        lambda m: m.predict_f(batch),
        lambda m: m.predict_f(batch, full_cov=True),
        lambda m: m.predict_y(XNEW),
        lambda m: m.predict_log_density((problem.X[:5], problem.Y[:5])),
        lambda m: (m.q_mu, m.q_sqrt, m.prior_kl()),
    ]
    for call in calls:
        for x, y in zip(tf.nest.flatten(call(model)), tf.nest.flatten(call(svgp)), strict=True):
            assert x.shape == y.shape
            np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)
    for full_cov in (True, False):
        drawn = []
        for m in (model, svgp):
            tf.random.set_seed(4)
            drawn.append(m.predict_f_samples(XNEW, 3, full_cov=full_cov).numpy())
        np.testing.assert_allclose(*drawn, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("cache", ["tensor", "variable", "nocache", None])
def test_a_posterior_follows_q_when_its_cache_is_updated(cache: Any) -> None:
    model = inferred()
    posterior = model.posterior(cache)
    if cache in ("nocache", None):
        with pytest.raises(ValueError, match="Cache has not been precomputed"):
            posterior.predict_f(XNEW)
        posterior.update_cache("tensor")
    np.testing.assert_allclose(posterior.predict_f(XNEW), model.predict_f(XNEW), rtol=1e-9)
    for change in (
        lambda: model.natgrad_step(tuple(x[:20] for x in DATA), 0.5),
        lambda: model.infer(DATA),
        lambda: model.kernel.lengthscales.assign(1.9),  # q(u) is inferred again
    ):
        before = np.stack(posterior.predict_f(XNEW))
        change()
        assert np.abs(prediction(model) - before).max() > 1e-3
        assert np.abs(prediction(model) - posterior.predict_f(XNEW)).max() > 1e-3
        np.testing.assert_allclose(posterior.fused_predict_f(XNEW), prediction(model), rtol=1e-9)
        np.testing.assert_array_equal(posterior.q_mu, model.q_mu)
        np.testing.assert_array_equal(posterior.q_sqrt, model.q_sqrt)
        posterior.update_cache()
        np.testing.assert_allclose(posterior.predict_f(XNEW), prediction(model), rtol=1e-9)


def test_a_compiled_function_sees_an_updated_variable_cache() -> None:
    model = inferred()
    posterior = model.posterior("variable")
    predict = tf.function(posterior.predict_f)
    before = np.stack(predict(XNEW))
    model.kernel.variance.assign(5.0)
    posterior.update_cache()
    np.testing.assert_allclose(np.stack(predict(XNEW)), prediction(model), rtol=1e-9)
    assert np.abs(prediction(model) - before).max() > 1e-2


@pytest.mark.parametrize("name", ["probit_bernoulli", "student_t"])
def test_predictions_and_the_bound_compile_with_xla(name: str) -> None:
    problem = sparse_problem(name)
    model = problem.model()
    model.infer(problem.data)
    for call in (
        lambda: model.predict_f(XNEW),
        lambda: model.predict_f(XNEW, full_cov=True),
        lambda: model.predict_y(XNEW),
        lambda: model.elbo(problem.data),
    ):
        compiled = tf.function(call, jit_compile=True, autograph=False)()
        for x, y in zip(tf.nest.flatten(compiled), tf.nest.flatten(call()), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-9)


# Parameters, copies, files


def test_print_summary_and_parameter_dict_have_the_sites_and_nothing_internal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = inferred()
    print_summary(model)
    printed = re.findall(r"SparseCVIModel([.\w]+)", capsys.readouterr().out)
    assert sorted(printed) == [
        ".inducing_variable.Z",
        ".kernel.lengthscales",
        ".kernel.variance",
        ".mean_function.A",
        ".mean_function.b",
        ".sites.lambda_1",
        ".sites.lambda_2",
    ]
    assert set(parameter_dict(model)) == set(printed)


def test_values_round_trip() -> None:
    model, other = inferred(), PROBLEM.model()
    assert np.abs(prediction(other) - prediction(model)).max() > 1e-2
    multiple_assign(other, read_values(model))
    np.testing.assert_array_equal(prediction(other), prediction(model))


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("how", [copy.deepcopy, gpflow.utilities.deepcopy])
def test_deepcopy_is_equal_and_independent(how: Any, trained: bool) -> None:
    model = inferred()
    if trained:
        gpflow.optimizers.Scipy().minimize(
            model.training_loss_closure(DATA), model.trainable_variables, options={"maxiter": 2}
        )
    duplicate, before = how(model), prediction(model)
    np.testing.assert_array_equal(prediction(duplicate), before)
    duplicate.kernel.lengthscales.assign(2.5)  # inferred again from the data it remembers
    np.testing.assert_allclose(prediction(duplicate), refreshed(duplicate), rtol=1e-5)
    assert np.abs(prediction(duplicate) - before).max() > 1e-3
    np.testing.assert_array_equal(prediction(model), before)


def test_freeze() -> None:
    model = inferred()
    frozen, before = gpflow.utilities.freeze(model), prediction(model)
    assert frozen.trainable_variables == ()
    model.kernel.variance.assign(9.0)
    np.testing.assert_array_equal(prediction(frozen), before)
    assert np.abs(prediction(model) - before).max() > 1e-3


def test_checkpoints_restore_and_never_mix_hyperparameters(tmp_path: Path) -> None:
    model, fresh, stale = inferred(), PROBLEM.model(), PROBLEM.model()
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "current"))
    tf.train.Checkpoint(model=fresh).read(path).assert_consumed()
    np.testing.assert_array_equal(prediction(fresh), prediction(model))
    model.kernel.lengthscales.assign(2.0)  # as an optimiser's last step
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "moved"))
    tf.train.Checkpoint(model=stale).read(path).assert_consumed()
    np.testing.assert_array_equal(prediction(stale), prediction(model))  # q(u) had followed
    for each in (model, stale):
        each.kernel.lengthscales.assign(1.5)
    for call in (lambda: stale.predict_f(XNEW), lambda: stale.elbo(DATA), lambda: stale.q_mu):
        with pytest.raises(InvalidPosteriorError, match=r"not at hand: call model\.infer\(data\)"):
            call()
    stale.infer(DATA)
    np.testing.assert_allclose(prediction(stale), prediction(model), rtol=1e-5)


def test_pickle_leaves_the_data_behind() -> None:
    model = inferred()
    size = len(pickle.dumps(PROBLEM.model()))
    other = pickle.loads(pickle.dumps(model))
    assert len(pickle.dumps(model)) < size + 200
    np.testing.assert_array_equal(prediction(other), prediction(model))
    other.kernel.variance.assign(3.0)
    with pytest.raises(InvalidPosteriorError, match="not at hand"):
        other.predict_f(XNEW)


def test_saved_model(tmp_path: Path) -> None:
    model = inferred()
    X, Y = (tf.TensorSpec([None, n], tf.float64) for n in (2, 1))
    model.predict = tf.function(lambda X: model.predict_f(X), input_signature=[X])
    model.bound = tf.function(lambda X, Y: model.elbo((X, Y)), input_signature=[X, Y])
    tf.saved_model.save(model, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    np.testing.assert_allclose(np.stack(loaded.predict(XNEW)), prediction(model), rtol=1e-12)
    np.testing.assert_allclose(loaded.bound(*DATA), model.elbo(DATA), rtol=1e-10)


# Training


def test_set_trainable_never_offers_the_sites_to_an_optimiser() -> None:
    model = PROBLEM.model()
    before = [id(v) for v in model.trainable_variables]
    set_trainable(model, True)
    assert not model.sites.lambda_1.trainable
    assert [id(v) for v in model.trainable_variables] == before
    with tf.GradientTape() as tape:
        loss = model.training_loss(DATA)
    assert tape.gradient(loss, model.sites.lambda_1.unconstrained_variable) is None


def test_priors_count() -> None:
    model, other = PROBLEM.model(), PROBLEM.model()
    prior = tfp.distributions.Gamma(np.float64(2.0), np.float64(3.0))
    model.kernel.lengthscales.prior = prior
    expected = other.training_loss(DATA) - prior.log_prob(np.float64(1.2))
    np.testing.assert_allclose(model.training_loss(DATA), expected, rtol=1e-9)
    np.testing.assert_allclose(model.training_loss_closure(DATA)(), expected, rtol=1e-9)


def test_every_way_to_pass_data_to_scipy_is_the_same() -> None:
    found = []
    ways: list[tuple[Callable[[Any], Any], bool]] = [
        (lambda m: m.training_loss_closure(DATA), True),
        (lambda m: m.training_loss_closure(DATA, compile=False), False),
        (lambda m: lambda: m.training_loss(DATA), True),
        (lambda m: lambda: m.training_loss(tuple(map(tf.constant, DATA))), True),
        (lambda m: m.training_loss_closure(dataset().batch(16)), True),
        (lambda m: m.training_loss_closure(tuple(map(tf.Variable, DATA))), True),
    ]
    for make, compiles in ways:
        model = PROBLEM.model()
        result = gpflow.optimizers.Scipy().minimize(
            make(model), model.trainable_variables, compile=compiles, options={"maxiter": 3}
        )
        found.append([result.fun, *prediction(model).ravel()])
        np.testing.assert_allclose(prediction(model), refreshed(model), rtol=1e-5)
    for other in found[1:]:  # blocks of rows round differently, and three steps amplify that
        np.testing.assert_allclose(other, found[0], rtol=1e-6)


def test_variables_as_data_are_read_when_the_loss_is() -> None:
    X, Y = map(tf.Variable, DATA)
    model = PROBLEM.model()
    losses = [
        model.training_loss_closure((X, Y)),
        tf.function(lambda: model.training_loss((X, Y))),
        lambda: model.training_loss((X, Y)),
    ]
    for factor in (1.0, 0.5):
        X.assign(factor * PROBLEM.X)
        expected = float(PROBLEM.model().training_loss((factor * PROBLEM.X, PROBLEM.Y)))
        for loss in losses:
            np.testing.assert_allclose(loss(), expected, rtol=1e-8)


ADAMS = {"keras3": keras.optimizers.Adam, "tf_keras": tf_keras.optimizers.Adam}


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("batches", [True, False])
@pytest.mark.parametrize("name", ADAMS)
def test_adam(name: str, batches: bool, compiled: bool) -> None:
    model = PROBLEM.model("elbo", num_data=40 if batches else None)
    data = iter(dataset().repeat().batch(20)) if batches else DATA
    loss = model.training_loss_closure(data, compile=compiled)
    optimiser = ADAMS[name](learning_rate=0.05)
    variables = model.trainable_variables

    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss()
        optimiser.apply_gradients(zip(tape.gradient(value, variables), variables, strict=True))
        return value

    step = tf.function(step, autograph=False) if compiled else step
    start = float(inferred(objective="elbo").elbo(DATA))
    for _ in range(12):
        step()
    assert float(model.elbo(DATA)) > start + 0.5
    if not batches:  # and q(u) follows the last step, which no loss has seen
        np.testing.assert_allclose(prediction(model), refreshed(model), rtol=1e-5)


def test_a_compiled_prediction_with_a_stale_q_is_refused() -> None:
    model = inferred()
    predict = tf.function(lambda: model.predict_f(XNEW))
    xla = tf.function(lambda: model.predict_f(XNEW), jit_compile=True)
    np.testing.assert_allclose(np.stack(predict()), prediction(model), rtol=1e-9)
    model.kernel.lengthscales.assign(1.5)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"call model\.infer\(data\) before"):
        predict()
    assert np.isnan(np.stack(xla())).all()  # XLA leaves assertions out
    model.infer(DATA)
    np.testing.assert_allclose(np.stack(predict()), prediction(model), rtol=1e-9)


@pytest.mark.slow  # eight new processes
@pytest.mark.parametrize("inter_op", [1, 2])
@pytest.mark.parametrize("kind", ["arrays", "dataset", "mapped", "batches"])
def test_two_threads_train_two_models_in_graphs(kind: str, inter_op: int) -> None:
    """The loss runs on the host inside the graph: it must not wait for a thread that it holds itself."""
    script = f"""
        import threading
        import gpflow, tensorflow as tf
        tf.config.threading.set_inter_op_parallelism_threads({inter_op})
        from tests.sparse_cases import sparse_problem

        def train(name):
            problem = sparse_problem(name)
            data = tf.data.Dataset.from_tensor_slices(problem.data)
            model = problem.model(num_data=40)
            loss = model.training_loss_closure({{
                "arrays": lambda: problem.data,
                "dataset": lambda: data.batch(16),
                "mapped": lambda: data.map(lambda x, y: (2.0 * x, y), 2).batch(16).prefetch(2),
                "batches": lambda: iter(data.repeat().shuffle(40).batch(10).prefetch(2)),
            }}[{kind!r}]())
            variables = model.trainable_variables
            gpflow.optimizers.Scipy().minimize(loss, variables, options={{"maxiter": 3}})
            trained.append(name)

        trained = []
        names = ["probit_bernoulli", "student_t"]
        threads = [threading.Thread(target=train, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(trained) == names
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    subprocess.run(command, check=True, timeout=120)


# What is refused


def entries(model: gh.SparseCVIModel) -> dict[str, Callable[[Any], Any]]:
    return {
        "infer": model.infer,
        "elbo": model.elbo,
        "compiled elbo": lambda data: tf.function(lambda: model.elbo(data))(),
        "ep_like_log_marginal": model.ep_like_log_marginal,
        "training_loss": model.training_loss,
        "compiled loss": lambda data: tf.function(model.training_loss, autograph=False)(data),
        "closure": model.training_loss_closure,
        "natgrad_step": model.natgrad_step,
    }


BAD_DATA = {
    "labels": ((PROBLEM.X, 2.0 * PROBLEM.Y - 1.0), r"Y must be 0 or 1 .* found -1"),
    "width": ((np.ones((40, 3)), PROBLEM.Y), r"X must have 2 column\(s\), as the inducing points"),
    "outputs": ((PROBLEM.X, np.tile(PROBLEM.Y, 2)), r"Y must have 1 column\(s\) .* found 2"),
    "rows": ((PROBLEM.X, PROBLEM.Y[:7]), "same number of rows; found 40 and 7"),
    "nan": ((np.where(PROBLEM.X > 1.9, np.nan, PROBLEM.X), PROBLEM.Y), "X must be finite"),
}


@pytest.mark.parametrize("entry", entries(PROBLEM.model()))
@pytest.mark.parametrize("kind", BAD_DATA)
def test_bad_data_are_refused_at_every_entry(kind: str, entry: str) -> None:
    data, words = BAD_DATA[kind]
    with pytest.raises((InvalidDataError, tf.errors.InvalidArgumentError), match=words):
        entries(PROBLEM.model())[entry](data)


def test_more_rows_than_num_data_are_refused_at_every_entry() -> None:
    for call in entries(PROBLEM.model(num_data=30)).values():
        with pytest.raises(
            (InvalidDataError, tf.errors.InvalidArgumentError), match="at most num_data = 30 rows"
        ):
            call(DATA)


def test_more_inducing_points_than_data_are_refused() -> None:
    few = PROBLEM.X[:4], PROBLEM.Y[:4]
    model = PROBLEM.model()
    words = r"at most as many points as there are data \(4\); found 6"
    for call in (model.infer, model.training_loss, model.natgrad_step):
        with pytest.raises(InvalidDataError, match=words):
            call(few)
    with pytest.raises(InvalidDataError, match=words):
        PROBLEM.model(num_data=4)
    PROBLEM.model(num_data=40).natgrad_step(few)  # a batch may be small
    assert model.elbo(few) < 0.0  # and so may test data


@pytest.mark.parametrize(
    ("Z", "words"),
    [
        (np.full((3, 2), np.nan), "must be finite; found nan at row 0"),
        (np.zeros((3, 2)), "distinct points; found .* at rows 0 and 1"),
        (np.zeros(3), r"must have the shape \[M, D\]"),
        ("Z", "must be an array of points"),
    ],
)
def test_bad_inducing_points_are_refused(Z: Any, words: str) -> None:
    with pytest.raises(InvalidDataError, match=words):
        PROBLEM.model(inducing_variable=Z)


def test_a_mean_function_with_other_outputs_is_refused() -> None:
    mean = gpflow.functions.Linear(A=np.ones((2, 3)), b=np.zeros(3))
    with pytest.raises(InvalidDataError, match=r"mean_function must return 1 column"):
        PROBLEM.model(mean_function=mean)


@pytest.mark.parametrize("compiled", [True, False])
def test_an_exhausted_iterator_is_refused(compiled: bool) -> None:
    model = PROBLEM.model(num_data=40)
    loss = model.training_loss_closure(iter(dataset().batch(20)), compile=compiled)
    loss()
    loss()
    sites = model.sites.lambda_1.numpy()
    with pytest.raises(
        (InvalidDataError, tf.errors.InvalidArgumentError), match="iterator of batches is exhausted"
    ):
        loss()
    np.testing.assert_array_equal(model.sites.lambda_1, sites)


def test_data_that_change_their_number_of_rows_are_refused() -> None:
    sizes = iter((40, 40, 30))
    changing = tf.data.Dataset.from_generator(
        lambda: iter(dataset(next(sizes)).as_numpy_iterator()),
        output_signature=tuple(tf.TensorSpec([n], tf.float64) for n in (2, 1)),
    )
    loss = PROBLEM.model().training_loss_closure(changing)
    loss()
    with pytest.raises(
        (InvalidDataError, tf.errors.InvalidArgumentError), match="changed its number of rows: 40"
    ):
        loss()


def test_what_cannot_run_in_a_graph_says_so() -> None:
    model = inferred()
    calls: dict[str, Callable[[], Any]] = {
        r"natgrad_step\(\) computes on the host": lambda: model.natgrad_step(DATA),
        r"infer\(\) reports to Python": lambda: model.infer(DATA),
        "EP-like value of a sparse model": lambda: model.ep_like_log_marginal(DATA),
        r"must be a pair \(X, Y\) inside tf.function": lambda: model.elbo(dataset()),
    }
    for words, call in calls.items():
        with pytest.raises((RuntimeError, InvalidDataError), match=words):
            tf.function(call, autograph=False)()


def test_inducing_points_of_another_width_than_the_data_are_refused() -> None:
    model = PROBLEM.model(inducing_variable=np.eye(3), mean_function=None)
    with pytest.raises(InvalidDataError, match=r"X must have 3 column\(s\).* found 2"):
        model.infer(DATA)


@pytest.mark.parametrize("compiled", [True, False])
def test_batches_that_change_their_width_are_refused(compiled: bool) -> None:
    model = PROBLEM.model(num_data=40)
    loss = model.training_loss
    if compiled:
        loss = tf.function(loss, autograph=False)
    loss(tuple(x[:10] for x in DATA))
    sites = model.sites.lambda_1.numpy()
    with pytest.raises(
        (InvalidDataError, tf.errors.InvalidArgumentError), match=r"X must have 2 column\(s\)"
    ):
        loss((np.ones((10, 3)), DATA[1][:10]))
    np.testing.assert_array_equal(model.sites.lambda_1, sites)


def test_products_of_newton_steps_are_reported_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    product = RowSums.product
    monkeypatch.setattr(RowSums, "product", lambda *x: calls.append(1) or product(*x))
    monkeypatch.setattr(inducing, "INDUCING", dataclasses.replace(INDUCING, patience=1, slow=0.0))
    found = PROBLEM.model().infer(DATA)
    assert found.converged
    assert calls
    assert f"Newton steps took {len(calls)} products" in found.message
    assert found.num_evaluations < 60
    monkeypatch.undo()
    assert "products" not in inferred().infer(DATA).message
