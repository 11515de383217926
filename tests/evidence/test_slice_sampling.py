"""Elliptical slice sampling leaves its target invariant."""

from __future__ import annotations

import numpy as np
import pytest

from gpflow_hybrid.evidence import slice_sampling
from gpflow_hybrid.evidence.slice_sampling import SliceState, elliptical_slice


def uniforms_of(rng: np.random.Generator, num: int):
    """New ones for every shrink, the same whoever asks."""
    numbers: dict[int, np.ndarray] = {}

    def uniforms(shrink: int, chain: np.ndarray | None) -> np.ndarray:
        all_chains = numbers.setdefault(shrink, rng.uniform(size=num))
        return all_chains if chain is None else all_chains[chain]

    return uniforms


def test_exact_draws_stay_exact_draws() -> None:
    # Target: N(0, 1) exp(τ h) with h = −½ (x − 1)²/s per datum, a Gaussian; begin with draws from it.
    rng = np.random.default_rng(0)
    s, tau = 0.5, 0.6
    variance = 1 / (1 + tau / s)
    mean = variance * tau / s
    Q, n = 40_000, 2
    x = mean + np.sqrt(variance) * rng.standard_normal((Q, n, 1))

    def potential(x: np.ndarray, index: np.ndarray | None) -> np.ndarray:
        return -0.5 * np.square(x[..., 0] - 1.0) / s

    state = SliceState(x, potential(x, None))
    for _ in range(3):
        direction = rng.standard_normal((Q, n, 1))
        state = elliptical_slice(state, direction, np.full(Q, tau), potential, uniforms_of(rng, Q))
    moved = state.x
    assert np.all(moved != x)
    np.testing.assert_allclose(state.values, potential(state.x, None))
    # 80 000 numbers: 0.0035 standard deviations of the mean, 0.005 of the variance.
    np.testing.assert_allclose(moved.mean(), mean, atol=0.01)
    np.testing.assert_allclose(moved.var() / variance, 1.0, atol=0.02)


def slowly(x, values, direction, tau, potential, uniform):
    """One chain, as the algorithm is written down."""
    level = tau * values.sum() + np.log1p(-uniform(-2))
    theta = 2.0 * np.pi * uniform(-1)
    low, high = theta - 2.0 * np.pi, theta
    for shrink in range(slice_sampling.MAX_SHRINKS + 1):
        proposal = x * np.cos(theta) + direction * np.sin(theta)
        if tau * potential(proposal).sum() > level:
            return proposal
        low, high = (theta, high) if theta < 0.0 else (low, theta)
        theta = low + uniform(shrink) * (high - low)
    return x


@pytest.mark.parametrize("ahead", [1, 100, 100_000])
def test_proposals_ahead_change_nothing(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are evaluated at once, each chain takes the first that is above its level."""
    monkeypatch.setattr(slice_sampling, "AHEAD", ahead)
    rng = np.random.default_rng(1)
    Q, n = 50, 3
    x, direction = rng.standard_normal((2, Q, n, 1))
    width = np.geomspace(0.01, 2.0, Q)  # some need many shrinks
    tau = rng.uniform(size=Q)

    def potential(x: np.ndarray, index: np.ndarray | None) -> np.ndarray:
        index = np.arange(Q) if index is None else index
        return -np.square((x[..., 0] - 0.3) / width[index][:, None])

    uniforms = uniforms_of(rng, Q)
    state = SliceState(x, potential(x, None))
    found = elliptical_slice(state, direction, tau, potential, uniforms)
    for q in range(Q):
        expected = slowly(
            x[q],
            state.values[q],
            direction[q],
            tau[q],
            lambda x, q=q: potential(x[None], np.array([q]))[0],
            lambda shrink, q=q: uniforms(shrink, None)[q],
        )
        np.testing.assert_allclose(found.x[q], expected, rtol=1e-12)
    np.testing.assert_allclose(found.values, potential(found.x, None), rtol=1e-12)


def test_no_way_out_stays() -> None:
    x = np.zeros((3, 1, 1))
    state = SliceState(x, np.zeros((3, 1)))
    state = elliptical_slice(
        state,
        np.ones_like(x),
        np.ones(3),
        lambda x, _: np.full(x.shape[:2], -np.inf),
        uniforms_of(np.random.default_rng(0), 3),
    )
    np.testing.assert_array_equal(state.x, x)
    np.testing.assert_array_equal(state.values, np.zeros((3, 1)))
