"""The training loss has the exact total gradient of the collapsed objective."""

from __future__ import annotations

import itertools

import gpflow
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

import gpflow_hybrid as gh
from tests.selection import by_speed

OBJECTIVES = ["elbo", 0.5, "ep_like"]
KERNELS = {
    "sum": lambda: gpflow.kernels.Matern52() + gpflow.kernels.Linear(variance=0.5),
    "product": lambda: (
        gpflow.kernels.SquaredExponential(lengthscales=2.0)
        * gpflow.kernels.Matern32(lengthscales=3.0)
    ),
    "ard": lambda: gpflow.kernels.Matern52(variance=3.0, lengthscales=[0.7, 2.0]),
    "changepoints": lambda: gpflow.kernels.ChangePoints(
        [gpflow.kernels.SquaredExponential(), gpflow.kernels.Matern32(lengthscales=0.5)],
        locations=[0.1],
        steepness=2.0,
    ),
}


def inputs(seed: int = 0, num: int = 14) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(num, 2))


def binary(X: np.ndarray) -> np.ndarray:
    noise = np.random.default_rng(9).normal(size=(len(X), 1))
    return (np.sin(2 * X[:, :1]) + 0.5 * noise > 0).astype(float)


def check_gradient(model: gh.CVIModel, rtol: float = 1e-5, step: float = 1e-4) -> None:
    """Against central differences of the loss, each evaluated at its own optimum λ*."""
    with tf.GradientTape() as tape:
        loss = model.training_loss()
    gradients = tape.gradient(loss, model.trainable_variables)
    norm = max(float(tf.norm(g)) for g in gradients)
    assert norm > 1e-3, "a vanishing gradient tests nothing"
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        kept = np.array(variable.numpy())
        for index in np.ndindex(kept.shape):
            values = []
            for sign in (2, 1, -1, -2):
                moved = kept.copy()
                moved[index] += sign * step
                variable.assign(moved)
                values.append(float(model.training_loss()))
            variable.assign(kept)
            # Fourth order, so that the step's own error is far below the tolerance.
            difference = (-values[0] + 8 * values[1] - 8 * values[2] + values[3]) / (12 * step)
            np.testing.assert_allclose(gradient.numpy()[index], difference, atol=rtol * norm)


PROBIT = gh.likelihoods.ProbitBernoulli()  # one instance: its compiled graphs are reused


@pytest.mark.parametrize(
    ("kernel", "objective"),
    by_speed(
        itertools.product(KERNELS, OBJECTIVES),
        [("sum", "elbo"), ("product", 0.5), ("ard", "ep_like"), ("changepoints", "ep_like")],
    ),
)
def test_gradient_over_kernels(kernel, objective):
    X = inputs()
    Y = binary(X)
    if kernel == "changepoints":
        X = X[:, :1]  # GPflow's takes one input dimension
    model = gh.CVIModel((X, Y), KERNELS[kernel](), PROBIT, objective=objective)
    check_gradient(model)


def heteroskedastic(X):
    Y = np.sin(2 * X[:, :1]) + 0.3 * np.random.default_rng(1).normal(size=(len(X), 1))
    kernel = gpflow.kernels.SeparateIndependent(
        [gpflow.kernels.SquaredExponential(), gpflow.kernels.Matern32(variance=0.5)]
    )
    return Y, kernel, gpflow.likelihoods.HeteroskedasticTFPConditional()


def poisson(X):
    Y = np.random.default_rng(2).poisson(np.exp(1 + X[:, :1])).astype(float)
    return Y, gpflow.kernels.Matern52(), gpflow.likelihoods.Poisson()


def student(X):
    Y = np.sin(2 * X[:, :1]) + 0.2 * np.random.default_rng(3).standard_t(3, size=(len(X), 1))
    Y[0] += 6.0
    return Y, gpflow.kernels.Matern52(), gpflow.likelihoods.StudentT(scale=0.4)


def bernoulli(X):
    return binary(X), gpflow.kernels.Matern52(variance=9.0), gpflow.likelihoods.Bernoulli()


def multiclass(X):
    Y = (binary(X) + (X[:, 1:] > 0)).astype(float)
    return Y, gpflow.kernels.Matern52(), gpflow.likelihoods.MultiClass(3)


@pytest.mark.parametrize(
    ("make", "objective"),
    by_speed(
        itertools.product([bernoulli, student, poisson, heteroskedastic, multiclass], OBJECTIVES),
        [
            (bernoulli, "elbo"),
            (bernoulli, "ep_like"),
            (student, 0.5),
            (poisson, "ep_like"),
            (heteroskedastic, "ep_like"),
            (multiclass, "ep_like"),
        ],
    ),
)
def test_gradient_over_likelihoods(make, objective):
    X = inputs(4)
    Y, kernel, likelihood = make(X)
    model = gh.CVIModel((X, Y), kernel, likelihood, objective=objective)
    assert model.infer(tolerance=1e-8).converged
    check_gradient(model)


@pytest.mark.parametrize("objective", ["elbo", "ep_like"])
def test_gradient_with_mean_function_latents_and_prior(objective):
    X = inputs(5)
    Y = np.concatenate([binary(X), binary(-X)], axis=1)
    kernel = gpflow.kernels.Matern52()
    kernel.lengthscales.prior = tfp.distributions.LogNormal(np.float64(0.5), np.float64(0.3))
    model = gh.CVIModel(
        (X, Y),
        kernel,
        PROBIT,
        gpflow.functions.Linear(A=[[0.3, 0.1], [-0.2, 0.4]], b=[0.1, -0.3]),
        objective=objective,
    )
    assert len(model.trainable_variables) == 4
    check_gradient(model)


def sonar_fold(fold: int = 0):
    X, Y = gh.datasets.load("sonar")
    train, test = list(gh.datasets.folds(len(X)))[fold]
    X_train, X_test = gh.datasets.standardise(X[train], X[test])
    return (X_train, Y[train]), (X_test, Y[test])


def test_objective_is_the_one_at_the_optimal_sites():
    data, _ = sonar_fold()
    model = gh.CVIModel(data, gpflow.kernels.Matern52(lengthscales=5.0), PROBIT)
    reference = gpflow.utilities.deepcopy(model)
    reference.infer(tolerance=1e-9)
    for objective, value in (
        ("elbo", reference.elbo()),
        (0.5, reference.power_ep_log_marginal(0.5)),
        ("ep_like", reference.ep_like_log_marginal()),
    ):
        model.objective = objective
        np.testing.assert_allclose(model.maximum_log_likelihood_objective(), value, rtol=1e-8)


@pytest.mark.parametrize(
    ("objective", "optimum"), [("elbo", (2.46, 1.48)), ("ep_like", (2.33, 2.29))]
)
def test_scipy_is_all_of_training(objective, optimum):
    # The optima of METHOD's independent implementation, for the first fold.
    data, _ = sonar_fold()
    kernel = gpflow.kernels.Matern52()
    model = gh.CVIModel(data, kernel, PROBIT, objective=objective)
    result = gpflow.optimizers.Scipy().minimize(model.training_loss, model.trainable_variables)
    assert result.success
    assert result.nfev <= 40
    found = np.log(kernel.lengthscales.numpy()), 0.5 * np.log(kernel.variance.numpy())
    np.testing.assert_allclose(found, optimum, atol=0.01)
    with tf.GradientTape() as tape:
        loss = model.training_loss()
    for gradient in tape.gradient(loss, model.trainable_variables):
        np.testing.assert_allclose(gradient, 0.0, atol=0.02)  # L-BFGS stops at ftol, not at zero


def test_elbo_training_reaches_the_optimum_of_vgp():
    X = inputs(6, num=25)
    Y = binary(X)
    ours = gh.CVIModel(
        (X, Y), gpflow.kernels.Matern52(), gpflow.likelihoods.Bernoulli(), objective="elbo"
    )
    theirs = gpflow.models.VGP((X, Y), gpflow.kernels.Matern52(), gpflow.likelihoods.Bernoulli())
    for model in (ours, theirs):
        gpflow.optimizers.Scipy().minimize(
            model.training_loss, model.trainable_variables, options={"maxiter": 3000}
        )
    # VGP adds jitter to K and stops when its 350 variational parameters are nearly optimal.
    np.testing.assert_allclose(ours.elbo(), theirs.elbo(), atol=2e-4)
    for a, b in zip(ours.kernel.parameters, theirs.kernel.parameters, strict=True):
        np.testing.assert_allclose(a, b, rtol=0.02)


def test_sites_follow_the_hyperparameters_after_training():
    data, test = sonar_fold()
    model = gh.CVIModel(data, gpflow.kernels.Matern52(), PROBIT)
    model.training_loss()
    model.kernel.variance.assign(7.0)  # as an optimiser does after its last evaluation
    fresh = gh.CVIModel(data, gpflow.kernels.Matern52(variance=7.0), PROBIT)
    fresh.infer(tolerance=1e-9)
    np.testing.assert_allclose(model.elbo(), fresh.elbo(), rtol=1e-8)
    model.training_loss()
    model.kernel.variance.assign(7.0)
    for a, b in zip(model.predict_f(test[0]), fresh.predict_f(test[0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_sites_of_the_user_do_not_follow():
    data, _ = sonar_fold()
    model = gh.CVIModel(data, gpflow.kernels.Matern52(), PROBIT)
    for claim in (model.infer, lambda: model.natgrad_step(0.5)):
        model.training_loss()
        claim()
        kept = model.sites.lambda_1.numpy()
        model.kernel.variance.assign(model.kernel.variance.numpy() + 1.0)
        model.elbo()
        model.ep_like_log_marginal()
        model.predict_f(data[0])
        np.testing.assert_array_equal(model.sites.lambda_1, kept)
    model.training_loss()
    model.sites.lambda_1.assign(kept * 0.5)
    model.kernel.variance.assign(9.0)
    model.elbo()
    np.testing.assert_array_equal(model.sites.lambda_1, kept * 0.5)


def test_a_compiled_function_refuses_the_mixture():
    data, _ = sonar_fold()
    model = gh.CVIModel(data, gpflow.kernels.Matern52(), PROBIT)
    compiled = tf.function(model.elbo)
    model.training_loss()
    np.testing.assert_allclose(compiled(), model.elbo(), rtol=1e-12)
    model.kernel.variance.assign(7.0)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"call model\.infer\(\)"):
        compiled()
    model.infer()
    np.testing.assert_allclose(compiled(), model.elbo(), rtol=1e-12)


def test_objectives_are_pure():
    data, _ = sonar_fold()
    model = gh.CVIModel(data, gpflow.kernels.Matern52(), PROBIT)
    model.natgrad_step(0.3)
    kept = [x.numpy() for x in model.sites.values]
    model.elbo(), model.ep_like_log_marginal(), model.power_ep_log_marginal(0.5)
    for before, after in zip(kept, model.sites.values, strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.filterwarnings("ignore::gpflow_hybrid.ConvergenceWarning")
def test_a_bad_warm_start_does_not_matter():
    X = inputs(7, num=30)
    Y = binary(X)  # heavy-tailed noise on labels: the extreme settings of an optimiser's first step
    model = gh.CVIModel((X, Y), gpflow.kernels.Matern52(), gpflow.likelihoods.StudentT())
    first = float(model.training_loss())
    model.likelihood.scale.assign(0.02)
    model.training_loss()
    model.likelihood.scale.assign(1.0)
    np.testing.assert_allclose(model.training_loss(), first, rtol=1e-8)


def test_never_hands_on_a_nan():
    X = inputs(8)
    Y = np.random.default_rng(2).poisson(2.0, size=(len(X), 1)).astype(float)
    mean = gpflow.functions.Constant(1.0)
    model = gh.CVIModel((X, Y), gpflow.kernels.Matern52(), gpflow.likelihoods.Poisson(), mean)
    mean.c.assign(2000.0)
    with pytest.raises(gh.NonFiniteError, match="could not start"):
        model.training_loss()
    with pytest.raises(tf.errors.InvalidArgumentError, match="could not start"):
        tf.function(model.training_loss)()
    mean.c.assign(1.0)
    assert np.isfinite(model.training_loss())


@pytest.mark.parametrize("compile", [True, False])
def test_a_monitor_sees_the_objective_of_every_step(compile):
    X = inputs(10, num=20)
    model = gh.CVIModel((X, binary(X)), gpflow.kernels.Matern52(), PROBIT)
    seen = []
    task = gpflow.monitor.ExecuteCallback(lambda: seen.append(-float(model.ep_like_log_marginal())))
    monitor = gpflow.monitor.Monitor(gpflow.monitor.MonitorTaskGroup(task))
    result = gpflow.optimizers.Scipy().minimize(
        model.training_loss,
        model.trainable_variables,
        step_callback=monitor,
        compile=compile,
        track_loss_history=True,
    )
    assert len(seen) == result.nit > 2
    np.testing.assert_allclose(seen, result.loss_history, rtol=1e-8)
    np.testing.assert_allclose(-model.ep_like_log_marginal(), result.fun, rtol=1e-8)


def test_a_line_search_backs_away_from_a_lengthscale_of_zero():
    X = inputs(11)
    model = gh.CVIModel((X, binary(X)), gpflow.kernels.Matern52(), PROBIT)
    variable = model.kernel.lengthscales.unconstrained_variable

    @tf.function
    def loss_and_gradient():
        with tf.GradientTape() as tape:
            loss = model.training_loss()
        return loss, tape.gradient(loss, model.trainable_variables)

    variable.assign(-2000.0)  # softplus is exactly zero
    with pytest.raises(tf.errors.InvalidArgumentError, match="training has not begun"):
        loss_and_gradient()
    variable.assign(0.5)
    proper, _ = loss_and_gradient()
    variable.assign(-2000.0)
    loss, gradients = loss_and_gradient()
    assert np.isfinite(loss)
    assert loss > proper
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, 0.0)
    variable.assign(0.5)
    np.testing.assert_allclose(loss_and_gradient()[0], proper, rtol=1e-9)
