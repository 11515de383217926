"""The collapsed objective ``θ ↦ L_α(λ*(θ), θ)``, ``λ*(θ) = argmax_λ L_0(λ, θ)``, and its total gradient.

With ``ρ(λ, θ)`` the residual of the E-step and w the solution of ``Jᵀw = ∂L_α/∂λ`` at ``λ*``,

    L_α(λ*, θ) + wᵀρ(λ*, θ)

at constant λ* and w has the value of the collapsed objective, because ``ρ(λ*, θ) = 0``, and its total
derivative, by implicit differentiation. For the ELBO ``∂L_0/∂λ = 0`` and w vanishes (envelope theorem).

The last Newton step is taken without another factorisation. From a residual of 1e-6 it leads to λ*
within 1e-9, and the posterior moves there by its derivatives,

    δm = Σa,     δv = −(Σ∘Σ)b,     δ log Z = mᵀδλ₁ − ½(m∘m + v)ᵀδλ₂     (m and v halfway)

and the expectations of the likelihood by theirs, with errors of second order; the residual that is reported
is that of these. Σ itself stays where it was. What that changes in the gradient is known to first order but
for terms that vanish for the ELBO.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from gpflow.likelihoods import Likelihood

from ..likelihoods.expectations import ExpectationGradients, expectation_gradients
from ..likelihoods.ratio_gradients import RatioGradients
from ..likelihoods.ratios import has_cavity, log_expected_ratio
from ..linalg import Marginals
from ..priors import Array, Prior
from ..sites import SiteValues
from . import variational
from .bound import BoundEvaluation, assess, evaluate
from .common import (
    CONVERGED,
    INVALID_START,
    Collapse,
    FixedPoint,
    Method,
    SitePair,
    Solution,
    from_warm_start,
    moved,
    no_collapse,
)
from .newton import NewtonSystem, per_datum
from .options import COLLAPSE
from .own_parameters import parameter_question
from .questions import CURVATURE, EXPECTATIONS, ROUGH_CURVATURE, Iteration, ratios
from .remarks import Remark, remarks_on
from .removal import removable
from .reports import OWN_QUADRATURE_ERROR
from .variational import newton, newton_direction, newton_from, newton_system


class Adjoint(NamedTuple):
    """An objective and its derivatives in the marginals of q, ``[N, L]``; that in log Z is one."""

    value: Any
    mean: Array
    variance: Array


def collapse(
    alpha: float, prior: Prior, start: SiteValues, tolerance: float, max_steps: int
) -> Iteration[Collapse]:
    """Infer ``λ*`` from the given sites and solve for the total gradient of ``L_α``."""
    near = max(tolerance, COLLAPSE.polished_from)

    def from_start(
        sites: SiteValues, keeping: tuple[BoundEvaluation, ...]
    ) -> Iteration[tuple[Solution, BoundEvaluation]]:
        return newton(prior, sites, near, max_steps, keeping)

    solution, at = yield from from_warm_start(from_start, start, by_value=True)
    if not np.isfinite(at.elbo):
        return no_collapse(solution)
    system = yield from newton_system(at, rough=alpha == 0.0, for_adjoint=True)
    end = _last_step(prior, system, at, tolerance) if solution.residual <= near else at
    if end is None:  # not so near after all
        again, end = yield from newton_from(prior, at, tolerance, max_steps)
        solution = again._replace(
            num_steps=solution.num_steps + again.num_steps,
            num_evaluations=solution.num_evaluations + again.num_evaluations - 1,
        )
        at = end
        system = yield from newton_system(at, rough=alpha == 0.0, for_adjoint=True)
    solution = solution._replace(sites=end.sites, value=end.elbo, residual=end.residual_norm)
    adjoint, weights = _bound(end), SitePair(np.zeros_like(end.q.mean), np.zeros_like(end.q.mean))
    remarks: tuple[Remark, ...] = ()
    removed, prior_variance_bar = end.sites, None
    if alpha > 0.0:
        m, v = end.q.mean, end.q.variance
        removal = removable(alpha, end.sites.lambda_2, v, prior.variance)
        removed = removal.of(end.sites)
        ratio = yield ratios(alpha)(m, v, *removed)
        ratio, prior_variance_bar = removal.pull_back(ratio, m, v, end.sites)
        weights, error = _weights(system, end, ratio)
        if not (np.isfinite(ratio.value) and np.isfinite(weights.rows).all()):
            return no_collapse(solution._replace(status=INVALID_START))
        adjoint = _total_adjoint(system, end, ratio, weights)
        remarks = remarks_on(removal.num_parts, len(m), error)
    # Σ is that of the step before the last. With λ₂ = λ₂' − b, A'Λ' = AΛ + ABAᵀ to first order: v̄ − ½b
    # takes the place of v̄. What b changes in A diag(v̄) Aᵀ and A m̄ is left out: a relative error of
    # these, which vanish for the ELBO, of the size of b.
    b = end.sites.lambda_2 - at.sites.lambda_2
    return Collapse(
        solution,
        adjoint.value,
        end.q,
        weights,
        system.covariance,
        adjoint.mean,
        adjoint.variance - 0.5 * b,
        remarks,
        removed,
        prior_variance_bar,
    )


def at_fixed_sites(alpha: float, prior: Prior, sites: SiteValues, *_: Any) -> Iteration[Collapse]:
    """``L_α`` and its derivatives at the given λ, which does not follow the hyperparameters."""
    at = yield from evaluate(prior, sites)
    has_objective = np.isfinite(at.elbo) and has_cavity(at.q.variance, sites.lambda_2, alpha).all()
    status = CONVERGED if has_objective else INVALID_START
    solution = Solution(sites, status, 0, 1, at.elbo, 0.0)
    if status == INVALID_START:
        return no_collapse(solution)
    adjoint = _bound(at)
    if alpha > 0.0:
        ratio = yield ratios(alpha)(at.q.mean, at.q.variance, *sites)
        adjoint = Adjoint(at.q.log_normaliser + ratio.value, ratio.m, ratio.v)
    covariance = at.posterior.covariance(for_adjoint=True)
    weights = SitePair(np.zeros_like(at.q.mean), np.zeros_like(at.q.mean))
    return Collapse(
        solution, adjoint.value, at.q, weights, covariance, adjoint.mean, adjoint.variance
    )


def _last_step(
    prior: Prior, system: NewtonSystem, at: BoundEvaluation, tolerance: float
) -> BoundEvaluation | None:
    """After one more Newton step, by the derivatives of the posterior; None if it is too long for that, or
    was not solved for well enough to be one."""
    pair = newton_direction(system, at, COLLAPSE.last_step_tolerance, exact=True)
    if not np.max(np.abs(system.units * pair.rows)) <= COLLAPSE.long_step:
        return None
    a, b = pair.rows
    step = pair.step(at.q.mean)
    dm, dv = system.covariance.product(a).T, -system.covariance.squared_product(b).T
    m, v = at.q.mean + 0.5 * dm, at.q.variance + 0.5 * dv
    d_log_normaliser = np.sum(m * step.lambda_1) - 0.5 * np.sum((m * m + v) * step.lambda_2)
    q = Marginals(at.q.mean + dm, at.q.variance + dv, at.q.log_normaliser + d_log_normaliser)
    E = _expectations_nearby(at.E, system, dm, dv)
    end = assess(prior, moved(at.sites, step), at.posterior, q, E)
    shrinks = end.residual_norm <= max(tolerance, COLLAPSE.left_residual * at.residual_norm)
    return end if shrinks else None  # infinite where the ELBO is not finite


def _expectations_nearby(
    E: ExpectationGradients, system: NewtonSystem, dm: Array, dv: Array
) -> ExpectationGradients:
    """Expectations a short step away, by their curvature."""
    mm, mv, vm, vv = system.curvature
    d_mean = _per_datum(mm, dm) + _per_datum(mv, dv)
    d_variance = _per_datum(vm, dm) + _per_datum(vv, dv)
    gain = (E.mean + 0.5 * d_mean) * dm + (E.variance + 0.5 * d_variance) * dv
    return ExpectationGradients(
        E.value + np.sum(gain, axis=-1), E.mean + d_mean, E.variance + d_variance
    )


def _bound(at: BoundEvaluation) -> Adjoint:
    """The ELBO. ``E_q[log t] = λ₁m − ½λ₂(m² + v)``: the derivative in m is the residual a."""
    return Adjoint(at.elbo, at.residual.a, at.E.variance + 0.5 * at.sites.lambda_2)


def _weights(
    system: NewtonSystem, at: BoundEvaluation, ratio: RatioGradients
) -> tuple[SitePair, float]:
    """``w = J⁻ᵀ ∂L_α/∂λ``, and the relative error of the solved system."""
    m, v = at.q.mean, at.q.variance
    # δm = Σa, δv = −(Σ∘Σ)b, δλ₁ = a + mb, δλ₂ = b; ∂log Z/∂λ = (m, −½(m² + v))
    d_1, d_2 = ratio.lambda_1 + m, ratio.lambda_2 - 0.5 * (m * m + v)
    w, error = system.transpose_solve(
        SitePair(d_1, d_2 + m * d_1).rows, ratio.m.T, ratio.v.T, COLLAPSE.weights_tolerance
    )
    return SitePair.of_rows(w), error


def _total_adjoint(
    system: NewtonSystem, at: BoundEvaluation, ratio: RatioGradients, weights: SitePair
) -> Adjoint:
    """``L_α + wᵀρ`` and its derivatives in m and v: those of the ratio, and ``wᵀ∂ρ`` with
    ``∂ρ_a = (E_mm + λ₂) ∂m + E_mv ∂v``, ``∂ρ_b = −2 (E_vm ∂m + E_vv ∂v)``."""
    mm, mv, vm, vv = system.curvature
    wa, wb = weights
    residual = at.residual
    correction = np.sum(wa * residual.a) + np.sum(wb * residual.b)
    pull = functools.partial(_per_datum, transpose=True)
    return Adjoint(
        at.q.log_normaliser + ratio.value + correction,
        ratio.m + pull(mm, wa) + at.sites.lambda_2 * wa - 2.0 * pull(vm, wb),
        ratio.v + pull(mv, wa) - 2.0 * pull(vv, wb),
    )


def _per_datum(H: Array, x: Array, transpose: bool = False) -> Array:
    """:func:`~gpflow_hybrid.inference.newton.per_datum` of vectors ``[N, L]``."""
    return per_datum(H, x.T, transpose).T


def likelihood_value(
    alpha: float, likelihood: Likelihood, X: tf.Tensor, Y: tf.Tensor, fixed: FixedPoint
) -> tf.Tensor:
    """What ``L_α + wᵀρ`` has of the likelihood's own parameters, at a constant q."""
    q, sites, weights = fixed
    ratio = log_expected_ratio(likelihood, X, q.mean, q.variance, Y, *sites, alpha)
    value = tf.reduce_sum(ratio)
    if alpha == 0.0:
        return value
    E = expectation_gradients(likelihood, X, q.mean, q.variance, Y)
    # ρ_a = ∂E/∂m + …, ρ_b = −2 ∂E/∂v + …
    return value + tf.reduce_sum(weights.a * E.mean) - 2.0 * tf.reduce_sum(weights.b * E.variance)


@functools.cache
def fixed_sites(alpha: float) -> Method:
    """No inference: the objective ``L_α`` at the sites as they are, for an M-step."""
    return dataclasses.replace(
        variational_inference(alpha),
        collapse=functools.partial(at_fixed_sites, alpha),
        questions=(EXPECTATIONS, ratios(alpha)) if alpha > 0.0 else (EXPECTATIONS,),
    )


@functools.cache
def variational_inference(alpha: float) -> Method:
    """CVI with the learning objective ``L_α`` as a method of inference and learning."""
    questions = (EXPECTATIONS, ROUGH_CURVATURE, CURVATURE)
    return Method(
        sites_key="variational",
        solve=variational.solve,
        collapse=functools.partial(collapse, alpha),
        questions=(*questions, ratios(alpha)) if alpha > 0.0 else questions,
        parameter_question=parameter_question(
            ("variational", alpha),
            functools.partial(likelihood_value, alpha),
            lambda on: on.in_parameters(alpha),
        ),
        when_stalled=(
            "no step raises the ELBO any further. Either this is the limit of the arithmetic, and "
            "the sites can be used, or the expectations of the likelihood are not smooth: give its "
            "quadrature more points."
        ),
        quadrature_error=OWN_QUADRATURE_ERROR,
    )
