"""CVIModel, EPModel and LaplaceModel are one interface: only sites and reported values differ."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf
from gpflow.utilities import multiple_assign, parameter_dict, read_values, set_trainable

import gpflow_hybrid as gh
from tests import reference

N = 12
LIKELIHOOD = gpflow.likelihoods.Poisson()  # one instance: its compiled graphs are reused

MODELS = [gh.CVIModel, gh.EPModel, gh.LaplaceModel]
each_model = pytest.mark.parametrize("cls", MODELS)
each_new_model = pytest.mark.parametrize("cls", MODELS[1:])
"""Where tests/models/test_gpflow_habits.py has the same for CVIModel: a trace takes seconds."""


def data(seed: int = 0, columns: int = 1) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = np.sort(rng.uniform(0.0, 3.0, size=(N, 1)), axis=0)
    return X, rng.poisson(np.exp(1.0 + np.sin(2.0 * X + np.arange(columns)))).astype(float)


def build(cls: Any, observed: Any = None) -> Any:
    return cls(
        data() if observed is None else observed,
        gpflow.kernels.Matern32(variance=1.5, lengthscales=0.7),
        LIKELIHOOD,
        gpflow.functions.Constant(0.2),
    )


def inferred(cls: Any) -> Any:
    model = build(cls)
    assert model.infer(tolerance=1e-9).converged
    return model


def x_new() -> np.ndarray:
    return np.linspace(-0.5, 3.5, 5)[:, None]


def prediction(model: Any) -> np.ndarray:
    return np.stack([t.numpy() for t in model.predict_f(x_new())])


def value(model: Any) -> float:
    """What the training loss is minus of."""
    if isinstance(model, gh.CVIModel):
        return float(model.ep_like_log_marginal())
    return float(model.log_marginal_likelihood())


def test_constructors_take_the_same_arguments() -> None:
    signatures = [
        list(inspect.signature(cls).parameters.values()) for cls in (*MODELS, gh.SiteModel)
    ]
    common = [str(p) for p in signatures[-1]]
    assert [p.split(":")[0] for p in common] == [
        "data",
        "kernel",
        "likelihood",
        "mean_function",
        "num_latent_gps",
    ]
    for parameters in signatures[:-1]:
        assert [str(p) for p in parameters[:5]] == common
        assert all(p.kind is p.KEYWORD_ONLY for p in parameters[5:])


@each_model
def test_is_a_model_of_gpflow_with_sites_that_are_not_trained(cls: Any) -> None:
    model = build(cls)
    for base in (gh.CollapsedModel, gh.SiteModel, gpflow.models.GPModel):
        assert isinstance(model, base)
    assert isinstance(model.sites, gh.Sites)
    for parameter in (model.sites.lambda_1, model.sites.lambda_2):
        assert not parameter.trainable
        np.testing.assert_array_equal(parameter, np.zeros((N, 1)))
    names = {p.unconstrained_variable.ref() for p in (*model.kernel.parameters,)}
    names.add(model.mean_function.c.unconstrained_variable.ref())
    for _ in range(2):
        assert {v.ref() for v in model.trainable_variables} == names
        set_trainable(model, True)  # still does not offer λ to an optimiser


@each_model
def test_infer_reports_in_every_field_what_the_model_has(cls: Any) -> None:
    model = build(cls)
    result = model.infer()
    assert isinstance(result, gh.InferenceResult)
    assert {f.name: type(getattr(result, f.name)) for f in dataclasses.fields(result)} == {
        "converged": bool,
        "num_steps": int,
        "num_evaluations": int,
        "elbo": float,
        "residual": float,
        "min_cavity_precision": float,
        "num_negative_sites": int,
        "message": str,
        "quadrature_error": float,
    }
    assert result.converged
    assert result.message.startswith("Converged")
    assert 0 < result.num_steps < result.num_evaluations <= 15
    assert result.residual <= 1e-6
    np.testing.assert_allclose(result.elbo, model.elbo(), rtol=1e-12)
    lambda_2 = model.sites.lambda_2.numpy()
    assert result.num_negative_sites == np.sum(lambda_2 < 0.0)
    _, variance = model.predict_f(model.data[0])
    np.testing.assert_allclose(
        result.min_cavity_precision, np.min(1.0 / variance - lambda_2), rtol=1e-6
    )
    again = model.infer()
    assert (again.num_steps, again.num_evaluations) == (0, 1)


@each_model
def test_objectives_are_ordered_and_leave_the_sites_alone(cls: Any) -> None:
    model = inferred(cls)
    model.sites.lambda_1.assign(0.9 * model.sites.lambda_1)  # anywhere, not at a fixed point
    before = np.stack(model.sites.values)
    values = [model.elbo(), model.power_ep_log_marginal(0.5), model.ep_like_log_marginal()]
    assert values[0] < values[1] < values[2]
    loo = model.loo_log_predictive_density()
    assert loo.shape == (N,)
    prior = (x.numpy() for x in model.prior())
    expected = reference.loo(*prior, *before, data()[1], reference.LOG_PROBS["poisson"])
    np.testing.assert_allclose(loo, expected, rtol=1e-7)
    value(model)
    np.testing.assert_array_equal(np.stack(model.sites.values), before)


def test_the_elbo_is_highest_for_variational_inference_and_values_are_close() -> None:
    models = [inferred(cls) for cls in MODELS]
    elbos = [float(m.elbo()) for m in models]
    assert elbos[0] > max(elbos[1:])
    values = [value(m) for m in models]
    # EP's is near the evidence for counts; EP-like nearly so; Laplace's is a few hundredths off.
    np.testing.assert_allclose(values[0], values[1], atol=2e-3)
    np.testing.assert_allclose(values[2], values[1], atol=0.1)
    assert len(set(np.round(values, 6))) == 3


@each_model
def test_predictions_of_every_kind_agree(cls: Any) -> None:
    model = inferred(cls)
    X = x_new()
    mean, variance = model.predict_f(X)
    _, covariance = model.predict_f(X, full_cov=True)
    np.testing.assert_allclose(np.diagonal(covariance[0]), variance[:, 0], rtol=1e-10)
    assert np.all(np.linalg.eigvalsh(covariance[0]) > 0.0)
    np.testing.assert_allclose(
        np.stack(model.posterior().predict_f(X)), prediction(model), rtol=1e-9
    )
    Y = np.full_like(X, 3.0)
    for found, expected in zip(
        [*model.predict_y(X), model.predict_log_density((X, Y))],
        [
            *LIKELIHOOD.predict_mean_and_var(X, mean, variance),
            LIKELIHOOD.predict_log_density(X, mean, variance, Y),
        ],
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-10)
    tf.random.set_seed(0)
    samples = model.predict_f_samples(X, 2000)
    # Five standard errors.
    error = 5.0 * np.sqrt(variance[:, 0] / 2000.0)
    assert np.all(np.abs(np.mean(samples, 0)[:, 0] - mean[:, 0]) < error)


@each_model
def test_copies_and_values(cls: Any) -> None:
    model = inferred(cls)
    before = prediction(model)
    duplicate = copy.deepcopy(model)
    np.testing.assert_array_equal(prediction(duplicate), before)
    duplicate.sites.lambda_1.assign(0.5 * duplicate.sites.lambda_1)
    assert np.max(np.abs(prediction(duplicate) - before)) > 1e-2
    np.testing.assert_array_equal(prediction(model), before)
    fresh = build(cls)
    assert set(parameter_dict(model)) == {
        ".kernel.lengthscales",
        ".kernel.variance",
        ".mean_function.c",
        ".sites.lambda_1",
        ".sites.lambda_2",
    }
    multiple_assign(fresh, read_values(model))
    np.testing.assert_array_equal(prediction(fresh), before)
    frozen = gpflow.utilities.freeze(model)
    np.testing.assert_array_equal(prediction(frozen), before)


@each_model
def test_sites_follow_the_hyperparameters_after_training_unless_they_are_the_users(
    cls: Any,
) -> None:
    model, fresh = build(cls), build(cls)
    np.testing.assert_allclose(-model.training_loss(), value(inferred(cls)), rtol=1e-8)
    for m in (model, fresh):
        m.kernel.lengthscales.assign(1.4)  # as an optimiser does after its last evaluation
    stale = model.sites.values.lambda_1.numpy()
    fresh.infer(tolerance=1e-9)
    np.testing.assert_allclose(prediction(model), prediction(fresh), rtol=1e-6)
    assert np.max(np.abs(model.sites.lambda_1 - stale)) > 1e-3
    np.testing.assert_allclose(value(model), value(fresh), rtol=1e-8)

    fresh.kernel.lengthscales.assign(0.5)
    kept = fresh.sites.lambda_1.numpy()
    prediction(fresh), fresh.elbo(), value(fresh)
    np.testing.assert_array_equal(fresh.sites.lambda_1, kept)


@each_new_model
def test_compiled_training_loss_is_the_eager_one(cls: Any) -> None:
    model, other = build(cls), build(cls)

    def loss_and_gradient(m: Any) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            loss = m.training_loss()
        return loss, tape.gradient(loss, m.trainable_variables)

    loss, gradients = tf.function(lambda: loss_and_gradient(model), autograph=False)()
    expected, expected_gradients = loss_and_gradient(other)
    np.testing.assert_allclose(loss, expected, rtol=1e-10)
    assert max(np.max(np.abs(g)) for g in gradients) > 0.1
    for found, gradient in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(found, gradient, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(np.stack(model.sites.values), np.stack(other.sites.values))


@each_model
def test_update_data(cls: Any) -> None:
    X, Y = (tf.Variable(a, shape=[None, 1]) for a in data())
    model = build(cls, (X, Y))
    model.infer(tolerance=1e-9)
    np.testing.assert_allclose(prediction(model), prediction(inferred(cls)), rtol=1e-8)
    new = data(1)
    model.update_data(new)
    np.testing.assert_array_equal(model.sites.lambda_2, np.zeros((N, 1)))
    fresh = build(cls, new)
    for m in (model, fresh):
        m.infer(tolerance=1e-9)
    np.testing.assert_allclose(prediction(model), prediction(fresh), rtol=1e-8)
    np.testing.assert_allclose(value(model), value(fresh), rtol=1e-8)
    with pytest.raises(gh.InvalidDataError, match="tf.Variable"):
        fresh.update_data(new)


@each_new_model
def test_separate_kernels_for_two_columns_are_two_models(cls: Any) -> None:
    X, Y = data(2, columns=2)
    lengthscales = (0.4, 1.2)
    kernels = [gpflow.kernels.Matern32(lengthscales=s) for s in lengthscales]
    joint = cls((X, Y), gpflow.kernels.SeparateIndependent(kernels), LIKELIHOOD)
    singles = [cls((X, Y[:, i : i + 1]), k, LIKELIHOOD) for i, k in enumerate(kernels)]
    for model in (joint, *singles):
        assert model.infer(tolerance=1e-9).converged
    expected = np.concatenate([prediction(m) for m in singles], -1)
    np.testing.assert_allclose(prediction(joint), expected, rtol=1e-6)
    np.testing.assert_allclose(value(joint), sum(value(m) for m in singles), rtol=1e-8)
    np.testing.assert_allclose(joint.elbo(), sum(m.elbo() for m in singles), rtol=1e-8)


@pytest.mark.slow
@each_new_model
def test_single_precision(cls: Any) -> None:
    expected = inferred(cls)
    values = value(expected), prediction(expected)
    gpflow.config.set_default_float(np.float32)
    model = cls(
        tuple(a.astype(np.float32) for a in data()),
        gpflow.kernels.Matern32(variance=1.5, lengthscales=0.7),
        gpflow.likelihoods.Poisson(),  # its bin size has a dtype
        gpflow.functions.Constant(np.float32(0.2)),
    )
    result = model.infer(tolerance=1e-4)
    assert result.converged, result.message
    mean, variance = model.predict_f(x_new().astype(np.float32))
    assert mean.dtype == variance.dtype == tf.float32
    # Single precision carries 1e-7, and the residual is 1e-4.
    np.testing.assert_allclose(np.stack([mean, variance]), values[1], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(value(model), values[0], rtol=1e-4)


@each_model
def test_a_line_search_that_went_too_far_can_come_back(cls: Any) -> None:
    model = build(cls)
    loss = model.training_loss_closure()
    first = loss()
    sites = model.sites.lambda_1.numpy()
    model.kernel.lengthscales.assign(1e-200)  # whose square is zero
    with tf.GradientTape() as tape:
        value = loss()
    assert value == 1000.0 * N > first
    np.testing.assert_array_equal(tape.gradient(value, model.trainable_variables), 0.0)
    np.testing.assert_array_equal(model.sites.values.lambda_1, sites)
    with pytest.raises(gh.NonFiniteError, match="could not start"):
        model.predict_f(x_new())  # λ follows the hyperparameters, but not there
    model.kernel.lengthscales.assign(0.7)
    np.testing.assert_allclose(loss(), first, rtol=1e-8)


@each_model
def test_hyperparameters_without_a_value_are_refused_by_datum(cls: Any) -> None:
    model = build(cls)
    model.mean_function.c.assign(2000.0)  # a rate of exp(2000)
    with pytest.raises(gh.NonFiniteError, match=r"not finite at datum 0 \(x = "):
        model.infer()
    with pytest.raises(gh.NonFiniteError, match="could not start"):
        model.training_loss()
    np.testing.assert_array_equal(model.sites.lambda_2, np.zeros((N, 1)))
    model.mean_function.c.assign(0.2)
    assert model.infer().converged
