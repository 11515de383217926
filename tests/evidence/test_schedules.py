"""Temperatures go where the weights say: against exact integrals, and what is promised of them."""

from __future__ import annotations

import dataclasses

import gpflow
import numpy as np
import pytest
from scipy import stats

import gpflow_hybrid as gh
from gpflow_hybrid.evidence import AnnealingResult, annealed_importance_sampling, grid
from gpflow_hybrid.evidence.chains import NUM_KNOTS
from gpflow_hybrid.evidence.plans import make_plan
from gpflow_hybrid.evidence.results import is_poor
from gpflow_hybrid.evidence.schedules import NO_WARP, affordable, evened, needed

from .quadrature import integrate

PROBIT = gh.likelihoods.ProbitBernoulli()
X = np.array([[0.0], [0.4], [1.5]])
Y = np.array([[1.0], [1.0], [0.0]])
VARIANCES = [0.1, 400.0, 1e4]


def anneal(effort: float, num_temperatures: int = 6, **more: object) -> AnnealingResult:
    """From the prior, far from the posterior where the variance is large."""
    model = gh.CVIModel((X, Y), gpflow.kernels.Matern52(9.0, 0.8), PROBIT)
    return annealed_importance_sampling(
        model,
        start="prior",
        hyperparameters=grid({".kernel.variance": VARIANCES}),
        num_chains=64,
        num_temperatures=num_temperatures,
        effort=effort,
        progress=False,
        **more,
    )


def truths() -> np.ndarray:
    sign = 2.0 * Y[:, 0] - 1.0
    kernels = [gpflow.kernels.Matern52(v, 0.8)(X).numpy() for v in VARIANCES]
    return np.array(
        [
            integrate(np.zeros(3), K, lambda f: stats.norm.logcdf(sign * f).sum(-1)).log_marginal
            for K in kernels
        ]
    )


def test_settings_with_uneven_weights_anneal_again_and_find_the_truth() -> None:
    plain, found = anneal(1.0), anneal(60.0)
    poor = is_poor(plain.log_weights)
    assert poor.any()
    assert not poor.all()
    np.testing.assert_array_equal(plain.temperatures, 6)
    # What was even is left as it was, to the last digit.
    np.testing.assert_array_equal(found.temperatures > 6, poor)
    np.testing.assert_array_equal(found.log_weights[~poor], plain.log_weights[~poor])
    assert not is_poor(found.log_weights).any()
    assert gh.evidence.results.TRUSTED == found.message
    errors = np.abs(found.log_marginal_likelihood - truths())
    assert np.all(errors < 3.5 * found.standard_error + 1e-8)
    assert f"6 to {found.temperatures.max()} temperatures" in str(found)


def test_the_effort_is_kept() -> None:
    plain, found = anneal(1.0), anneal(3.0)
    plan = make_plan(
        "prior",
        None,
        "arithmetic",
        False,
        num_chains=64,
        num_temperatures=6,
        block_size=None,
        num_samples=1,
        thinning=5,
        seed=0,
    )
    again = found.temperatures[found.temperatures > 6]
    assert 0 < len(again)
    # At least the last round of every setting; rounds before it are smaller.
    sweeps = [dataclasses.replace(plan, num_temperatures=int(t)).num_sweeps for t in again]
    assert sum(sweeps) <= 2.0 * len(VARIANCES) * plan.num_sweeps
    assert np.sum(is_poor(found.log_weights)) <= np.sum(is_poor(plain.log_weights))


def test_the_same_seed_has_the_same_result() -> None:
    one, other = (anneal(8.0, test_data=(X, Y)) for _ in range(2))
    np.testing.assert_array_equal(one.log_weights, other.log_weights)
    np.testing.assert_array_equal(one.test_log_densities, other.test_log_densities)


def test_steps_are_evened_out() -> None:
    """φ varies ten times as much in the first tenth: three quarters of the steps follow it."""
    lengths = np.ones(NUM_KNOTS)
    lengths[: NUM_KNOTS // 10] = 10.0
    warp = evened(NO_WARP, lengths)
    assert warp[0] == 0.0
    assert warp[-1] == 1.0
    assert np.all(np.diff(warp) > 0.0)
    # After u of the steps, ¾ of the length and ¼ of the old way are u.
    so_far = np.interp(warp, NO_WARP, np.concatenate([[0.0], np.cumsum(lengths)]) / lengths.sum())
    np.testing.assert_allclose(0.75 * so_far + 0.25 * warp, NO_WARP, atol=1e-12)
    for nothing in (np.zeros(NUM_KNOTS), np.full(NUM_KNOTS, np.inf)):
        np.testing.assert_array_equal(evened(NO_WARP, nothing), NO_WARP)


@dataclasses.dataclass
class Output:
    log_weights: np.ndarray
    num_temperatures: int


def test_more_temperatures_where_weights_are_uneven() -> None:
    normal = stats.norm.ppf((np.arange(64) + 0.5) / 64)
    outputs = {
        0: Output(0.1 * normal, 200),
        1: Output(1.3 * normal, 200),
        2: Output(3.0 * normal, 200),
        3: Output(np.where(normal > 0.0, -np.inf, 0.0), 400),
        4: Output(np.where(normal > -2.0, -np.inf, 0.0), 400),
    }
    wanted = needed(outputs)
    assert wanted == {1: 400, 2: 800, 4: 1600}
    plan = make_plan(
        "posterior",
        None,
        "arithmetic",
        False,
        num_chains=64,
        num_temperatures=None,
        block_size=None,
        num_samples=0,
        thinning=5,
        seed=0,
    )
    assert affordable(plan, 3000.0, wanted) == wanted
    assert affordable(plan, 1300.0, wanted) == {1: 400, 2: 800}
    assert affordable(plan, 399.0, wanted) == {}


@pytest.mark.parametrize("effort", [0.5, float("nan"), "much"])
def test_an_effort_that_makes_no_sense_is_refused(effort: object) -> None:
    with pytest.raises(gh.errors.InvalidDataError, match="effort must be a number, at least 1"):
        anneal(effort)  # type: ignore[arg-type]
