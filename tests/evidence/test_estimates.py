"""compare_evidence: every estimate side by side, equal to what each method says alone."""

from __future__ import annotations

import math

import gpflow
import matplotlib
import numpy as np
import pytest
import tensorflow as tf
from gpflow.utilities import read_values

import gpflow_hybrid as gh
from gpflow_hybrid.errors import InvalidDataError

matplotlib.use("Agg")

PROBIT = gh.likelihoods.ProbitBernoulli()
QUICK = {"num_chains": 16, "num_temperatures": 20}


def make_data(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(12, 1))
    return X, (np.sin(2.0 * X) + 0.5 * rng.normal(size=X.shape) > 0.0).astype(float)


@pytest.fixture(scope="module")
def model() -> gh.CVIModel:
    return gh.CVIModel(make_data(), gpflow.kernels.Matern52(variance=4.0), PROBIT)


@pytest.fixture(scope="module")
def comparison(model: gh.CVIModel) -> gh.EvidenceComparison:
    before = read_values(model)
    result = gh.compare_evidence(model, powers=(0.25, 0.5), annealing=QUICK, seed=3)
    for path, value in read_values(model).items():
        np.testing.assert_array_equal(value, before[path])  # the model is left as it is
    return result


def test_every_estimate_is_what_its_method_says_alone(
    model: gh.CVIModel, comparison: gh.EvidenceComparison
) -> None:
    parts = (make_data(), model.kernel, PROBIT)
    cvi, ep, laplace = gh.CVIModel(*parts), gh.EPModel(*parts), gh.LaplaceModel(*parts)
    for other in (cvi, ep, laplace):
        other.infer()
    expected = {
        "elbo": cvi.elbo(),
        "power_ep_0.25": cvi.power_ep_log_marginal(0.25),
        "power_ep_0.5": cvi.power_ep_log_marginal(0.5),
        "ep_like": cvi.ep_like_log_marginal(),
        "ep": ep.log_marginal_likelihood(),
        "laplace": laplace.log_marginal_likelihood(),
    }
    values = comparison.as_dict()
    for name, value in expected.items():
        np.testing.assert_allclose(values[name], float(value), atol=1e-8, err_msg=name)
    sampled = gh.annealed_importance_sampling(model, seed=3, **QUICK)
    assert values["ais"] == sampled.log_marginal_likelihood
    assert values["ais_standard_error"] == sampled.standard_error
    assert set(values) == {*expected, "ais", "ais_standard_error"}


def test_the_order_on_a_skewed_posterior(comparison: gh.EvidenceComparison) -> None:
    values = comparison.as_dict()
    assert values["elbo"] < values["power_ep_0.25"] < values["power_ep_0.5"] < values["ep_like"]
    error = 3.0 * values["ais_standard_error"]
    assert values["elbo"] < values["ais"] + error
    assert abs(values["ep"] - values["ais"]) < 0.05 + error  # EP is that good for probit


def test_the_table_names_every_method_and_the_distance_from_sampling(
    comparison: gh.EvidenceComparison,
) -> None:
    text = str(comparison)
    assert len(text.splitlines()) == 1 + len(comparison.estimates)
    row = next(line for line in text.splitlines() if line.startswith("laplace"))
    difference = comparison["laplace"].value - comparison["ais"].value
    assert f"{difference:+.3f}" in row
    assert f"± {comparison['ais'].standard_error:.3f}" in text
    with pytest.raises(KeyError, match="computed were elbo"):
        comparison["mcmc"]


def test_the_plot_shows_every_value(comparison: gh.EvidenceComparison) -> None:
    ax = comparison.plot()
    labels = [t.get_text() for t in ax.get_yticklabels()]
    assert labels[::-1] == [e.name for e in comparison.estimates]
    matplotlib.pyplot.close(ax.figure)


def test_a_gaussian_likelihood_makes_all_of_them_exact() -> None:
    X, Y = make_data(1)
    exact = gpflow.models.GPR((X, Y), gpflow.kernels.Matern52(), noise_variance=0.2)
    result = gh.compare_evidence(exact, powers=(), annealing=QUICK)
    for estimate in result.estimates:
        np.testing.assert_allclose(
            estimate.value, float(exact.log_marginal_likelihood()), atol=1e-6, err_msg=estimate.name
        )


def test_what_has_no_value_keeps_its_row_and_says_why() -> None:
    rng = np.random.default_rng(0)
    X, Y = rng.normal(size=(6, 1)), rng.integers(0, 3, size=(6, 1)).astype(float)
    vgp = gpflow.models.VGP(
        (X, Y), gpflow.kernels.Matern52(), gpflow.likelihoods.Softmax(3), num_latent_gps=3
    )
    result = gh.compare_evidence(vgp, sample=False)
    assert [e.name for e in result.estimates] == [
        "elbo",
        "power_ep_0.5",
        "ep_like",
        "ep",
        "laplace",
    ]
    for name in ("ep", "laplace"):
        assert math.isnan(result[name].value)
        assert "ScalarLikelihood" in result[name].note
    assert math.isfinite(result["ep_like"].value)
    assert result.reference is None
    assert "none" in str(result)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"powers": (2.0,)}, "powers must be a number in"),
        ({"annealing": 5}, "annealing must be a dictionary"),
    ],
)
def test_bad_arguments_are_named(model: gh.CVIModel, arguments: dict, match: str) -> None:
    with pytest.raises(InvalidDataError, match=match):
        gh.compare_evidence(model, **arguments)


def test_models_without_a_full_prior_are_refused() -> None:
    svgp = gpflow.models.SVGP(gpflow.kernels.Matern52(), PROBIT, tf.zeros((2, 1), tf.float64))
    with pytest.raises(InvalidDataError, match="inducing"):
        gh.compare_evidence(svgp)
