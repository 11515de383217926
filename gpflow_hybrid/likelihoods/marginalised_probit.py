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
from .projected import ProjectedLikelihood, SiteWeights
from .ratio_gradients import RatioGradients, closed_ratio_gradients


class MarginalisedProbit(ProjectedLikelihood):
    """``Φ((2y − 1) a/√(1 + k̃))`` with the probit's exact integrals, at ``m c`` and ``v c²``,
    ``c² = 1/(1 + k̃)``."""

    def __init__(self, likelihood: ProbitBernoulli, Y: Array, variance: Array) -> None:
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

    def _second(self, m: Array, v: Array) -> tuple[Array, Array]:
        at = (None, m * self.c, v * self.c2, self.Y)
        mv, vv = self.likelihood.expectation_curvature(*at)
        return self.c * self.c2 * mv, self.c2 * self.c2 * vv

    def curvature(self, m: Array, v: Array) -> tuple[Array, ...]:
        mm = 2.0 * self.expectations(m, v).variance
        mv, vv = self._second(m, v)
        return tuple(diagonal(x) for x in (mm, mv, mv, vv))

    def ratios(self, m: Array, v: Array, lambda_1: Array, lambda_2: Array) -> RatioGradients:
        found = closed_ratio_gradients(self._log_expected, (m, v, lambda_1, lambda_2))
        assert found is not None
        exists = np.all(lambda_2 * v < 1.0)
        return found if exists else found._replace(value=np.nan)

    def pull_back(self, m: Array, v: Array, sites: Any, weights: SiteWeights | None) -> Pulled:
        E = self.expectations(m, v)
        if weights is None:
            return Pulled(-self.c2 * (0.5 * m * E.mean + v * E.variance), [])
        lambda_1, lambda_2 = sites
        V = v / (1.0 - lambda_2 * v)
        M = m - (lambda_1 - lambda_2 * m) * V
        _, _, in_ratio = self._log_expected(M, V)
        mv, vv = self._second(m, v)
        mm = 2.0 * E.variance
        # ∂c/∂k̃ = −½c³: what k̃ changes in E_m and E_v
        d_m = -self.c2 * (0.5 * E.mean + 0.5 * m * mm + v * mv)
        d_v = -self.c2 * (E.variance + 0.5 * m * mv + v * vv)
        return Pulled(in_ratio + weights.a * d_m - 2.0 * weights.b * d_v, [])
