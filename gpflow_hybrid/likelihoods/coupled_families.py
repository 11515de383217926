"""The densities of GPflow's likelihoods of several latents, in closed form."""

from __future__ import annotations

import numpy as np

from ..namespaces import ARRAYS
from .density import Array, Density
from .node_rules import PointDerivatives


class HeteroskedasticDensity(Density):
    """``N(y; f₁, exp(f₂)²)``."""

    is_scalar = False

    def __init__(self, y: Array) -> None:
        self.y = y[:, 0]

    def at(self, f: Array, second: bool = True) -> PointDerivatives:
        r, precision = self.y - f[..., 0], np.exp(-2.0 * f[..., 1])
        a = r * precision
        b = r * a
        log_prob = -0.5 * (np.log(2.0 * np.pi) + b) - f[..., 1]
        first = ARRAYS.latents([a, b - 1.0])
        if not second:
            return PointDerivatives(log_prob, first, [])
        cross = -2.0 * a
        rows = [ARRAYS.latents([-precision, cross]), ARRAYS.latents([cross, -2.0 * b])]
        return PointDerivatives(log_prob, first, rows)


class SoftmaxDensity(Density):
    """``exp(f_y) / Σ exp(f)``."""

    is_scalar = False

    def __init__(self, y: Array, num_classes: int) -> None:
        self.chosen = np.asfortranarray(np.eye(num_classes)[y[:, 0].astype(int)])

    def at(self, f: Array, second: bool = True) -> PointDerivatives:
        log_p = f - np.max(f, axis=-1, keepdims=True)
        p = np.exp(log_p)
        total = np.sum(p, axis=-1, keepdims=True)
        log_p -= np.log(total)
        p /= total
        rows = []
        if second:
            for k in range(p.shape[-1]):
                row = p * p[..., k : k + 1]
                row[..., k] -= p[..., k]
                rows.append(row)
        return PointDerivatives(np.sum(self.chosen * log_p, -1), self.chosen - p, rows)
