"""Sparse models on batches, and on data that come as a stream."""

from __future__ import annotations

import warnings
from typing import Any

import gpflow
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import gpflow_hybrid as gh
from gpflow_hybrid import ConvergenceWarning, InvalidDataError
from gpflow_hybrid.inference.inducing import InducingPosterior, Pair, SummedSites
from gpflow_hybrid.models.minibatches import weights_at_other_factors
from gpflow_hybrid.rows import rows_of
from tests.sparse_cases import sparse_problem

PROBLEM = sparse_problem("probit_bernoulli")
DATA = PROBLEM.data


def batches(size: int) -> list[Any]:
    starts = range(0, len(PROBLEM.X), size)
    return [tuple(x[i : i + size] for x in DATA) for i in starts]


def stream(*data: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(data)


# Weights of the total gradient


def test_weights_follow_sites_to_other_factors() -> None:
    rng = np.random.default_rng(1)
    old, new = (
        [np.tril(rng.normal(size=(4, 4))) + 4.0 * np.eye(4) for _ in range(2)] for _ in range(2)
    )
    w, step = (Pair(rng.normal(size=(2, 4)), rng.normal(size=(2, 4, 4))) for _ in range(2))
    moved = SummedSites(*step).at_other_factors(old, new)
    found = weights_at_other_factors(w, old, new).flat() @ Pair(*moved).flat()
    np.testing.assert_allclose(found, w.flat() @ step.flat(), rtol=1e-10)


def test_weights_of_sites_are_the_same_at_every_q() -> None:
    rng = np.random.default_rng(0)

    def symmetric() -> np.ndarray:
        x = rng.normal(size=(2, 5, 5))
        return x + np.swapaxes(x, 1, 2)

    def posterior() -> InducingPosterior:
        roots = rng.normal(size=(2, 5, 5))
        return InducingPosterior(
            SummedSites(rng.normal(size=(2, 5)), roots @ np.swapaxes(roots, 1, 2))
        )

    q, other = posterior(), posterior()
    w, step = (Pair(rng.normal(size=(2, 5)), symmetric()) for _ in range(2))
    of_sites = q.weights_of_sites(w)
    expected = of_sites.flat() @ step.flat()
    for at in (q, other):
        in_units = at.in_units(SummedSites(*step)).flat()
        np.testing.assert_allclose(
            at.weights_in_units(of_sites).flat() @ in_units, expected, rtol=1e-10
        )
    np.testing.assert_allclose(q.weights_in_units(of_sites).flat(), w.flat(), rtol=1e-10)


@pytest.mark.parametrize("how", ["reset", "infer", "training_loss"])
def test_what_batches_have_left_is_forgotten_with_their_q(how: str) -> None:
    model = PROBLEM.model(num_data=40)
    for batch in batches(10):
        model.training_loss(batch)
    assert model.sites.num_steps == 5  # and one before the first estimate
    assert np.any(model.sites.weights.numpy() != 0.0)
    {
        "reset": model.sites.reset,
        "infer": lambda: model.infer(DATA),
        "training_loss": lambda: model.training_loss(DATA),
    }[how]()
    assert model.sites.num_steps == 0
    assert not np.any(model.sites.weights.numpy())


# A cavity that does not exist


def without_a_cavity(**more: Any) -> gh.SparseCVIModel:
    """q(u) is nearly the prior, and every site as precise as the data make it."""
    model = PROBLEM.model(mean_function=None, **more)
    model.kernel.variance.assign(1e4)
    model.sites.lambda_2.assign(1e-6 * np.eye(6)[None])
    return model


def test_a_value_without_a_cavity_is_refused_and_names_the_datum() -> None:
    model = without_a_cavity()
    words = (
        r"cavity of datum 0 \(latent 0\) .* with α = 1 \(\d+ such data\).*model\.sites\.reset\(\)"
    )
    for data in (DATA, stream(*DATA).batch(7)):
        with pytest.raises(gh.InvalidPosteriorError, match=words):
            model.ep_like_log_marginal(data)
    with pytest.raises(gh.InvalidPosteriorError, match=r"with α = 0\.9"):
        model.power_ep_log_marginal(DATA, 0.9)
    assert np.isfinite(model.elbo(DATA))
    model.infer(DATA)
    assert np.isfinite(model.ep_like_log_marginal(DATA))


def test_a_batch_without_a_cavity_says_so_once_in_every_loss() -> None:
    model = without_a_cavity(num_data=40)
    start = [x.numpy() for x in model.sites.values]
    X, Y = batches(10)[0]

    def fall_back(loss: Any, num_steps: int) -> list[Any]:
        model.sites.assign(gh.sites.SiteValues(*start))
        model.sites.num_steps.assign(num_steps)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss()
        return [str(w.message) for w in caught if w.category is ConvergenceWarning]

    def compiled() -> Any:
        return tf.function(lambda: model.training_loss((X, Y)), autograph=False)

    for loss in (lambda: model.training_loss((X, Y)), compiled(), compiled()):
        assert fall_back(loss, 0) == []  # q(u) is still on its way
        (message,) = fall_back(loss, 100)
        assert message.startswith("A cavity does not exist")
        assert fall_back(loss, 100) == []


def test_a_compiled_loss_on_all_data_has_remarks_of_its_own() -> None:
    problem = sparse_problem("student_t")
    model = problem.model(likelihood=gpflow.likelihoods.StudentT(scale=0.003))
    losses = [model.training_loss_closure(problem.data) for _ in range(2)]
    heard = []
    for loss in (*losses, *losses):
        model.sites.reset()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss()
        heard.append(sum(w.category is ConvergenceWarning for w in caught))
    assert heard[0] > 0
    assert heard == [heard[0], heard[0], 0, 0]


# Gradients of values


@pytest.mark.parametrize("kind", ["arrays", "stream", "batch"])
def test_eager_objectives_have_the_gradient_at_their_q(kind: str) -> None:
    model = PROBLEM.model("elbo", num_data=40)
    model.infer(DATA)
    model.natgrad_step(batches(10)[1], 0.3)
    arrays = batches(10)[0] if kind == "batch" else DATA
    data = stream(*arrays).batch(7) if kind == "stream" else arrays

    def differentiated(elbo: Any) -> list[np.ndarray]:
        with tf.GradientTape() as tape:
            value = elbo()
        return [g.numpy() for g in tape.gradient(value, model.trainable_variables)]

    found = differentiated(lambda: model.elbo(data))
    expected = differentiated(tf.function(lambda: model.elbo(arrays), autograph=False))
    for x, y in zip(found, expected, strict=True):
        assert np.max(np.abs(x)) > 1e-3
        np.testing.assert_allclose(x, y, rtol=1e-7, atol=1e-8)


def test_a_gradient_that_is_asked_for_too_late_is_refused() -> None:
    model = PROBLEM.model("elbo")
    model.infer(DATA)
    for early in (True, False):
        with tf.GradientTape(persistent=True) as tape:
            value = model.elbo(DATA)
        variables = model.trainable_variables
        before = tape.gradient(value, variables)[1] if early else None
        model.kernel.variance.assign(2.0 + early)
        if early:  # it is known
            np.testing.assert_array_equal(tape.gradient(value, variables)[1], before)
            continue
        with pytest.raises(RuntimeError, match="have changed since this value was computed"):
            tape.gradient(value, variables)


# Streams


@pytest.mark.parametrize("size", [1, 7, 16, 100])
@pytest.mark.parametrize("batched", [0, 1, 3, 12, 40])
def test_batches_of_a_stream_are_joined_and_cut_to_blocks(batched: int, size: int) -> None:
    dataset = stream(*DATA)
    rows = rows_of(dataset.batch(batched) if batched else dataset, gpflow.likelihoods.Bernoulli())
    blocks = list(rows.blocks(size))
    lengths = [len(X) for X, _ in blocks]
    assert lengths[:-1] == [size] * (len(blocks) - 1)
    assert 0 < lengths[-1] <= size
    for i, whole in enumerate(DATA):
        np.testing.assert_array_equal(np.concatenate([b[i] for b in blocks]), whole)


def test_a_stream_of_other_shapes_is_refused() -> None:
    X, Y = DATA
    model = PROBLEM.model()
    words = r"rows X \[D\] and Y \[P\], or of batches .* found "
    for data in (stream(X, Y[:, 0]), stream(X, Y[:, 0]).batch(8), stream(X[:, 0], Y)):
        for call in (model.infer, model.elbo, model.training_loss, model.training_loss_closure):
            with pytest.raises(InvalidDataError, match=words):
                call(data)
    unknown = tf.data.Dataset.from_generator(
        lambda: iter(stream(X, Y)), output_signature=(tf.TensorSpec(None, tf.float64),) * 2
    )
    with pytest.raises(InvalidDataError, match=words + "<unknown> and <unknown>.*ensure_shape"):
        model.infer(unknown)
    known = stream(X, Y[:, 0]).map(lambda x, y: (x, y[..., None]))
    assert model.infer(known).converged


# Training


@pytest.mark.parametrize(
    ("objective", "optimizers"), [("ep_like", keras.optimizers), ("elbo", tf_keras.optimizers)]
)
def test_adam_on_batches_reaches_the_optimum_of_all_data(objective: str, optimizers: Any) -> None:
    """On a fifth of the rows at a time, from q(u) = p(u) and 37 nats off.

    Of inducing points there are many optima, and which one is reached depends on the way: they are fixed.
    """
    N, rng = 500, np.random.default_rng(0)
    X = rng.uniform(-3.0, 3.0, (N, 1))
    data = X, (2.0 * np.sin(1.3 * X) + rng.normal(size=X.shape) > 0.0).astype(float)

    def make(num_data: int | None = None) -> gh.SparseCVIModel:
        model = gh.SparseCVIModel(
            gpflow.kernels.Matern52(variance=1.5, lengthscales=3.5),
            gh.likelihoods.ProbitBernoulli(),
            np.linspace(-3.0, 3.0, 10)[:, None],
            mean_function=gpflow.functions.Constant(0.0),
            num_data=num_data,
            objective=objective,
        )
        gpflow.set_trainable(model.inducing_variable, False)
        return model

    full = make()
    start = float(full.training_loss(data))
    gpflow.optimizers.Scipy().minimize(full.training_loss_closure(data), full.trainable_variables)
    best = float(full.training_loss(data))
    assert start - best > 30.0

    model = make(N)
    variables = model.trainable_variables
    loss = model.training_loss_closure(iter(stream(*data).shuffle(N, seed=0).batch(100).repeat()))
    # The first gradients, at a q(u) that is on its way, are large: with Adam's own β₂ = 0.999 the steps
    # after them would be short for longer than this takes.
    num_steps = 100
    adam = optimizers.Adam(optimizers.schedules.CosineDecay(0.2, num_steps), beta_2=0.95)
    adam.build(variables)

    @tf.function(autograph=False)
    def step() -> None:
        with tf.GradientTape() as tape:
            value = loss()
        adam.apply_gradients(zip(tape.gradient(value, variables), variables, strict=True))

    for _ in range(num_steps):
        step()
    power = {"elbo": 0.0, "ep_like": 1.0}[objective]
    at_its_own_q = -float(model.power_ep_log_marginal(data, power))
    model.infer(data)
    reached = float(model.training_loss(data))
    assert reached - best < 0.3  # nats of all data: what the noise of batches leaves
    assert at_its_own_q - best < 0.5  # q(u) came along


@pytest.mark.filterwarnings("ignore:A cavity does not exist")  # for a few batches
def test_batches_train_to_the_optimum_of_all_data_where_the_weights_matter() -> None:
    """With M = N/4 and a wide prior; without weights it ends beyond its start, at a lengthscale of 1.01."""

    def make(**more: Any) -> gh.SparseCVIModel:
        problem = sparse_problem("probit_bernoulli", 40, 10)
        model = problem.model(mean_function=None, **more)
        model.kernel.variance.assign(200.0)
        model.kernel.lengthscales.assign(1.0)
        gpflow.set_trainable(model.inducing_variable, False)
        gpflow.set_trainable(model.kernel.variance, False)
        return model

    full = make()
    gpflow.optimizers.Scipy().minimize(full.training_loss_closure(DATA), full.trainable_variables)
    model = make(num_data=40)
    model.infer(DATA)
    # Each leaves four rows out in turn: little noise, so that few steps tell.
    kept = np.concatenate([np.delete(np.arange(40), np.arange(k, k + 4)) for k in range(0, 40, 4)])
    loss = model.training_loss_closure(iter(stream(*(x[kept] for x in DATA)).batch(36).repeat()))
    sgd = tf.optimizers.SGD(0.02)

    @tf.function(autograph=False)
    def step() -> None:
        with tf.GradientTape() as tape:
            value = loss()
        gradients = tape.gradient(value, model.trainable_variables)
        sgd.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    for i in range(300):
        sgd.learning_rate.assign(0.02 / (1.0 + i / 60.0))
        step()
    best, found = (float(m.kernel.lengthscales.numpy()) for m in (full, model))
    start = 1.0
    assert start - best > 0.08
    # q(u) still varies between batches, by its step size, and the gradient's mean with that squared.
    assert abs(found - best) < 0.03
