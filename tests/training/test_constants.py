"""A constant that explains the data as well as f: then f is no fit."""

from __future__ import annotations

from typing import Any

import gpflow
import numpy as np
import pytest

import gpflow_hybrid as gh
from gpflow_hybrid.training.constants import evidence_of_constant

NOISES = {"gaussian": gpflow.likelihoods.Gaussian, "student_t": gpflow.likelihoods.StudentT}


def waves(offset: float, kind: str) -> Any:
    rng = np.random.default_rng(0)
    X = rng.uniform(-3.0, 3.0, size=(60, 1))
    data = (X, offset + np.sin(2.0 * X) + 0.2 * rng.normal(size=X.shape))
    if kind == "gpr":
        return gpflow.models.GPR(data, gpflow.kernels.Matern52())
    return gh.CVIModel(data, gpflow.kernels.Matern52(), NOISES[kind]())


@pytest.mark.filterwarnings("ignore::gpflow_hybrid.ConvergenceWarning")  # of line searches
@pytest.mark.parametrize("kind", ["gpr", "gaussian", "student_t"])
def test_observations_far_from_the_mean_function_are_no_fit(kind: str) -> None:
    assert gh.fit(waves(0.0, kind)).converged
    for offset in (1e3, 1e8):
        result = gh.fit(waves(offset, kind))
        assert result.status == "no_better_than_constant"
        assert not result.converged
        assert "subtract their mean from Y" in result.message


def test_of_a_sparse_model_too() -> None:
    for offset, status in ((0.0, "converged"), (1e3, "no_better_than_constant")):
        X, Y = waves(offset, "gpr").data
        Z = np.linspace(-3.0, 3.0, 12)[:, None]
        model = gh.SparseCVIModel(gpflow.kernels.Matern52(), gpflow.likelihoods.Gaussian(), Z)
        gpflow.set_trainable(model.inducing_variable, False)
        assert gh.fit(model, data=(X, Y)).status == status


def test_the_evidence_of_a_constant_is_that_of_a_constant_kernel() -> None:
    """Whose variance and noise are trained, or the noise held."""
    rng = np.random.default_rng(1)
    X = rng.normal(size=(50, 1))
    data = (X, 3.0 + 0.5 * rng.normal(size=(50, 1)))
    for held in (None, 0.4):
        model = gpflow.models.GPR(data, gpflow.kernels.Constant())
        if held is not None:
            model.likelihood.variance.assign(held)
            gpflow.set_trainable(model.likelihood, False)
        expected = -gh.fit(model, progress=False).loss
        assert evidence_of_constant(model, *data, 50) == pytest.approx(expected, abs=0.02)
    assert evidence_of_constant(model, *data, 100) < 1.9 * expected


def test_the_evidence_of_a_constant_under_student_t() -> None:
    rng = np.random.default_rng(2)
    X = rng.normal(size=(50, 1))
    Y = 3.0 + 0.5 * rng.standard_t(3.0, size=(50, 1))
    model = gh.CVIModel((X, Y), gpflow.kernels.Constant(), gpflow.likelihoods.StudentT(df=3.0))
    loss = gh.fit(model, progress=False).loss
    assert evidence_of_constant(model, X, Y, 50) == pytest.approx(-loss, abs=0.2)
    same = gh.CVIModel((X, 0.0 * Y), gpflow.kernels.Constant(), gpflow.likelihoods.StudentT())
    assert np.isnan(evidence_of_constant(same, X, 0.0 * Y, 50))  # any noise is too much
    labels = (Y > 3.0).astype(float)
    classifier = gh.CVIModel(
        (X, labels), gpflow.kernels.Constant(), gh.likelihoods.ProbitBernoulli()
    )
    assert np.isnan(evidence_of_constant(classifier, X, Y, 50))
