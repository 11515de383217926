"""Axes, lattices and designs on densities that are known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy.special import log_ndtr, logsumexp
from scipy.stats import norm

from gpflow_hybrid.integration.axes import axes_at
from gpflow_hybrid.integration.designs import (
    composite_design,
    design_weights,
    fewest_points,
    integrate_by_design,
)
from gpflow_hybrid.integration.lattices import Lattice
from gpflow_hybrid.integration.marginals import marginal, smooth_draws
from gpflow_hybrid.integration.movable import Node

Log = Callable[[np.ndarray], np.ndarray]


def skewed(slopes: np.ndarray, root: np.ndarray) -> Log:
    """A skew normal in each coordinate of ``root⁻¹ x``; its integral is |root|."""
    inverse = np.linalg.inv(root)

    def log_density(x: np.ndarray) -> np.ndarray:
        t = x @ inverse.T
        return np.sum(norm.logpdf(t) + np.log(2.0) + log_ndtr(slopes * t), -1)

    return log_density


def with_gradient(log_density: Log) -> Callable[[np.ndarray], tuple[float, np.ndarray]]:
    def both(x: np.ndarray) -> tuple[float, np.ndarray]:
        steps = 1e-5 * np.eye(len(x))
        slope = (log_density(x + steps) - log_density(x - steps)) / 2e-5
        return float(log_density(x)), slope

    return both


def mode_of(log_density: Log, d: int) -> np.ndarray:
    from scipy.optimize import minimize

    return minimize(lambda x: -float(log_density(x)), np.zeros(d), tol=1e-10).x


def look_at(log_density: Log) -> Callable[[np.ndarray], Node]:
    """Predictions that depend on where the setting is."""
    return lambda x: Node(x, float(log_density(x)), np.array([np.sum(x), 0.3 * x[0]]), ())


@pytest.mark.parametrize("d", [1, 2, 3])
def test_a_lattice_finds_integral_and_predictions(d: int) -> None:
    rng = np.random.default_rng(d)
    root = rng.normal(size=(d, d)) + 2.0 * np.eye(d)
    slopes = np.array([2.0, -1.0, 0.5])[:d]
    log_density = skewed(slopes, root)
    axes = axes_at(mode_of(log_density, d), with_gradient(log_density))
    lattice = Lattice(look_at(log_density), axes, 5000)
    found = lattice.integrate(1e-4)
    assert found.has_converged
    assert abs(found.log_evidence - np.linalg.slogdet(root)[1]) < 1e-3
    # E exp(aᵀx) of a skew normal: 2 exp(b²/2) Φ(δ b) in each coordinate, b = rootᵀa.
    for row, a in enumerate((np.ones(d), 0.3 * np.eye(d)[0])):
        b = root.T @ a
        delta = slopes / np.sqrt(1.0 + slopes**2)
        expected = np.sum(np.log(2.0) + 0.5 * b**2 + log_ndtr(delta * b))
        each = np.array([node.log_predictive[row] for node in found.nodes])
        assert abs(logsumexp(each + found.log_weights) - expected) < 1e-3


def test_scaled_axes_follow_the_skew() -> None:
    log_density = skewed(np.array([4.0, 0.0]), np.eye(2))
    axes = axes_at(mode_of(log_density, 2), with_gradient(log_density))
    falls = []
    for axis in range(2):
        for side in (-1.0, 1.0):
            z = np.zeros(2)
            z[axis] = side * np.sqrt(2.0)
            falls.append(log_density(axes.mode) - log_density(axes.position(z)))
    # A standard normal falls by one at √2.
    np.testing.assert_allclose(falls, 1.0, atol=0.35)
    assert np.max(np.abs(axes.skew)) > 0.3


def test_the_volume_is_the_jacobian() -> None:
    log_density = skewed(np.array([2.0, -1.0]), np.array([[1.0, 0.4], [0.0, 0.7]]))
    axes = axes_at(mode_of(log_density, 2), with_gradient(log_density))
    z = np.array([0.7, -1.9])
    columns = [(axes.position(z + e) - axes.position(z - e)) / 2e-6 for e in 1e-6 * np.eye(2)]
    expected = np.linalg.slogdet(np.stack(columns, 1))[1]
    assert abs(float(axes.log_volume(z)) - expected) < 1e-8


def test_too_few_evaluations_are_told() -> None:
    log_density = skewed(np.array([3.0, -2.0]), np.eye(2))
    axes = axes_at(mode_of(log_density, 2), with_gradient(log_density))
    found = Lattice(look_at(log_density), axes, 20).integrate(1e-9)
    assert not found.has_converged
    assert len(found.nodes) <= 20


@pytest.mark.parametrize("d", [2, 4])
def test_no_more_settings_are_looked_at_than_allowed(d: int) -> None:
    log_density = skewed(np.full(d, 3.0), np.eye(d))
    axes = axes_at(mode_of(log_density, d), with_gradient(log_density))
    counts = []
    for allowed in (3**d if d == 2 else fewest_points(d), 300):
        seen = []

        def look(x: np.ndarray, seen: list[np.ndarray] = seen) -> Node:
            seen.append(x)
            return look_at(log_density)(x)

        if d == 2:
            found = Lattice(look, axes, allowed).integrate(1e-12)
        else:
            found = integrate_by_design(look, axes, 1e-12, allowed, 0)
        assert not found.has_converged
        assert len(seen) <= allowed
        counts.append(len(seen))
    assert counts[1] > counts[0]


def test_marginals_of_very_few_nodes_are_those_of_the_axes() -> None:
    log_density = skewed(np.zeros(2), np.eye(2))
    axes = axes_at(np.zeros(2), with_gradient(log_density))
    z = np.array([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0]])
    draws = smooth_draws(z, log_density(axes.position(z)) + axes.log_volume(z), axes)
    for column in draws.x.T:
        one = marginal("x", column, draws.weights)
        assert abs(one.mean) < 0.02
        assert abs(one.deviation - 1.0) < 0.05


@pytest.mark.parametrize("d", [4, 5, 6])
def test_a_composite_design_has_the_moments_of_a_normal(d: int) -> None:
    """Exact for every polynomial of degree three, so for means and covariances."""
    sphere = composite_design(d)
    assert len(sphere) == 2 * d + {4: 16, 5: 16, 6: 32}[d]
    np.testing.assert_allclose(np.sum(sphere**2, 1), 1.0)
    radius = 1.1
    centre, point = design_weights(d, radius, len(sphere))
    z = radius * np.sqrt(d) * sphere
    w = point * np.exp(-0.5 * np.sum(z**2, 1))
    assert abs(centre + w.sum() - 1.0) < 1e-12
    np.testing.assert_allclose(w @ z, 0.0, atol=1e-12)
    np.testing.assert_allclose(z.T @ (w[:, None] * z), np.eye(d), atol=1e-12)


@pytest.mark.parametrize("d", [4, 6])
def test_a_gaussian_by_a_design(d: int) -> None:
    root = np.random.default_rng(d).normal(size=(d, d)) + 2.0 * np.eye(d)
    log_density = skewed(np.zeros(d), root)

    def flat(x: np.ndarray) -> Node:
        return Node(x, float(log_density(x)), np.zeros(1), ())

    axes = axes_at(np.zeros(d), with_gradient(log_density))
    found = integrate_by_design(flat, axes, 1e-3, 1000, 0)
    assert "composite" in found.description
    assert abs(found.log_evidence - np.linalg.slogdet(root)[1]) < 1e-3


def test_quasi_random_points_where_a_design_is_not_enough() -> None:
    slopes = np.array([2.0, -1.0, 0.5, 0.0])
    log_density = skewed(slopes, np.eye(4))
    axes = axes_at(mode_of(log_density, 4), with_gradient(log_density))
    found = integrate_by_design(look_at(log_density), axes, 0.05, 3000, 0)
    assert "quasi-random" in found.description
    assert found.has_converged
    assert abs(found.log_evidence) < 0.03
    assert 1e-4 < found.log_evidence_error < 0.03
    delta = slopes / np.sqrt(1.0 + slopes**2)
    expected = np.sum(np.log(2.0) + 0.5 + log_ndtr(delta))
    each = np.array([node.log_predictive[0] for node in found.nodes])
    assert (
        abs(logsumexp(each + found.log_weights) - expected) < 0.1
    )  # its tolerance, and a heavy tail


def test_marginals_of_a_skew_normal() -> None:
    from scipy.stats import skewnorm

    log_density = skewed(np.array([2.0, -1.0]), np.eye(2))
    axes = axes_at(mode_of(log_density, 2), with_gradient(log_density))
    found = Lattice(look_at(log_density), axes, 1000).integrate(1e-2)
    masses = np.array([n.log_density for n in found.nodes]) + axes.log_volume(found.z)
    draws = smooth_draws(found.z, masses, axes, found.step)
    for column, slope in enumerate((2.0, -1.0)):
        one = marginal("x", draws.x[:, column], draws.weights)
        exact = skewnorm(slope)
        assert abs(one.mean - exact.mean()) < 0.01
        assert abs(one.deviation - exact.std()) < 0.01
        # Four thousand draws.
        np.testing.assert_allclose(
            list(one.quantiles.values()), exact.ppf(list(one.quantiles)), atol=0.04
        )


@pytest.mark.parametrize("reach", [8.0, 25.0])
def test_marginals_of_a_density_with_a_long_arm(reach: float) -> None:
    """A Gaussian, and an arm that reaches many of its standard deviations to one side."""

    def log_density(x: np.ndarray) -> np.ndarray:
        along, across = x[..., 0], x[..., 1]
        arm = -0.5 * ((along - 0.5 * reach) / (0.25 * reach)) ** 4 - 0.5 * (across / 0.6) ** 2
        return np.logaddexp(-0.5 * np.sum(x**2, -1), arm - 2.5)

    axes = axes_at(np.zeros(2), with_gradient(log_density))
    found = Lattice(look_at(log_density), axes, 3000).integrate(1e-3)
    masses = np.array([n.log_density for n in found.nodes]) + axes.log_volume(found.z)
    draws = smooth_draws(found.z, masses, axes, found.step)
    assert 1.0 / np.sum(draws.weights**2) > 500.0
    grid = [np.linspace(-6.0, 2.0 * reach, 1500), np.linspace(-6.0, 6.0, 300)]
    at = np.stack(np.meshgrid(*grid, indexing="ij"), -1).reshape(-1, 2)
    exact = np.exp(log_density(at)).reshape(1500, 300)
    for column in range(2):
        mass = exact.sum(1 - column)
        below = (np.cumsum(mass) - 0.5 * mass) / mass.sum()
        one = marginal("x", draws.x[:, column], draws.weights)
        levels = np.interp(list(one.quantiles.values()), grid[column], below)
        # In probability: effectively some thousand draws, and an interpolated density.
        np.testing.assert_allclose(levels, list(one.quantiles), atol=0.015)
