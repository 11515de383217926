"""RobustMax of projections: its value in closed form for two classes, its derivatives by differences."""

from __future__ import annotations

import gpflow
import numpy as np
import pytest
import tensorflow as tf
from scipy.stats import norm

import gpflow_hybrid as gh
from gpflow_hybrid.likelihoods.marginalised import Largest
from tests.sparse_cases import sparse_problem

RNG = np.random.default_rng(2)
A = RNG.normal(size=(3, 5, 3))  # [Q, N, L]
VARIANCE = RNG.uniform(0.3, 1.5, size=(5, 3))
Y = RNG.integers(0, 3, size=(5, 1))


def likelihood(num_classes: int = 3) -> gpflow.likelihoods.MultiClass:
    link = gpflow.likelihoods.RobustMax(num_classes, epsilon=0.02)
    gpflow.set_trainable(link.epsilon, True)
    return gpflow.likelihoods.MultiClass(num_classes, invlink=link)


def test_the_value_is_the_closed_form_of_two_classes() -> None:
    labels, a, variance = Y % 2, A[..., :2], VARIANCE[:, :2]
    found = Largest(likelihood(2), labels, variance).at(a).log_prob
    n = np.arange(5)
    own, other = labels[:, 0], 1 - labels[:, 0]
    P = norm.cdf((a[:, n, own] - a[:, n, other]) / np.sqrt(variance.sum(1)))
    # Twenty Gauss–Hermite nodes of a standard normal's distribution function.
    np.testing.assert_allclose(found, np.log(0.98 * P + 0.02 * (1.0 - P)), rtol=1e-3, atol=1e-3)


def test_derivatives_are_those_of_finite_differences() -> None:
    kind, h = likelihood(), 1e-5
    at = Largest(kind, Y, VARIANCE).at(A)
    for k in range(3):
        step = h * np.eye(3)[k]
        up, down = (Largest(kind, Y, VARIANCE).at(A + s * step) for s in (1.0, -1.0))
        slope = (up.log_prob - down.log_prob) / (2.0 * h)
        np.testing.assert_allclose(at.first[..., k], slope, rtol=1e-6, atol=1e-8)
        curvature = (up.first - down.first) / (2.0 * h)
        np.testing.assert_allclose(at.second[k], curvature, rtol=1e-6, atol=1e-8)

    bars = RNG.normal(size=A.shape[:2]), RNG.normal(size=A.shape)

    def total(variance: np.ndarray) -> float:
        found = Largest(kind, Y, variance).at(A, False)
        return float(np.sum(bars[0] * found.log_prob) + np.sum(bars[1] * found.first))

    pulled = Largest(kind, Y, VARIANCE).pull_back(A, *bars)
    direction = RNG.normal(size=VARIANCE.shape)
    difference = (total(VARIANCE + h * direction) - total(VARIANCE - h * direction)) / (2.0 * h)
    np.testing.assert_allclose(np.sum(pulled.variance * direction), difference, rtol=1e-6)
    variable, ends = kind.invlink.epsilon.unconstrained_variable, []
    start = variable.numpy()
    for sign in (1.0, -1.0):
        variable.assign(start + sign * h)
        ends.append(total(VARIANCE))
    variable.assign(start)
    np.testing.assert_allclose(pulled.parameters[0], (ends[0] - ends[1]) / (2.0 * h), rtol=1e-6)


def test_the_gradient_of_the_training_loss_in_hyperparameters_and_inducing_points(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The ELBO has several optima: from where it was, inference stays with one of them.
    monkeypatch.setattr(
        gh.SparseCVIModel, "_start", lambda model, sums: model._warm_start(sums.prior)
    )
    problem = sparse_problem("multiclass", 25, 5)
    model = problem.model("ep_like")
    with tf.GradientTape() as tape:
        loss = model.training_loss(problem.data)
    gradients = tape.gradient(loss, model.trainable_variables)
    rng, h = np.random.default_rng(0), 1e-4
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        direction = rng.normal(size=variable.shape)
        start, ends = variable.numpy(), []
        for sign in (2.0, 1.0, -1.0, -2.0):  # of fourth order: of second, their own error is 2e-5
            variable.assign(start + sign * h * direction)
            ends.append(float(model.training_loss(problem.data)))
        variable.assign(start)
        difference = (8.0 * (ends[1] - ends[2]) - (ends[0] - ends[3])) / (12.0 * h)
        found = float(np.sum(gradient * direction))
        np.testing.assert_allclose(found, difference, rtol=1e-5, atol=1e-5, err_msg=variable.name)
