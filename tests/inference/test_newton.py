"""The Newton system and its transpose, against the matrix written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from scipy import linalg

from gpflow_hybrid.inference import newton_host
from gpflow_hybrid.inference.newton import Curvature, HostNewtonSystem, NewtonSystem


def dense_newton_matrix(Sigma: Any, hessian: Curvature, g2: Any, c: float) -> Any:
    """``J + μI`` written out, for vectors ``(a, b)`` flattened from ``[2, L, N]``."""
    L, N, _ = Sigma.shape
    mm, mv, vm, vv = (
        np.block([[np.diag(H[:, i, j]) for j in range(L)] for i in range(L)])
        for H in (x.numpy() for x in hessian)
    )
    S, S2 = (linalg.block_diag(*matrices) for matrices in (Sigma, np.square(Sigma)))
    g2 = np.diag(np.transpose(g2).ravel())
    return c * np.eye(2 * L * N) + np.block(
        [[-(mm + g2) @ S, mv @ S2], [2.0 * vm @ S, -2.0 * vv @ S2]]
    )


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
@pytest.mark.parametrize("small", [0, 300])
@pytest.mark.parametrize("large", [0, 300])
@pytest.mark.parametrize("iterations", [1, 60])
def test_newton_systems_solve_their_equations(
    num_latents: int,
    is_coupled: bool,
    quadrature_error: float,
    small: int,
    large: int,
    iterations: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(newton_host, "SMALL", small)
    monkeypatch.setattr(newton_host, "LARGE", large)
    monkeypatch.setattr(newton_host, "ITERATIONS", iterations)  # 1: the factors come in
    rng = np.random.default_rng(3)
    N, L = 50, num_latents
    A = rng.normal(size=(L, N, N)) / np.sqrt(N)
    Sigma = tf.constant(A @ np.swapaxes(A, 1, 2))
    hessian = Curvature(*(tf.constant(-0.05 * rng.uniform(size=(N, L, L))) for _ in range(4)))
    hessian = hessian._replace(mm=tf.linalg.diag(-rng.uniform(0.1, 0.5, size=(N, L))))
    if not is_coupled:
        hessian = Curvature(*(tf.linalg.diag(tf.linalg.diag_part(H)) for H in hessian))
    # Price's theorem, on the diagonal, and what a quadrature makes of it
    g2 = -tf.linalg.diag_part(hessian.mm) + quadrature_error * rng.normal(size=(N, L))
    r, d = tf.constant(rng.normal(size=(2, 2, L, N)))
    damping = 0.3
    step = np.linalg.solve(
        dense_newton_matrix(Sigma.numpy(), hessian, g2, 1.0 + damping), np.ravel(r)
    )
    # δm = Σa and δv = −(Σ∘Σ)b
    pulled = r + np.stack(
        [(Sigma @ d[0][..., None])[..., 0], -(Sigma**2 @ d[1][..., None])[..., 0]]
    )
    adjoint = np.linalg.solve(
        dense_newton_matrix(Sigma.numpy(), hessian, g2, 1.0).T, np.ravel(pulled)
    )
    # A step on a small system, and TensorFlow's always, leaves the error of the quadrature out.
    inexact = 1e-3 + 2.0 * quadrature_error
    for kind in (HostNewtonSystem, NewtonSystem):
        system = kind(Sigma, hessian, g2, is_coupled=is_coupled)
        found = np.ravel(system.solve(*r, tf.constant(damping, tf.float64)))
        assert np.linalg.norm(found - step) < inexact * np.linalg.norm(step)
        weights, error = system.transpose_solve(tuple(r), tuple(d), 1e-12)
        np.testing.assert_allclose(np.ravel(weights), adjoint, rtol=1e-8, atol=1e-9)
        assert float(error) < 1e-10


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("wrong", range(6))
def test_a_newton_system_that_is_not_finite_has_no_solution(wrong: int, transpose: bool) -> None:
    N = 5
    Sigma, g2, r = np.eye(N)[None], np.full((1, N), 0.1), np.ones((2, 1, N))
    hessian = [np.full((N, 1, 1), -0.1) for _ in range(4)]
    [Sigma, *hessian, g2][wrong][..., -1] = np.nan
    system = newton_host.HostSystem(Sigma, tuple(hessian), g2, 0.0, False)
    zero = np.zeros((1, N))
    if transpose:
        found, _ = system.transpose_solve(r, zero, zero, 1e-10)
    else:
        found = system.solve(r, 1e-4)
    assert np.isnan(found).all()
