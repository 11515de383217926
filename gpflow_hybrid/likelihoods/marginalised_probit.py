"""The probit likelihood of projections, with exact integrals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .density import Array
from .expectations import ExpectationGradients
from .marginalised import Pulled
from .node_rules import diagonal
from .probit import ProbitBernoulli
from .projected import Moments, ProjectedLikelihood, SiteWeights
from .ratio_gradients import RatioGradients, closed_ratio_gradients
from .ratios import cavity, has_cavity


class MarginalisedProbit(ProjectedLikelihood):
    """``Φ((2y − 1) a/√(1 + k̃))`` with the probit's exact integrals, at ``m c`` and ``v c²``,
    ``c² = 1/(1 + k̃)``."""

    def __init__(self, likelihood: ProbitBernoulli, X: Array, Y: Array, variance: Array) -> None:
        self.likelihood, self.Y = likelihood, Y
        self.c2 = 1.0 / (1.0 + variance)
        self.c = np.sqrt(self.c2)
        self.variance = variance

    def _log_expected(self, M: Array, V: Array) -> tuple[Any, ...]:
        """``log E[p̃]`` under N(M, V), and its derivatives in both."""
        return self.likelihood.log_expected_derivatives(None, M, V + self.variance, self.Y)

    def expectations(self, m: Array, v: Array, largest: float = math.inf) -> ExpectationGradients:
        at = (None, m * self.c, np.minimum(v, largest) * self.c2, self.Y)
        value, in_mean, in_variance = self.likelihood.expectation_derivatives(*at)
        return ExpectationGradients(value, self.c * in_mean, self.c2 * in_variance)

    def curvature(self, at: Moments) -> tuple[Array, ...]:
        inputs = (None, at.m * self.c, at.v * self.c2, self.Y)
        mv, vv = self.likelihood.expectation_curvature(*inputs)
        mv, vv = self.c * self.c2 * mv, self.c2 * self.c2 * vv
        return tuple(diagonal(x) for x in (2.0 * at.E.variance, mv, mv, vv))

    def ratios(self, at: Moments) -> RatioGradients:
        found = closed_ratio_gradients(self._log_expected, (at.m, at.v, *at.removed))
        assert found is not None
        exists = np.all(has_cavity(at.v, at.removed.lambda_2, 1.0))
        return found if exists else found._replace(value=np.nan)

    def pull_back(self, at: Moments, weights: SiteWeights | None) -> Pulled:
        m, v, E = at.m, at.v, at.E
        if weights is None:
            return Pulled(-self.c2 * (0.5 * m * E.mean + v * E.variance), [])
        cav = cavity(m, v, *at.removed, 1.0)
        _, _, in_ratio = self._log_expected(cav.mean, cav.variance)
        mm, mv, _, vv = (np.einsum("nll->nl", x) for x in at.curvature)
        # ∂c/∂k̃ = −½c³: what k̃ changes in E_m and E_v
        d_m = -self.c2 * (0.5 * E.mean + 0.5 * m * mm + v * mv)
        d_v = -self.c2 * (E.variance + 0.5 * m * mv + v * vv)
        return Pulled(in_ratio + weights.a * d_m - 2.0 * weights.b * d_v, [])
