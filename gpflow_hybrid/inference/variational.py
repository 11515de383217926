"""The E-step: bring the sites to the optimum of the ELBO, and say how it went.

The optimum is the fixed point ``λ = g(λ)`` of the natural-gradient map
``g₁ = ∂E/∂m − 2m ∂E/∂v``, ``g₂ = −2 ∂E/∂v``, with ``E(m, v) = E_q[log p]``. Two ways there:

- *plain damping*, ``λ ← (1 − ρ)λ + ρ g(λ)`` with a fixed ρ, as in the paper;
- *damped Newton* (automatic): the step δ solves ``(J + μI) δ = g(λ) − λ`` with ``J = I − ∂g/∂λ``. As
  μ → ∞ it is a short natural-gradient step, an ascent direction of the ELBO; at μ = 0 it is
  Newton's, quadratically convergent. μ rises until the ELBO does not fall, and falls again.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from gpflow.base import RegressionData
from gpflow.likelihoods import Likelihood, ScalarLikelihood

from ..compilation import subgraph
from ..likelihoods.expectations import (
    ExpectationGradients,
    expectation_gradients,
    expected_log_site,
)
from ..linalg import (
    Known,
    Marginals,
    add_prior_mean,
    evaluate,
    offset_sites,
)
from ..namespaces import functions_of
from ..sites import SiteValues
from .common import (
    CONVERGED,
    EXHAUSTED,
    INVALID_START,
    STALLED,
    Prior,
    Residual,
    Solution,
    is_valid,
    relative_norm,
    unpack,
)
from .newton import (
    HostNewtonSystem,
    NewtonSystem,
    curvature,
    has_rough_curvature,
    newton_system,
)

MAX_DAMPING = 1e10
"""Where μ gives up: the ELBO cannot be raised any more at this precision."""

SHRINK_LIMIT = 0.95
"""No step may take away more than this part of a marginal's precision, or of a positive site."""

FEW_DATA = 300
"""Number of data up to which a rough curvature saves nothing worth having."""

WILD_SITE = 1e3
"""Precision of a first site, in units of the prior's, at which the prior's variance is not believed."""


def residual_of(q: Marginals, sites: SiteValues, E: ExpectationGradients) -> Residual:
    """``g(λ) − λ``: ``a = ∂E/∂m − (λ₁ − λ₂m)``, ``b = −2 ∂E/∂v − λ₂``; zero at the optimum of the ELBO."""
    return Residual(
        E.mean - (sites.lambda_1 - sites.lambda_2 * q.mean), -2.0 * E.variance - sites.lambda_2
    )


def natural_gradient_step(
    q: Marginals, sites: SiteValues, E: ExpectationGradients, lr: tf.Tensor
) -> SiteValues:
    """``λ ← (1 − ρ)λ + ρ (∂E/∂m − 2m ∂E/∂v, −2 ∂E/∂v)``."""
    target_2 = -2.0 * E.variance
    target_1 = E.mean + target_2 * q.mean
    return SiteValues(
        sites.lambda_1 + lr * (target_1 - sites.lambda_1),
        sites.lambda_2 + lr * (target_2 - sites.lambda_2),
    )


def natural_gradient_steps(
    prior: Prior,
    likelihood: Likelihood,
    data: RegressionData,
    start: SiteValues,
    num_steps: int,
    lr: float,
) -> tuple[SiteValues, tf.Tensor, tf.Tensor]:
    """So many steps of fixed size; λ, the residual there, and whether every q on the way was valid."""
    problem = Problem(prior, likelihood, data)
    lr = tf.constant(lr, start.lambda_1.dtype)

    def body(i: tf.Tensor, at: Evaluation) -> tuple[tf.Tensor, Evaluation]:
        proposal = natural_gradient_step(at.q, at.sites, at.E, lr)
        return i + 1, problem.evaluate(proposal)

    first = problem.evaluate(start)
    _, last = tf.while_loop(
        lambda i, at: (i < num_steps) & tf.math.is_finite(at.elbo), body, (tf.constant(0), first)
    )
    return last.sites, problem.measure(last), tf.math.is_finite(last.elbo)


class Evaluation(NamedTuple):
    """Everything known at one λ."""

    sites: SiteValues
    q: Marginals
    known: Known  # what q is made of
    E: ExpectationGradients
    elbo: tf.Tensor  # []
    noise: tf.Tensor  # the rounding error to expect in the ELBO, []


class Problem:
    """One E-step: a prior, a likelihood and data, all fixed; λ is the unknown."""

    def __init__(self, prior: Prior, likelihood: Likelihood, data: RegressionData) -> None:
        self.prior = Prior(*(tf.stop_gradient(t) for t in prior))
        self.likelihood = likelihood
        self.data = (tf.convert_to_tensor(data[0]), tf.convert_to_tensor(data[1]))
        self.evaluate = subgraph(self._evaluate)
        self._gradients = subgraph(
            lambda mean, variance: expectation_gradients(
                likelihood, self.data[0], mean, variance, self.data[1]
            )
        )
        second = functools.partial(curvature, likelihood, self.data)
        self._curvature = self._rough_curvature = subgraph(second)
        num_data = self.data[0].shape[0]
        if has_rough_curvature(likelihood) and (num_data is None or num_data > FEW_DATA):
            self._rough_curvature = subgraph(functools.partial(second, rough=True))

    def _evaluate(self, sites: SiteValues) -> Evaluation:
        """Posterior, expectations and ELBO at λ; a NaN ELBO where no valid q exists."""
        K, mean = self.prior
        r, lam = offset_sites(mean, *sites)
        known = evaluate(K, r, lam)
        q = add_prior_mean(known.posterior, mean, *sites)
        ok = is_valid(q)
        nan = tf.constant(float("nan"), K.dtype)
        E = self._gradients(q.mean, q.variance)
        log_t = expected_log_site(q.mean, q.variance, *sites)
        elbo = q.log_normaliser + (tf.reduce_sum(E.value) - tf.reduce_sum(log_t))
        finite = tf.reduce_all(tf.math.is_finite(E.mean) & tf.math.is_finite(E.variance))
        eps = np.finfo(K.dtype.as_numpy_dtype).eps
        noise = eps * rounded(q, sites, r, E.value, log_t, tf.reduce_max(tf.linalg.diag_part(K)))
        return Evaluation(sites, q, known, E, tf.where(ok & finite, elbo, nan), noise)

    def newton_system(self, at: Evaluation, *, rough: bool) -> NewtonSystem | HostNewtonSystem:
        """The Newton system at an evaluated λ, whose ``Sigma`` is that of q; a rough one is for steps."""
        second = self._rough_curvature if rough else self._curvature
        hessian = second(at.q.mean, at.q.variance, at.E)
        # One after the other: threads of two libraries on the same cores wait for each other. (An inlined
        # function does not hold back what depends on it; an identity does.)
        hessian = tf.nest.map_structure(tf.identity, hessian)
        with tf.control_dependencies(tf.nest.flatten(hessian)):
            Sigma = at.known.covariance(self.prior.K, tf.transpose(at.sites.lambda_2))
        return newton_system(
            Sigma,
            hessian,
            -2.0 * at.E.variance,
            is_coupled=not isinstance(self.likelihood, ScalarLikelihood),
        )

    def measure(self, at: Evaluation) -> tf.Tensor:
        """The residual norm at an evaluated λ, infinite where there is no valid q."""
        found = residual_of(at.q, at.sites, at.E)
        norm = relative_norm(at.q, found, Residual(at.E.mean, -2.0 * at.E.variance))
        return tf.where(tf.math.is_finite(at.elbo), norm, tf.constant(np.inf, norm.dtype))

    def damped(
        self, start: SiteValues, lr: tf.Tensor, tolerance: tf.Tensor, max_steps: tf.Tensor
    ) -> Solution:
        """Plain damping with a fixed step; the best λ of all those visited is kept."""
        at = self.evaluate(start)
        residual = self.measure(at)

        def unfinished(at: Any, res: Any, best: Any, count: Any) -> tf.Tensor:
            return (count < max_steps) & (res > tolerance) & tf.math.is_finite(at.elbo)

        def body(at: Any, res: Any, best: Any, count: Any) -> tuple[Any, ...]:
            new = self.evaluate(natural_gradient_step(at.q, at.sites, at.E, lr))
            new_res = self.measure(new)
            better = improves(new.elbo - best[1], new.noise, new_res < best[2])
            better = better & is_known(new.noise, best[1], at.noise)
            best = tf.nest.map_structure(
                lambda x, y: tf.where(better, x, y), (new.sites, new.elbo, new_res), best
            )
            return new, new_res, best, count + 1

        last, _, (best, best_elbo, best_res), count = tf.while_loop(
            unfinished,
            body,
            (at, residual, (at.sites, at.elbo, residual), tf.constant(0)),
        )
        status = tf.case(
            [
                (~tf.math.is_finite(at.elbo), lambda: INVALID_START),
                (best_res <= tolerance, lambda: CONVERGED),
                (~tf.math.is_finite(last.elbo), lambda: STALLED),
            ],
            default=lambda: EXHAUSTED,
        )
        return Solution(best, status, count, count + 1, best_elbo, best_res)

    def newton(
        self, start: SiteValues, tolerance: tf.Tensor, max_steps: tf.Tensor
    ) -> tuple[Solution, Evaluation]:
        """Damped Newton, monotone in the ELBO; what it found, and everything known there."""
        at = self.evaluate(start)
        dtype = at.elbo.dtype
        residual = self.measure(at)
        zero = tf.zeros((), dtype)

        def candidate(
            system: NewtonSystem | HostNewtonSystem, at: Evaluation, mu: tf.Tensor
        ) -> Any:
            """The step at damping μ, raised without evaluation until the step is admissible."""
            r = residual_of(at.q, at.sites, at.E)
            ra, rb = tf.transpose(r.a), tf.transpose(r.b)
            m, v = at.q.mean, at.q.variance
            lam, target = at.sites.lambda_2, -2.0 * at.E.variance

            def step(mu: tf.Tensor) -> SiteValues:
                a, b = (
                    tf.ensure_shape(tf.transpose(x), lam.shape) for x in system.solve(ra, rb, mu)
                )
                return SiteValues(a + m * b, b)

            def inadmissible(mu: tf.Tensor, delta: SiteValues) -> tf.Tensor:
                return tf.reduce_any(goes_too_far(delta, lam, target, v)) & (mu < MAX_DAMPING)

            def raise_damping(mu: tf.Tensor, _: SiteValues) -> Any:
                mu = raised(mu)
                return mu, step(mu)

            mu, delta = tf.while_loop(inadmissible, raise_damping, (mu, step(mu)))
            return mu, SiteValues(*(x + d for x, d in zip(at.sites, delta, strict=True)))

        def natural_step(at: Evaluation, mu: tf.Tensor) -> Any:
            # A prior so wide that p(y|f) is absurd under it (exp(f) with v = 100) would give absurd
            # sites: as if its variance were one, they are a start.
            wild = tf.reduce_max(tf.abs(at.E.variance) * at.q.variance) > WILD_SITE
            E = tf.cond(
                wild,
                lambda: self._gradients(at.q.mean, tf.minimum(at.q.variance, 1.0)),
                lambda: at.E,
            )
            return mu, natural_gradient_step(at.q, at.sites, E, 1.0 / (1.0 + mu))

        def unfinished(
            at: Any, res: Any, mu: Any, steps: Any, evaluations: Any, failures: Any
        ) -> tf.Tensor:
            return (
                (evaluations <= max_steps)
                & (res > tolerance)
                & (mu < MAX_DAMPING)
                & tf.math.is_finite(at.elbo)
            )

        def body(
            at: Any, res: Any, mu: Any, steps: Any, evaluations: Any, failures: Any
        ) -> tuple[Any, ...]:
            # q = prior: the sites are all zero, and the natural gradient is the better start.
            cold = tf.reduce_all(tf.equal(at.sites.lambda_2, 0.0))
            mu, proposal = tf.cond(
                cold,
                lambda: natural_step(at, mu),
                lambda: candidate(self.newton_system(at, rough=True), at, mu),
            )
            new = self.evaluate(proposal)
            new_res = self.measure(new)
            accept = improves(new.elbo - at.elbo, at.noise, new_res < res)
            accept = accept & is_known(new.noise, at.elbo, at.noise)
            lowered = tf.where(mu > 0.04, mu / 4.0, zero)
            mu = tf.where(accept, tf.where(failures > 0, mu, lowered), raised(mu))
            return (
                tf.cond(accept, lambda: new, lambda: at),
                tf.where(accept, new_res, res),
                mu,
                steps + tf.cast(accept, tf.int32),
                evaluations + 1,
                tf.where(accept, 0, failures + 1),
            )

        at_end, res, mu, steps, evaluations, _ = tf.while_loop(
            unfinished,
            body,
            (at, residual, zero, tf.constant(0), tf.constant(1), tf.constant(0)),
        )
        status = tf.case(
            [
                (~tf.math.is_finite(at.elbo), lambda: INVALID_START),
                (res <= tolerance, lambda: CONVERGED),
                (mu >= MAX_DAMPING, lambda: STALLED),
            ],
            default=lambda: EXHAUSTED,
        )
        return Solution(at_end.sites, status, steps, evaluations, at_end.elbo, res), at_end


def rounded(
    q: Marginals, sites: SiteValues, r: Any, expected: Any, log_t: Any, largest: Any
) -> Any:
    """What the ELBO is a difference of, in rounding errors.

    :param largest: element of K.
    """
    xp = functions_of(largest)
    terms = (
        xp.abs(q.log_normaliser)
        + xp.sum(xp.abs(expected))
        + xp.sum(xp.abs(sites.lambda_1 * q.mean))
        + xp.sum(xp.abs(log_t))
    )
    # A wide prior: m = μ₀ + Kβ with β = λ₁ − λ₂m is a difference of much larger numbers.
    beta = sites.lambda_1 - sites.lambda_2 * q.mean
    cancelled = xp.sum(xp.abs(r)) * xp.sum(xp.abs(beta)) * largest
    return 100.0 * terms + 4.0 * cancelled


def goes_too_far(step: SiteValues, lam: Any, target: Any, v: Any) -> Any:
    """Where a step would take away more of a marginal's precision, or of a positive site, than it may.

    :param lam: the present λ₂, ``[N, L]``.
    :param target: where a natural-gradient step leads it.
    """
    b = step.lambda_2
    shrinks = (lam > 0.0) & (target > 0.0) & (lam + b < (1.0 - SHRINK_LIMIT) * lam)
    is_finite = functions_of(b).isfinite
    return shrinks | (b * v < -SHRINK_LIMIT) | ~is_finite(b) | ~is_finite(step.lambda_1)


def improves(gain: Any, noise: Any, closer: Any) -> Any:
    """Whether the ELBO has risen; below its rounding error the residual decides."""
    return (gain > noise) | ((gain >= -noise) & closer)


def is_known(new_noise: Any, elbo: Any, noise: Any) -> Any:
    """Whether the new ELBO is a number at all, and not what rounding left of one.

    Sites of enormous precision make ``I + KΛ`` singular to working precision.
    """
    xp = functions_of(elbo)
    return new_noise <= xp.maximum(xp.maximum(noise, 1.0), 1e-3 * xp.abs(elbo))


def raised(mu: Any) -> Any:
    """The next larger damping."""
    return functions_of(mu).maximum(4.0 * mu, 0.1)


def infer_newton(likelihood: Likelihood, *tensors: tf.Tensor) -> Solution:
    """:meth:`Problem.newton` from plain tensors; the limits are tolerance and number of steps."""
    *problem, start, tolerance, max_steps = unpack(likelihood, *tensors)
    solution, _ = Problem(*problem).newton(start, tolerance, max_steps)
    return solution


def infer_damped(likelihood: Likelihood, *tensors: tf.Tensor) -> Solution:
    """:meth:`Problem.damped` from plain tensors; the limits are followed by the step size."""
    *problem, start, tolerance, max_steps, lr = unpack(likelihood, *tensors)
    return Problem(*problem).damped(start, lr, tolerance, max_steps)
