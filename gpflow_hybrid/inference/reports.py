"""What inference tells the user."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf
from gpflow.base import RegressionData
from gpflow.likelihoods import (
    Bernoulli,
    Likelihood,
    MonteCarloLikelihood,
    MultiClass,
    ScalarLikelihood,
)

from ..likelihoods.expectations import expectation_gradients, independent_expectations
from ..linalg import Marginals, marginals
from ..objectives import elbo
from ..sites import SiteValues
from .common import CONVERGED, EXHAUSTED, Method, Solution, unpack
from .newton import curvature

QUADRATURE_FAILURE = 0.5
"""Error above which the fixed point of the likelihood's quadrature is not called converged."""


@dataclasses.dataclass(frozen=True)
class InferenceResult:
    """How inference went."""

    converged: bool
    """Whether the residual came below the tolerance."""
    num_steps: int
    """Steps taken on λ."""
    num_evaluations: int
    """Evaluations of the posterior (m, v, log Z), those of rejected steps included."""
    elbo: float
    """The ELBO at the sites the model was left with."""
    residual: float
    """Residual of the method's fixed point, relative, in units of the posterior."""
    min_cavity_precision: float
    """The smallest ``1/v − λ₂``; the EP-like value needs it positive."""
    num_negative_sites: int
    """How many λ₂ are negative."""
    message: str
    """What happened and, where it did not converge, what to do."""


class Diagnosis(NamedTuple):
    """A solution and what is worth knowing at its sites, as tensors."""

    solution: Solution
    q: Marginals
    elbo: tf.Tensor
    min_cavity_precision: tf.Tensor
    quadrature_error: tf.Tensor


def with_diagnosis(method: Method) -> Callable[..., Diagnosis]:
    """``method.solve`` followed by a look at where it ended, to be compiled as one."""
    error_of = method.quadrature_error

    def function(likelihood: Likelihood, *tensors: tf.Tensor) -> Diagnosis:
        solution = method.solve(likelihood, *tensors)
        (K, mean), _, data, *_ = unpack(likelihood, *tensors)
        q = marginals(K, mean, *solution.sites)
        return Diagnosis(
            solution,
            q,
            elbo(q, solution.sites, likelihood, data),
            tf.reduce_min(1.0 / q.variance - solution.sites.lambda_2),
            error_of(likelihood, data, q.mean, q.variance, solution.sites)
            if error_of is not None
            else tf.zeros_like(q.log_normaliser),
        )

    return function


def report(found: Diagnosis, likelihood: Likelihood, method: Method) -> InferenceResult:
    """The result object of a finished loop."""
    solution, error = found.solution, float(found.quadrature_error)
    trusted = error <= QUADRATURE_FAILURE
    return InferenceResult(
        converged=int(solution.status) == CONVERGED and trusted,
        num_steps=int(solution.num_steps),
        num_evaluations=int(solution.num_evaluations),
        elbo=float(found.elbo),
        residual=float(solution.residual),
        min_cavity_precision=float(found.min_cavity_precision),
        num_negative_sites=int(tf.math.count_nonzero(solution.sites.lambda_2 < 0.0)),
        message=_outcome(solution, method, trusted) + _quadrature_remark(error, likelihood, method),
    )


def _outcome(solution: Solution, method: Method, trusted: bool) -> str:
    status, residual = int(solution.status), float(solution.residual)
    taken, tried = int(solution.num_steps), int(solution.num_evaluations) - 1
    number = "1 step was" if tried - taken == 1 else f"{tried - taken} steps were"
    shortened = f" {number} taken back and shortened." if tried > taken else ""
    if status == CONVERGED and trusted:
        return f"Converged: residual {residual:.1e} after {taken} steps.{shortened}"
    if status == CONVERGED:
        return f"Not converged: the residual is {residual:.1e}, but of an inaccurate integral."
    if status == EXHAUSTED:
        return (
            f"Not converged: residual {residual:.1e} after {tried + 1} evaluations of the "
            f"posterior.{shortened} {method.when_exhausted}"
        )
    return f"Not converged: at residual {residual:.1e} {method.when_stalled}"


def _quadrature_remark(error: float, likelihood: Likelihood, method: Method) -> str:
    if error <= method.tolerated_error:
        return ""
    if method.when_inaccurate is not None:
        return f" {method.when_inaccurate} The error is {error:.1e}."
    if isinstance(likelihood, MultiClass):
        remedy = "raise likelihood.num_gauss_hermite_points"
    elif isinstance(likelihood, MonteCarloLikelihood):
        remedy = (
            "its fixed points cannot follow them; keep the kernel's variance smaller by a prior"
        )
    else:
        dimension = 1 if isinstance(likelihood, ScalarLikelihood) else likelihood.latent_dim
        remedy = (
            "give it more points, for example quadrature=gpflow.quadrature.NDiagGHQuadrature("
            f"{dimension}, {100 if dimension == 1 else 40})"
        )
        if isinstance(likelihood, Bernoulli):
            remedy += ", or use the exact gpflow_hybrid.likelihoods.ProbitBernoulli"
    return (
        f" The quadrature of {type(likelihood).__name__} is too coarse for these posteriors (error "
        f"{error:.1e}), so that the ELBO and the sites are not to be trusted: {remedy}."
    )


def quadrature_error(
    likelihood: Likelihood,
    data: RegressionData,
    m: tf.Tensor,
    v: tf.Tensor,
    sites: SiteValues | None = None,
) -> tf.Tensor:
    """How far a likelihood's own ``E_q[log p]`` is from exact, by two symptoms; ``[]``.

    Exact expectations obey the heat equation ``∂²E/∂m² = 2 ∂E/∂v``, and their slope ``∂E/∂m`` is that of
    another rule; both differences are taken in units of the posterior, ``v`` and ``√v``.
    """
    E = expectation_gradients(likelihood, data[0], m, v, data[1])
    if hasattr(likelihood, "expectation_curvature"):  # for exact expectations only
        heat = tf.zeros((), m.dtype)
    else:
        second = tf.linalg.diag_part(curvature(likelihood, data, m, v).mm)
        heat = tf.reduce_max(tf.abs(second - 2.0 * E.variance) * v)
    with tf.GradientTape() as tape:
        tape.watch(m)
        other = independent_expectations(likelihood, data[0], m, v, data[1])
    if other is None:
        return heat
    slope = tf.reduce_max(
        tf.abs(E.mean - tape.gradient(other, m, unconnected_gradients=tf.UnconnectedGradients.ZERO))
        * tf.sqrt(v)
    )
    return tf.maximum(heat, slope)
