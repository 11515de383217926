"""What an E-step tells the user."""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from gpflow.base import RegressionData
from gpflow.likelihoods import (
    Bernoulli,
    Likelihood,
    MonteCarloLikelihood,
    MultiClass,
    ScalarLikelihood,
)

from .inference import CONVERGED, EXHAUSTED, Solution
from .likelihoods.expectations import expectation_gradients, independent_expectations
from .linalg import Marginals
from .newton import curvature

QUADRATURE_FAILURE = 0.5
"""Error above which the fixed point of the likelihood's quadrature is not called converged."""

QUADRATURE_ERROR = 1e-2
"""Error of a likelihood's own quadrature, in units of the posterior, worth a remark."""


@dataclasses.dataclass(frozen=True)
class InferenceResult:
    """How an E-step went."""

    converged: bool
    """Whether the residual came below the tolerance."""
    num_steps: int
    """Steps taken on λ."""
    num_evaluations: int
    """Evaluations of the posterior (m, v, log Z), those of rejected steps included."""
    elbo: float
    """The ELBO at the sites the model was left with."""
    residual: float
    """Residual of the fixed point λ = g(λ), relative, in units of the posterior."""
    min_cavity_precision: float
    """The smallest ``1/v − λ₂``; the EP-like value needs it positive."""
    num_negative_sites: int
    """How many λ₂ are negative."""
    message: str
    """What happened and, where it did not converge, what to do."""


def report(
    solution: Solution,
    q: Marginals,
    likelihood: Likelihood,
    data: RegressionData,
    fixed_lr: bool,
) -> InferenceResult:
    """The result object of a finished loop; ``q`` is the posterior at its sites."""
    lambda_2 = solution.sites.lambda_2
    error = float(quadrature_error(likelihood, data, q.mean, q.variance))
    return InferenceResult(
        converged=int(solution.status) == CONVERGED and error <= QUADRATURE_FAILURE,
        num_steps=int(solution.num_steps),
        num_evaluations=int(solution.num_evaluations),
        elbo=float(solution.elbo),
        residual=float(solution.residual),
        min_cavity_precision=float(tf.reduce_min(1.0 / q.variance - lambda_2)),
        num_negative_sites=int(tf.math.count_nonzero(lambda_2 < 0.0)),
        message=_outcome(solution, fixed_lr) + _quadrature_remark(error, likelihood),
    )


def _outcome(solution: Solution, fixed_lr: bool) -> str:
    status, residual = int(solution.status), float(solution.residual)
    if status == CONVERGED:
        return f"Converged: residual {residual:.1e} after {int(solution.num_steps)} steps."
    if status == EXHAUSTED:
        remedy = " or leave lr out: the automatic mode needs no step size." if fixed_lr else "."
        return (
            f"Not converged: residual {residual:.1e} after {int(solution.num_evaluations)} "
            f"evaluations of the posterior. Raise max_steps{remedy}"
        )
    if fixed_lr:
        return (
            f"Not converged: a step with this lr left no valid q(f) (residual {residual:.1e} before "
            "it). Take a smaller lr, or leave lr out: the automatic mode needs no step size."
        )
    return (
        f"Not converged: at residual {residual:.1e} no step raises the ELBO any further. Either this "
        "is the limit of the arithmetic, and the sites can be used, or the expectations of the "
        "likelihood are not smooth: give its quadrature more points."
    )


def _quadrature_remark(error: float, likelihood: Likelihood) -> str:
    if error <= QUADRATURE_ERROR:
        return ""
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
    likelihood: Likelihood, data: RegressionData, m: tf.Tensor, v: tf.Tensor
) -> tf.Tensor:
    """How far a likelihood's own ``E_q[log p]`` is from exact, by two symptoms; ``[]``.

    Exact expectations obey the heat equation ``∂²E/∂m² = 2 ∂E/∂v``, and their slope ``∂E/∂m`` is that of
    another rule; both differences are taken in units of the posterior, ``v`` and ``√v``.
    """
    E = expectation_gradients(likelihood, data[0], m, v, data[1])
    second = tf.linalg.diag_part(curvature(likelihood, data, m, v).mm)
    heat = tf.reduce_max(tf.abs(second - 2.0 * E.variance) * v)
    with tf.GradientTape() as tape:
        tape.watch(m)
        other = independent_expectations(likelihood, data[0], m, v, data[1])
    if other is None:
        return heat
    slope = tf.reduce_max(tf.abs(E.mean - tape.gradient(other, m)) * tf.sqrt(v))
    return tf.maximum(heat, slope)
