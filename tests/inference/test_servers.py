"""One iteration, answered in three ways; graphs and threads."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import textwrap
import weakref
from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

import gpflow_hybrid as gh
from gpflow_hybrid.inference import servers
from gpflow_hybrid.inference.servers import Sessions
from gpflow_hybrid.likelihoods.on_arrays import on_arrays
from gpflow_hybrid.priors import DensePrior
from tests.likelihood_cases import CASES


def model_of(name: str, objective: Any = "ep_like") -> gh.CVIModel:
    rng = np.random.default_rng(0)
    case = CASES[name]
    X = rng.normal(size=(24, 2))
    Y = case.observe(np.sin(2.0 * X[:, :1]), rng)
    kernel = gpflow.kernels.Matern52(variance=1.5)
    return gh.CVIModel(
        (X, Y), kernel, case.make(), num_latent_gps=case.num_latent, objective=objective
    )


def loss_and_gradient(model: Any) -> list[Any]:
    with tf.GradientTape() as tape:
        loss = model.training_loss()
    return [loss, *tape.gradient(loss, model.trainable_variables)]


def assert_graph_is_eager(model: Any) -> None:
    """From the same start, to the last digits: the steps are the same."""
    num_data = len(model.data[0])
    eager = [np.asarray(x) for x in loss_and_gradient(model)]
    sites = [x.numpy() for x in model.sites.values]
    model.sites.reset(num_data)
    graph = tf.function(lambda: loss_and_gradient(model), autograph=False)()
    for x, y in zip([*graph, *model.sites.values], [*eager, *sites], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["bernoulli_probit", "poisson", "softmax", "multiclass"])
def test_a_graph_gives_what_eager_calls_give(name: str) -> None:
    assert_graph_is_eager(model_of(name))


@pytest.mark.parametrize("objective", ["elbo", 0.4])
def test_the_same_for_other_objectives(objective: Any) -> None:
    assert_graph_is_eager(model_of("student_t", objective))


@pytest.mark.parametrize("kind", [gh.EPModel, gh.LaplaceModel])
def test_the_same_for_other_methods(kind: type[gh.CollapsedModel]) -> None:
    X, Y = model_of("student_t").data
    likelihood = gpflow.likelihoods.StudentT(scale=0.5)
    assert_graph_is_eager(kind((X, Y), gpflow.kernels.Matern52(), likelihood))


SUBCLASSED = {
    "gaussian": lambda kind: kind(0.1),
    "student_t": lambda kind: kind(scale=0.5, df=4.0),
    "gamma": lambda kind: kind(shape=2.0),
    "beta": lambda kind: kind(scale=5.0),
    "ordinal": lambda kind: kind(np.array([-0.4, 0.4])),
    "heteroskedastic": lambda kind: kind(),
    "softmax": lambda kind: kind(3),
}


@pytest.mark.parametrize("in_graph", [True, False])
@pytest.mark.parametrize("name", SUBCLASSED)
def test_arrays_and_tensors_answer_alike(name: str, in_graph: bool) -> None:
    """The loss and its gradient, also in the likelihood's own parameters; a subclass, which may have
    changed anything, is asked through TensorFlow."""
    model = model_of(name)
    kind = type(model.likelihood)
    likelihood = SUBCLASSED[name](type("Own", (kind,), {}))
    assert on_arrays(model.likelihood) is not None
    assert on_arrays(likelihood) is None
    L = model.num_latent_gps
    own = gh.CVIModel(model.data, copy.deepcopy(model.kernel), likelihood, num_latent_gps=L)
    found = [loss_and_gradient(own)]
    evaluate = tf.function(loss_and_gradient, autograph=False) if in_graph else loss_and_gradient
    found.append(evaluate(model))
    for x, y in zip(*found, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9)


def test_parameters_change_without_another_trace() -> None:
    """Also those that were held when the graph was traced."""
    model = model_of("student_t")
    gpflow.set_trainable(model.likelihood, False)
    variables = [*model.kernel.trainable_variables, *model.likelihood.variables]
    traces = []

    @tf.function(autograph=False)
    def evaluate() -> Any:
        traces.append(1)
        with tf.GradientTape() as tape:
            tape.watch(variables)
            loss = model.training_loss()
        return [loss, *tape.gradient(loss, variables)]

    evaluate()
    model.likelihood.scale.assign(0.2)
    found = evaluate()
    assert len(traces) == 1
    gpflow.set_trainable(model.likelihood, True)
    model.sites.reset(len(model.data[0]))
    for x, y in zip(found, loss_and_gradient(model), strict=True):
        # From another start: gradients feel the residual, 1e-9, to first order.
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-9)
    assert abs(float(found[-1])) > 1e-3  # there is something to see


def test_parameters_are_read_once_for_all_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPflow's transforms take as long as the arithmetic of some hundred data."""
    num_reads, values_of = [0], servers.values_of

    def counted(likelihood: Any) -> Any:
        num_reads[0] += 1
        return values_of(likelihood)

    monkeypatch.setattr(servers, "values_of", counted)
    X = np.random.default_rng(0).normal(size=(30, 1))
    likelihood = gpflow.likelihoods.StudentT(scale=0.3)
    model = gh.CVIModel((X, np.sin(X)), gpflow.kernels.RBF(), likelihood)
    asked = model.infer().num_evaluations
    assert asked > 2
    assert num_reads == [1]
    (scale,) = values_of(likelihood)
    assert scale == pytest.approx(0.3, rel=1e-14)
    likelihood.scale.assign(0.5)
    model.infer()
    assert num_reads == [2]


def test_compiled_answers_do_not_keep_a_likelihood_alive() -> None:
    """One that has a function which holds it."""
    likelihood = gpflow.likelihoods.HeteroskedasticTFPConditional(tfp.distributions.Laplace)
    X = np.linspace(0.0, 1.0, 5)[:, None]
    data = (X, np.sin(X))
    gh.CVIModel(data, gpflow.kernels.Matern52(), likelihood, num_latent_gps=2).infer()
    kept = weakref.ref(likelihood)
    del likelihood
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize(
    "make",
    [
        lambda loc, scale: tfp.distributions.Normal(loc, scale + 0.5),
        lambda loc, scale: tfp.distributions.Normal(2.0 * loc, scale),
    ],
)
def test_a_normal_of_other_moments_is_not_taken_for_the_usual_one(make: Any) -> None:
    likelihood = gpflow.likelihoods.HeteroskedasticTFPConditional(make)
    X = np.linspace(0.0, 1.0, 5)[:, None]
    model = gh.CVIModel((X, np.sin(X)), gpflow.kernels.Matern52(), likelihood, num_latent_gps=2)
    np.testing.assert_allclose(model.infer().elbo, model.elbo(), rtol=1e-8)


def test_a_graph_does_not_keep_a_likelihood_alive() -> None:
    model = model_of("ordinal")
    loss = tf.function(model.training_loss, autograph=False)
    loss()
    gone = weakref.ref(model.likelihood)
    model.likelihood = gpflow.likelihoods.StudentT()
    gc.collect()
    assert gone() is None


def test_the_graph_of_a_density_is_small() -> None:
    """One operation of the host, no loop, whatever the likelihood's parameters add."""

    def operations(name: str) -> list[tf.Operation]:
        model = model_of(name)
        graph = tf.function(lambda: loss_and_gradient(model), autograph=False)
        parts = [graph.get_concrete_function().graph]
        found = []
        while parts:
            part = parts.pop()
            found += part.get_operations()
            library = part.as_graph_def().library.function
            found += [node for function in library for node in function.node_def]
        return [getattr(op, "type", None) or op.op for op in found]

    kinds = operations("ordinal")
    assert kinds.count("PyFunc") + kinds.count("PyFuncStateless") == 1
    assert "While" not in kinds
    assert len(kinds) < len(operations("own_log_cosh")) / 2


class Failing(gpflow.likelihoods.StudentT):
    """Fails inside a graph when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = tf.Variable(False, trainable=False)

    def _scalar_log_prob(self, X: Any, F: Any, Y: Any) -> Any:
        tf.debugging.Assert(~self.fails, ["told to"])
        return super()._scalar_log_prob(X, F, Y)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Sessions]:
    """The sessions of every graph that is traced from now on."""
    found: list[Sessions] = []

    class Noted(Sessions):
        def __init__(self) -> None:
            super().__init__()
            found.append(self)

    monkeypatch.setattr(servers, "Sessions", Noted)
    return found


def test_a_graph_that_fails_leaves_little_behind(
    made: list[Sessions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "MAX_OPEN", 2)
    closed: list[DensePrior] = []
    close = DensePrior.close
    monkeypatch.setattr(DensePrior, "close", lambda self: (closed.append(self), close(self))[1])
    X, Y = model_of("student_t").data
    model = gh.CVIModel((X, Y), gpflow.kernels.Matern52(), Failing())
    loss = tf.function(model.training_loss, autograph=False)
    expected = float(loss())
    (sessions,) = made
    assert len(sessions) == 0
    assert len(closed) == 1
    model.likelihood.fails.assign(True)
    for _ in range(5):
        with pytest.raises(tf.errors.InvalidArgumentError, match="told to"):
            loss()
    assert len(sessions) == 2
    assert len(closed) == 4  # memory and all
    model.likelihood.fails.assign(False)
    np.testing.assert_allclose(loss(), expected, rtol=1e-9)


def test_an_error_on_the_host_is_passed_on(
    made: list[Sessions], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("own_log_cosh")
    loss = tf.function(model.training_loss, autograph=False)
    loss()
    sites = [x.numpy() for x in model.sites.values]

    def fail(*_: Any) -> None:
        raise MemoryError("no room for K")

    monkeypatch.setattr(DensePrior, "posterior", fail)
    with pytest.raises(Exception, match="no room for K"):
        loss()
    assert len(made[0]) == 0
    for x, y in zip(model.sites.values, sites, strict=True):
        np.testing.assert_array_equal(x, y)


class Closable:
    closed = False

    def close(self) -> None:
        self.closed = True


def test_the_longest_waiting_session_goes_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(servers, "MAX_OPEN", 3)
    sessions, iterations = Sessions(), [Closable() for _ in range(4)]
    numbers = [sessions.put(x) for x in iterations]
    assert [x.closed for x in iterations] == [True, False, False, False]
    assert len(sessions) == 3
    with pytest.raises(RuntimeError, match="was given up"):
        sessions.take(numbers[0])
    assert sessions.take(numbers[1]) is iterations[1]
    assert len(sessions) == 2


PARALLEL = """
    import sys, threading
    import tensorflow as tf
    tf.config.threading.set_inter_op_parallelism_threads(int(sys.argv[1]))
    tf.config.threading.set_intra_op_parallelism_threads(1)
    import gpflow, numpy as np
    import gpflow_hybrid as gh

    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 2))
    Y = np.sin(2.0 * X[:, :1]) + 0.1 * rng.normal(size=(40, 1))
    class Own(gpflow.likelihoods.StudentT):
        pass  # asked through TensorFlow

    models = [
        gh.CVIModel((X, Y), gpflow.kernels.Matern52(variance=1.0 + i), Own())
        for i in range(4)
    ]
    losses = [tf.function(m.training_loss, autograph=False) for m in models]
    for loss in losses:
        loss.get_concrete_function()
    found = [None] * 4
    def work(i):
        for _ in range(5):
            models[i].sites.reset(40)
            found[i] = float(losses[i]())
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    expected = []
    for m in models:
        m.sites.reset(40)
        expected.append(float(m.training_loss()))
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    print("done")
"""


@pytest.mark.parametrize("num_threads", [1, 2])
def test_parallel_calls_do_not_wait_for_each_other(num_threads: int) -> None:
    """More calls than threads for operations: whoever computes on the host needs none of them."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PARALLEL), str(num_threads)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "done", done.stderr[-2000:]
