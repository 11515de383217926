"""The collapsed objective of :mod:`~gpflow_hybrid.inference.collapsed` on NumPy arrays, by LAPACK.

The last Newton step is taken without another factorisation. From a residual of 1e-6 it leads to λ*
within 1e-9, and the posterior moves there by its derivatives,

    δm = Σa,     δv = −(Σ∘Σ)b,     δ log Z = dᵀδr − ½(d∘d + v)ᵀδλ₂     (d and v halfway)

and the expectations of the likelihood by theirs, with errors of second order, below 1e-12. Only Σ itself
stays where it was, which the gradient feels as a relative error of the size of that step.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from gpflow.likelihoods import Likelihood

from ..likelihoods.expectations import ExpectationGradients
from ..likelihoods.ratios import RatioGradients, closed_ratio_gradients
from ..linalg import EvaluatedCovariance, LatentPosterior, lapack
from ..linalg.backends import call_on_host
from ..sites import SiteValues
from .common import Adjoint, Collapse, Residual
from .newton_host import HostSystem, products
from .variational import goes_too_far, residual_of
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

GRADIENT_ERROR = 1e-5
"""Relative error of the solved system above which the gradient is not called exact."""

NOT_EXACT = (
    "gpflow_hybrid: the total gradient is not exact at these hyperparameters; relative error"
)

NO_CAVITY = (
    "gpflow_hybrid: a cavity does not exist at these hyperparameters; the training loss falls "
    "back to the ELBO, a lower bound of the objective."
)


def collapse(alpha: float, likelihood: Likelihood, *tensors: tf.Tensor) -> Collapse:
    """Infer ``λ*`` from the given sites and solve for the total gradient of ``L_0`` or ``L_1``."""

    def on_host(*arrays: Any) -> tuple[Array, ...]:
        *problem, lambda_1, lambda_2, tolerance, max_steps = arrays
        start = SiteValues(lambda_1, lambda_2)
        return _collapse(alpha, HostProblem(likelihood, *problem), start, tolerance, max_steps)

    K, columns = tensors[0], tensors[4].shape  # [N, L]
    rows, pair = tf.TensorShape(columns[::-1]), tf.TensorShape([2]).concatenate(columns)
    shapes = [pair, [5], [], columns, columns, pair, rows, rows, rows[:1]]
    *found, shift, variance, log_normaliser, Sigma = call_on_host(
        on_host, list(tensors), [*shapes, rows[:1].concatenate(K.shape[1:])]
    )
    sites, numbers, value, mean_bar, variance_bar, weights = found
    return Collapse(
        unpack_solution(sites, numbers),
        Residual(*tf.unstack(weights)),
        EvaluatedCovariance(LatentPosterior(shift, variance, log_normaliser), Sigma),
        Adjoint(value, mean_bar, variance_bar),
    )


def _collapse(
    alpha: float, problem: HostProblem, start: SiteValues, tolerance: float, max_steps: int
) -> tuple[Array, ...]:
    """What :func:`collapse` needs of the host, as arrays."""
    solution, at = from_warm_start(problem, start, max(tolerance, POLISHED_FROM), max_steps)
    # At a first guess that is no distribution there is nothing to solve: NaN all through.
    is_valid = bool(np.isfinite(at.elbo))
    system = problem.system(at, rough=alpha == 0.0) if is_valid else None
    if system is not None and solution.residual <= max(tolerance, POLISHED_FROM):
        at = _polished(problem, system, at)
        solution = solution._replace(sites=at.sites, value=at.elbo, residual=problem.measure(at))
    # E_q[log t] = λ₁m − ½λ₂(m² + v); the derivative in m is the residual a
    lambda_2 = at.sites.lambda_2
    rest = residual_of(at.q, at.sites, at.E)
    adjoint = Adjoint(at.elbo, rest.a, at.E.variance + 0.5 * lambda_2)
    weights = Residual(np.zeros_like(rest.a), np.zeros_like(rest.b))
    if system is not None and alpha > 0.0:
        X, Y = problem.data
        ratio = closed_ratio_gradients(
            problem.likelihood, X, at.q.mean, at.q.variance, Y, *at.sites
        )
        solved = _weights(system, at, ratio)
        # Where a cavity does not exist L_α does not either; the ELBO, its lower bound, stands in, so
        # that an optimiser can back away.
        if (lambda_2 * at.q.variance < 1.0).all() and np.isfinite(solved).all():
            weights, adjoint = solved, _total_adjoint(system, at, ratio, solved, rest)
        else:
            print(NO_CAVITY, file=sys.stderr, flush=True)
    Sigma = np.zeros_like(problem.K) if system is None else system.Sigma
    found = (
        *pack(solution),
        adjoint.value,
        adjoint.mean,
        adjoint.variance,
        np.stack(weights),
        *(np.stack([part[i] for part in at.parts]) for i in range(3)),
        np.broadcast_to(Sigma, (problem.num_latent, *Sigma.shape[1:])),
    )
    return tuple(np.asarray(x, problem.K.dtype) for x in found)


def _polished(problem: HostProblem, system: HostSystem, at: HostEvaluation) -> HostEvaluation:
    """After one more Newton step, by the derivatives of the posterior."""
    step, (a, b) = newton_step(system, at, LAST_STEP_TOLERANCE)
    if goes_too_far(step, at.sites.lambda_2, -2.0 * at.E.variance, at.q.variance).any():
        return at
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
    return moved if np.isfinite(moved.elbo) else at


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


def _weights(system: HostSystem, at: HostEvaluation, ratio: RatioGradients) -> Residual:
    """``w = J⁻ᵀ ∂L_α/∂λ`` in the coordinates ``a = δλ₁ − m δλ₂``, ``b = δλ₂``."""
    m, v = at.q.mean, at.q.variance
    # δm = Σa, δv = −(Σ∘Σ)b, δλ₁ = a + mb, δλ₂ = b; ∂log Z/∂λ = (m, −½(m² + v))
    d_1, d_2 = ratio.lambda_1 + m, ratio.lambda_2 - 0.5 * (m * m + v)
    w, error = system.transpose_solve(
        np.stack([d_1.T, (d_2 + m * d_1).T]), ratio.m.T, ratio.v.T, WEIGHTS_TOLERANCE
    )
    if error > GRADIENT_ERROR:
        print(NOT_EXACT, float(error), file=sys.stderr, flush=True)
    return Residual(w[0].T, w[1].T)


def _total_adjoint(
    system: HostSystem,
    at: HostEvaluation,
    ratio: RatioGradients,
    weights: Residual,
    residual: Residual,
) -> Adjoint:
    """``L_α + wᵀρ`` and its derivatives in m and v: those of the ratio, and ``wᵀ∂ρ`` with
    ``∂ρ_a = (E_mm + λ₂) ∂m + E_mv ∂v``, ``∂ρ_b = −2 (E_vm ∂m + E_vv ∂v)``; exact expectations have
    ``E_mm = 2 E_v``."""
    wa, wb = weights
    mv, vv = system.mv.T, system.vv.T
    correction = sum(np.sum(w * r) for w, r in zip(weights, residual, strict=True))
    return Adjoint(
        at.q.log_normaliser + ratio.value + correction,
        ratio.m + (2.0 * at.E.variance + at.sites.lambda_2) * wa - 2.0 * mv * wb,
        ratio.v + mv * wa - 2.0 * vv * wb,
    )
