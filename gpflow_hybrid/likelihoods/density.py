"""What can be asked of ``log p(y|f)`` on NumPy's arrays."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .node_rules import NodeRule, PointDerivatives, diagonal

Array = npt.NDArray[Any]


class InParameter(NamedTuple):
    """Derivatives of ``log p`` and of ``∂log p/∂f`` in one parameter, shaped as these are."""

    log_prob: Array
    first: Array


class Expected(NamedTuple):
    """``E(m, v) = E_N(f; m, v)[log p]`` and its derivatives in closed form, ``[N, L]`` each; where the
    latents are coupled, value ``[N, 1]`` and second derivatives ``[N, L, L]``."""

    value: Array
    m: Array
    v: Array
    mm: Array
    mv: Array
    vv: Array

    @property
    def curvature(self) -> tuple[Array, ...]:
        """``E_mm``, ``E_mv``, ``E_vm`` and ``E_vv``, ``[N, L, L]``."""
        mm, mv, vv = (x if x.ndim == 3 else diagonal(x) for x in self[3:])
        return mm, mv, np.swapaxes(mv, 1, 2), vv


class InExpectation(NamedTuple):
    """Derivatives of ``E``, ``∂E/∂m`` and ``∂E/∂v`` in one parameter, shaped as these are."""

    value: Array
    m: Array
    v: Array


class ExpectedPower(NamedTuple):
    """``(1/α) log E_N(f; m, v)[p^α]`` and its derivatives in m, v and every parameter, ``[N, L]`` each."""

    value: Array
    m: Array
    v: Array
    parameters: Sequence[Array]


class Density(abc.ABC):
    """``log p(yₙ|fₙ)`` of some data, at nodes ``f [Q, N, L]``."""

    is_scalar = True
    """Whether every latent of a datum has a factor of its own."""

    @abc.abstractmethod
    def at(self, f: Array, second: bool = True) -> PointDerivatives:
        """``log p`` and its derivatives in f."""

    def log_prob(self, f: Array) -> Array:
        """``log p`` alone; what rounds off 1 may be lost."""
        return self.at(f, False).log_prob

    def in_parameters(self, f: Array) -> list[InParameter]:
        """In every parameter of the likelihood, in the order of its values."""
        return []

    def expected(self, m: Array, v: Array) -> Expected | None:
        """Expectations in closed form, where GPflow has them."""
        return None

    def expected_in_parameters(self, rule: NodeRule, m: Array, v: Array) -> list[InExpectation]:
        """Derivatives of expectations in every parameter, by the nodes of N(0, 1)."""
        z, w, s = rule.z[:, None], rule.weights[:, None, None], np.sqrt(v)
        return [
            InExpectation(
                np.sum(w * d.log_prob, 0),
                np.sum(w * d.first, 0),
                np.sum(w * z * d.first, 0) / (2.0 * s),
            )
            for d in self.in_parameters(m + s * z)
        ]

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
