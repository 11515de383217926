"""Sums over rows that the workers of a cluster hold: what goes out and what comes back."""

from __future__ import annotations

import math
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np
from gpflow.likelihoods import Likelihood

from ..inference.blocks import total
from ..inference.inducing import ExpectationSums, InducingPosterior, Pair, SummedSites
from ..inference.row_sums import (
    GradientSums,
    MissingCavities,
    ObjectiveSums,
    RowSums,
    SiteSummary,
    summarised,
)
from ..priors.inducing import InducingPrior
from ..rows import ModelParts
from .shard import Setting, SumRequest
from .structure import positions, structure_of, values_of

if TYPE_CHECKING:
    from .rows import ShardedRows


class ClusterSums(RowSums):
    """The sums of :class:`~gpflow_hybrid.inference.row_sums.RowSums`, at one setting of the
    hyperparameters: θ, Z and q(u) go out, M×M numbers come back."""

    rows: ShardedRows

    def __init__(
        self,
        parts: ModelParts,
        prior: InducingPrior,
        rows: ShardedRows,
        alpha: float,
        in_parts: bool = False,
    ) -> None:
        self.prior, self.rows, self.alpha = prior, rows, alpha
        variables = positions(parts, prior.variables)
        structure = structure_of(parts, rows.name)
        self._setting = Setting(_token(), structure, values_of(parts), alpha, in_parts, variables)
        self._q: tuple[InducingPosterior | None, str] = (None, "")

    def _ask(
        self, name: str, method: str, q: InducingPosterior | None, *arguments: Any
    ) -> list[Any]:
        """The answers, in the order of the rows and already added up in parts where they are many."""
        if self._q[0] is not q:
            self._q = (q, _token())
        sites = None if q is None else q.sites
        question = SumRequest(self._setting, method, self._q[1], sites, arguments)
        combine = {"sites": summarised, "missing_cavities": None}.get(method, total)
        return self.rows.ask(name, question, combine)

    def expectations(
        self, q: InducingPosterior, largest_variance: float = math.inf
    ) -> ExpectationSums:
        found: ExpectationSums = total(
            self._ask("e-step", "expectations", q, float(largest_variance))
        )
        if not np.isfinite(largest_variance):
            self.rows.tell(found.expected - q.kl)
        return found

    def suggested(self, likelihood: Likelihood) -> SummedSites:
        found: SummedSites = total(self._ask("first-sites", "suggested", None))
        return found

    def values(self, q: InducingPosterior) -> float:
        value = float(total(self._ask("objective", "values", q)))
        self.rows.tell(value - q.kl)
        return value

    def loo_log_predictive_density(self, q: InducingPosterior) -> float:
        return float(total(self._ask("leave-one-out", "loo_log_predictive_density", q)))

    def sites(self, q: InducingPosterior) -> SiteSummary:
        return summarised(self._ask("sites", "sites", q))

    def missing_cavities(self, q: InducingPosterior) -> MissingCavities | None:
        found = self._ask("cavities", "missing_cavities", q)
        counted = [
            (first, x) for first, x in zip(self.rows.first_of_shard, found, strict=True) if x
        ]
        if not counted:
            return None
        first, shown = counted[0]
        return shown._replace(n=first + shown.n, number=sum(x.number for _, x in counted))

    def product(self, q: InducingPosterior, x: Pair) -> Pair:
        return total(self._ask("e-step-product", "product", q, x))

    def transpose_product(self, q: InducingPosterior, w: Pair) -> Pair:
        return total(self._ask("gradient-product", "transpose_product", q, w))

    def linearise(self, q: InducingPosterior) -> ObjectiveSums:
        found: ObjectiveSums = total(self._ask("objective", "linearise", q))
        self.rows.tell(float(found.value) - q.kl)
        return found

    def pull_back(self, q: InducingPosterior, w: Pair | None) -> GradientSums:
        return total(self._ask("gradient", "pull_back", q, w))


def _token() -> str:
    return uuid.uuid4().hex
