"""The E-step of :mod:`~gpflow_hybrid.inference.variational` on NumPy arrays, by LAPACK.

The same damped Newton iteration, for likelihoods whose expectations work on arrays too: a graph that
trains such a model calls it as one operation, instead of being traced and optimised with the whole
iteration in it, and the expectations of a few hundred data are not divided among threads.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from gpflow.likelihoods import Likelihood

from ..likelihoods.expectations import ExpectationGradients, expected_log_site, works_on_arrays
from ..linalg import Marginals, backend, lapack
from ..linalg.backends import call_on_host
from ..sites import SiteValues
from . import newton_host
from .common import (
    ACCEPTABLE_RESIDUAL,
    CONVERGED,
    EXHAUSTED,
    INVALID_START,
    STALLED,
    Residual,
    Solution,
    relative_norm,
)
from .newton import STEP_TOLERANCE, has_rough_curvature
from .newton_host import HostSystem
from .variational import (
    FEW_DATA,
    MAX_DAMPING,
    WILD_SITE,
    goes_too_far,
    improves,
    is_known,
    natural_gradient_step,
    raised,
    residual_of,
    rounded,
)

Array = npt.NDArray[Any]


def works_on_host(likelihood: Likelihood) -> bool:
    """Whether the iteration can run here, on arrays, with the linear algebra of the moment."""
    return works_on_arrays(likelihood) and backend().name == "lapack"


class HostEvaluation(NamedTuple):
    """Everything known at one λ."""

    sites: SiteValues
    q: Marginals
    parts: list[lapack.Posterior]  # of the latents
    E: ExpectationGradients
    elbo: Any
    noise: Any


class HostProblem:
    """One E-step: ``K [L or 1, N, N]``, ``μ₀ [N, L]``, likelihood and data are fixed; λ is the unknown."""

    def __init__(self, likelihood: Likelihood, K: Array, mean: Array, X: Array, Y: Array) -> None:
        self.K, self.mean = K, mean
        self.likelihood = likelihood
        self.data = X, Y
        self.num_latent = mean.shape[1]
        self.is_large = len(mean) > newton_host.LARGE
        self.largest = max(matrix.diagonal().max() for matrix in K)

    def kernel_matrix(self, latent: int) -> Array:
        """``K`` of a latent, shared or its own."""
        return self.K[0 if len(self.K) == 1 else latent]

    def expectations(self, m: Array, v: Array) -> ExpectationGradients:
        """``E_q[log p]`` and its derivatives."""
        X, Y = self.data
        return ExpectationGradients(*self.likelihood.expectation_derivatives(X, m, v, Y))

    def evaluate(self, sites: SiteValues) -> HostEvaluation:
        """Posterior, expectations and ELBO at λ; a NaN ELBO where no valid q exists."""
        lambda_1, lambda_2 = sites
        r = lambda_1 - lambda_2 * self.mean
        columns = zip(*(np.ascontiguousarray(x.T) for x in (r, lambda_2)), strict=True)
        parts = [lapack.posterior(self.kernel_matrix(i), *rs) for i, rs in enumerate(columns)]
        return self.known(sites, parts)

    def known(
        self,
        sites: SiteValues,
        parts: list[lapack.Posterior],
        expectations: Callable[[Array, Array], ExpectationGradients] | None = None,
    ) -> HostEvaluation:
        """Expectations and ELBO where the latents' posteriors are known.

        :param expectations: from means and variances; the likelihood's unless given.
        """
        lambda_1, lambda_2 = sites
        constant = np.sum(self.mean * (lambda_1 - 0.5 * lambda_2 * self.mean))
        q = Marginals(
            self.mean + np.stack([p.shift for p in parts], 1),
            np.stack([p.variance for p in parts], 1),
            sum(p.log_normaliser for p in parts) + constant,
        )
        E = (expectations or self.expectations)(q.mean, q.variance)
        log_t = expected_log_site(q.mean, q.variance, *sites)
        elbo = q.log_normaliser + (np.sum(E.value) - np.sum(log_t))
        ok = (q.variance > 0.0).all() and np.isfinite(q.log_normaliser)
        ok = ok and np.isfinite(E.mean).all() and np.isfinite(E.variance).all()
        r = lambda_1 - lambda_2 * self.mean
        noise = np.finfo(self.K.dtype).eps * rounded(q, sites, r, E.value, log_t, self.largest)
        return HostEvaluation(sites, q, parts, E, elbo if ok else elbo * np.nan, noise)

    def measure(self, at: HostEvaluation) -> float:
        """The residual norm at an evaluated λ, infinite where there is no valid q."""
        if not np.isfinite(at.elbo):
            return math.inf
        said = Residual(at.E.mean, -2.0 * at.E.variance)
        return float(relative_norm(at.q, residual_of(at.q, at.sites, at.E), said))

    def step_system(self, at: HostEvaluation) -> HostSystem:
        """The Newton system at an evaluated λ, without damping, good enough for a step."""
        return self.system(at, rough=True, mirrored=self.is_large)

    def system(self, at: HostEvaluation, *, rough: bool, mirrored: bool = True) -> HostSystem:
        """The Newton system at an evaluated λ, with a rough curvature and half of Σ if that will do."""
        X, Y = self.data
        is_rough = rough and len(self.mean) > FEW_DATA and has_rough_curvature(self.likelihood)
        cheaper = {"rough": True} if is_rough else {}
        mv, vv = self.likelihood.expectation_curvature(X, at.q.mean, at.q.variance, Y, **cheaper)
        cross = _diagonal(mv)
        hessian = (_diagonal(2.0 * at.E.variance), cross, cross, _diagonal(vv))
        return HostSystem(
            self._covariance(at, mirrored), hessian, -2.0 * at.E.variance.T, 0.0, False
        )

    def _covariance(self, at: HostEvaluation, mirrored: bool) -> Array:
        """``Σ``, ``[L, N, N]``."""
        found = [
            lapack.covariance(
                self.kernel_matrix(i),
                np.ascontiguousarray(at.sites.lambda_2[:, i]),
                part.chol_inverse,
                part.variance,
                mirrored=mirrored,
            )
            for i, part in enumerate(at.parts)
        ]
        return found[0][None] if len(found) == 1 else np.stack(found)

    def newton(
        self, start: SiteValues, tolerance: float, max_steps: int
    ) -> tuple[Solution, HostEvaluation]:
        """Damped Newton, monotone in the ELBO; what it found, and everything known there."""
        at = self.evaluate(start)
        has_started = bool(np.isfinite(at.elbo))
        residual = self.measure(at)
        zero = self.K.dtype.type(0.0)
        mu, steps, evaluations, failures = zero, 0, 1, 0
        system: HostSystem | None = None
        while (
            evaluations <= max_steps
            and residual > tolerance
            and mu < MAX_DAMPING
            and np.isfinite(at.elbo)
        ):
            # q = prior: the sites are all zero, and the natural gradient is the better start.
            if not at.sites.lambda_2.any():
                proposal = self._natural_step(at, mu)
            else:
                system = self.step_system(at) if system is None else system
                mu, proposal = self._newton_step(system, at, mu)
            if self.is_large:
                system = None  # memory is dearer there than another Σ after a step that failed
            new = self.evaluate(proposal)
            new_residual = self.measure(new)
            evaluations += 1
            risen = improves(new.elbo - at.elbo, at.noise, new_residual < residual)
            if risen and is_known(new.noise, at.elbo, at.noise):
                if failures == 0:
                    mu = mu / 4.0 if mu > 0.04 else zero
                at, residual, system = new, new_residual, None
                steps, failures = steps + 1, 0
            else:
                mu, failures = raised(mu), failures + 1
            del new  # one matrix less while the next is factorised
        if not has_started:
            status = INVALID_START
        elif residual <= tolerance:
            status = CONVERGED
        else:
            status = STALLED if mu >= MAX_DAMPING else EXHAUSTED
        return Solution(at.sites, status, steps, evaluations, at.elbo, residual), at

    def _natural_step(self, at: HostEvaluation, mu: Any) -> SiteValues:
        # A prior so wide that p(y|f) is absurd under it would give absurd sites: as if its variance were
        # one, they are a start.
        wild = np.max(np.abs(at.E.variance) * at.q.variance) > WILD_SITE
        E = self.expectations(at.q.mean, np.minimum(at.q.variance, 1.0)) if wild else at.E
        return natural_gradient_step(at.q, at.sites, E, 1.0 / (1.0 + mu))

    def _newton_step(
        self, system: HostSystem, at: HostEvaluation, mu: Any
    ) -> tuple[Any, SiteValues]:
        """The step at damping μ, raised without evaluation until the step is admissible."""
        target = -2.0 * at.E.variance
        while True:
            step, _ = newton_step(system.damped(mu), at, STEP_TOLERANCE)
            too_far = goes_too_far(step, at.sites.lambda_2, target, at.q.variance)
            if mu >= MAX_DAMPING or not too_far.any():
                return mu, SiteValues(*(x + d for x, d in zip(at.sites, step, strict=True)))
            mu = raised(mu)


def newton_step(
    system: HostSystem, at: HostEvaluation, tolerance: float
) -> tuple[SiteValues, Residual]:
    """``δλ = (J + μI)⁻¹ (g(λ) − λ)``, and the same as ``a = δλ₁ − m δλ₂`` and ``b = δλ₂``."""
    r = residual_of(at.q, at.sites, at.E)
    x = system.solve(np.stack([r.a.T, r.b.T]), tolerance)
    a, b = x[0].T, x[1].T
    return SiteValues(a + at.q.mean * b, b), Residual(a, b)


def from_warm_start(
    problem: HostProblem, warm: SiteValues, tolerance: float, max_steps: int
) -> tuple[Solution, HostEvaluation]:
    """From the given sites; if that does not come near a solution, from zero as well, and the better."""
    first = problem.newton(warm, tolerance, max_steps)
    old = first[0]
    if old.residual <= ACCEPTABLE_RESIDUAL:
        return first
    zero = SiteValues(*(np.zeros_like(x) for x in warm))
    second = problem.newton(zero, tolerance, max_steps)
    return second if second[0].value > old.value or not np.isfinite(old.value) else first


def pack(solution: Solution) -> tuple[Array, Array]:
    """A solution as two arrays: the sites ``[2, N, L]``, and all its numbers."""
    sites, *numbers = solution
    return np.stack(sites), np.asarray(numbers)


def unpack_solution(sites: tf.Tensor, numbers: tf.Tensor) -> Solution:
    """What :func:`pack` packed, as tensors."""
    status, num_steps, num_evaluations = tf.unstack(tf.cast(numbers[:3], tf.int32))
    found = SiteValues(*tf.unstack(sites))
    return Solution(found, status, num_steps, num_evaluations, *tf.unstack(numbers[3:]))


def infer_newton(likelihood: Likelihood, *tensors: tf.Tensor) -> Solution:
    """:meth:`HostProblem.newton` from plain tensors; the limits are tolerance and number of steps."""
    likelihood = copy.copy(likelihood)  # a graph that holds the original would keep it alive

    def on_host(*arrays: Any) -> tuple[Array, ...]:
        *problem, lambda_1, lambda_2, tolerance, max_steps = arrays
        start = SiteValues(lambda_1, lambda_2)
        solution, _ = HostProblem(likelihood, *problem).newton(start, tolerance, max_steps)
        return tuple(x.astype(lambda_1.dtype, copy=False) for x in pack(solution))

    sites = tf.TensorShape([2]).concatenate(tensors[4].shape)
    return unpack_solution(*call_on_host(on_host, list(tensors), [sites, [5]]))


def _diagonal(x: Array) -> Array:
    """``[N, L]`` as diagonal matrices ``[N, L, L]``."""
    return x[:, :, None] * np.eye(x.shape[1], dtype=x.dtype)
