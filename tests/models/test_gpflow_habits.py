"""CVIModel does what users of GPflow expect of a model."""

import copy
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
from gpflow.base import AnyNDArray
from gpflow.posteriors import PrecomputeCacheType
from gpflow.utilities import (
    multiple_assign,
    parameter_dict,
    print_summary,
    read_values,
    set_trainable,
)

from gpflow_hybrid import CVIModel, InvalidDataError
from gpflow_hybrid.likelihoods import ProbitBernoulli

N = 12

# Without parameters. Models that share it share the compiled E-step.
LIKELIHOOD = gpflow.likelihoods.Bernoulli(invlink=tf.math.sigmoid)


def data(seed: int = 0, num: int = N) -> tuple[AnyNDArray, AnyNDArray]:
    rng = np.random.default_rng(seed)
    X = rng.uniform(0.0, 3.0, size=(num, 1))
    return X, (np.sin(2.0 * X) + 0.5 * rng.normal(size=X.shape) > 0.0).astype(float)


def build(objective: Any = "elbo") -> CVIModel:
    """Logistic classification with a mean function: parameters in three places."""
    return CVIModel(
        data(),
        gpflow.kernels.Matern32(variance=1.5, lengthscales=0.7),
        LIKELIHOOD,
        gpflow.functions.Constant(0.2),
        objective=objective,
    )


def inferred() -> CVIModel:
    model = build()
    model.infer(tolerance=1e-9)
    return model


def x_new() -> AnyNDArray:
    return np.linspace(-0.5, 3.5, 5)[:, None]


def prediction(model: CVIModel) -> AnyNDArray:
    return np.stack([t.numpy() for t in model.predict_f(x_new())])


def lambdas(model: CVIModel) -> AnyNDArray:
    return np.stack([t.numpy() for t in model.sites.values])


def dense(model: CVIModel, X: AnyNDArray) -> tuple[AnyNDArray, AnyNDArray]:
    """Mean ``[M]`` and covariance ``[M, M]`` of one latent, from the definition of q."""
    X_data = np.asarray(model.data[0])
    K, k, kk = (model.kernel(*a).numpy() for a in ((X_data,), (X_data, X), (X,)))
    lambda_1, lambda_2 = (x[:, 0] for x in lambdas(model))
    mu = np.asarray(model.mean_function(X_data))[:, 0]
    Sigma = np.linalg.inv(np.linalg.inv(K) + np.diag(lambda_2))
    m = Sigma @ (lambda_1 + np.linalg.solve(K, mu))
    A = np.linalg.solve(K, k)
    mean = np.asarray(model.mean_function(X))[:, 0] + A.T @ (m - mu)
    return mean, kk - k.T @ A + A.T @ Sigma @ A


# Parameters, copies, files


def test_print_summary_lists_sites_and_nothing_internal(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(inferred())
    printed = capsys.readouterr().out
    assert "CVIModel.sites.lambda_1" in printed
    assert "CVIModel.sites.lambda_2" in printed
    assert "bound" not in printed
    assert "._" not in printed
    rows = re.findall(r"CVIModel\.[\w.]+", printed)
    assert sorted(rows) == [
        "CVIModel.kernel.lengthscales",
        "CVIModel.kernel.variance",
        "CVIModel.mean_function.c",
        "CVIModel.sites.lambda_1",
        "CVIModel.sites.lambda_2",
    ]


def test_parameter_dict_and_multiple_assign() -> None:
    model, other = inferred(), build()
    model.kernel.lengthscales.assign(1.1)
    assert set(parameter_dict(model)) == {
        ".kernel.lengthscales",
        ".kernel.variance",
        ".mean_function.c",
        ".sites.lambda_1",
        ".sites.lambda_2",
    }
    assert np.abs(prediction(other) - prediction(model)).max() > 1e-3
    multiple_assign(other, read_values(model))
    np.testing.assert_array_equal(lambdas(other), lambdas(model))
    np.testing.assert_array_equal(prediction(other), prediction(model))


@pytest.mark.parametrize("when", ["new", "inferred", "trained"])
def test_deepcopy_is_equal_and_independent(when: str) -> None:
    model = build()
    if when == "inferred":
        model.infer()
    elif when == "trained":
        gpflow.optimizers.Scipy().minimize(
            model.training_loss,
            model.trainable_variables,
            compile=False,
            options={"maxiter": 2},
        )
    duplicate = copy.deepcopy(model)
    before = prediction(model)
    np.testing.assert_array_equal(prediction(duplicate), before)
    duplicate.kernel.lengthscales.assign(2.5)
    duplicate.natgrad_step(0.7)
    assert np.abs(prediction(duplicate) - before).max() > 1e-3
    np.testing.assert_array_equal(prediction(model), before)
    if when != "trained":
        return
    duplicate.infer(tolerance=1e-9)  # the copy compiles its own E-step
    model.kernel.lengthscales.assign(2.5)
    model.infer(tolerance=1e-9)
    np.testing.assert_allclose(prediction(duplicate), prediction(model), rtol=1e-7)


def test_freeze() -> None:
    model = inferred()
    frozen = gpflow.utilities.freeze(model)
    assert frozen.trainable_variables == ()
    before = prediction(model)
    np.testing.assert_array_equal(prediction(frozen), before)
    model.kernel.variance.assign(9.0)
    np.testing.assert_array_equal(prediction(frozen), before)
    assert np.abs(prediction(model) - before).max() > 1e-3


@pytest.mark.parametrize("trained", [False, True])
def test_checkpoint_restores_everything(tmp_path: Path, trained: bool) -> None:
    model = inferred()
    if trained:
        # λ is bound to the hyperparameters of the last evaluation, and they moved on since.
        model.training_loss()
    model.kernel.lengthscales.assign(0.9)
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "checkpoint"))

    fresh = build()
    tf.train.Checkpoint(model=fresh).read(path).assert_consumed()
    np.testing.assert_array_equal(lambdas(fresh), lambdas(model))
    for name, value in read_values(model).items():
        np.testing.assert_array_equal(read_values(fresh)[name], value)
    np.testing.assert_array_equal(prediction(fresh), prediction(model))
    np.testing.assert_array_equal(lambdas(fresh), lambdas(model))


@pytest.mark.slow  # the tutorial on saving, which the tests run, serves one in a new process too
def test_saved_model_predicts_the_same_in_a_new_process(tmp_path: Path) -> None:
    model = inferred()
    model.predict = tf.function(
        lambda X: model.predict_f(X), input_signature=[tf.TensorSpec([None, 1], tf.float64)]
    )
    path = tmp_path / "saved"
    tf.saved_model.save(model, str(path))
    np.save(tmp_path / "x.npy", x_new())
    script = f"""
        import numpy as np, tensorflow as tf
        model = tf.saved_model.load({str(path)!r})
        np.save({str(tmp_path / "y.npy")!r}, model.predict(np.load({str(tmp_path / "x.npy")!r})))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=120)
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), prediction(model), rtol=1e-12)


# Trainability


def test_the_sites_are_not_trainable_by_default() -> None:
    model = build()
    assert len(model.trainable_variables) == 3
    assert all(v is not w for v in model.trainable_variables for w in model.sites.variables)


def test_trainable_sites_get_no_gradient_and_change_no_other() -> None:
    model, other = inferred(), inferred()
    set_trainable(other, True)
    hyperparameters = [
        [*m.kernel.trainable_variables, *m.mean_function.trainable_variables]
        for m in (model, other)
    ]
    found = []
    for m, variables in zip((model, other), hyperparameters, strict=True):
        with tf.GradientTape() as tape:
            loss = m.training_loss()
        site_variables = [m.sites.lambda_1.unconstrained_variable]
        *gradients, site_gradient = tape.gradient(loss, variables + site_variables)
        assert site_gradient is None
        found.append(gradients)
    assert max(np.abs(g).max() for g in found[0]) > 1e-2
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8)


def test_kernel_training_of_an_unfrozen_model_is_that_of_a_frozen_one() -> None:
    """λ moves by inference only: with unfrozen sites Scipy finds the same optimum and λ."""
    model, other = build(), build()
    set_trainable(other, True)
    losses = []
    for m in (model, other):
        result = gpflow.optimizers.Scipy().minimize(
            m.training_loss, m.kernel.trainable_variables, compile=False, options={"maxiter": 4}
        )
        losses.append(result.fun)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-9)
    np.testing.assert_allclose(prediction(other), prediction(model), rtol=1e-7)
    before = lambdas(other)
    other.infer(tolerance=1e-9)
    np.testing.assert_allclose(lambdas(other), before, rtol=1e-6, atol=1e-8)


def test_trainable_false_is_honoured() -> None:
    model = build()
    set_trainable(model.kernel.lengthscales, False)
    set_trainable(model.mean_function, False)
    variance = model.kernel.variance.numpy()
    gpflow.optimizers.Scipy().minimize(
        model.training_loss, model.trainable_variables, compile=False, options={"maxiter": 3}
    )
    assert model.kernel.lengthscales.numpy() == 0.7
    assert model.mean_function.c.numpy() == 0.2
    assert abs(model.kernel.variance.numpy() - variance) > 1e-3


# Predictions are current


def test_predictions_follow_hyperparameters_and_sites() -> None:
    model = inferred()
    compiled = tf.function(lambda: model.predict_f(x_new()))
    for change in (
        lambda: model.kernel.lengthscales.assign(1.3),
        lambda: model.mean_function.c.assign(-0.5),
        lambda: model.sites.lambda_1.assign(model.sites.lambda_1 + 0.3),
        lambda: model.sites.lambda_2.assign(model.sites.lambda_2 * 2.0),
        lambda: model.natgrad_step(0.5),
        lambda: model.infer(),
    ):
        before = prediction(model)
        change()
        after = prediction(model)
        assert np.abs(after - before).max() > 1e-4
        mean, covariance = dense(model, x_new())
        np.testing.assert_allclose(after[0][:, 0], mean, rtol=1e-6)
        np.testing.assert_allclose(after[1][:, 0], np.diag(covariance), rtol=1e-6)
        np.testing.assert_allclose(np.stack(compiled()), after, rtol=1e-9)


def refreshed(model: CVIModel) -> AnyNDArray:
    """The predictions of a copy on which infer() was run at the final hyperparameters."""
    other = build()
    values = read_values(model)
    multiple_assign(other, {k: v for k, v in values.items() if not k.startswith(".sites")})
    other.infer(tolerance=1e-9)
    return prediction(other)


@pytest.mark.parametrize("objective", ["elbo", "ep_like"])
def test_sites_follow_the_hyperparameters_after_scipy(objective: str) -> None:
    model = build(objective)
    start = float(model.training_loss())
    gpflow.optimizers.Scipy().minimize(
        model.training_loss,
        model.trainable_variables,
        compile=objective == "elbo",
        options={"maxiter": 3},
    )
    expected = refreshed(model)
    np.testing.assert_allclose(prediction(model), expected, rtol=1e-6)
    assert float(model.training_loss()) < start - 1e-3


ADAMS = {"keras3": keras.optimizers.Adam, "tf_keras": tf_keras.optimizers.Adam}


@pytest.mark.parametrize("name", ADAMS)
def test_adam(name: str) -> None:
    """Lowers the loss, and λ follows its last step, which no evaluation of the loss has seen."""
    model = build()
    optimiser = ADAMS[name](learning_rate=0.05)
    variables = model.trainable_variables
    losses = []
    for _ in range(8):
        with tf.GradientTape() as tape:
            loss = model.training_loss()
        optimiser.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        losses.append(float(loss))
    stale = lambdas(model)
    assert np.all(np.diff(losses) < 0.0)
    expected = refreshed(model)
    np.testing.assert_allclose(prediction(model), expected, rtol=1e-6)
    assert np.abs(lambdas(model) - stale).max() > 1e-6


def test_a_compiled_prediction_with_stale_sites_is_refused() -> None:
    model = build()
    predict = tf.function(lambda: model.predict_f(x_new()))
    model.training_loss()
    np.testing.assert_allclose(np.stack(predict()), prediction(model), rtol=1e-9)
    model.kernel.lengthscales.assign(1.5)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"call model\.infer\(\) before"):
        predict()
    expected = refreshed(model)
    model.infer(tolerance=1e-9)
    np.testing.assert_allclose(np.stack(predict()), expected, rtol=1e-7)


def test_copies_and_restored_models_follow_too(tmp_path: Path) -> None:
    model = build()
    model.training_loss()
    duplicate = copy.deepcopy(model)
    restored = build()
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "checkpoint"))
    tf.train.Checkpoint(model=restored).read(path).assert_consumed()
    for m in (model, duplicate, restored):
        m.kernel.lengthscales.assign(1.4)
    expected = refreshed(model)
    for m in (model, duplicate, restored):
        np.testing.assert_allclose(prediction(m), expected, rtol=1e-6)


def test_assigned_sites_are_the_users_own() -> None:
    """λ set by hand after training stays, whatever the hyperparameters do."""
    model = build()
    model.training_loss()
    values = model.sites.lambda_1.numpy() + 0.5
    model.sites.lambda_1.assign(values)
    model.kernel.lengthscales.assign(1.4)
    mean, _ = dense(model, x_new())
    np.testing.assert_allclose(prediction(model)[0][:, 0], mean, rtol=1e-6)
    np.testing.assert_array_equal(model.sites.lambda_1.numpy(), values)


# Posterior objects


@pytest.mark.parametrize(
    "cache", ["tensor", "variable", PrecomputeCacheType.TENSOR, PrecomputeCacheType.VARIABLE]
)
def test_cached_predictions(cache: Any) -> None:
    model = inferred()
    posterior = model.posterior(cache)
    for full_cov in (False, True):
        direct = model.predict_f(x_new(), full_cov=full_cov)
        fused = posterior.fused_predict_f(x_new(), full_cov=full_cov)
        for found, also, expected in zip(
            posterior.predict_f(x_new(), full_cov=full_cov), fused, direct, strict=True
        ):
            np.testing.assert_allclose(found, expected, rtol=1e-10)
            np.testing.assert_allclose(also, expected, rtol=1e-10)

    before = np.stack(posterior.predict_f(x_new()))
    model.sites.lambda_1.assign(model.sites.lambda_1 - 0.4)
    np.testing.assert_array_equal(np.stack(posterior.predict_f(x_new())), before)
    posterior.update_cache()
    np.testing.assert_allclose(np.stack(posterior.predict_f(x_new())), prediction(model))
    assert np.abs(prediction(model) - before).max() > 1e-2


def test_variable_cache_serves_a_compiled_function_after_sites_change_sign() -> None:
    """The number of negative sites is the size of a cached array."""
    model = inferred()
    posterior = model.posterior("variable")
    predict = tf.function(posterior.predict_f)
    before = np.stack(predict(x_new()))
    lambda_2 = model.sites.lambda_2.numpy()
    lambda_2[[1, 5]] = -0.05
    model.sites.lambda_2.assign(lambda_2)
    posterior.update_cache()
    np.testing.assert_allclose(np.stack(predict(x_new())), prediction(model), rtol=1e-9)
    assert np.abs(prediction(model) - before).max() > 1e-3


@pytest.mark.parametrize("cache", [None, "nocache", PrecomputeCacheType.NOCACHE])
def test_no_cache(cache: Any) -> None:
    model = inferred()
    posterior = model.posterior(cache)
    with pytest.raises(ValueError, match="Cache has not been precomputed"):
        posterior.predict_f(x_new())
    np.testing.assert_allclose(np.stack(posterior.fused_predict_f(x_new())), prediction(model))


def test_unknown_cache() -> None:
    with pytest.raises(ValueError, match="^precompute_cache must be 'tensor', .*found 'disk'"):
        build().posterior("disk")


@pytest.mark.parametrize("num_latent", [1, 2])
def test_leading_dimensions_of_new_inputs(num_latent: int) -> None:
    rng = np.random.default_rng(3)
    X = rng.normal(size=(N, 2))
    Y = rng.normal(size=(N, num_latent))
    kernel = gpflow.kernels.SeparateIndependent(
        [gpflow.kernels.Matern52(lengthscales=0.5 + i) for i in range(num_latent)]
    )
    model = CVIModel((X, Y), kernel, gpflow.likelihoods.StudentT(df=4.0))
    model.natgrad_step(0.3)
    batch = rng.normal(size=(2, 3, 4, 2))
    for full_cov, shape in ((False, (4, num_latent)), (True, (num_latent, 4, 4))):
        means, covs = model.predict_f(batch, full_cov=full_cov)
        assert means.shape == (2, 3, 4, num_latent)
        assert covs.shape == (2, 3, *shape)
        for i in np.ndindex(2, 3):
            mean, cov = model.predict_f(batch[i], full_cov=full_cov)
            np.testing.assert_allclose(means[i], mean, rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(covs[i], cov, rtol=1e-9, atol=1e-12)


def test_full_output_cov_is_not_implemented() -> None:
    model = build()
    for predict in (model.predict_f, model.posterior().predict_f, model.predict_y):
        with pytest.raises(NotImplementedError, match="full_output_cov"):
            predict(x_new(), full_output_cov=True)


@pytest.mark.parametrize("full_cov", [False, True])
def test_samples_have_the_moments_of_the_prediction(full_cov: bool) -> None:
    model = inferred()
    tf.random.set_seed(1)
    num = 4000
    assert model.predict_f_samples(x_new()).shape == (5, 1)
    samples = model.predict_f_samples(x_new(), num, full_cov=full_cov).numpy()
    assert samples.shape == (num, 5, 1)
    mean, covariance = dense(model, x_new())
    if not full_cov:
        covariance = np.diag(np.diag(covariance))
    # Five standard errors of 4000 draws.
    s = np.sqrt(np.diag(covariance))
    assert np.all(np.abs(samples.mean(0)[:, 0] - mean) < 5.0 * s / np.sqrt(num))
    found = np.cov(samples[..., 0].T)
    assert np.all(np.abs(found - covariance) < 5.0 * np.sqrt(2.0 / num) * np.outer(s, s))


def test_negative_sites_against_the_dense_formula() -> None:
    model = build()
    rng = np.random.default_rng(4)
    lambda_2 = rng.uniform(0.1, 2.0, size=(N, 1))
    lambda_2[[0, 3, 7]] = [[-0.2], [-0.05], [-0.1]]
    model.sites.lambda_1.assign(rng.normal(size=(N, 1)))
    model.sites.lambda_2.assign(lambda_2)
    mean, covariance = dense(model, x_new())
    found_mean, found_covariance = model.predict_f(x_new(), full_cov=True)
    np.testing.assert_allclose(found_mean[:, 0], mean, rtol=1e-6)
    np.testing.assert_allclose(found_covariance[0], covariance, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(model.predict_f(x_new())[1][:, 0], np.diag(covariance), rtol=1e-6)


# Kernels and likelihoods with several latents


def counts(seed: int) -> tuple[AnyNDArray, AnyNDArray]:
    rng = np.random.default_rng(seed)
    X = np.linspace(0.0, 3.0, N)[:, None]
    return X, rng.poisson(np.exp(np.sin(X + np.arange(2)))).astype(float)


def test_shared_independent_is_the_plain_kernel() -> None:
    models = []
    likelihood = gpflow.likelihoods.Poisson()
    for wrap in (lambda k: k, lambda k: gpflow.kernels.SharedIndependent(k, output_dim=2)):
        model = CVIModel(counts(5), wrap(gpflow.kernels.Matern32()), likelihood)
        model.infer(tolerance=1e-9)
        models.append(model)
    np.testing.assert_allclose(prediction(models[1]), prediction(models[0]), rtol=1e-9)
    np.testing.assert_allclose(models[1].elbo(), models[0].elbo(), rtol=1e-9)


def test_separate_independent_is_one_model_per_output() -> None:
    X, Y = counts(6)
    lengthscales = (0.4, 1.2)
    likelihood = gpflow.likelihoods.Poisson()
    joint = CVIModel(
        (X, Y),
        gpflow.kernels.SeparateIndependent(
            [gpflow.kernels.Matern32(lengthscales=s) for s in lengthscales]
        ),
        likelihood,
    )
    singles = [
        CVIModel(
            (X, Y[:, i : i + 1]),
            gpflow.kernels.Matern32(lengthscales=s),
            likelihood,
        )
        for i, s in enumerate(lengthscales)
    ]
    for model in (joint, *singles):
        model.infer(tolerance=1e-9)
    np.testing.assert_allclose(
        prediction(joint), np.concatenate([prediction(m) for m in singles], -1), rtol=1e-6
    )
    for value in (CVIModel.elbo, CVIModel.ep_like_log_marginal):
        np.testing.assert_allclose(value(joint), sum(value(m) for m in singles), rtol=1e-8)
    for i, model in enumerate(singles):
        cov = joint.predict_f(x_new(), full_cov=True)[1][i]
        np.testing.assert_allclose(
            cov, model.predict_f(x_new(), full_cov=True)[1][0], rtol=1e-6, atol=1e-9
        )


def test_heteroskedastic_likelihood_with_separate_kernels() -> None:
    """GPflow's VGP cannot do this; the noise is found larger where it is larger."""
    rng = np.random.default_rng(7)
    X = np.linspace(0.0, 4.0, 40)[:, None]
    scale = np.where(X < 2.0, 0.1, 1.0)
    Y = np.sin(2.0 * X) + scale * rng.normal(size=X.shape)
    model = CVIModel(
        (X, Y),
        gpflow.kernels.SeparateIndependent(
            [gpflow.kernels.SquaredExponential(), gpflow.kernels.Matern32(lengthscales=2.0)]
        ),
        gpflow.likelihoods.HeteroskedasticTFPConditional(),
    )
    start = float(model.elbo())
    result = model.infer(tolerance=1e-6)
    assert result.converged, result.message
    assert result.elbo > start + 10.0
    mean, variance = model.predict_y(np.array([[1.0], [3.0]]))
    assert variance[1, 0] > 10.0 * variance[0, 0]
    np.testing.assert_allclose(mean[0, 0], np.sin(2.0), atol=0.2)  # two noise scales


# Kinds of data


@pytest.mark.parametrize(
    "convert",
    [np.asarray, lambda a: a.tolist(), tf.constant, tf.Variable],
    ids=["array", "list", "tensor", "variable"],
)
def test_kinds_of_data(convert: Callable[[Any], Any]) -> None:
    X, Y = data()
    model = CVIModel(
        (convert(X), convert(Y)),
        gpflow.kernels.Matern32(variance=1.5, lengthscales=0.7),
        LIKELIHOOD,
        gpflow.functions.Constant(0.2),
    )
    model.infer(tolerance=1e-9)
    np.testing.assert_allclose(prediction(model), prediction(inferred()), rtol=1e-8)


def test_integer_data_become_floats() -> None:
    X, Y = np.arange(N)[:, None], np.arange(N)[:, None] % 3
    likelihood = gpflow.likelihoods.Poisson()
    models = [
        CVIModel(d, gpflow.kernels.Matern32(), likelihood)
        for d in ((X, Y), (X.astype(float), Y.astype(float)), (X.tolist(), Y.tolist()))
    ]
    for model in models:
        model.infer(tolerance=1e-9)
        assert model.data[0].dtype == tf.float64
    np.testing.assert_array_equal(prediction(models[0]), prediction(models[1]))
    np.testing.assert_array_equal(prediction(models[2]), prediction(models[1]))


def test_update_data_to_another_length() -> None:
    X, Y = data()
    model = CVIModel(
        (tf.Variable(X, shape=[None, 1]), tf.Variable(Y, shape=[None, 1])),
        gpflow.kernels.Matern32(variance=1.5, lengthscales=0.7),
        LIKELIHOOD,
        gpflow.functions.Constant(0.2),
        objective="elbo",
    )
    model.infer(tolerance=1e-9)
    np.testing.assert_allclose(prediction(model), prediction(inferred()), rtol=1e-8)
    posterior = model.posterior("variable")
    loss = model.training_loss_closure()
    loss()

    new = data(8, N + 7)
    model.update_data(new)
    fresh = CVIModel(new, model.kernel, model.likelihood, model.mean_function)
    # The sites start again: q = prior.
    np.testing.assert_array_equal(lambdas(model), np.zeros((2, N + 7, 1)))
    np.testing.assert_allclose(prediction(model), prediction(fresh), rtol=1e-12)
    for m in (model, fresh):
        m.infer(tolerance=1e-9)
    np.testing.assert_allclose(prediction(model), prediction(fresh), rtol=1e-8)
    np.testing.assert_allclose(loss(), -fresh.elbo(), rtol=1e-8)
    posterior.update_cache()
    np.testing.assert_allclose(np.stack(posterior.predict_f(x_new())), prediction(fresh), rtol=1e-7)


def test_variables_that_changed_length_without_update_data_are_refused_in_words() -> None:
    X, Y = data()
    variables = tf.Variable(X, shape=[None, 1]), tf.Variable(Y, shape=[None, 1])
    model = CVIModel(variables, gpflow.kernels.Matern32(), LIKELIHOOD)
    for variable, value in zip(variables, data(8, N + 7), strict=True):
        variable.assign(value)
    for call in (
        model.elbo,
        model.natgrad_step,
        model.infer,
        model.training_loss,
        model.posterior,
        lambda: model.predict_f(x_new()),
    ):
        with pytest.raises(InvalidDataError, match=r"model\.update_data\(\(X, Y\)\)"):
            call()
    with pytest.raises(tf.errors.InvalidArgumentError, match="update_data|Incompatible shapes"):
        tf.function(model.elbo)()


# The training loss


def test_priors_count() -> None:
    model, other = build(), build()
    prior = tfp.distributions.Gamma(np.float64(2.0), np.float64(3.0))
    model.kernel.lengthscales.prior = prior
    # GPflow's priors are on the constrained value.
    np.testing.assert_allclose(
        model.training_loss(), other.training_loss() - prior.log_prob(np.float64(0.7)), rtol=1e-9
    )
    gradients = []
    for m in (model, other):
        with tf.GradientTape() as tape:
            loss = m.training_loss()
        variable = m.kernel.lengthscales.unconstrained_variable
        gradients.append(tape.gradient(loss, variable).numpy())
    # d/dl log Gamma(l; 2, 3) = 1/l − 3, through l = softplus(u): dl/du = 1 − exp(−l)
    expected = -(1.0 / 0.7 - 3.0) * -np.expm1(-0.7)
    np.testing.assert_allclose(gradients[0] - gradients[1], expected, rtol=1e-6)


def test_scipy_compiled_and_eager_find_the_same_optimum() -> None:
    found = []
    for compile_loss in (True, False):
        model = build()
        model.kernel.lengthscales.prior = tfp.distributions.Gamma(np.float64(3.0), np.float64(3.0))
        model.kernel.variance.prior = tfp.distributions.Gamma(np.float64(3.0), np.float64(2.0))
        result = gpflow.optimizers.Scipy().minimize(
            model.training_loss, model.trainable_variables, compile=compile_loss
        )
        assert result.success, result.message
        np.testing.assert_allclose(result.jac, 0.0, atol=1e-4)
        found.append(np.concatenate([[result.fun], result.x]))
    # L-BFGS stops at a gradient of 1e-5: optima to 1e-4.
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("objective", ["elbo", "ep_like"])
def test_training_loss_is_the_objective_at_the_inferred_sites(objective: Any) -> None:
    model, other = build(objective), inferred()
    expected = -float({"elbo": other.elbo, "ep_like": other.ep_like_log_marginal}[objective]())
    compiled = [model.training_loss_closure()] if objective == "elbo" else []
    for loss in (
        model.training_loss,
        model.training_loss_closure(compile=False),
        gpflow.models.training_loss_closure(model, model.data, compile=False),
        *compiled,
    ):
        value = loss()
        assert value.shape == ()
        np.testing.assert_allclose(value, expected, rtol=1e-8)
    np.testing.assert_allclose(model.maximum_log_likelihood_objective(), -expected, rtol=1e-8)
    np.testing.assert_allclose(
        gpflow.models.maximum_log_likelihood_objective(model, model.data), -expected, rtol=1e-8
    )


def test_float32() -> None:
    expected = inferred()
    expected_loss = float(expected.training_loss())
    expected_prediction = prediction(expected)
    gpflow.config.set_default_float(np.float32)
    X, Y = (a.astype(np.float32) for a in data())
    model = CVIModel(
        (X, Y),
        gpflow.kernels.Matern32(variance=1.5, lengthscales=0.7),
        LIKELIHOOD,
        gpflow.functions.Constant(np.float32(0.2)),
        objective="elbo",
    )
    result = model.infer(tolerance=1e-4)
    assert result.converged, result.message
    mean, variance = model.predict_f(x_new().astype(np.float32))
    assert mean.dtype == variance.dtype == tf.float32
    # Single precision carries 1e-7, and the residual of the E-step is 1e-4.
    np.testing.assert_allclose(
        np.stack([mean, variance]), expected_prediction, rtol=1e-3, atol=1e-3
    )
    with tf.GradientTape() as tape:
        loss = model.training_loss()
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-4)
    assert all(np.isfinite(g).all() for g in tape.gradient(loss, model.trainable_variables))


def test_set_trainable_never_offers_the_sites_to_an_optimiser() -> None:
    model = CVIModel(*_shared_parts())
    before = [id(v) for v in model.trainable_variables]
    gpflow.set_trainable(model, True)
    assert not model.sites.lambda_1.trainable
    assert [id(v) for v in model.trainable_variables] == before


def test_frozen_copy_of_a_trained_model_predicts() -> None:
    model = CVIModel(*_shared_parts())
    gpflow.optimizers.Scipy().minimize(
        model.training_loss, model.trainable_variables, options={"maxiter": 2}
    )
    expected = model.predict_f(model.data[0])
    frozen = gpflow.utilities.freeze(model)
    for a, b in zip(frozen.predict_f(model.data[0]), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)


def test_posterior_cache_follows_the_hyperparameters_after_training() -> None:
    model = CVIModel(*_shared_parts())
    model.training_loss()
    posterior = model.posterior()
    model.kernel.variance.assign(9.0)
    posterior.update_cache()
    cached = posterior.predict_f(model.data[0])
    for a, b in zip(cached, model.predict_f(model.data[0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8)


def _shared_parts():
    rng = np.random.default_rng(77)
    X = rng.normal(size=(12, 1))
    Y = (np.sin(2 * X) + 0.3 * rng.normal(size=X.shape) > 0).astype(float)
    return (X, Y), gpflow.kernels.Matern52(), ProbitBernoulli()
