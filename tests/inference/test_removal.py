"""Where a cavity would not exist, or be much wider than the prior, a part of the site is taken out of q."""

from __future__ import annotations

import warnings
from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf
from gpflow.quadrature import NDiagGHQuadrature
from hypothesis import given, settings
from hypothesis import strategies as st

import gpflow_hybrid as gh
from gpflow_hybrid.inference.removal import removable
from gpflow_hybrid.likelihoods.ratio_gradients import ratio_gradients
from gpflow_hybrid.sites import SiteValues
from tests import reference

X = np.linspace(0.0, 6.0, 25)[:, None]
Y = np.sin(X) + 0.2 * np.random.default_rng(3).normal(size=X.shape)
Y[[6, 7, 15]] += [[5.0], [-6.0], [4.0]]
WORDS = "A cavity does not exist at these hyperparameters, or is much wider"


def logs(low: float, high: float) -> Any:
    return st.floats(low, high).map(np.exp)


@settings(deadline=None, max_examples=200)
@given(logs(-8.0, 8.0), logs(-8.0, 8.0), logs(-8.0, 8.0), st.sampled_from([-1.0, 1.0]))
def test_what_is_taken_out_leaves_a_cavity(v: float, k: float, size: float, sign: float) -> None:
    alpha, lambda_2 = 0.7, sign * size
    found = removable(alpha, *(np.array([[x]]) for x in (lambda_2, v, k)))
    (s,) = found.part.flat
    precision = 1.0 / v - alpha * s * lambda_2
    assert 0.0 <= s <= 1.0
    assert precision >= min(0.5 / v, 0.5 / k) * (1.0 - 1e-9)
    whole = 1.0 / v - alpha * lambda_2
    assert s == 1.0 or whole < 0.5 / k * (1.0 + 1e-9)
    # a site of other data that are not negative: 1/v − λ₂ ≥ 1/k
    if whole >= 1.0 / k:
        assert s == 1.0


@pytest.mark.parametrize("name", ["s", "ratio"])
def test_derivatives(name: str) -> None:
    """Of sites taken out as a whole, in part, not at all, under q narrower and wider than the prior."""
    alpha = 0.8
    v = np.array([0.5, 0.5, 0.5, 0.5, 3.0, 3.0])[:, None]
    k = np.array([2.0, 2.0, 2.0, 2.0, 1.0, 1.0])[:, None]
    leverage = np.array([0.3, 0.95, 1.4, 2.5, 0.7, -0.4])[:, None]
    lambda_2 = leverage / (alpha * v)
    m, lambda_1 = (np.random.default_rng(i).normal(size=v.shape) for i in range(2))
    likelihood = gpflow.likelihoods.Gaussian(0.3)
    observed = np.zeros_like(v)

    def value(m: Any, v: Any, lambda_1: Any, lambda_2: Any, k: Any) -> Any:
        removal = removable(alpha, lambda_2, v, k)
        if name == "s":
            weights = np.arange(1.0, 7.0)[:, None]
            zero = np.zeros_like(v)
            bars = (removal.in_variance, zero, removal.in_lambda_2, removal.in_prior_variance)
            return np.sum(weights * removal.part), [zero, *(weights * x for x in bars)]
        sites = SiteValues(lambda_1, lambda_2)
        tensors = (tf.constant(x) for x in (m, v, *removal.of(sites)))
        ratio = ratio_gradients(likelihood, None, observed, *tensors, alpha)
        arrays = type(ratio)(*(x.numpy() for x in ratio))
        found, in_k = removal.pull_back(arrays, m, v, sites)
        return found.value, [*found[1:], in_k]

    arguments = [m, v, lambda_1, lambda_2, k]
    part = removable(alpha, lambda_2, v, k).part.ravel()
    np.testing.assert_array_equal(part == 1.0, [True, False, False, False, False, True])
    assert part[3] == 0.0 < part[2] < part[1] < 1.0
    _, gradients = value(*arguments)
    step = 1e-5
    for i, gradient in enumerate(gradients):
        for n in range(len(v)):
            moved = [[x.copy() for x in arguments] for _ in range(2)]
            moved[0][i][n] += step
            moved[1][i][n] -= step
            difference = (value(*moved[0])[0] - value(*moved[1])[0]) / (2.0 * step)
            np.testing.assert_allclose(gradient[n, 0], difference, atol=1e-6, rtol=1e-6)


def student(kind: str, variance: float, **more: Any) -> tuple[Any, tuple[Any, ...]]:
    """A model whose sites are in part negative, and what its loss takes."""
    quadrature = NDiagGHQuadrature(1, 100)
    likelihood = gpflow.likelihoods.StudentT(scale=0.3, df=2.5, quadrature=quadrature)
    kernel = gpflow.kernels.Matern52(variance=variance, **more)
    if kind == "sparse":
        model = gh.SparseCVIModel(kernel, likelihood, X[::2].copy())
        gpflow.set_trainable(model.inducing_variable, False)
        return model, ((X, Y),)
    return gh.CVIModel((X, Y), kernel, likelihood), ()


# Where whole sites leave cavities, where they do not, and in between.
BORDERS = {"dense": (4.5, 4.8), "sparse": (4.2, 4.6)}


def loss_and_remarks(model: Any, data: tuple[Any, ...]) -> tuple[float, list[str]]:
    model._remarks.forget()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loss = float(model.training_loss(*data))
    return loss, [text for text in (str(w.message) for w in said) if text.startswith(WORDS)]


@pytest.mark.parametrize("kind", BORDERS)
def test_the_loss_is_continuous_across_the_border(kind: str) -> None:
    model, data = student(kind, 1.0)

    def at(log_variance: float) -> tuple[float, list[str]]:
        model.kernel.variance.assign(np.exp(log_variance))
        if kind == "sparse":
            model.sites.reset()
        return loss_and_remarks(model, data)

    inside, outside = BORDERS[kind]
    assert at(inside)[1] == []
    (message,) = at(outside)[1]
    assert f"of {len(X)} data" in message
    # The border by bisection: it is a ridge, but values on both sides of it agree.
    for _ in range(36):
        middle = 0.5 * (inside + outside)
        inside, outside = (inside, middle) if at(middle)[1] else (middle, outside)
    np.testing.assert_allclose(at(inside)[0], at(outside)[0], rtol=1e-7)


@pytest.mark.filterwarnings("ignore::gpflow_hybrid.ConvergenceWarning")
@pytest.mark.parametrize(
    ("kind", "log_variance"), [("dense", 4.7), ("dense", 5.0), ("sparse", 4.5), ("sparse", 5.0)]
)
def test_the_gradient_is_exact_beyond_it(kind: str, log_variance: float) -> None:
    model, data = student(kind, np.exp(log_variance))
    _, remarks = loss_and_remarks(model, data)
    assert remarks
    variables = model.trainable_variables
    with tf.GradientTape() as tape:
        loss = model.training_loss(*data)
    gradients = tape.gradient(loss, variables)
    norm = max(float(tf.norm(g)) for g in gradients)
    step = 1e-5
    for variable, gradient in zip(variables, gradients, strict=True):
        kept, values = variable.numpy(), []
        for sign in (2, 1, -1, -2):
            variable.assign(kept + sign * step)
            values.append(float(model.training_loss(*data)))
        variable.assign(kept)
        difference = (-values[0] + 8 * values[1] - 8 * values[2] + values[3]) / (12 * step)
        np.testing.assert_allclose(gradient, difference, atol=2e-5 * norm)


def test_it_is_said_once_in_a_compiled_loss_and_no_less_than_the_bound() -> None:
    model, _ = student("dense", np.exp(5.0))
    compiled = model.training_loss_closure()
    heard = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            loss = float(compiled())
        heard.append(sum(str(w.message).startswith(WORDS) for w in said))
    assert heard == [1, 0]
    np.testing.assert_allclose(loss, loss_and_remarks(model, ())[0], rtol=1e-9)
    bound = float(model.elbo())
    assert -loss > bound
    with pytest.raises(gh.InvalidPosteriorError, match="cavity of datum"):
        model.ep_like_log_marginal()


def test_the_value_is_what_the_formula_says() -> None:
    """By brute force, datum by datum."""
    model, _ = student("dense", np.exp(5.0))
    loss, _ = loss_and_remarks(model, ())
    K = model.kernel(X).numpy()
    lambda_1, lambda_2 = (x.numpy() for x in model.sites.values)
    q = reference.posterior(K[None], np.zeros_like(X), lambda_1, lambda_2)
    m, v, k = q.mean, q.variance, K[0, 0]
    c = np.maximum(0.5, 1.0 - v / (2.0 * k))
    s = np.where(lambda_2 * v > c, np.maximum(0.0, 2.0 * c / (lambda_2 * v) - 1.0), 1.0)
    assert np.sum(s < 1.0) >= 2
    expected = lambda_1 * m - 0.5 * lambda_2 * (m * m + v)
    total = q.log_normaliser - np.sum((1.0 - s) * expected)
    f = np.linspace(-150.0, 150.0, 600_001)
    for n in range(len(X)):
        log_q = -0.5 * (f - m[n]) ** 2 / v[n] - 0.5 * np.log(2.0 * np.pi * v[n])
        log_t = lambda_1[n] * f - 0.5 * lambda_2[n] * f * f
        log_p = tf.squeeze(
            model.likelihood.log_prob(f[:, None], f[:, None], Y[n] + 0.0 * f[:, None])
        )
        h = log_q + log_p.numpy() - s[n] * log_t
        total += np.logaddexp.reduce(h) + np.log(f[1] - f[0])
    np.testing.assert_allclose(-loss, total, rtol=1e-7)
