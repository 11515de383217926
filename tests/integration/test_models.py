"""Every model that has a collapsed training loss, its priors, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

import gpflow_hybrid as gh
from tests.integration.cases import classifier, exact_model, labels, regression_data

X_NEW = np.linspace(-0.5, 3.5, 7)[:, None]


def on_a_grid(model: Any, *data: Any) -> tuple[float, np.ndarray]:
    """Log evidence and probabilities by a plain grid over both logarithms, 17 × 17."""
    log_l, log_v = np.linspace(-2.0, 2.0, 17), np.linspace(-2.2, 4.2, 17)
    priors = [p.prior for p in (model.kernel.lengthscales, model.kernel.variance)]
    for p in (model.kernel.lengthscales, model.kernel.variance):
        p.prior = None
    loss = model.training_loss_closure(*data) if data else model.training_loss

    @tf.function(autograph=False)
    def at(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        model.kernel.lengthscales.assign(tf.exp(a))
        model.kernel.variance.assign(tf.exp(b))
        return -loss()

    predict = tf.function(lambda: model.predict_y(X_NEW)[0], autograph=False)
    masses, means = [], []
    for a in log_l:
        for b in log_v:
            prior = priors[0].log_prob(np.exp(a)) + a + priors[1].log_prob(np.exp(b)) + b
            masses.append(float(at(tf.constant(a), tf.constant(b)) + prior))
            means.append(np.squeeze(predict()))
    masses = np.array(masses)
    w = np.exp(masses - masses.max())
    area = (log_l[1] - log_l[0]) * (log_v[1] - log_v[0])
    return float(masses.max() + np.log(w.sum() * area)), (w / w.sum()) @ np.stack(means)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (gh.CVIModel, {}),
        pytest.param(gh.CVIModel, {"objective": 0.5}, marks=pytest.mark.slow),
        (gh.EPModel, {}),
        pytest.param(gh.LaplaceModel, {}, marks=pytest.mark.slow),
    ],
    ids=["EP-like", "power", "EP", "Laplace"],
)
def test_dense_models_against_a_plain_grid(kind: Any, options: dict[str, Any]) -> None:
    model = classifier(kind, **options)
    found = gh.integrate_hyperparameters(model, tolerance=2e-3)
    evidence, p = on_a_grid(model)
    assert abs(found.log_evidence - evidence) < 5e-3  # the tolerance is that of each datum
    np.testing.assert_allclose(np.squeeze(found.predict_y(X_NEW)[0]), p, atol=2e-3)


@pytest.mark.slow
def test_a_sparse_model_against_a_plain_grid() -> None:
    model = classifier(gh.SparseCVIModel)
    gpflow.set_trainable(model.inducing_variable, False)
    found = gh.integrate_hyperparameters(model, data=labels(), tolerance=2e-3)
    evidence, p = on_a_grid(model, labels())
    assert abs(found.log_evidence - evidence) < 5e-3
    np.testing.assert_allclose(np.squeeze(found.predict_y(X_NEW)[0]), p, atol=2e-3)


def test_inducing_points_are_trained_and_not_integrated(tmp_path: Any) -> None:
    model = classifier(gh.SparseCVIModel)
    before = model.inducing_variable.Z.numpy()
    found = gh.integrate_hyperparameters(model, data=labels(), tolerance=0.1)
    assert set(found.settings[0]) == {".kernel.variance", ".kernel.lengthscales"}
    np.testing.assert_array_equal(model.inducing_variable.Z, before)
    held = found.mixture.held()[".inducing_variable.Z"]
    assert np.max(np.abs(held - before)) > 1e-3
    found.save(tmp_path / "sparse.npz")
    loaded = gh.HyperparameterPosterior.load(tmp_path / "sparse.npz", model, labels())
    np.testing.assert_allclose(loaded.predict_y(X_NEW)[0], found.predict_y(X_NEW)[0], atol=1e-10)


def test_default_priors_are_scaled_to_the_data_and_stated() -> None:
    X, Y = regression_data()
    model = gpflow.models.GPR((10.0 * X, 5.0 * Y), gpflow.kernels.Matern32())
    gpflow.set_trainable(model.likelihood, False)
    words = gh.integrate_hyperparameters(model, tolerance=0.2).priors
    scale = np.median(np.abs(10.0 * (X - X.T))[np.triu_indices(12, 1)])
    assert f"median {scale:.4g}" in words[".kernel.lengthscales"]
    assert f"median {np.var(5.0 * Y):.4g}" in words[".kernel.variance"]
    assert all("default" in text for text in words.values())
    given = {".kernel.lengthscales": tfp.distributions.LogNormal(np.float64(2.0), np.float64(0.1))}
    other = gh.integrate_hyperparameters(model, tolerance=0.2, priors=given)
    assert "given" in other.priors[".kernel.lengthscales"]
    assert abs(np.log(other[".kernel.lengthscales"].quantiles[0.5]) - 2.0) < 0.2


def test_a_flat_prior_is_refused_where_the_integral_diverges() -> None:
    """Labels that a wiggly enough function explains: EP's value has a plateau towards large variances."""
    X, Y = gh.datasets.load("sonar")
    train, _ = next(iter(gh.datasets.folds(len(X))))
    (X_train,) = gh.datasets.standardise(X[train])
    kernel = gpflow.kernels.Matern52(variance=30.0, lengthscales=10.0)
    model = gh.EPModel((X_train, Y[train]), kernel, gh.likelihoods.ProbitBernoulli())
    with pytest.raises(gh.InvalidDataError, match="The integral over .kernel.variance diverges"):
        gh.integrate_hyperparameters(model, priors={".kernel.variance": "flat"})


def test_flat_priors_are_refused_where_the_data_bound_their_product_alone() -> None:
    rng = np.random.default_rng(3)
    X = np.linspace(0.0, 6.0, 20)[:, None]
    kernel = gpflow.kernels.RBF() * gpflow.kernels.Matern52()
    model = gpflow.models.GPR((X, np.sin(2.0 * X) + 0.1 * rng.normal(size=X.shape)), kernel)
    model.likelihood.variance.assign(0.01)
    for part in (kernel.kernels[0].lengthscales, kernel.kernels[1].lengthscales, model.likelihood):
        gpflow.set_trainable(part, False)
    paths = [f".kernel.kernels[{i}].variance" for i in range(2)]
    words = (
        f"The integral over {paths[0]} and {paths[1]} diverges under a flat prior: at {paths[0]} = "
    )
    with pytest.raises(gh.InvalidDataError, match=re.escape(words)):
        gh.integrate_hyperparameters(model, priors=dict.fromkeys(paths, "flat"))


def test_a_flat_prior_is_taken_where_the_data_bound_the_parameter() -> None:
    rng = np.random.default_rng(3)
    X = np.linspace(0.0, 6.0, 60)[:, None]
    model = gpflow.models.GPR(
        (X, np.sin(2.0 * X) + 0.1 * rng.normal(size=X.shape)), gpflow.kernels.RBF()
    )
    gpflow.set_trainable(model.kernel.variance, False)
    gpflow.set_trainable(model.likelihood, False)
    model.likelihood.variance.assign(0.01)
    found = gh.integrate_hyperparameters(model, priors={".kernel.lengthscales": "flat"})
    assert found.converged
    assert "improper" in found.priors[".kernel.lengthscales"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "laplace"}, "method must be"),
        ({"tolerance": 0.0}, "tolerance must be"),
        ({"max_evaluations": 0}, "max_evaluations must be"),
        ({"max_evaluations": 8}, "max_evaluations must be at least 9 for 2 free scalars; found 8"),
        ({"num_chains": 0}, "num_chains must be"),
        ({"num_samples": 1.5}, "num_samples must be"),
        ({"num_burnin": 0}, "num_burnin must be"),
        ({"seed": -1}, "seed must be"),
        ({"priors": {".kernel.period": "flat"}}, "priors names '.kernel.period'"),
        ({"priors": {".kernel.variance": 3.0}}, "must be a distribution"),
        ({"priors": "flat"}, "priors must be a dictionary .* found 'flat'"),
        (
            {"priors": {"kernel.variance": tfp.distributions.LogNormal(0.0, 1.0)}},
            r"priors\['.kernel.variance'\] must be of float64, .* found float32",
        ),
        (
            {"method": "hmc", "num_samples": 3},
            "num_samples must be at least 4 for 2 free scalars and 4 chains; found 3",
        ),
        (
            {"method": "hmc", "num_samples": 5, "num_chains": 2},
            "num_samples must be at least 6 for 2 free scalars and 2 chains; found 5",
        ),
        ({"data": regression_data()}, "data must be left out"),
    ],
)
def test_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(gh.InvalidDataError, match=message):
        gh.integrate_hyperparameters(exact_model(), **arguments)


def test_models_are_refused() -> None:
    kernel = gpflow.kernels.Matern32()
    with pytest.raises(
        gh.InvalidDataError, match="function of the hyperparameters alone.*found VGP"
    ):
        gh.integrate_hyperparameters(
            gpflow.models.VGP(regression_data(), kernel, gpflow.likelihoods.Gaussian())
        )
    held = exact_model()
    gpflow.set_trainable(held, False)
    with pytest.raises(gh.InvalidDataError, match="must have a trainable hyperparameter"):
        gh.integrate_hyperparameters(held)
    X = np.random.default_rng(0).normal(size=(10, 7))
    many = gpflow.models.GPR((X, X[:, :1]), gpflow.kernels.RBF(lengthscales=np.ones(7)))
    with pytest.raises(
        gh.InvalidDataError, match='method="grid" is for up to 6 free scalars; found 9'
    ):
        gh.integrate_hyperparameters(many, method="grid")
    variable = exact_model()
    variable.kernel.extra = tf.Variable(1.0, dtype=tf.float64)
    with pytest.raises(gh.InvalidDataError, match="is a trainable tf.Variable"):
        gh.integrate_hyperparameters(variable)


def test_a_likelihood_that_was_given_more_points_has_them_again(tmp_path: Any) -> None:
    X, Y = regression_data()
    likelihood = gpflow.likelihoods.StudentT()
    likelihood.quadrature = gpflow.quadrature.NDiagGHQuadrature(1, 50)
    model = gh.CVIModel((X, Y), gpflow.kernels.Matern32(), likelihood, objective="elbo")
    gpflow.set_trainable(model.kernel, False)
    found = gh.integrate_hyperparameters(model, tolerance=0.3)
    found.save(tmp_path / "result.npz")
    parts = (X, Y), gpflow.kernels.Matern32(), gpflow.likelihoods.StudentT()
    other = gh.CVIModel(*parts, objective="elbo")
    gpflow.set_trainable(other.kernel, False)
    loaded = gh.HyperparameterPosterior.load(tmp_path / "result.npz", other)
    assert loaded.mixture.likelihood.quadrature.n_gh == found.mixture.likelihood.quadrature.n_gh
    new = X_NEW, np.sin(2.0 * X_NEW)
    np.testing.assert_allclose(
        loaded.predict_log_density(new), found.predict_log_density(new), atol=1e-10
    )
