"""The training loss on arrays is the training loss: value, gradient, and what is refused."""

from __future__ import annotations

from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from gpflow.utilities import set_trainable

import gpflow_hybrid as gh
from gpflow_hybrid.array_parameters import transform_of
from gpflow_hybrid.priors.stationary import StationaryMatrix, is_stationary, matrices
from gpflow_hybrid.training import curvatures, fit_verdicts
from gpflow_hybrid.training.curvatures import units_of
from gpflow_hybrid.training.optimiser_coordinates import Coordinates

RNG = np.random.default_rng(0)
X = np.vstack([RNG.normal(size=(29, 3)), np.zeros((1, 3))])
X[28] = X[27]  # a distance of zero
LABELS = (X[:, :1] + 0.3 * RNG.normal(size=(30, 1)) > 0.0).astype(float)
REAL = np.sin(2.0 * X[:, :1]) + 0.1 * RNG.normal(size=(30, 1))
K = gpflow.kernels
KERNELS = {
    "matern12": lambda: K.Matern12(1.3, 0.7),
    "matern32": lambda: K.Matern32(1.3, 0.7),
    "matern52": lambda: K.Matern52(1.3, 0.7),
    "exponential": lambda: K.Exponential(1.3, 0.7),
    "rbf": lambda: K.SquaredExponential(1.3, 0.7),
    "ard": lambda: K.Matern52(1.3, [0.7, 1.5, 3.0]),
    "rough_ard": lambda: K.Matern12(1.3, [0.7, 1.5, 3.0]),
    "columns": lambda: K.Matern32(1.3, 0.7, active_dims=[2, 0]),
}


@pytest.mark.parametrize("name", KERNELS)
def test_matrices_and_adjoints_are_gpflows(name: str) -> None:
    kernel = KERNELS[name]()
    matrix = StationaryMatrix(kernel, X)
    values = [p.numpy() for p in matrix.parameters]
    np.testing.assert_allclose(matrix.evaluate(*values), kernel(X), rtol=1e-9, atol=1e-9)
    K_bar = np.random.default_rng(1).normal(size=(30, 30))
    K_bar = K_bar + K_bar.T
    constrained = [tf.constant(v) for v in values]
    with tf.GradientTape() as tape:
        tape.watch(constrained)
        copy = type(kernel)(*constrained, active_dims=kernel.active_dims)
        copy.variance, copy.lengthscales = constrained
        loss = tf.reduce_sum(K_bar * copy(X))
    expected = tape.gradient(loss, constrained)
    for found, gradient in zip(matrix.pull_back(*values, K_bar), expected, strict=True):
        np.testing.assert_allclose(found, gradient, rtol=1e-8, atol=1e-8)
    np.testing.assert_array_equal(matrices(kernel, X)[0], matrix.evaluate(*values))


def test_subclasses_and_other_kernels_are_not_known() -> None:
    class Own(K.Matern52):
        def K_r(self, r: Any) -> Any:
            return 2.0 * super().K_r(r)

    assert not is_stationary(Own())
    assert not is_stationary(K.Matern52() + K.White())
    assert matrices(K.Linear(), X) is None


@pytest.mark.parametrize(
    "bijector",
    [
        None,
        tfp.bijectors.Exp(),
        tfp.bijectors.Softplus(),
        tfp.bijectors.Softplus(low=np.float64(0.3)),
        gpflow.utilities.positive(lower=1e-3),
    ],
)
def test_transforms_are_those_of_parameters(bijector: Any) -> None:
    parameter = gpflow.Parameter(np.array([0.5, 2.0]), transform=bijector)
    transform = transform_of(parameter)
    assert transform is not None
    u = parameter.unconstrained_variable
    with tf.GradientTape() as tape:
        value = tf.convert_to_tensor(parameter)
    found = transform(u.numpy())
    np.testing.assert_allclose(found[0], value, rtol=1e-12)
    np.testing.assert_allclose(found[1], tape.gradient(value, u), rtol=1e-12)


def test_another_transform_is_not_known() -> None:
    assert transform_of(gpflow.Parameter(0.5, transform=tfp.bijectors.Sigmoid())) is None


L = gpflow.likelihoods


def tied() -> gh.CVIModel:
    """One parameter in kernel and likelihood."""
    likelihood = L.Gaussian(0.4)
    kernel = K.Matern52()
    kernel.variance = likelihood.variance
    return gh.CVIModel((X, REAL), kernel, likelihood)


def with_priors() -> gh.CVIModel:
    """On the parameter and on the unconstrained value; that of a held parameter does not count."""
    model = gh.CVIModel((X, REAL), K.Matern52(), L.Gaussian(0.1))
    model.kernel.variance.prior = tfp.distributions.Gamma(np.float64(2.0), np.float64(1.0))
    model.kernel.lengthscales.prior = tfp.distributions.Normal(np.float64(0.5), np.float64(0.3))
    model.kernel.lengthscales.prior_on = "unconstrained"
    model.likelihood.variance.prior = tfp.distributions.LogNormal(np.float64(0.0), np.float64(1.0))
    set_trainable(model.likelihood, False)
    return model


MODELS = {
    "tied": tied,
    "priors": with_priors,
    "probit": lambda: gh.CVIModel((X, LABELS), K.Matern52(), gh.likelihoods.ProbitBernoulli()),
    "elbo": lambda: gh.CVIModel(
        (X, LABELS), K.Matern52(), gh.likelihoods.ProbitBernoulli(), objective="elbo"
    ),
    "gaussian": lambda: gh.CVIModel((X, REAL), K.Matern52(1.0, np.ones(3)), L.Gaussian(0.1)),
    "student": lambda: gh.CVIModel((X, REAL), K.Matern52(), L.StudentT(0.3)),
    "gamma": lambda: gh.CVIModel(
        (X, np.exp(REAL)), K.Matern52(), L.Gamma(), gpflow.functions.Constant(np.array([0.2]))
    ),
    "heteroskedastic": lambda: gh.CVIModel(
        (X, REAL),
        K.SeparateIndependent([K.Matern52(), K.RBF()]),
        L.HeteroskedasticTFPConditional(),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_and_its_gradient_are_the_models(name: str) -> None:
    model = MODELS[name]()
    loss = model.loss_on_arrays()
    assert loss is not None
    variables = model.trainable_variables
    scipy = gpflow.optimizers.Scipy
    for shift in (0.0, 0.3):
        x = scipy.pack_tensors(variables).numpy() + shift
        scipy.assign_tensors(variables, scipy.unpack_tensors(variables, tf.constant(x)))
        with tf.GradientTape() as tape:
            expected = model.training_loss()
        gradient = scipy.pack_tensors(tape.gradient(expected, variables)).numpy()
        value, found = loss(x)
        # Inference ends at a residual of 1e-9; the gradient feels it to first order.
        np.testing.assert_allclose(value, float(expected), rtol=1e-9, atol=1e-8)
        np.testing.assert_allclose(found, gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_known_where_a_loss_was_evaluated_last(name: str) -> None:
    """Sites and quality of the E-step are those of another one."""
    model = MODELS[name]()
    loss = model.loss_on_arrays()
    assert loss is not None
    assert loss.arrive() is None  # nothing has been evaluated
    scipy = gpflow.optimizers.Scipy
    x = scipy.pack_tensors(model.trainable_variables).numpy()
    loss(x + 0.1)
    scipy.assign_tensors(
        model.trainable_variables, scipy.unpack_tensors(model.trainable_variables, tf.constant(x))
    )
    assert loss.arrive() is None  # the model is elsewhere
    loss(x)
    found, sites = loss.arrive(), [s.numpy() for s in model.sites.values]
    report = model.refresh()
    assert found is not None
    assert found.residual < 1e-7
    assert found.log_prior == pytest.approx(float(model.log_prior_density()), abs=1e-12)
    assert found.quadrature_error == pytest.approx(report.quadrature_error, rel=1e-4, abs=1e-10)
    for x, y in zip(sites, model.sites.values, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)


def test_the_end_of_a_fit_needs_no_further_e_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["probit"]()
    monkeypatch.setattr(gh.CVIModel, "refresh", None)
    result = gh.fit(model, start="data", log_scale=True)
    assert result.status in ("converged", "no_better_than_prior")
    monkeypatch.undo()
    assert bool(model.sites.is_inferred())
    before = model.predict_f(X)
    assert model.refresh().num_steps == 0
    for x, y in zip(before, model.predict_f(X), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9)
    for path, parameter in gpflow.utilities.parameter_dict(model).items():
        if path in result.hyperparameters:
            np.testing.assert_allclose(result.hyperparameters[path], parameter, rtol=1e-14)


@pytest.mark.parametrize("mean", [None, gpflow.functions.Constant([0.4])])
def test_prior_marginals_are_those_of_the_kernels(mean: Any) -> None:
    kernel = K.SeparateIndependent([K.Matern52(2.0), K.RBF(0.5)])
    model = gh.CVIModel((X, REAL), kernel, MODELS["heteroskedastic"]().likelihood, mean)
    found_mean, variance = fit_verdicts._prior_marginals(model, tf.constant(X))
    np.testing.assert_allclose(variance, np.tile([2.0, 0.5], (30, 1)), rtol=1e-12)
    np.testing.assert_allclose(found_mean, np.full((30, 2), 0.0 if mean is None else 0.4))


def test_what_is_held_is_no_coordinate() -> None:
    model = MODELS["probit"]()
    set_trainable(model.kernel.variance, False)
    value, gradient = model.loss_on_arrays()(np.array([0.7]))
    assert gradient.shape == (1,)
    model.kernel.lengthscales.unconstrained_variable.assign(0.7)
    np.testing.assert_allclose(value, float(model.training_loss()), rtol=1e-9)


def test_parts_that_are_not_known_leave_it_to_the_graph() -> None:
    assert gh.CVIModel((X, LABELS), K.Linear(), L.Bernoulli()).loss_on_arrays() is None
    mean = gpflow.functions.Linear(np.ones((3, 1)))
    assert gh.CVIModel((X, LABELS), K.RBF(), L.Bernoulli(), mean).loss_on_arrays() is None
    variables = tuple(tf.Variable(d) for d in (X, LABELS))
    assert gh.CVIModel(variables, K.RBF(), L.Bernoulli()).loss_on_arrays() is None

    class Own(gh.CVIModel):
        pass

    assert Own((X, LABELS), K.RBF(), L.Bernoulli()).loss_on_arrays() is None
    with gh.linear_algebra("tensorflow"):
        assert MODELS["probit"]().loss_on_arrays() is None


def test_improper_parameters_are_refused_at_first_and_penalised_later() -> None:
    model = MODELS["probit"]()
    loss = model.loss_on_arrays()
    with pytest.raises(gh.NonFiniteError, match="zero or not finite"):
        loss(np.array([-1e4, 1.0]))
    first, _ = loss(np.array([1.0, 1.0]))
    penalty, gradient = loss(np.array([-1e4, 1.0]))
    assert penalty > 100.0 * first
    np.testing.assert_array_equal(gradient, 0.0)
    np.testing.assert_allclose(loss(np.array([1.0, 1.0]))[0], first, rtol=1e-9)


def test_fits_on_arrays_and_in_a_graph_end_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = gh.fit(MODELS["probit"]())
    logarithms = gh.fit(MODELS["probit"](), log_scale=True)
    monkeypatch.setattr(gh.CollapsedModel, "loss_on_arrays", lambda self: None)
    graph = gh.fit(MODELS["probit"]())
    graph_logarithms = gh.fit(MODELS["probit"](), log_scale=True)
    np.testing.assert_allclose(ours.loss, graph.loss, atol=1e-7)
    np.testing.assert_allclose(graph_logarithms.loss, logarithms.loss, atol=1e-6)
    # The tolerance of 1e-2 nats on the gradient is far below 1e-3 nats of the value.
    np.testing.assert_allclose(logarithms.loss, ours.loss, atol=1e-3)
    assert logarithms.converged
    assert graph_logarithms.num_evaluations <= graph.num_evaluations


@pytest.mark.parametrize("mixed", [False, True])
def test_coordinates_go_forth_and_back(mixed: bool) -> None:
    mask = np.array([True, True, True, False])
    rng = np.random.default_rng(0)
    units = np.tril(rng.normal(size=(4, 4))) + 3.0 * np.eye(4) if mixed else None
    coordinates = Coordinates(mask, units)
    u = np.array([-30.0, 0.4, 50.0, -2.0])
    t = np.append(np.log(np.logaddexp(0.0, u[:3])), u[3])
    z = coordinates.inward(u)
    np.testing.assert_allclose(z if units is None else units @ z, t, rtol=1e-12)
    np.testing.assert_allclose(coordinates.outward(z), u, rtol=1e-10)
    step, gradient = 1e-6, rng.normal(size=4)
    numeric = [
        (coordinates.outward(z + step * e) - coordinates.outward(z - step * e)) / (2 * step)
        for e in np.eye(4)
    ]
    inward = coordinates.gradient_inward(z, gradient)
    np.testing.assert_allclose(inward, np.stack(numeric) @ gradient, rtol=1e-6)
    np.testing.assert_allclose(coordinates.gradient_outward(z, inward), gradient, rtol=1e-10)
    in_t = np.append(np.exp(t[:3]) / -np.expm1(-np.exp(t[:3])), 1.0) * gradient
    np.testing.assert_allclose(coordinates.in_logarithms(inward), in_t, rtol=1e-10)
    assert Coordinates().bounds(z) is None
    assert coordinates.bounds(z)[3] == (-np.inf, np.inf)
    # A logarithm that is in no other's units may be moved by a factor of a million.
    lowest = coordinates.bounds(z)[0][0] - z[0]
    np.testing.assert_allclose(lowest * (1.0 if units is None else units[0, 0]), -np.log(1e6))


def test_the_guess_of_the_curvature_knows_lengthscales_and_variances() -> None:
    kernel = K.Matern52(lengthscales=np.ones(2)) * K.Linear()
    model = gh.CVIModel((X, LABELS), kernel, gh.likelihoods.ProbitBernoulli())
    variables = model.trainable_variables
    C = units_of(model, variables, 200)
    matern, linear = kernel.kernels
    sizes = np.cumsum([0, *(int(np.prod(v.shape)) for v in variables)])
    at = {id(v): i for v, i in zip(variables, sizes, strict=False)}
    i = at[id(matern.lengthscales.unconstrained_variable)]
    j = at[id(matern.variance.unconstrained_variable)]
    k = at[id(linear.variance.unconstrained_variable)]
    curvature = np.linalg.inv(C @ C.T)
    together = np.zeros(4)
    together[i : i + 2] = 1.0  # all lengthscales by a factor e, log σ² − ρ log ℓ being kept
    together[j] = curvatures.RIDGE
    np.testing.assert_allclose(
        together @ curvature @ together, curvatures.IN_LENGTHSCALES * 200, rtol=1e-10
    )
    for place in (j, k):
        np.testing.assert_allclose(curvature[place, place], curvatures.IN_OTHERS * 200, rtol=1e-10)
    np.testing.assert_allclose(np.delete(curvature[k], k), 0.0, atol=1e-12)
    gpflow.set_trainable(matern.lengthscales, False)
    assert units_of(model, model.trainable_variables, 200).shape == (2, 2)


def test_the_first_step_is_not_far() -> None:
    """L-BFGS's own would be the gradient: hundreds of nats a factor e."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(400, 2))
    labels = (np.sin(3.0 * inputs[:, :1]) > 0.0).astype(float)
    seen = []

    model = gh.CVIModel((inputs, labels), K.Matern52(), gh.likelihoods.ProbitBernoulli())
    loss_on_arrays = model.loss_on_arrays

    def watched() -> Any:
        loss = loss_on_arrays()

        def evaluate(x: Any) -> Any:
            value, gradient = loss(x)
            seen.append((np.log(np.logaddexp(0.0, x)), gradient))
            return value, gradient

        evaluate.leave_sites, evaluate.arrive = loss.leave_sites, loss.arrive
        return evaluate

    model.loss_on_arrays = watched
    result = gh.fit(model, log_scale=True)
    assert result.converged
    (start, gradient), (first, _), *_ = seen
    assert np.max(np.abs(first - start)) < 5.0 < 0.2 * np.max(np.abs(gradient))
    assert len(seen) < 15


def test_a_derivative_that_is_not_finite_is_not_handed_on() -> None:
    model = gh.CVIModel((X, LABELS), K.SquaredExponential(), gh.likelihoods.ProbitBernoulli())
    model.kernel.lengthscales = gpflow.Parameter(1.0, transform=tfp.bijectors.Exp())
    loss = model.loss_on_arrays()
    assert loss is not None
    x = gpflow.optimizers.Scipy.pack_tensors(model.trainable_variables).numpy()
    value, _ = loss(x)
    place = [
        v is model.kernel.lengthscales.unconstrained_variable for v in model.trainable_variables
    ]
    x[place.index(True)] = -354.0  # (x − x')²/ℓ² has overflowed
    penalty, gradient = loss(x)
    assert penalty > value
    np.testing.assert_array_equal(gradient, 0.0)
