"""GPflow's ``MultiClass`` with its ``RobustMax`` link, on arrays.

``p(y|f)`` is ``1 − ε`` where y's latent is the largest and ``ε/(C − 1)`` elsewhere: all expectations are
functions of the probability that it is, by the likelihood's own nodes z and weights w of N(0, 1),

    P(m, v) = Σ w G,     G = Π_{j≠y} c(dⱼ),     dⱼ = (m_y + s_y z − mⱼ)/sⱼ,     s = √v

with ``c`` the normal distribution function, squeezed as GPflow does it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import special

from .density import Array, Density, Expected, ExpectedPower, InExpectation
from .node_rules import NodeRule, PointDerivatives

SMALLEST_VARIANCE = 1e-10
"""GPflow's floor under a variance, and under twice that of y's latent."""

SQUASH = 1e-6
"""How far GPflow keeps each latent's distribution function from 0 and 1."""


class RobustMaxDensity(Density):
    """``1 − ε`` where y's latent is the largest, ``ε/(C − 1)`` elsewhere.

    :param rule: the nodes for y's latent.
    """

    is_scalar = False

    def __init__(self, y: Array, epsilon: Any, num_classes: int, rule: NodeRule) -> None:
        label = y[:, :1].astype(int)
        self.label, self.epsilon, self.num_classes = label, float(epsilon), num_classes
        self.rule = rule
        # y's latent first, the others behind it, and the way back
        self.order = np.argsort(np.arange(num_classes) != label, axis=1, kind="stable")
        self.back = np.argsort(self.order, axis=1)

    @property
    def _logs(self) -> tuple[float, float]:
        """``log p`` where y's latent is the largest, and where not."""
        return np.log1p(-self.epsilon), np.log(self.epsilon / (self.num_classes - 1.0))

    def at(self, f: Array, second: bool = True) -> PointDerivatives:
        """A step function: its derivatives are zero wherever they exist."""
        hit, miss = self._logs
        log_prob = np.where(np.argmax(f, -1) == self.label[:, 0], hit, miss)
        zero = np.zeros_like(f)
        return PointDerivatives(log_prob, zero, [zero] * f.shape[-1] if second else [])

    def largest(self, m: Array, v: Array) -> Expected:
        """The probability that y's latent is the largest, and its derivatives."""
        z, w = self.rule.z[:, 0], self.rule.weights
        m, v = (np.take_along_axis(x, self.order, 1) for x in (m, v))
        floor = SMALLEST_VARIANCE * np.append(0.5, np.ones(m.shape[1] - 1))
        s = np.sqrt(np.maximum(v, floor))
        ds = np.where(v > floor, 0.5 / s, 0.0)  # ∂s/∂v
        others = s[:, 1:, None]
        d = ((m[:, :1] + s[:, :1] * z)[:, None] - m[:, 1:, None]) / others  # [N, L − 1, Q]
        scale = 1.0 - 2.0 * SQUASH
        c = scale * special.ndtr(d) + SQUASH
        wG = w * np.prod(c, axis=1)  # [N, Q]
        h = scale * np.exp(-0.5 * d * d) / (np.sqrt(2.0 * np.pi) * c)
        # ∂log G in all m and all s: ∂dⱼ is 1/sⱼ in m_y, z/sⱼ in s_y, −1/sⱼ in mⱼ and −dⱼ/sⱼ in sⱼ.
        u = h / others
        total = np.sum(u, axis=1, keepdims=True)
        slopes = np.concatenate([total, -u, total * z, -u * d], axis=1)  # [N, 2L, Q]
        in_m, in_s = np.split((slopes @ wG[..., None])[..., 0], 2, axis=1)
        first = [self._in_place(x) for x in (in_m, in_s * ds)]
        H = (slopes * wG[:, None]) @ np.swapaxes(slopes, 1, 2) + self._bends(wG, d, h, s)
        L = m.shape[1]
        vv = H[:, L:, L:] * ds[:, :, None] * ds[:, None]
        diagonal = np.arange(L)
        vv[:, diagonal, diagonal] -= in_s * ds / (2.0 * s * s)
        curved = (H[:, :L, :L], H[:, :L, L:] * ds[:, None], vv)
        value = np.sum(wG, axis=1, keepdims=True)
        return Expected(value, *first, *(self._in_place(x) for x in curved))

    def _bends(self, wG: Array, d: Array, h: Array, s: Array) -> Array:
        """``Σ wG ∂²log G``, ``[N, 2L, 2L]`` in all m and all s.

        Of ``log c(dⱼ)`` in ``(m_y, s_y, mⱼ, sⱼ)``: ``e ttᵀ − k (1ₛtᵀ + t1ₛᵀ)`` with
        ``t = (1, z, −1, −dⱼ)``, ``1ₛ`` the unit vector of sⱼ, ``e = (log c)''/sⱼ²``, ``k = (log c)'/sⱼ²``.
        """
        N, L = s.shape
        z = self.rule.z[:, 0]
        H = np.zeros((N, 2 * L, 2 * L), s.dtype)
        for j in range(1, L):
            dj, k = d[:, j - 1], wG * h[:, j - 1] / s[:, j, None] ** 2
            one = np.ones_like(dj)
            t = np.stack([one, one * z, -one, -dj], axis=1)  # [N, 4, Q]
            block = (t * (-(dj + h[:, j - 1]) * k)[:, None]) @ np.swapaxes(t, 1, 2)
            row = (t @ k[..., None])[..., 0]
            block[:, 3] -= row
            block[:, :, 3] -= row
            index = np.array([0, L, j, L + j])
            H[:, index[:, None], index] += block
        return H

    def _in_place(self, x: Array) -> Array:
        """With the latents in their own order again."""
        if x.ndim == 2:
            return np.take_along_axis(x, self.back, 1)
        rows = np.take_along_axis(x, self.back[:, :, None], 1)
        return np.take_along_axis(rows, self.back[:, None], 2)

    def expected(self, m: Array, v: Array) -> Expected:
        # E = P log(1 − ε) + (1 − P) log(ε/(C − 1))
        hit, miss = self._logs
        P = self.largest(m, v)
        return Expected(miss + (hit - miss) * P.value, *((hit - miss) * x for x in P[1:]))

    def expected_power(self, m: Array, v: Array, alpha: float) -> ExpectedPower:
        # (1/α) log(1 + P ((1 − ε)^α − 1) + (1 − P) ((ε/(C − 1))^α − 1))
        hit, miss = (np.expm1(alpha * x) for x in self._logs)
        P = self.largest(m, v)
        p = P.value
        total = p * hit + (1.0 - p) * miss
        by_total = 1.0 / (alpha * (1.0 + total))
        in_epsilon = (1.0 - p) * (1.0 + miss) / self.epsilon - p * (1.0 + hit) / (
            1.0 - self.epsilon
        )
        slope = (hit - miss) * by_total
        return ExpectedPower(
            np.log1p(total) / alpha, slope * P.m, slope * P.v, [alpha * by_total * in_epsilon]
        )

    def expected_in_parameters(self, rule: NodeRule, m: Array, v: Array) -> list[InExpectation]:
        # ∂log(1 − ε) = −1/(1 − ε), ∂log(ε/(C − 1)) = 1/ε
        P = self.largest(m, v)
        miss = 1.0 / self.epsilon
        slope = -1.0 / (1.0 - self.epsilon) - miss
        return [InExpectation(miss + slope * P.value, slope * P.m, slope * P.v)]
