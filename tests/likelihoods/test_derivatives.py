"""Derivatives of expectations and ratios against automatic differentiation of GPflow's own values."""

from __future__ import annotations

from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf
from gpflow.quadrature import NDiagGHQuadrature

import gpflow_hybrid as gh
from gpflow_hybrid import tuning
from gpflow_hybrid.inference.total_gradient import variational_inference
from gpflow_hybrid.likelihoods.curvature import curvature
from gpflow_hybrid.likelihoods.densities import values_of
from gpflow_hybrid.likelihoods.expectations import (
    expectation_gradients,
    variational_expectations,
)
from gpflow_hybrid.likelihoods.node_rules import own_rule
from gpflow_hybrid.likelihoods.on_arrays import Observations, OnArrays, on_arrays
from gpflow_hybrid.likelihoods.ratio_gradients import ratio_gradients
from gpflow_hybrid.likelihoods.ratios import log_expected_ratio
from tests.likelihood_cases import CASES

N = 12
ZERO = tf.UnconnectedGradients.ZERO
BY_NODES = {
    "bernoulli_probit",
    "bernoulli_logit",
    "student_t",
    "beta",
    "ordinal",
    "softmax",
    "heteroskedastic",
    "own_log_cosh",
}


class Problem:
    """A likelihood with data, and marginals and signed sites whose cavities exist."""

    def __init__(self, name: str) -> None:
        case, rng = CASES[name], np.random.default_rng(7)
        self.likelihood = case.make()
        X = rng.normal(size=(N, 2))
        Y = case.observe(rng.normal(size=(N, 1)), rng)
        self.data = (tf.constant(X), tf.constant(Y))
        shape = (N, case.num_latent)
        self.m = tf.constant(rng.normal(size=shape))
        self.v = tf.constant(rng.uniform(0.1, 1.5, size=shape))
        self.sites = [
            tf.constant(rng.normal(size=shape)),
            tf.constant(rng.uniform(-0.5, 0.6, size=shape)),
        ]

    def expected(self) -> tf.Tensor:
        X, Y = self.data
        return tf.reduce_sum(variational_expectations(self.likelihood, X, self.m, self.v, Y))

    def ratio(self, alpha: float) -> tf.Tensor:
        X, Y = self.data
        return tf.reduce_sum(
            log_expected_ratio(self.likelihood, X, self.m, self.v, Y, *self.sites, alpha)
        )


def test_which_likelihoods_are_differentiated_at_their_nodes() -> None:
    found = {
        name
        for name, case in CASES.items()
        if own_rule(case.make(), case.num_latent, tf.float64) is not None
        and not hasattr(case.make(), "expectation_derivatives")
    }
    assert found == BY_NODES


@pytest.mark.parametrize("name", CASES)
def test_expectations(name: str) -> None:
    p = Problem(name)
    X, Y = p.data
    with tf.GradientTape() as tape:
        tape.watch((p.m, p.v))
        value = p.expected()
    d_m, d_v = tape.gradient(value, (p.m, p.v), unconnected_gradients=ZERO)
    E = expectation_gradients(p.likelihood, X, p.m, p.v, Y)
    np.testing.assert_allclose(tf.reduce_sum(E.value), value, rtol=1e-11)
    np.testing.assert_allclose(E.mean, d_m, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(E.variance, d_v, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", CASES)
def test_curvature(name: str) -> None:
    """The Hessian of the sum in all means and variances, datum by datum."""
    p = Problem(name)
    X, Y = p.data
    L = p.m.shape[1]
    joint = tf.concat([p.m, p.v], 1)  # [N, 2L]
    with tf.GradientTape(persistent=True) as outer:
        outer.watch(joint)
        with tf.GradientTape() as inner:
            inner.watch(joint)
            m, v = joint[:, :L], joint[:, L:]
            value = tf.reduce_sum(variational_expectations(p.likelihood, X, m, v, Y))
        gradient = inner.gradient(value, joint)
        columns = tf.unstack(gradient, axis=1)
    H = np.stack([outer.gradient(c, joint, unconnected_gradients=ZERO) for c in columns], 1)
    g2 = -2.0 * expectation_gradients(p.likelihood, X, p.m, p.v, Y).variance
    found = curvature(p.likelihood, X, Y, p.m, p.v, g2)
    scale = np.max(np.abs(H))
    for block, (rows, columns) in zip(found, [(0, 0), (0, L), (L, 0), (L, L)], strict=True):
        expected = H[:, rows : rows + L, columns : columns + L]
        np.testing.assert_allclose(block, expected, rtol=1e-8, atol=1e-10 * scale)


@pytest.mark.parametrize("alpha", [0.3, 1.0])
@pytest.mark.parametrize("name", CASES)
def test_ratios(name: str, alpha: float) -> None:
    p = Problem(name)
    arguments = (p.m, p.v, *p.sites)
    with tf.GradientTape() as tape:
        tape.watch(arguments)
        value = p.ratio(alpha)
    expected = tape.gradient(value, arguments, unconnected_gradients=ZERO)
    X, Y = p.data
    found = ratio_gradients(p.likelihood, X, Y, *arguments, alpha)
    np.testing.assert_allclose(found.value, value, rtol=1e-11)
    for x, y in zip(found[1:], expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-11)


def test_a_node_where_the_density_overflows_has_no_part() -> None:
    """``exp(f)`` at f = 1000: p = 0, neither infinite nor NaN."""
    likelihood = gpflow.likelihoods.Poisson()
    X, Y = tf.zeros([2, 1], tf.float64), tf.constant([[1.0], [3.0]], tf.float64)
    m, v = tf.zeros([2, 1], tf.float64), tf.fill([2, 1], tf.constant(1e4, tf.float64))
    sites = (tf.zeros_like(m), tf.zeros_like(m))
    found = ratio_gradients(likelihood, X, Y, m, v, *sites, 1.0)
    assert all(np.isfinite(x).all() for x in found)


ON_ARRAYS = sorted(set(CASES) - {"switched", "own_log_cosh"})
WITH_PARAMETERS = ["gaussian", "student_t", "gamma", "beta", "ordinal", "multiclass"]


def assert_alike(found: Any, expected: Any) -> None:
    for x, y in zip(found, expected, strict=True):
        assert isinstance(x, (np.ndarray, np.generic))
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)


def on_host(p: Problem) -> tuple[OnArrays, Observations, list[np.ndarray]]:
    form = on_arrays(p.likelihood)
    assert form is not None
    data = Observations(*(x.numpy() for x in p.data), values_of(p.likelihood))
    return form, data, [x.numpy() for x in (p.m, p.v, *p.sites)]


@pytest.fixture(params=[1, 10**6], ids=["in many chunks", "in one"])
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "QUADRATURE_ELEMENTS", request.param)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("name", ON_ARRAYS)
def test_expectations_of_arrays_are_those_of_tensors(name: str) -> None:
    p = Problem(name)
    form, data, (m, v, *_) = on_host(p)
    X, Y = p.data
    E = expectation_gradients(p.likelihood, X, p.m, p.v, Y)
    found = form.expectations(data, m, v)
    assert_alike(found, E)
    g2 = -2.0 * E.variance
    expected = curvature(p.likelihood, X, Y, p.m, p.v, g2)
    assert_alike(form.curvature(data, m, v, g2.numpy()), expected)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("alpha", [1e-3, 0.3, 1.0])
@pytest.mark.parametrize("name", ON_ARRAYS)
def test_ratios_of_arrays_are_those_of_tensors(name: str, alpha: float) -> None:
    p = Problem(name)
    form, data, arrays = on_host(p)
    ratios = form.ratios(alpha)
    assert ratios is not None
    expected = ratio_gradients(p.likelihood, *p.data, p.m, p.v, *p.sites, alpha)
    assert_alike(ratios(data, *arrays), expected)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_derivatives_in_parameters_of_arrays_are_those_of_tensors(name: str, alpha: float) -> None:
    p = Problem(name)
    form, data, arrays = on_host(p)
    weights = np.random.default_rng(5).normal(size=(2, N, 1))
    weights = weights if alpha > 0.0 else 0.0 * weights
    question = variational_inference(alpha).parameter_question
    tensors = [tf.constant(x) for x in (*arrays, *weights)]
    expected = question.answer(p.likelihood, *p.data, *tensors)
    assert_alike(form.in_parameters(alpha)(data, *arrays, *weights), expected)


def test_a_node_where_the_density_overflows_has_no_part_on_arrays() -> None:
    form = on_arrays(gpflow.likelihoods.Gamma())
    data = Observations(np.zeros((2, 1)), np.array([[1.0], [3.0]]), [np.array(1.0)])
    m, v = np.zeros((2, 1)), np.full((2, 1), 1e4)
    with np.errstate(all="ignore"):
        found = form.ratios(1.0)(data, m, v, m, m)
        own = form.in_parameters(1.0)(data, m, v, m, m, m, m)
    assert all(np.isfinite(x).all() for x in (*found, *own))


class OwnSoftmax(gpflow.likelihoods.Softmax):
    """The same, but nobody knows: tensors answer."""


class OwnQuadrature(NDiagGHQuadrature):
    """The same, but nobody knows."""


def test_who_does_not_answer_on_arrays() -> None:
    """Whatever may differ from what GPflow has made."""
    L = gpflow.likelihoods
    frozen = gpflow.utilities.freeze(L.StudentT())
    for likelihood in [
        OwnSoftmax(3),
        frozen,
        gpflow.utilities.freeze(gh.likelihoods.Ordinal(np.zeros(1))),
        L.Gaussian(scale=gpflow.functions.Linear(A=[[0.1]], b=[1.0])),
        L.StudentT(quadrature=OwnQuadrature(1, 10)),
        *(CASES[name].make() for name in set(CASES) - set(ON_ARRAYS)),
    ]:
        assert on_arrays(likelihood) is None


@pytest.mark.parametrize("num_classes", [2, 5])
def test_softmax_with_other_numbers_of_classes(num_classes: int) -> None:
    rng = np.random.default_rng(1)
    num = 40  # more than one chunk
    data = Observations(np.zeros((num, 1)), rng.integers(0, num_classes, size=(num, 1)))
    m, l1 = rng.normal(size=(2, num, num_classes))
    v = rng.uniform(0.1, 2.0, size=(num, num_classes))
    l2 = rng.uniform(-0.3, 0.4, size=(num, num_classes))
    likelihood = gpflow.likelihoods.Softmax(num_classes)
    form = on_arrays(likelihood)
    tensors = [tf.constant(x) for x in (m, v, l1, l2)]
    X, Y = data.X, data.Y
    m_, v_ = tensors[:2]
    assert_alike(form.expectations(data, m, v), expectation_gradients(likelihood, X, m_, v_, Y))
    assert_alike(form.curvature(data, m, v, -m), curvature(likelihood, X, Y, m_, v_, -m_))
    expected = ratio_gradients(likelihood, X, Y, *tensors, 1.0)
    assert_alike(form.ratios(1.0)(data, m, v, l1, l2), expected)
