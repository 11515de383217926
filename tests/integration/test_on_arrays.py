"""Densities and predictions on arrays against those of the model's graph."""

from __future__ import annotations

from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from gpflow.base import PriorOn

import gpflow_hybrid as gh
from gpflow_hybrid.integration.coordinates import Coordinate, CoordinatePrior
from gpflow_hybrid.integration.problems import prepare
from gpflow_hybrid.integration.scales import Flat
from gpflow_hybrid.priors.stationary import StationaryMatrix
from gpflow_hybrid.sites import SiteValues
from tests.integration.cases import classifier, labels

TFB, TFD = tfp.bijectors, tfp.distributions


def transforms() -> dict[str, Any]:
    return {
        "softplus": TFB.Softplus(),
        "shifted": gpflow.utilities.positive(lower=0.3),
        "exp": TFB.Exp(),
        "none": None,
    }


@pytest.mark.parametrize("transform", transforms())
@pytest.mark.parametrize("on", [PriorOn.CONSTRAINED, PriorOn.UNCONSTRAINED])
@pytest.mark.parametrize("kind", ["normal", "log-normal", "flat"])
def test_priors_of_coordinates(transform: str, on: PriorOn, kind: str) -> None:
    prior = {
        "normal": TFD.Normal(np.float64(0.4), np.float64(0.7)),
        "log-normal": TFD.LogNormal(np.float64(0.4), np.float64(0.7)),
        "flat": Flat(),
    }[kind]
    parameter = gpflow.Parameter(np.array([0.5, 1.2, 40.0]), transform=transforms()[transform])
    found = CoordinatePrior(prior, on)
    function = found.on_arrays(parameter)
    is_known = kind == "flat" or (
        (on == PriorOn.UNCONSTRAINED or transform == "none")
        if kind == "normal"
        else on == PriorOn.CONSTRAINED and transform != "none"
    )
    assert (function is not None) == is_known
    if function is None:
        return
    variable = parameter.unconstrained_variable
    with tf.GradientTape() as tape:
        expected = Coordinate("", parameter).log_prior(prior, on)
    slope = tape.gradient(expected, variable, unconnected_gradients="zero")
    value, gradient = function(variable.numpy())
    np.testing.assert_allclose(value, expected, rtol=1e-10)
    np.testing.assert_allclose(gradient, slope, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "bijector", [None, TFB.Exp(), TFB.Sigmoid(np.float64(0.0), np.float64(9.0))]
)
@pytest.mark.parametrize("likelihood", ["probit", "bernoulli", "student_t", "gaussian", "gamma"])
def test_nodes_are_those_of_the_model(likelihood: str, bijector: Any) -> None:
    made = {
        "probit": gh.likelihoods.ProbitBernoulli,
        "bernoulli": gpflow.likelihoods.Bernoulli,
        "student_t": gpflow.likelihoods.StudentT,
        "gaussian": gpflow.likelihoods.Gaussian,
        "gamma": gpflow.likelihoods.Gamma,
    }[likelihood]()
    X, Y = labels()
    data = X, Y + 0.1 * (likelihood == "gamma")
    kernel = gpflow.kernels.Matern52()
    if bijector is not None:
        kernel.lengthscales = gpflow.Parameter(1.0, transform=bijector)
    model = gh.CVIModel(data, kernel, made)
    problem = prepare(model, None, {})
    target = problem.target()
    rng = np.random.default_rng(0)
    for step in 0.3 * rng.normal(size=(3, target.dimension)):
        x = target.position() + step
        node = target.node(x)
        value, gradient = target.density(x)
        graph, slope = target.graph(tf.constant(x))
        assert abs(node.log_density - value) < 1e-8
        assert abs(node.log_density - graph) < 1e-6
        np.testing.assert_allclose(gradient, slope, atol=1e-5)
        movable = problem.movable()
        movable.restore(x, SiteValues(*node.sites))
        np.testing.assert_allclose(
            node.log_predictive, movable.model.predict_log_density(data), atol=1e-8
        )


def test_a_setting_of_a_lattice_needs_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    pulled = []
    pull_back = StationaryMatrix.pull_back

    def counted(self: StationaryMatrix, *arguments: Any) -> Any:
        pulled.append(1)
        return pull_back(self, *arguments)

    monkeypatch.setattr(StationaryMatrix, "pull_back", counted)
    target = prepare(classifier(), None, {}).target()
    x = target.position()
    target.node(x)
    assert not pulled
    target.density(x)
    assert len(pulled) == 1
