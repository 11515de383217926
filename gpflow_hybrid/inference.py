"""The E-step: bring the sites to the optimum of the ELBO, and say how it went.

The optimum is the fixed point ``λ = g(λ)`` of the natural-gradient map
``g₁ = ∂E/∂m − 2m ∂E/∂v``, ``g₂ = −2 ∂E/∂v``, with ``E(m, v) = E_q[log p]``. Two ways there:

- *plain damping*, ``λ ← (1 − ρ)λ + ρ g(λ)`` with a fixed ρ, as in the paper;
- *damped Newton* (automatic): the step δ solves ``(J + μI) δ = g(λ) − λ`` with ``J = I − ∂g/∂λ``. As
  μ → ∞ it is a short natural-gradient step, an ascent direction of the ELBO; at μ = 0 it is
  Newton's, quadratically convergent. μ rises until the ELBO does not fall, and falls again.

Newton's system is written in ``a = δλ₁ − m δλ₂`` and ``b = δλ₂``, in which the posterior moves by
``δm = Σa`` and ``δv = −(Σ∘Σ)b``:

    (1 + μ) a − (E_mm + g₂) Σa + E_mv (Σ∘Σ) b = ∂E/∂m − (λ₁ − λ₂m)
    (1 + μ) b + 2 E_vm Σa − 2 E_vv (Σ∘Σ) b   = g₂ − λ₂
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from gpflow.base import RegressionData
from gpflow.likelihoods import Likelihood, ScalarLikelihood

from .likelihoods.expectations import (
    ExpectationGradients,
    expectation_gradients,
    expected_log_site,
    independent_expectations,
)
from .linalg import (
    Marginals,
    add_prior_mean,
    covariance_from_factors,
    factorise,
    matvec,
    offset_sites,
    posterior_from_factors,
)
from .sites import SiteValues

# Status of a finished loop.
CONVERGED, EXHAUSTED, STALLED, INVALID_START = range(4)

MAX_DAMPING = 1e10
"""Where μ gives up: the ELBO cannot be raised any more at this precision."""

SHRINK_LIMIT = 0.95
"""No step may take away more than this part of a marginal's precision, or of a positive site."""


STEP_TOLERANCE = 1e-4
"""Relative error of a step where the latents are coupled: exact enough for fast convergence."""


class Prior(NamedTuple):
    """``N(μ₀, K)`` at the data: ``K [L or 1, N, N]`` and ``mean [N, L]``."""

    K: tf.Tensor
    mean: tf.Tensor


class Residual(NamedTuple):
    """``g(λ) − λ`` in the coordinates a and b, ``[N, L]``: zero at the optimum of the ELBO."""

    a: tf.Tensor  # ∂E/∂m − (λ₁ − λ₂m)
    b: tf.Tensor  # −2 ∂E/∂v − λ₂


def residual_of(q: Marginals, sites: SiteValues, E: ExpectationGradients) -> Residual:
    """How far the sites are from the fixed point of the natural-gradient map."""
    return Residual(
        E.mean - (sites.lambda_1 - sites.lambda_2 * q.mean), -2.0 * E.variance - sites.lambda_2
    )


def residual_norm(q: Marginals, residual: Residual, E: ExpectationGradients) -> tf.Tensor:
    """The largest residual in units of the posterior, relative to what the likelihood says.

    ``max(|b| v, |a| √v)`` over the same of ``g`` where that is less than one, so that data which
    barely move the prior are converged too.
    """
    s = tf.sqrt(q.variance)
    found = tf.maximum(
        tf.reduce_max(tf.abs(residual.b) * q.variance), tf.reduce_max(tf.abs(residual.a) * s)
    )
    said = tf.maximum(
        tf.reduce_max(tf.abs(2.0 * E.variance) * q.variance), tf.reduce_max(tf.abs(E.mean) * s)
    )
    return found / tf.maximum(tf.minimum(said, 1.0), 1e-30)


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


class Evaluation(NamedTuple):
    """Everything known at one λ."""

    sites: SiteValues
    q: Marginals
    Sigma: tf.Tensor  # [L, N, N]
    E: ExpectationGradients
    elbo: tf.Tensor  # []
    noise: tf.Tensor  # the rounding error to expect in the ELBO, []


class Curvature(NamedTuple):
    """Second derivatives of ``E(m, v)`` per datum, ``[N, L, L]`` each, first index as named first."""

    mm: tf.Tensor
    mv: tf.Tensor
    vm: tf.Tensor
    vv: tf.Tensor


def curvature(
    likelihood: Likelihood, data: RegressionData, m: tf.Tensor, v: tf.Tensor
) -> Curvature:
    """The Hessian of every datum's ``E_q[log p]`` in its marginal means and variances."""
    X, Y = data
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch((m, v))
        E = expectation_gradients(likelihood, X, m, v, Y)
        columns = [tf.reduce_sum(g[:, k]) for g in (E.mean, E.variance) for k in range(m.shape[1])]
    rows = [
        tape.gradient(c, (m, v), unconnected_gradients=tf.UnconnectedGradients.ZERO)
        for c in columns
    ]
    L = m.shape[1]
    mm, mv = (tf.stack([r[i] for r in rows[:L]], axis=1) for i in (0, 1))
    vm, vv = (tf.stack([r[i] for r in rows[L:]], axis=1) for i in (0, 1))
    return Curvature(mm, mv, vm, vv)


def quadrature_error(
    likelihood: Likelihood, data: RegressionData, m: tf.Tensor, v: tf.Tensor
) -> tf.Tensor:
    """How far a likelihood's own ``E_q[log p]`` is from exact, by two symptoms; ``[]``.

    Exact expectations obey the heat equation ``∂²E/∂m² = 2 ∂E/∂v``, here in units of a site's share
    of the posterior precision; and they agree with another rule, here in nats.
    """
    E = expectation_gradients(likelihood, data[0], m, v, data[1])
    second = tf.linalg.diag_part(curvature(likelihood, data, m, v).mm)
    heat = tf.reduce_max(tf.abs(second - 2.0 * E.variance) * v)
    other = independent_expectations(likelihood, data[0], m, v, data[1])
    return heat if other is None else tf.maximum(heat, tf.reduce_max(tf.abs(E.value - other)))


class NewtonSystem:
    """``J + μI`` at one λ and, for the gradient of the collapsed objective, the transpose of J.

    Vectors are pairs ``(a, b)`` of ``[L, N]``. Where the likelihood does not couple the latents the
    system decouples into one of size N per latent, solved directly; where it does, those precondition
    GMRES.
    """

    def __init__(
        self, Sigma: tf.Tensor, hessian: Curvature, g2: tf.Tensor, is_coupled: bool
    ) -> None:
        self.Sigma = Sigma
        self.Sigma2 = tf.square(Sigma)
        self.hessian = hessian
        self.g2 = tf.transpose(g2)  # [L, N]
        self.is_coupled = is_coupled
        self.mv, self.vm, self.vv = (
            tf.transpose(tf.linalg.diag_part(h)) for h in (hessian.mv, hessian.vm, hessian.vv)
        )
        # Σ E_mv (Σ∘Σ)
        self.product = tf.matmul(Sigma, self.mv[..., None] * self.Sigma2)

    def _matrix(self, c: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """``c I − 2 E_vv (Σ∘Σ) − (2/c) E_vm Σ E_mv (Σ∘Σ)``, ``[L, N, N]``, and 0 if it is finite, else NaN.

        TensorFlow raises on a matrix that it cannot factorise; a non-finite one becomes the identity
        and the second value makes the solution NaN, which the iteration rejects.
        """
        M = -2.0 * self.vv[..., None] * self.Sigma2 - (2.0 / c) * self.vm[..., None] * self.product
        diagonal = tf.linalg.diag_part(M) + c
        # An exactly singular matrix is moved off by a rounding error.
        largest = tf.reduce_max(tf.abs(M), axis=[-2, -1], keepdims=True)[..., 0]
        eps = np.finfo(M.dtype.as_numpy_dtype).eps
        M = tf.linalg.set_diag(M, diagonal + eps * largest)
        finite = tf.reduce_all(tf.math.is_finite(M))
        identity = tf.eye(tf.shape(M)[-1], batch_shape=tf.shape(M)[:-2], dtype=M.dtype)
        flag = tf.where(finite, tf.zeros((), M.dtype), tf.constant(np.nan, M.dtype))
        return tf.where(finite, M, identity), flag

    def solve(self, ra: tf.Tensor, rb: tf.Tensor, damping: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """``(J + μI)⁻¹ (ra, rb)``, ``[L, N]`` each; inexactly where the latents are coupled."""
        c = 1.0 + damping
        M, flag = self._matrix(c)
        lu, pivots = tf.linalg.lu(M)

        def decoupled(r: tf.Tensor) -> tf.Tensor:
            ra, rb = tf.unstack(r)
            rhs = rb - 2.0 * self.vm * matvec(self.Sigma, ra) / c
            b = tf.squeeze(tf.linalg.lu_solve(lu, pivots, rhs[..., None]), -1)
            return tf.stack([(ra - self.mv * matvec(self.Sigma2, b)) / c, b])

        def apply(x: tf.Tensor) -> tf.Tensor:
            a, b = tf.unstack(x)
            H = self.hessian
            dm, dv = matvec(self.Sigma, a), -matvec(self.Sigma2, b)
            into_a = c * a - self.g2 * dm - _per_datum(H.mm, dm) - _per_datum(H.mv, dv)
            into_b = c * b + 2.0 * (_per_datum(H.vm, dm) + _per_datum(H.vv, dv))
            return tf.stack([into_a, into_b])

        r = tf.stack([ra, rb]) + flag
        if self.is_coupled:
            return tuple(tf.unstack(gmres(apply, decoupled, r, STEP_TOLERANCE)))
        return tuple(tf.unstack(decoupled(r)))

    def transpose_apply(self, wa: tf.Tensor, wb: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """``Jᵀ (wa, wb)`` with every coupling between latents."""
        H = self.hessian
        into_m = -_per_datum(H.mm, wa, True) - self.g2 * wa + 2.0 * _per_datum(H.vm, wb, True)
        into_v = _per_datum(H.mv, wa, True) - 2.0 * _per_datum(H.vv, wb, True)
        return wa + matvec(self.Sigma, into_m), wb + matvec(self.Sigma2, into_v)

    def transpose_solve(
        self, ra: tf.Tensor, rb: tf.Tensor, tolerance: float
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """``J⁻ᵀ (ra, rb)`` by preconditioned GMRES; one iteration where the latents decouple."""
        M, flag = self._matrix(tf.ones((), ra.dtype))
        lu, pivots = tf.linalg.lu(tf.linalg.matrix_transpose(M))

        def precondition(x: tf.Tensor) -> tf.Tensor:
            xa, xb = tf.unstack(x)
            rhs = xb - matvec(self.Sigma2, self.mv * xa)
            wb = tf.squeeze(tf.linalg.lu_solve(lu, pivots, rhs[..., None]), -1)
            return tf.stack([xa - 2.0 * matvec(self.Sigma, self.vm * wb), wb])

        def apply(w: tf.Tensor) -> tf.Tensor:
            return tf.stack(self.transpose_apply(*tf.unstack(w)))

        return tuple(tf.unstack(gmres(apply, precondition, tf.stack([ra, rb]) + flag, tolerance)))


def _per_datum(H: tf.Tensor, x: tf.Tensor, transpose: bool = False) -> tf.Tensor:
    """``Hₙ xₙ`` for every datum: ``[N, L, L]`` and ``[L, N]`` to ``[L, N]``."""
    return tf.transpose(matvec(H, tf.transpose(x), transpose_a=transpose))


def gmres(
    apply: Callable[[tf.Tensor], tf.Tensor],
    precondition: Callable[[tf.Tensor], tf.Tensor],
    rhs: tf.Tensor,
    tolerance: float,
    max_iterations: int = 60,
) -> tf.Tensor:
    """Solve ``A x = rhs`` with right-preconditioned GMRES; tensors of any one shape."""
    shape, dtype = tf.shape(rhs), rhs.dtype
    flat = tf.reshape(rhs, [-1])
    size = tf.size(flat)
    norm = tf.norm(flat)
    steps = tf.minimum(max_iterations, size)
    first = tf.math.divide_no_nan(flat, norm)
    basis = tf.concat([first[None], tf.zeros([steps, size], dtype)], 0)  # [steps + 1, D]
    hessenberg = tf.zeros([steps + 1, steps], dtype)
    target = norm * tf.one_hot(0, steps + 1, dtype=dtype)

    def least_squares(H: tf.Tensor) -> tf.Tensor:
        # Columns not reached yet are zero; the tiny ridge keeps them out of the solution.
        gram = tf.matmul(H, H, transpose_a=True)
        ridge = 1e-30 + tf.cast(tf.linalg.diag_part(gram) == 0.0, dtype)
        return tf.linalg.lstsq(
            tf.concat([H, tf.linalg.diag(tf.sqrt(ridge))], 0),
            tf.concat([target, tf.zeros([steps], dtype)], 0)[:, None],
            fast=False,
        )[:, 0]

    def body(j: Any, basis: Any, H: Any, _: Any) -> Any:
        w = tf.reshape(apply(precondition(tf.reshape(basis[j], shape))), [-1])
        h = tf.zeros([steps + 1], dtype)
        for _pass in range(2):  # Gram–Schmidt, twice for orthogonality
            projection = tf.linalg.matvec(basis, w)
            w = w - tf.linalg.matvec(basis, projection, transpose_a=True)
            h = h + projection
        length = tf.norm(w)
        h = h + length * tf.one_hot(j + 1, steps + 1, dtype=dtype)
        H = H + h[:, None] * tf.one_hot(j, steps, dtype=dtype)[None]
        basis = tf.tensor_scatter_nd_update(
            basis, [[j + 1]], tf.math.divide_no_nan(w, length)[None]
        )
        y = least_squares(H)
        error = tf.norm(target - tf.linalg.matvec(H, y))
        return j + 1, basis, H, error

    _, basis, hessenberg, _ = tf.while_loop(
        lambda j, b, H, error: (j < steps) & (error > tolerance * norm),
        body,
        (tf.constant(0), basis, hessenberg, norm),
        shape_invariants=(
            tf.TensorShape([]),
            tf.TensorShape([None, None]),
            tf.TensorShape([None, None]),
            tf.TensorShape([]),
        ),
    )
    y = least_squares(hessenberg)
    x = tf.linalg.matvec(basis[:-1], y, transpose_a=True)
    return tf.ensure_shape(precondition(tf.reshape(x, shape)), rhs.shape)


class Solution(NamedTuple):
    """What a loop returns: the best sites seen, and how it went, as tensors."""

    sites: SiteValues
    status: tf.Tensor
    num_steps: tf.Tensor
    num_evaluations: tf.Tensor
    elbo: tf.Tensor
    start_elbo: tf.Tensor
    residual: tf.Tensor


class Problem:
    """One E-step: a prior, a likelihood and data, all fixed; λ is the unknown."""

    def __init__(self, prior: Prior, likelihood: Likelihood, data: RegressionData) -> None:
        self.prior = Prior(*(tf.stop_gradient(t) for t in prior))
        self.likelihood = likelihood
        self.data = (tf.convert_to_tensor(data[0]), tf.convert_to_tensor(data[1]))
        # Each is used in several places of the graph and traced once.
        self.evaluate = tf.function(self._evaluate, autograph=False)
        self._curvature = tf.function(
            lambda mean, variance: curvature(likelihood, self.data, mean, variance),
            autograph=False,
        )

    def _evaluate(self, sites: SiteValues, with_covariance: bool = True) -> Evaluation:
        """Posterior, expectations and ELBO at λ; a NaN ELBO where no valid q exists."""
        K, mean = self.prior
        r, lam = offset_sites(mean, *sites)
        factors = factorise(K, lam)
        q = add_prior_mean(posterior_from_factors(K, factors, r, lam), mean, *sites)
        Sigma = covariance_from_factors(K, factors) if with_covariance else tf.zeros_like(K[:, :0])
        # A variance that rounding has made non-positive is as good as an invalid q.
        ok = tf.reduce_all(q.variance > 0.0) & tf.math.is_finite(q.log_normaliser)
        nan = tf.constant(float("nan"), K.dtype)
        E = expectation_gradients(self.likelihood, self.data[0], q.mean, q.variance, self.data[1])
        log_t = expected_log_site(q.mean, q.variance, *sites)
        elbo = q.log_normaliser + (tf.reduce_sum(E.value) - tf.reduce_sum(log_t))
        finite = tf.reduce_all(tf.math.is_finite(E.mean) & tf.math.is_finite(E.variance))
        terms = (
            tf.abs(q.log_normaliser)
            + tf.reduce_sum(tf.abs(E.value))
            + tf.reduce_sum(tf.abs(sites.lambda_1 * q.mean))
            + tf.reduce_sum(tf.abs(log_t))
        )
        noise = 100.0 * np.finfo(K.dtype.as_numpy_dtype).eps * terms
        return Evaluation(sites, q, Sigma, E, tf.where(ok & finite, elbo, nan), noise)

    def newton_system(self, at: Evaluation) -> NewtonSystem:
        return NewtonSystem(
            at.Sigma,
            self._curvature(at.q.mean, at.q.variance),
            -2.0 * at.E.variance,
            is_coupled=not isinstance(self.likelihood, ScalarLikelihood),
        )

    def measure(self, at: Evaluation) -> tf.Tensor:
        """The residual norm at an evaluated λ, infinite where there is no valid q."""
        norm = residual_norm(at.q, residual_of(at.q, at.sites, at.E), at.E)
        return tf.where(tf.math.is_finite(at.elbo), norm, tf.constant(np.inf, norm.dtype))

    def damped(
        self, start: SiteValues, lr: tf.Tensor, tolerance: tf.Tensor, max_steps: tf.Tensor
    ) -> Solution:
        """Plain damping with a fixed step; the best λ of all those visited is kept."""
        at = self.evaluate(start, with_covariance=False)
        residual = self.measure(at)

        def unfinished(at: Any, res: Any, best: Any, count: Any) -> tf.Tensor:
            return (count < max_steps) & (res > tolerance) & tf.math.is_finite(at.elbo)

        def body(at: Any, res: Any, best: Any, count: Any) -> tuple[Any, ...]:
            new = self.evaluate(
                natural_gradient_step(at.q, at.sites, at.E, lr), with_covariance=False
            )
            new_res = self.measure(new)
            better = improves(new.elbo - best[1], new.noise, new_res < best[2])
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
        return Solution(best, status, count, count + 1, best_elbo, at.elbo, best_res)

    def newton(
        self, start: SiteValues, tolerance: tf.Tensor, max_evaluations: tf.Tensor
    ) -> Solution:
        """Damped Newton, monotone in the ELBO."""
        at = self.evaluate(start)
        dtype = at.elbo.dtype
        residual = self.measure(at)
        zero = tf.zeros((), dtype)

        def candidate(system: NewtonSystem, at: Evaluation, mu: tf.Tensor) -> Any:
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
                b = delta.lambda_2
                shrinks = (lam > 0.0) & (target > 0.0) & (lam + b < (1.0 - SHRINK_LIMIT) * lam)
                bad = shrinks | (b * v < -SHRINK_LIMIT) | ~tf.math.is_finite(b)
                bad = bad | ~tf.math.is_finite(delta.lambda_1)
                return tf.reduce_any(bad) & (mu < MAX_DAMPING)

            def raise_damping(mu: tf.Tensor, _: SiteValues) -> Any:
                mu = _raised(mu)
                return mu, step(mu)

            mu, delta = tf.while_loop(inadmissible, raise_damping, (mu, step(mu)))
            return mu, SiteValues(*(x + d for x, d in zip(at.sites, delta, strict=False)))

        def natural_step(at: Evaluation, mu: tf.Tensor) -> Any:
            return mu, natural_gradient_step(at.q, at.sites, at.E, 1.0 / (1.0 + mu))

        def unfinished(
            at: Any, res: Any, mu: Any, steps: Any, evaluations: Any, failures: Any
        ) -> tf.Tensor:
            return (
                (evaluations < max_evaluations)
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
                lambda: candidate(self.newton_system(at), at, mu),
            )
            new = self.evaluate(proposal)
            new_res = self.measure(new)
            accept = improves(new.elbo - at.elbo, at.noise, new_res < res)
            lowered = tf.where(mu > 0.04, mu / 4.0, zero)
            mu = tf.where(accept, tf.where(failures > 0, mu, lowered), _raised(mu))
            at = tf.nest.map_structure(lambda x, y: tf.where(accept, x, y), new, at)
            return (
                at,
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
        return Solution(at_end.sites, status, steps, evaluations, at_end.elbo, at.elbo, res)


def improves(gain: tf.Tensor, noise: tf.Tensor, closer: tf.Tensor) -> tf.Tensor:
    """Whether the ELBO has risen; below its rounding error the residual decides."""
    return (gain > noise) | ((gain >= -noise) & closer)


def _raised(mu: tf.Tensor) -> tf.Tensor:
    return tf.maximum(4.0 * mu, 0.1)


def infer_newton(
    likelihood: Likelihood,
    K: tf.Tensor,
    mean: tf.Tensor,
    X: tf.Tensor,
    Y: tf.Tensor,
    lambda_1: tf.Tensor,
    lambda_2: tf.Tensor,
    tolerance: tf.Tensor,
    max_evaluations: tf.Tensor,
) -> Solution:
    """:meth:`Problem.newton` from plain tensors."""
    problem = Problem(Prior(K, mean), likelihood, (X, Y))
    return problem.newton(SiteValues(lambda_1, lambda_2), tolerance, max_evaluations)


def infer_damped(
    likelihood: Likelihood,
    K: tf.Tensor,
    mean: tf.Tensor,
    X: tf.Tensor,
    Y: tf.Tensor,
    lambda_1: tf.Tensor,
    lambda_2: tf.Tensor,
    tolerance: tf.Tensor,
    max_steps: tf.Tensor,
    lr: tf.Tensor,
) -> Solution:
    """:meth:`Problem.damped` from plain tensors."""
    problem = Problem(Prior(K, mean), likelihood, (X, Y))
    return problem.damped(SiteValues(lambda_1, lambda_2), lr, tolerance, max_steps)
