"""The Newton system and its transpose, against the matrix written out."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from scipy import linalg

from gpflow_hybrid import tuning
from gpflow_hybrid.inference import directions, newton
from gpflow_hybrid.inference.newton import NewtonSystem
from gpflow_hybrid.likelihoods.curvature import Curvature
from gpflow_hybrid.linalg.workspace import Workspace
from gpflow_hybrid.priors.dense import DenseCovariance


def covariance(Sigma: np.ndarray, spares_memory: bool = False) -> DenseCovariance:
    """An operator with these matrices, ``[L, N, N]``."""
    zeros = np.zeros(Sigma.shape[:2])
    workspace = Workspace(Sigma.shape[-1], Sigma.dtype)
    return DenseCovariance(list(Sigma), zeros, workspace, len(Sigma), spares_memory)


def written_out(Sigma: np.ndarray, curvature: Curvature, g2: np.ndarray, c: float) -> np.ndarray:
    """``J + μI`` for vectors ``(a, b)`` flattened from ``[2, L, N]``."""
    L, N, _ = Sigma.shape
    mm, mv, vm, vv = (
        np.block([[np.diag(H[:, i, j]) for j in range(L)] for i in range(L)]) for H in curvature
    )
    S, S2 = (linalg.block_diag(*matrices) for matrices in (Sigma, np.square(Sigma)))
    return c * np.eye(2 * L * N) + np.block(
        [[-(mm + np.diag(g2.ravel())) @ S, mv @ S2], [2.0 * vm @ S, -2.0 * vv @ S2]]
    )


def diagonal(x: np.ndarray) -> np.ndarray:
    """``[N, L]`` as ``[N, L, L]``."""
    return x[:, :, None] * np.eye(x.shape[1])


def problem(
    num_latents: int, is_coupled: bool, quadrature_error: float
) -> tuple[np.ndarray, Curvature, np.ndarray, np.random.Generator]:
    """``Σ``, the curvature, ``g₂ [L, N]``, and the generator for more."""
    rng = np.random.default_rng(3)
    N, L = 50, num_latents
    A = rng.normal(size=(L, N, N)) / np.sqrt(N)
    Sigma = A @ np.swapaxes(A, 1, 2)
    parts = [-0.05 * rng.uniform(size=(N, L, L)) for _ in range(3)]
    if not is_coupled:
        parts = [diagonal(np.einsum("nll->nl", H)) for H in parts]
    mm = -rng.uniform(0.1, 0.5, size=(N, L))
    # Price's theorem, on the diagonal, and what a quadrature makes of it
    g2 = -mm + quadrature_error * rng.normal(size=(N, L))
    return Sigma, Curvature(diagonal(mm), *parts), g2.T, rng


@pytest.mark.parametrize(
    ("num_latents", "is_coupled", "quadrature_error"),
    [
        (1, False, 0.0),
        (1, False, 1e-7),
        (1, False, 1e-3),
        (1, False, 0.05),
        (2, False, 0.0),
        (2, True, 0.0),
    ],
)
@pytest.mark.parametrize("few", [0, 300])
@pytest.mark.parametrize("spares_memory", [False, True])
@pytest.mark.parametrize("iterations", [1, 60])
def test_newton_systems_solve_their_equations(
    num_latents: int,
    is_coupled: bool,
    quadrature_error: float,
    few: int,
    spares_memory: bool,
    iterations: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "FEW_DATA", few)
    options = dataclasses.replace(  # 1: the factors come in
        newton.NEWTON, iterations=iterations
    )
    monkeypatch.setattr(newton, "NEWTON", options)
    Sigma, curvature, g2, rng = problem(num_latents, is_coupled, quadrature_error)
    r, d = rng.normal(size=(2, 2, *g2.shape))
    damping = 0.3
    J = written_out(Sigma, curvature, g2, 1.0)
    step = np.linalg.solve(J + damping * np.eye(len(J)), r.ravel())
    # δm = Σa and δv = −(Σ∘Σ)b
    pulled = r + np.stack(
        [(Sigma @ d[0][..., None])[..., 0], -(Sigma**2 @ d[1][..., None])[..., 0]]
    )
    adjoint = np.linalg.solve(J.T, pulled.ravel())

    system = NewtonSystem(covariance(Sigma, spares_memory), curvature, g2)
    assert system.is_coupled == is_coupled
    # A step on a small system leaves the error of the quadrature out, unless it shall be exact.
    found = system.damped(damping).solve(r, 1e-4)
    inexact = 1e-3 + 2.0 * quadrature_error
    assert np.linalg.norm(found.ravel() - step) < inexact * np.linalg.norm(step)
    found = system.damped(damping).solve(r, 1e-10, exact=True)
    np.testing.assert_allclose(found.ravel(), step, rtol=1e-7, atol=1e-8)
    weights, error = system.transpose_solve(r, *d, 1e-12)
    np.testing.assert_allclose(weights.ravel(), adjoint, rtol=1e-8, atol=1e-9)
    assert error < 1e-10


@pytest.mark.parametrize("strong", [0.0, 0.02, 1e3])
@pytest.mark.parametrize(("num_directions", "per_datum"), [(3000, 6.0), (30, 6.0), (3000, 0.75)])
def test_strong_directions(
    strong: float, num_directions: int, per_datum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them are the inverse itself; with fewer GMRES has the rest to do."""
    options = dataclasses.replace(newton.NEWTON, strong_curvature=strong)
    monkeypatch.setattr(directions, "NEWTON", options)
    monkeypatch.setattr(tuning, "DIRECTIONS", num_directions)
    monkeypatch.setattr(tuning, "DIRECTIONS_PER_DATUM", per_datum)
    Sigma, (mm, mv, _, vv), g2, rng = problem(3, True, 0.05)
    curvature = Curvature(mm, mv, np.swapaxes(mv, 1, 2), 0.5 * (vv + np.swapaxes(vv, 1, 2)))
    J = written_out(Sigma, curvature, g2, 1.3)
    r = rng.normal(size=(2, *g2.shape))
    found = directions.StrongDirections(covariance(Sigma), curvature, g2)
    assert len(found._strong[0]) <= min(num_directions, per_datum * g2.shape[1])
    solve = found.solver(1.3)
    system = NewtonSystem(covariance(Sigma), curvature, g2, damping=0.3)
    for transpose, matrix in ((False, J), (True, J.T)):
        exact = np.linalg.solve(matrix, r.ravel())
        error = np.linalg.norm(solve(r, transpose).ravel() - exact) / np.linalg.norm(exact)
        has_all = strong == 0.0 and (num_directions, per_datum) == (3000, 6.0)
        assert error < 1e-10 if has_all else 1e-6 < error < 1.0
        found = system._solve(r, 1e-11, False, transpose=transpose)
        np.testing.assert_allclose(found.ravel(), exact, rtol=1e-8, atol=1e-9)


class WithoutFactors(DenseCovariance):
    """A covariance that is too large for a matrix M, as that of a sparse prior is."""

    def between(self, *_: Any) -> None:
        return None

    def reduced_solver(self, *_: Any) -> None:
        return None


@pytest.mark.parametrize("is_coupled", [False, True])
@pytest.mark.parametrize("few", [0, 300])
def test_iterations_alone(is_coupled: bool, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "FEW_DATA", few)
    Sigma, curvature, g2, rng = problem(2, is_coupled, 0.0)
    operator = covariance(Sigma)
    operator.__class__ = WithoutFactors
    r = rng.normal(size=(2, *g2.shape))
    zeros = np.zeros_like(g2)
    system = NewtonSystem(operator, curvature, g2)
    J = written_out(Sigma, curvature, g2, 1.0)
    found, error = system.transpose_solve(r, zeros, zeros, 1e-10)
    np.testing.assert_allclose(found.ravel(), np.linalg.solve(J.T, r.ravel()), rtol=1e-6, atol=1e-7)
    assert error < 1e-8
    found = system.solve(r, 1e-10)
    np.testing.assert_allclose(found.ravel(), np.linalg.solve(J, r.ravel()), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("wrong", range(6))
def test_a_newton_system_that_is_not_finite_has_no_solution(wrong: int, transpose: bool) -> None:
    N = 5
    Sigma, g2, r = np.eye(N)[None], np.full((1, N), 0.1), np.ones((2, 1, N))
    parts = [np.full((N, 1, 1), -0.1) for _ in range(4)]
    [Sigma, *parts, g2][wrong][..., -1] = np.nan
    system = NewtonSystem(covariance(Sigma), Curvature(*parts), g2)
    zero = np.zeros((1, N))
    if transpose:
        found, _ = system.transpose_solve(r, zero, zero, 1e-10)
    else:
        found = system.solve(r, 1e-4)
    assert np.isnan(found).all()
