"""What inference tells the user."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from gpflow.likelihoods import (
    Bernoulli,
    Likelihood,
    MonteCarloLikelihood,
    MultiClass,
    ScalarLikelihood,
)

from ..display import ShownAsText, in_rows
from ..likelihoods.curvature import curvature
from ..likelihoods.expectations import (
    expectation_gradients,
    expected_log_site,
    has_independent_rule,
    quadrature_error,
)
from ..likelihoods.node_rules import (
    expectation_gradients_by,
    independent_rule,
    point_derivatives,
)
from ..likelihoods.on_arrays import OnArrays
from ..linalg import Marginals
from ..priors import Prior
from ..sites import SiteValues
from .common import CONVERGED, EXHAUSTED, Method, Solution
from .inducing import InducingSolution
from .options import REPORT
from .questions import EXPECTATIONS, Iteration, Question
from .row_sums import SiteSummary


@dataclasses.dataclass(frozen=True, repr=False)
class InferenceResult(ShownAsText):
    """How inference went; prints as a few lines."""

    converged: bool
    """Whether the residual came below the tolerance, and is that of accurate integrals."""
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
    quadrature_error: float = 0.0
    """How far the quadrature that inference relied on is from exact, in units of the posterior; of a sparse
    model in a log likelihood, after f is integrated out given u."""

    def __repr__(self) -> str:
        status = "converged" if self.converged else "not converged"
        return (
            f"<InferenceResult: {status}, residual {self.residual:.1e}, ELBO {self.elbo:.6g}, "
            f"{self.num_steps} steps>"
        )

    def __str__(self) -> str:
        evaluations = f"{self.num_steps}, with {self.num_evaluations} evaluations of the posterior"
        rows = [
            ("ELBO", f"{self.elbo:.4f}"),
            ("residual", f"{self.residual:.1e}"),
            ("steps", evaluations),
            ("smallest cavity", f"{self.min_cavity_precision:.4g}"),
            ("negative sites", f"{self.num_negative_sites}"),
        ]
        if self.quadrature_error > 0.0:
            rows.append(("quadrature error", f"{self.quadrature_error:.1e}"))
        return f"{self.message}\n{in_rows(rows)}"


class Diagnosis(NamedTuple):
    """A solution and what is worth knowing at its sites."""

    solution: Solution
    q: Marginals
    elbo: float
    quadrature_error: float


class QuadratureError(NamedTuple):
    """In units of the posterior, ``[]``."""

    size: Any


def diagnosed(
    method: Method, prior: Prior, start: SiteValues, tolerance: float, max_steps: int
) -> Iteration[Diagnosis]:
    """``method.solve`` followed by a look at where it ended."""
    solution = yield from method.solve(prior, start, tolerance, max_steps)
    sites = solution.sites
    q = prior.posterior(sites).marginals
    if not solution.has_started:
        return Diagnosis(solution, q, np.nan, np.nan)
    E = yield EXPECTATIONS(q.mean, q.variance)
    log_t = expected_log_site(q.mean, q.variance, *sites)
    elbo = q.log_normaliser + (np.sum(E.value) - np.sum(log_t))
    error = 0.0
    if method.quadrature_error is not None:
        error = float((yield method.quadrature_error(q.mean, q.variance, *sites)).size)
    return Diagnosis(solution, q, float(elbo), error)


def report(found: Diagnosis, likelihood: Likelihood, method: Method) -> InferenceResult:
    """The result object of a finished iteration."""
    solution, error = found.solution, found.quadrature_error
    trusted = error <= method.tolerated_error
    lambda_2 = solution.sites.lambda_2
    return InferenceResult(
        converged=solution.status == CONVERGED and trusted,
        num_steps=solution.num_steps,
        num_evaluations=solution.num_evaluations,
        elbo=found.elbo,
        residual=solution.residual,
        min_cavity_precision=float(np.min(1.0 / found.q.variance - lambda_2)),
        num_negative_sites=int(np.count_nonzero(lambda_2 < 0.0)),
        message=_outcome(solution, method, trusted) + _quadrature_remark(error, likelihood, method),
        quadrature_error=error,
    )


def sparse_report(found: InducingSolution, sites: SiteSummary) -> InferenceResult:
    """The result object of inference with inducing variables."""
    tried = found.num_evaluations - 1
    number = tried - found.num_steps
    shortened = "" if number <= 0 else f" {number} steps were taken back."
    if found.num_products:
        shortened += (
            f" Newton steps took {found.num_products} products, each a sum over the data too."
        )
    if found.status == CONVERGED:
        message = f"Converged: residual {found.residual:.1e} after {found.num_steps} steps."
    elif found.status == EXHAUSTED:
        message = (
            f"Not converged: residual {found.residual:.1e} after {tried + 1} sums over the data. Raise "
            "max_steps."
        )
    else:
        message = (
            f"Not converged: at residual {found.residual:.1e} no step raises the ELBO any further. Either "
            "this is the limit of the arithmetic, and q(u) can be used, or the expectations of the "
            "likelihood are not smooth: give its quadrature more points."
        )
    trusted = sites.inner_error <= REPORT.inner_error
    if not trusted:
        message = (
            f"Not to be trusted: the quadrature that marginalises f given u is too coarse, with an error "
            f"of {sites.inner_error:.1e} in a log likelihood, because the likelihood is much narrower than "
            'the residual variances. Use more inducing points, or objective="elbo". ' + message
        )
    return InferenceResult(
        converged=found.status == CONVERGED and trusted,
        num_steps=found.num_steps,
        num_evaluations=found.num_evaluations,
        elbo=found.elbo,
        residual=found.residual,
        min_cavity_precision=sites.smallest_cavity,
        num_negative_sites=sites.num_negative,
        message=message + shortened,
        quadrature_error=sites.inner_error,
    )


def _outcome(solution: Solution, method: Method, trusted: bool) -> str:
    status, residual = solution.status, solution.residual
    taken, tried = solution.num_steps, solution.num_evaluations - 1
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


def _own_error(likelihood: Likelihood, X: Any, Y: Any, m: Any, v: Any, *_: Any) -> QuadratureError:
    """How far a likelihood's own ``E_q[log p]`` is from exact, in units of the posterior."""
    E = expectation_gradients(likelihood, X, m, v, Y)
    mm = 2.0 * E.variance
    if not hasattr(likelihood, "expectation_curvature"):  # for exact expectations only
        mm = tf.linalg.diag_part(curvature(likelihood, X, Y, m, v, -mm).mm)
    slope = None
    if has_independent_rule(likelihood):
        at_nodes = functools.partial(point_derivatives, likelihood, X, Y)
        rule = independent_rule(m.dtype.as_numpy_dtype)
        _, slope, _ = expectation_gradients_by(rule, at_nodes, m, v)
    return QuadratureError(quadrature_error(E, mm, slope, v))


def _own_error_on_host(form: OnArrays) -> Callable[..., QuadratureError]:
    return lambda data, m, v, *_: QuadratureError(form.quadrature_error(data, m, v))


OWN_QUADRATURE_ERROR = Question(
    "own_quadrature_error", _own_error, QuadratureError, 4, (0,), _own_error_on_host
)
"""How far a likelihood's own ``E_q[log p]`` is from exact, in units of the posterior."""
