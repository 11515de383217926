"""The collapsed objective of a sparse model and its total gradient.

At the fixed point ``x = G(x, θ)`` of inference, x the sites of q(w), the objective is

    L = Σ φₙ − KL,     φ = ℓ_α(m, v, λ) + E_q[log t] ≥ E

with the sites λ that q says of every datum; for α = 0 it is the ELBO itself, stationary in x. Else, with
``w = (I − ∂G/∂x)⁻ᵀ ∂L/∂x``, ``L + wᵀ(G − x)`` at constant w and x has its value and its total derivative.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.sparse.linalg import LinearOperator, gmres

from ..priors.protocol import Array
from . import inducing
from .common import INVALID_START
from .inducing import InducingPosterior, InducingSolution, Pair, SummedSites
from .options import COLLAPSE, INDUCING
from .remarks import Remark, remarks_on
from .row_sums import GradientSums, RowSums


class InducingCollapse(NamedTuple):
    """The objective at the fixed point with its derivatives."""

    solution: InducingSolution
    value: float
    gradient: GradientSums | None
    remarks: tuple[Remark, ...] = ()


def collapse(
    rows: RowSums, start: SummedSites, tolerance: float, max_steps: int
) -> InducingCollapse:
    """Infer, and the objective where inference has ended."""
    solution = from_warm_start(rows, start, tolerance, max_steps)
    if solution.status == INVALID_START:
        return InducingCollapse(solution, np.nan, None)
    return at_solution(rows, solution)


def from_warm_start(
    rows: RowSums, start: SummedSites, tolerance: float, max_steps: int
) -> InducingSolution:
    """Infer from the given sites, and where that does not end near a solution from zero ones as well."""
    solution = inducing.solve(rows, start, tolerance, max_steps)
    if solution.residual > COLLAPSE.acceptable_residual and start.lambda_2.any():
        cold = SummedSites(*(np.zeros_like(x) for x in start))
        other = inducing.solve(rows, cold, tolerance, max_steps)
        better = other.elbo > solution.elbo or not np.isfinite(solution.elbo)
        solution = other if better else solution
    return solution


def at_solution(rows: RowSums, solution: InducingSolution) -> InducingCollapse:
    """The objective where inference has ended."""
    q = solution.q
    if rows.alpha == 0.0:
        return InducingCollapse(solution, solution.elbo, rows.pull_back(q, None))
    found = rows.linearise(q)
    w, error = weights(rows, q, found.slope)
    if not (np.isfinite(found.value) and np.isfinite(w.flat()).all()):
        return InducingCollapse(solution._replace(status=INVALID_START), np.nan, None)
    assert solution.step is not None
    value = found.value - q.kl + float(w.flat() @ q.in_units(solution.step).flat())
    remarks = remarks_on(found.num_parts, found.num_data, error)
    return InducingCollapse(solution, value, rows.pull_back(q, w), remarks)


def weights(rows: RowSums, q: InducingPosterior, slope: Pair) -> tuple[Pair, float]:
    """``w`` and the relative error of the solved system, where it matters; every product is a sum over the
    rows."""
    num_latent = len(q.h)
    r = slope.flat()
    size = float(np.linalg.norm(r))
    if size == 0.0 or not np.isfinite(size):
        return slope, 0.0

    def product(x: Array) -> Array:
        return x - rows.transpose_product(q, Pair.of_flat(x, num_latent)).flat()

    J = LinearOperator((r.size, r.size), product, dtype=r.dtype)
    limit = min(INDUCING.weights_iterations, r.size)
    seen = [1.0]
    w, _ = gmres(
        J,
        r,
        rtol=INDUCING.weights_tolerance,
        atol=INDUCING.weights_error,
        restart=limit,
        maxiter=1,
        callback=seen.append,
        callback_type="pr_norm",
    )
    error = float(seen[-1])
    return Pair.of_flat(w, num_latent), error if error * size > INDUCING.weights_error else 0.0
