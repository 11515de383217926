"""What inference needs of a prior, on NumPy's arrays.

Marginals and sites are ``[N, L]``; vectors that a covariance acts on are ``[L, N]``, one latent a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy.typing as npt

from ..linalg import Marginals
from ..sites import SiteValues

Array = npt.NDArray[Any]

Solver = Callable[[Array, bool], Array]
"""``M⁻¹x``, or ``M⁻ᵀx`` if the second argument is true."""


class Covariance(Protocol):
    """``Σ`` of q at some sites, as an operator, and the adjoint of everything that came from the prior."""

    @property
    def variance(self) -> Array:
        """``v = diag Σ``, ``[L, N]``."""

    def product(self, x: Array) -> Array:
        """``Σx``."""

    def squared_product(self, x: Array) -> Array:
        """``(Σ∘Σ)x``."""

    def reduced_solver(self, mv: Array, vm: Array, vv: Array, c: float) -> Solver | None:
        """Solves with ``M = c I − 2 E_vv (Σ∘Σ) − (2/c) E_vm Σ E_mv (Σ∘Σ)``; None where it is too large."""

    def between(self, data: Array, a: Array, b: Array) -> Array | None:
        """``Σ_l aᵢaⱼ Σ_ij + 2 bᵢbⱼ Σ_ij²`` for directions ``[L, R]`` that belong to these data, ``[R, R]``;
        None where that is too large."""

    def adjoint(
        self,
        beta: Array,
        mean_bar: Array,
        variance_bar: Array,
        prior_variance_bar: Array | None = None,
    ) -> tuple[Array, ...]:
        """Cotangents of the arrays that the prior was made of, in their order: of log Z, and of a function
        of the marginals with the given derivatives ``[L, N]``.

        :param beta: ``β = λ₁ − λ₂m``, ``[L, N]``.
        :param prior_variance_bar: derivatives in the prior's own variances.
        """


class Posterior(Protocol):
    """q at some sites."""

    @property
    def marginals(self) -> Marginals:
        """Means, variances and log Z; NaN where no valid q exists."""

    def covariance(self, *, for_adjoint: bool) -> Covariance:
        """Σ. One that is not for the adjoint may be had at half the price."""


class Prior(Protocol):
    """``N(μ₀, K)`` at the data, given sites."""

    @property
    def mean(self) -> Array:
        """``μ₀``, ``[N, L]``."""

    @property
    def variance(self) -> Array:
        """``diag K``, ``[N, L]``."""

    @property
    def largest_variance(self) -> float:
        """The largest element of K: what rounding errors are relative to."""

    @property
    def spares_memory(self) -> bool:
        """Whether a covariance should go before the next posterior comes."""

    def largest_correlation(self) -> float:
        """Between two data; where it is nothing, no datum tells of another."""

    def posterior(self, sites: SiteValues, keeping: tuple[Posterior, ...] = ()) -> Posterior:
        """q at these sites.

        :param keeping: earlier ones that are still needed; all others may lose their memory.
        """

    def close(self) -> None:
        """Nothing of this prior is needed any more."""
