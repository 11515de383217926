"""What leaves a model, by whichever door, has λ of the hyperparameters that leave with it."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf
from gpflow.utilities import freeze, multiple_assign, parameter_dict, print_summary, read_values

import gpflow_hybrid as gh

PROBIT = gh.likelihoods.ProbitBernoulli()
RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 2))
Y = (X[:, :1] > 0.0).astype(float)
XNEW = RNG.normal(size=(4, 2))


def build(cls: Any = gh.CVIModel) -> Any:
    if cls is gh.SparseCVIModel:
        return cls(gpflow.kernels.Matern52(), PROBIT, X[:6].copy())
    return cls((X, Y), gpflow.kernels.Matern52(), PROBIT)


def loss_of(model: Any) -> Any:
    is_sparse = isinstance(model, gh.SparseCVIModel)
    return model.training_loss((X, Y)) if is_sparse else model.training_loss()


def stepped(cls: Any) -> Any:
    """After a few steps of Adam, whose last came after the last evaluation."""
    model = build(cls)
    optimizer = tf.keras.optimizers.Adam(0.1)
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = loss_of(model)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return model


def expected(model: Any) -> Any:
    """Predictions of another model with the same hyperparameters, inferred afresh."""
    fresh = build(type(model))
    values = {k: v for k, v in read_values(model).items() if "sites" not in k}
    multiple_assign(fresh, values)
    is_sparse = isinstance(fresh, gh.SparseCVIModel)
    fresh.infer((X, Y), tolerance=1e-9) if is_sparse else fresh.infer(tolerance=1e-9)
    return fresh.predict_f(XNEW)


each_model = pytest.mark.parametrize(
    "cls", [gh.CVIModel, gh.EPModel, gh.LaplaceModel, gh.SparseCVIModel]
)


@each_model
@pytest.mark.parametrize("traced_before", [False, True])
def test_a_saved_model_is_served_after_adam(cls: Any, traced_before: bool, tmp_path: Path) -> None:
    model = build(cls)
    model.predict = tf.function(
        lambda X: model.predict_f(X), input_signature=[tf.TensorSpec([None, 2], tf.float64)]
    )
    if traced_before:
        model.predict(XNEW)
    loss_of(model)
    model.kernel.lengthscales.assign(1.7)  # as an optimiser does after its last evaluation
    tf.saved_model.save(model, str(tmp_path))
    served = tf.saved_model.load(str(tmp_path))  # its variables go with it
    np.testing.assert_allclose(served.predict(XNEW), expected(model), rtol=1e-6, atol=1e-9)


@each_model
def test_a_checkpoint_after_adam(cls: Any, tmp_path: Path) -> None:
    model = stepped(cls)
    checkpoint = tf.train.Checkpoint(model=model)
    checkpoint.save(str(tmp_path / "first"))
    model.kernel.lengthscales.assign(0.6)
    path = checkpoint.save(str(tmp_path / "second"))  # the same object again
    other = build(cls)
    tf.train.Checkpoint(model=other).restore(path)
    np.testing.assert_array_equal(other.sites.values.lambda_1, model.sites.values.lambda_1)
    np.testing.assert_allclose(other.predict_f(XNEW), expected(model), rtol=1e-6, atol=1e-9)


@each_model
def test_values_read_after_adam(cls: Any) -> None:
    model = stepped(cls)
    wanted = [np.asarray(x) for x in expected(stepped(cls))]
    values = read_values(model)
    other = build(cls)
    multiple_assign(other, values)
    np.testing.assert_allclose(other.predict_f(XNEW), wanted, rtol=1e-6, atol=1e-9)
    model = stepped(cls)
    by_path = {path: p.numpy() for path, p in parameter_dict(model).items()}
    for path, value in values.items():
        np.testing.assert_allclose(by_path[path], value, atol=1e-8)
    np.testing.assert_allclose(freeze(stepped(cls)).predict_f(XNEW), wanted, rtol=1e-6, atol=1e-9)


def test_what_cannot_be_refreshed_is_refused() -> None:
    model = build()
    model.training_loss()
    model.kernel.lengthscales.assign(1e-200)  # whose square is zero: no inference there
    for read in (read_values, freeze, lambda m: tf.train.Checkpoint(m=m).save("/nowhere/x")):
        with pytest.raises(gh.NonFiniteError, match="could not start"):
            read(model)


def test_sites_of_the_users_own_are_left_alone(tmp_path: Path) -> None:
    model = build()
    model.infer()
    before = model.sites.values.lambda_1.numpy()
    model.kernel.lengthscales.assign(2.0)
    read_values(model)
    tf.train.Checkpoint(model=model).save(str(tmp_path / "x"))
    np.testing.assert_array_equal(model.sites.lambda_1, before)


@each_model
def test_no_summary_shows_the_sites_as_trainable(
    cls: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build(cls)
    gpflow.set_trainable(model, True)
    print_summary(model)
    lines = [line for line in capsys.readouterr().out.splitlines() if ".sites." in line]
    assert len(lines) == 2
    assert all("True" not in line for line in lines)
    assert not any(p is model.sites.lambda_1 for p in model.trainable_parameters)


def test_a_copy_follows_its_own_hyperparameters() -> None:
    model = stepped(gh.CVIModel)
    copy = gpflow.utilities.deepcopy(model)
    copy.kernel.lengthscales.assign(0.4)
    wanted = expected(copy)
    np.testing.assert_allclose(freeze(copy).predict_f(XNEW), wanted, rtol=1e-6, atol=1e-9)
    assert np.max(np.abs(copy.sites.lambda_1 - model.sites.lambda_1)) > 1e-3


@each_model
def test_sites_do_not_keep_their_model_alive(cls: Any) -> None:
    model = stepped(cls)
    read_values(model)
    sites, gone = model.sites, weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert np.all(np.isfinite(sites.lambda_1))


def test_hyperparameters_alone_go_to_a_model_of_other_data() -> None:
    """As the page on troubleshooting says."""
    model = stepped(gh.CVIModel)
    values = read_values(model)
    other = gh.CVIModel((X[:15], Y[:15]), gpflow.kernels.Matern52(), PROBIT)
    with pytest.raises(ValueError, match="Shape mismatch"):
        multiple_assign(other, values)
    multiple_assign(other, {path: x for path, x in values.items() if ".sites." not in path})
    assert other.infer().converged
    np.testing.assert_array_equal(other.kernel.lengthscales, model.kernel.lengthscales)
