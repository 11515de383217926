"""Inference under a step function of f starts at the optimum of a steep softmax."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf

import gpflow_hybrid as gh
from gpflow_hybrid.inference import smooth_start
from gpflow_hybrid.inference.options import SMOOTH_START
from gpflow_hybrid.inference.servers import run
from gpflow_hybrid.inference.smooth_start import smoothly_started, starts_smoothly
from gpflow_hybrid.likelihoods.on_arrays import on_arrays
from gpflow_hybrid.models import cvi
from gpflow_hybrid.sites import SiteValues

pytestmark = pytest.mark.filterwarnings("ignore::gpflow_hybrid.ConvergenceWarning")  # coarse rules


class OtherMultiClass(gpflow.likelihoods.MultiClass):
    """One that is asked through TensorFlow."""

    def _variational_expectations(self, X: Any, Fmu: Any, Fvar: Any, Y: Any) -> tf.Tensor:
        return super()._variational_expectations(X, Fmu, Fvar, Y)


def labelled(num: int = 60) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.uniform(-2.0, 2.0, size=(num, 2))
    f = np.sin(2.0 * X[:, :1]) + 0.5 * np.cos(3.0 * X[:, 1:]) + 0.4 * rng.normal(size=(num, 1))
    return X, np.digitize(f, [-0.5, 0.5])


def classifier(likelihood: Any = None, num: int = 60, **kernel: float) -> gh.CVIModel:
    likelihood = likelihood or gpflow.likelihoods.MultiClass(3)
    return gh.CVIModel(
        labelled(num), gpflow.kernels.Matern52(**kernel), likelihood, num_latent_gps=3
    )


@pytest.mark.parametrize("kind", [gpflow.likelihoods.MultiClass, OtherMultiClass])
def test_the_start_is_the_optimum_of_a_steep_softmax(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of Softmax under a prior whose f is β times as large, taken back to the smaller one."""
    options = dataclasses.replace(SMOOTH_START, tolerance=1e-10)
    monkeypatch.setattr(smooth_start, "SMOOTH_START", options)
    model = classifier(kind(3), variance=4.0)
    assert (on_arrays(model.likelihood) is None) == (kind is OtherMultiClass)
    starts = []

    def end_at_once(prior: Any, start: SiteValues, *_: Any) -> Generator[Any, Any, SiteValues]:
        starts.append(start)
        return start
        yield

    method = dataclasses.replace(model._method(), solve=end_at_once)
    nothing = SiteValues(*(x.numpy() for x in model.sites.values))
    iteration = smoothly_started(method).solve(model.host_prior(), nothing, 1e-6, 50)
    found = run(iteration, model.likelihood, model._data_tensors())
    beta = SMOOTH_START.steepness / 2.0  # the prior's deviation is two
    kernel = gpflow.kernels.Matern52(variance=4.0 * beta**2)
    steep = gh.CVIModel(model.data, kernel, gpflow.likelihoods.Softmax(3), num_latent_gps=3)
    steep.infer(tolerance=1e-10)
    lambda_1, lambda_2 = (x.numpy() for x in steep.sites.values)
    np.testing.assert_allclose(found.lambda_1, beta * lambda_1, rtol=1e-7, atol=1e-8)
    np.testing.assert_allclose(found.lambda_2, beta**2 * lambda_2, rtol=1e-7, atol=1e-8)


def test_a_fit_ends_where_from_signs_it_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The EP-like loss from signs jumps with the hyperparameters, and a line search ends on a jump."""
    found = gh.fit(classifier(num=100), progress=False)
    assert found.gradient_norm < 1e-2
    assert found.num_evaluations < 30
    monkeypatch.setattr(cvi, "starts_smoothly", lambda _: False)
    from_signs = gh.fit(classifier(num=100), progress=False, max_iterations=20)
    assert from_signs.gradient_norm > 1.0


def test_the_scale_of_f_does_not_matter() -> None:
    """As it does not to which latent is the largest."""
    expected = float(classifier(variance=1.0).training_loss())
    assert float(classifier(variance=100.0).training_loss()) == pytest.approx(expected, rel=1e-8)


def test_a_loss_is_the_same_however_the_likelihood_is_asked() -> None:
    expected = classifier().training_loss()
    for model in (classifier(), classifier(OtherMultiClass(3))):
        np.testing.assert_allclose(model.training_loss(), expected, rtol=1e-9)
        loss = tf.function(model.training_loss, autograph=False)
        np.testing.assert_allclose(loss(), expected, rtol=1e-9)


def test_others_start_as_they_did() -> None:
    assert starts_smoothly(gpflow.likelihoods.MultiClass(3))
    for likelihood in (gpflow.likelihoods.Softmax(3), gpflow.likelihoods.StudentT()):
        assert not starts_smoothly(likelihood)
        assert on_arrays(likelihood).smooth_relative is None


def test_where_there_is_no_prior_there_is_no_start() -> None:
    """A line search that went too far comes back: that of the relative asks nothing."""
    model = classifier(num=12)
    loss = model.training_loss_closure()
    first = float(loss())
    model.kernel.lengthscales.assign(1e-200)  # distances of 1e200, squared
    assert float(loss()) == 1000.0 * 12 > first
    with pytest.raises(gh.NonFiniteError, match="could not start"):
        classifier(num=12, lengthscales=1e-200).training_loss()
    model.kernel.lengthscales.assign(1.0)
    assert float(loss()) == pytest.approx(first, rel=1e-8)
