"""The collapsed objective of :mod:`~gpflow_hybrid.inference.collapsed` on NumPy arrays, by LAPACK.

The last Newton step is taken without another factorisation. From a residual of 1e-6 it leads to λ*
within 1e-9, and the posterior moves there by its derivatives,

    δm = Σa,     δv = −(Σ∘Σ)b,     δ log Z = dᵀδr − ½(d∘d + v)ᵀδλ₂     (d and v halfway)

and the expectations of the likelihood by theirs, with errors of second order; the residual that is reported
is that of these. Σ itself stays where it was. What that changes in the gradient is known to first order but
for terms that vanish for the ELBO.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from gpflow.likelihoods import Likelihood

from ..likelihoods.expectations import ExpectationGradients
from ..likelihoods.ratios import RatioGradients, closed_ratio_gradients
from ..linalg import lapack
from ..linalg.backends import LapackBackend, call_on_host
from ..sites import SiteValues
from .common import (
    GRADIENT_ERROR,
    NO_CAVITY,
    NOT_EXACT,
    Adjoint,
    Prior,
    Residual,
    Solution,
)
from .newton_host import HostSystem, products
from .variational import residual_of
from .variational_host import (
    HostEvaluation,
    HostProblem,
    from_warm_start,
    newton_step,
    pack,
    unpack_solution,
)

Array = npt.NDArray[Any]

POLISHED_FROM = 1e-6
"""Residual from which the last step needs no new factorisation."""

LAST_STEP_TOLERANCE = 1e-3
"""Relative error of that step: what it leaves of the residual."""

WEIGHTS_TOLERANCE = 1e-8
"""Relative error of the weights in the total gradient, an order below that of Σ."""

LONG_STEP = 1e-5
"""In units of the posterior: a last step for which first derivatives are not enough."""


class HostCollapse(NamedTuple):
    """``λ*``, the objective there, and what its derivatives in the prior are made of."""

    solution: Solution
    value: tf.Tensor  # []
    mean_bar: tf.Tensor  # μ̄₀  [N, L]
    Sigma: tf.Tensor  # [L, N, N]
    vectors: list[tf.Tensor]  # r, λ₂, d, d̄, v̄ for K̄  [L, N]

    def with_gradient(self, prior: Prior) -> tf.Tensor:
        """The objective, with its total derivatives in the prior."""

        @tf.custom_gradient
        def attach(K: tf.Tensor, mean: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
            def grad(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                r, lambda_2, d, d_bar, v_bar = self.vectors
                bars = (upstream * d_bar, upstream * v_bar, upstream * tf.ones_like(r[:, 0]))
                K_bar = LapackBackend().kernel_adjoint(self.Sigma, r, lambda_2, d, *bars)
                if K.shape[0] == 1 != K_bar.shape[0]:
                    K_bar = tf.reduce_sum(K_bar, axis=0, keepdims=True)
                return K_bar, upstream * self.mean_bar

            return tf.identity(self.value), grad

        return attach(*prior)


def collapse(alpha: float, likelihood: Likelihood, *tensors: tf.Tensor) -> HostCollapse:
    """Infer ``λ*`` from the given sites and solve for the total gradient of ``L_0`` or ``L_1``."""
    likelihood = copy.copy(likelihood)  # a graph that holds the original would keep it alive

    def on_host(*arrays: Any) -> tuple[Array, ...]:
        *problem, lambda_1, lambda_2, tolerance, max_steps = arrays
        start = SiteValues(lambda_1, lambda_2)
        found = _collapse(alpha, HostProblem(likelihood, *problem), start, tolerance, max_steps)
        return tuple(np.asarray(x, lambda_1.dtype) for x in found)

    K, columns = tensors[0], tensors[4].shape  # [N, L]
    rows = tf.TensorShape(columns[::-1])
    sites, numbers, value, mean_bar, vectors, Sigma = call_on_host(
        on_host,
        list(tensors),
        [
            tf.TensorShape([2]).concatenate(columns),
            [5],
            [],
            columns,
            tf.TensorShape([5]).concatenate(rows),
            rows[:1].concatenate(K.shape[1:]),
        ],
    )
    solution = unpack_solution(sites, numbers)
    return HostCollapse(solution, value, mean_bar, Sigma, tf.unstack(vectors))


def _collapse(
    alpha: float, problem: HostProblem, start: SiteValues, tolerance: float, max_steps: int
) -> tuple[Any, ...]:
    """What :func:`collapse` needs of the host."""
    near = max(tolerance, POLISHED_FROM)
    solution, at = from_warm_start(problem, start, near, max_steps)
    if not np.isfinite(at.elbo):  # nothing to solve
        vectors = np.full((5, *problem.mean.T.shape), np.nan)
        nothing = np.zeros((problem.num_latent, *problem.K.shape[1:]))
        return *pack(solution), np.nan, vectors[0].T, vectors, nothing
    system = problem.system(at, rough=alpha == 0.0)
    end = _polished(problem, system, at) if solution.residual <= near else at
    if end is None:  # not so near after all
        before = solution
        solution, end = problem.newton(at.sites, tolerance, max_steps)
        solution = solution._replace(
            num_steps=before.num_steps + solution.num_steps,
            num_evaluations=before.num_evaluations + solution.num_evaluations,
        )
        at, system = end, problem.system(end, rough=alpha == 0.0)
    solution = solution._replace(sites=end.sites, value=end.elbo, residual=problem.measure(end))
    adjoint = _bound(end) if alpha == 0.0 else _total_adjoint(problem, system, end)
    mean_bar, vectors = _prior_adjoint(problem, system, at, end, adjoint)
    return *pack(solution), adjoint.value, mean_bar, vectors, system.Sigma


def _polished(
    problem: HostProblem, system: HostSystem, at: HostEvaluation
) -> HostEvaluation | None:
    """After one more Newton step, by the derivatives of the posterior; None if it is too long for that."""
    step, (a, b) = newton_step(system, at, LAST_STEP_TOLERANCE)
    if not np.max(np.abs(system.units * np.stack([a.T, b.T]))) <= LONG_STEP:
        return None
    sites = SiteValues(*(x + d for x, d in zip(at.sites, step, strict=True)))
    moves = zip(
        at.parts,
        products(system.Sigma, a.T),
        -system.squared_products(b.T),
        (step.lambda_1 - step.lambda_2 * problem.mean).T,
        b.T,
        strict=True,
    )
    moved = problem.known(
        sites, [_moved(*each) for each in moves], lambda m, v: _expectations_near(at, system, m, v)
    )
    return moved if np.isfinite(moved.elbo) else None


def _expectations_near(
    at: HostEvaluation, system: HostSystem, m: Array, v: Array
) -> ExpectationGradients:
    """Expectations a short step away, by their curvature; exact ones have ``E_mm = 2 E_v``."""
    dm, dv = m - at.q.mean, v - at.q.variance
    mv, vv = system.mv.T, system.vv.T
    d_mean = 2.0 * at.E.variance * dm + mv * dv
    d_variance = mv * dm + vv * dv
    gain = (at.E.mean + 0.5 * d_mean) * dm + (at.E.variance + 0.5 * d_variance) * dv
    return ExpectationGradients(
        at.E.value + np.sum(gain, axis=-1), at.E.mean + d_mean, at.E.variance + d_variance
    )


def _moved(
    part: lapack.Posterior, d_shift: Array, d_variance: Array, d_r: Array, d_lambda_2: Array
) -> lapack.Posterior:
    """A latent's posterior after a short step, its ``L⁻¹`` as it was."""
    d, v = part.shift + 0.5 * d_shift, part.variance + 0.5 * d_variance
    d_log_normaliser = d @ d_r - 0.5 * (d * d + v) @ d_lambda_2
    return lapack.Posterior(
        part.shift + d_shift,
        part.variance + d_variance,
        part.log_normaliser + d_log_normaliser,
        part.chol_inverse,
    )


def _bound(at: HostEvaluation) -> Adjoint:
    """The ELBO. ``E_q[log t] = λ₁m − ½λ₂(m² + v)``: the derivative in m is the residual a."""
    a, _ = residual_of(at.q, at.sites, at.E)
    return Adjoint(at.elbo, a, at.E.variance + 0.5 * at.sites.lambda_2)


def _total_adjoint(problem: HostProblem, system: HostSystem, at: HostEvaluation) -> Adjoint:
    """``L_1 + wᵀρ`` and its derivatives in m and v: those of the ratio, and ``wᵀ∂ρ`` with
    ``∂ρ_a = (E_mm + λ₂) ∂m + E_mv ∂v``, ``∂ρ_b = −2 (E_vm ∂m + E_vv ∂v)``; exact expectations have
    ``E_mm = 2 E_v``."""
    X, Y = problem.data
    m, v, lambda_2 = at.q.mean, at.q.variance, at.sites.lambda_2
    ratio = closed_ratio_gradients(problem.likelihood, X, m, v, Y, *at.sites)
    wa, wb = weights = _weights(system, at, ratio)
    # Where a cavity does not exist L_1 does not either; the ELBO, its lower bound, stands in, so that an
    # optimiser can back away.
    if not ((lambda_2 * v < 1.0).all() and np.isfinite(weights).all()):
        print(NO_CAVITY, file=sys.stderr, flush=True)
        return _bound(at)
    mv, vv = system.mv.T, system.vv.T
    residual = residual_of(at.q, at.sites, at.E)
    correction = sum(np.sum(w * r) for w, r in zip(weights, residual, strict=True))
    return Adjoint(
        at.q.log_normaliser + ratio.value + correction,
        ratio.m + (2.0 * at.E.variance + lambda_2) * wa - 2.0 * mv * wb,
        ratio.v + mv * wa - 2.0 * vv * wb,
    )


def _weights(system: HostSystem, at: HostEvaluation, ratio: RatioGradients) -> Residual:
    """``w = J⁻ᵀ ∂L_1/∂λ`` in the coordinates ``a = δλ₁ − m δλ₂``, ``b = δλ₂``."""
    m, v = at.q.mean, at.q.variance
    # δm = Σa, δv = −(Σ∘Σ)b, δλ₁ = a + mb, δλ₂ = b; ∂log Z/∂λ = (m, −½(m² + v))
    d_1, d_2 = ratio.lambda_1 + m, ratio.lambda_2 - 0.5 * (m * m + v)
    w, error = system.transpose_solve(
        np.stack([d_1.T, (d_2 + m * d_1).T]), ratio.m.T, ratio.v.T, WEIGHTS_TOLERANCE
    )
    if error > GRADIENT_ERROR:
        print(NOT_EXACT, float(error), file=sys.stderr, flush=True)
    return Residual(w[0].T, w[1].T)


def _prior_adjoint(
    problem: HostProblem,
    system: HostSystem,
    at: HostEvaluation,
    end: HostEvaluation,
    adjoint: Adjoint,
) -> tuple[Array, Array]:
    """``μ̄₀ = A(d̄ + r)`` and the vectors that make K̄ with the Σ of the step before the last.

    With λ₂ = λ₂' − b of that step, ``A'Λ' = AΛ + ABAᵀ`` to first order: v̄ − ½b takes the place of v̄, and
    ``A'r' = r' − λ₂'d'`` is as it is. What b changes in ``A diag(v̄) Aᵀ`` and ``A d̄`` is left out: a
    relative error of these, which vanish for the ELBO, of the size of b.
    """
    lambda_2 = at.sites.lambda_2.T
    b = end.sites.lambda_2.T - lambda_2
    d_bar, v_bar = adjoint.mean.T, adjoint.variance.T
    d = np.stack([part.shift for part in end.parts])
    r = (end.sites.lambda_1 - end.sites.lambda_2 * problem.mean).T
    mean_bar = d_bar - lambda_2 * products(system.Sigma, d_bar) + r - (lambda_2 + b) * d
    return mean_bar.T, np.stack([r - b * d, lambda_2, d, d_bar, v_bar - 0.5 * b])
