"""Elliptical slice sampling leaves its target invariant."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from gpflow_hybrid.evidence.slice_sampling import SliceState, elliptical_slice


def test_exact_draws_stay_exact_draws() -> None:
    # Target: N(0, 1) exp(τ h) with h = −½ (x − 1)²/s per datum, a Gaussian; begin with draws from it.
    rng = np.random.default_rng(0)
    s, tau = 0.5, 0.6
    variance = 1 / (1 + tau / s)
    mean = variance * tau / s
    Q, n = 40_000, 2
    x = mean + np.sqrt(variance) * rng.standard_normal((Q, n, 1))

    def potential(x: tf.Tensor, index: tf.Tensor | None) -> tf.Tensor:
        return -0.5 * tf.square(x[..., 0] - 1.0) / s

    values = potential(tf.constant(x), None)
    state = SliceState(tf.constant(x), values, tf.constant(-1))
    for _ in range(3):
        state = elliptical_slice(
            state,
            tf.constant(rng.standard_normal((Q, n, 1))),
            tf.constant(tau, tf.float64),
            potential,
            lambda _: tf.constant(rng.uniform(size=Q)),
        )
    moved = state.x.numpy()
    assert np.all(moved != x)
    np.testing.assert_allclose(state.values, potential(state.x, None))
    # 80 000 numbers: 0.0035 standard deviations of the mean, 0.005 of the variance.
    np.testing.assert_allclose(moved.mean(), mean, atol=0.01)
    np.testing.assert_allclose(moved.var() / variance, 1.0, atol=0.02)


def test_no_way_out_stays() -> None:
    x = tf.zeros((3, 1, 1), tf.float64)
    state = SliceState(x, tf.zeros((3, 1), tf.float64), tf.constant(-1))
    rng = np.random.default_rng(0)
    state = elliptical_slice(
        state,
        tf.ones_like(x),
        tf.constant(1.0, tf.float64),
        lambda x, _: tf.fill(tf.shape(x)[:2], tf.constant(-np.inf, tf.float64)),
        lambda _: tf.constant(rng.uniform(size=3)),
    )
    np.testing.assert_array_equal(state.x, x)
    np.testing.assert_array_equal(state.values, np.zeros((3, 1)))
    assert int(state.nan_datum) == -1
