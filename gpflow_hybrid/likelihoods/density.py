"""What can be asked of ``log p(y|f)`` on NumPy's arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy.typing as npt

from .node_rules import PointDerivatives

Array = npt.NDArray[Any]


class InParameter(NamedTuple):
    """Derivatives of ``log p`` and of ``∂log p/∂f`` in one parameter, shaped as these are."""

    log_prob: Array
    first: Array


class Expected(NamedTuple):
    """``E(m, v) = E_N(f; m, v)[log p]`` and its derivatives in closed form, ``[N, L]`` each."""

    value: Array
    m: Array
    v: Array
    mm: Array
    mv: Array
    vv: Array


class ExpectedPower(NamedTuple):
    """``(1/α) log E_N(f; m, v)[p^α]`` and its derivatives in m, v and every parameter, ``[N, L]`` each."""

    value: Array
    m: Array
    v: Array
    parameters: Sequence[Array]


class Density:
    """``log p(yₙ|fₙ)`` of some data, at nodes ``f [Q, N, L]``."""

    is_scalar = True
    """Whether every latent of a datum has a factor of its own."""

    def at(self, f: Array, second: bool = True) -> PointDerivatives:
        """``log p`` and its derivatives in f."""
        raise NotImplementedError

    def in_parameters(self, f: Array) -> list[InParameter]:
        """In every parameter of the likelihood, in the order of its values."""
        return []

    def expected(self, m: Array, v: Array) -> Expected | None:
        """Expectations in closed form, where GPflow has them."""
        return None

    def with_noise(self, variance: Array) -> tuple[Density, Callable[[Any], Any]] | None:
        """``∫ N(f; a, k̃) p(y|f) df`` as a density of a, where it is one of the same kind.

        Its derivatives in its own parameters are those in what the function that is returned with it takes
        them to: ``(∂/∂k̃, ∂/∂ψ₁, …)`` from those of :meth:`in_parameters`. None where there is none.
        """
        return None

    def expected_power(self, m: Array, v: Array, alpha: float) -> ExpectedPower | None:
        """Expected powers in closed form, where there is one; for α = 1 by :meth:`with_noise`."""
        noisy = self.with_noise(v) if alpha == 1.0 else None
        if noisy is None:
            return None
        density, chain = noisy
        at = density.at(m[None], False)
        d_v, *parameters = chain([d.log_prob[0] for d in density.in_parameters(m[None])])
        return ExpectedPower(at.log_prob[0], at.first[0], d_v, parameters)
