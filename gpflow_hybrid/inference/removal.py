"""How much of a site is taken out of q where a datum is left out.

``ℓ_α`` has the cavity ``q/t^α`` under it. While no other site is negative its variance is at most the
prior's, k. Else it can grow without bound, and ``ℓ_α`` with it; where ``αλ₂v ≥ 1`` there is none. A
training loss takes only a part ``t^s`` of a site out of q where the cavity would be wider than 2k, that is
where ``αλ₂v`` is more than ``c = 1 − v/2k``: as much less as it is more,

    s αλ₂v = max(0, 2c − αλ₂v),

so that the cavity's precision is reflected. Where q is itself wider than the prior, c is at least ½. The
rest of the site counts as it does in the ELBO,

    ℓ = (1/α) log E_q[(p/t^s)^α] − (1 − s) E_q[log t],

which is ``ℓ_α`` for s = 1, continuous in all arguments, and no less than ``ℓ_0`` by Jensen's inequality.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..likelihoods.ratio_gradients import RatioGradients
from ..priors.protocol import Array
from ..sites import SiteValues
from .options import COLLAPSE


class Removal(NamedTuple):
    """The part s of every site and its derivatives, ``[N, L]`` each."""

    part: Array
    in_lambda_2: Array
    in_variance: Array
    in_prior_variance: Array

    def of(self, sites: SiteValues) -> SiteValues:
        """``sλ``: what is taken out."""
        return SiteValues(self.part * sites.lambda_1, self.part * sites.lambda_2)

    def pull_back(
        self, ratio: RatioGradients, m: Array, v: Array, sites: SiteValues
    ) -> tuple[RatioGradients, Array | None]:
        """``Σℓ`` and its derivatives in m, v, λ and k, from those of the first term in m, v and sλ."""
        s, rest = self.part, 1.0 - self.part
        if not rest.any():
            return ratio, None
        lambda_1, lambda_2 = sites
        expected = lambda_1 * m - 0.5 * lambda_2 * (m * m + v)  # E_q[log t]
        in_part = ratio.lambda_1 * lambda_1 + ratio.lambda_2 * lambda_2 + expected
        found = RatioGradients(
            ratio.value - np.sum(rest * expected),
            ratio.m - rest * (lambda_1 - lambda_2 * m),
            ratio.v + 0.5 * rest * lambda_2 + in_part * self.in_variance,
            s * ratio.lambda_1 - rest * m,
            s * ratio.lambda_2 + 0.5 * rest * (m * m + v) + in_part * self.in_lambda_2,
        )
        return found, in_part * self.in_prior_variance

    @property
    def num_parts(self) -> int:
        """Data whose sites are not taken out as a whole."""
        return int(np.sum((self.part < 1.0).any(-1)))


def removable(alpha: float, lambda_2: Array, v: Array, prior_variance: Array) -> Removal:
    """``s`` at these sites and marginals."""
    with np.errstate(all="ignore"):
        widest = COLLAPSE.widest_cavity * prior_variance
        border = 1.0 - v / widest
        is_wide = ~(border > COLLAPSE.removable_leverage)  # q itself
        border = np.where(is_wide, COLLAPSE.removable_leverage, border)
        leverage = alpha * lambda_2 * v
        slope = 2.0 / leverage  # of s in the border
        part = np.where(leverage > border, np.maximum(border * slope - 1.0, 0.0), 1.0)
        bends = (part > 0.0) & (part < 1.0)
        moves = bends & ~is_wide
        return Removal(
            part,
            np.where(bends, -border * slope / lambda_2, 0.0),
            np.where(bends, -border * slope / v, 0.0) - np.where(moves, slope / widest, 0.0),
            np.where(moves, slope * v / (widest * prior_variance), 0.0),
        )
