"""GPflow's ``Softmax`` on NumPy's arrays, with the fixed nodes that replace Monte Carlo.

``log p(y|f) = f_y − log Σ exp f``, ``g = e_y − p`` and ``H = ppᵀ − diag p`` with ``p = softmax f``: all are
sums over nodes of p and of products of p. Arrays have the latent as their first axis; data are worked on
a few at a time, so that their nodes stay in a core's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import tuning
from .nodes import standard_normal_points

Array = npt.NDArray[Any]


class _Chunk(NamedTuple):
    """Some data: rows, ``s = √v`` ``[L, n]``, the nodes, ``log p(·|f)`` and p there, ``[L, Q, n]``."""

    rows: slice
    s: Array
    nodes: Array
    log_p: Array
    p: Array


class SoftmaxOnArrays:
    """Expectations under q and their derivatives."""

    def __init__(self, num_classes: int) -> None:
        z, log_weights = standard_normal_points(num_classes)
        self.z = np.ascontiguousarray(z.T)  # [L, Q]
        self.log_weights = log_weights
        self.weights = np.exp(log_weights)

    def _chunks(self, m: Array, v: Array) -> Iterator[_Chunk]:
        size = max(1, tuning.QUADRATURE_ELEMENTS // self.z.size)
        for start in range(0, len(m), size):
            rows = slice(start, start + size)
            s = np.sqrt(v[rows].T)
            nodes = m[rows].T[:, None] + s[:, None] * self.z[..., None]
            log_p = nodes - np.max(nodes, axis=0)
            p = np.exp(log_p)
            total = np.sum(p, axis=0)
            log_p -= np.log(total)
            p /= total
            yield _Chunk(rows, s, nodes, log_p, p)

    def expectations(self, X: Any, Y: Array, m: Array, v: Array) -> tuple[Array, Array, Array]:
        """``E [N]``, ``E_m`` and ``E_v`` ``[N, L]``."""
        chosen = _one_hot(Y, m)
        value, mean, variance = np.empty(len(m), m.dtype), np.empty_like(m), np.empty_like(m)
        for c in self._chunks(m, v):
            value[c.rows] = np.sum(chosen[c.rows] * (self.weights @ c.log_p).T, axis=1)
            mean[c.rows] = chosen[c.rows] - (self.weights @ c.p).T
            # The label's part is Σ w z = 0.
            variance[c.rows] = -(self._weighted_by_z(c.p) / (2.0 * c.s)).T
        return value, mean, variance

    def _weighted_by_z(self, x: Array) -> Array:
        """``Σ w z_l x_l``, ``[L, n]``."""
        return np.stack([(self.weights * z) @ y for z, y in zip(self.z, x, strict=True)])

    def curvature(
        self, X: Any, Y: Array, m: Array, v: Array, g2: Array, rough: bool = False
    ) -> tuple[Array, Array, Array, Array]:
        """``E_mm``, ``E_mv``, ``E_vm`` and ``E_vv``, ``[N, L, L]``."""
        N, L = m.shape
        mm, mv, vv = (np.empty((N, L, L), m.dtype) for _ in range(3))
        w, z = self.weights, self.z
        for c in self._chunks(m, v):
            r, s = c.rows, c.s
            for k in range(L):
                for j in range(k + 1):
                    # Weights of Σ w H, Σ w z H for either latent, Σ w zz H
                    rules = np.stack([w, w * z[j], w * z[k], w * z[j] * z[k]])
                    H = rules @ (c.p[k] * c.p[j])  # [4, n]
                    if j == k:
                        of_p = rules @ c.p[k]
                        H -= of_p
                        vv[r, k, k] = (H[3] / s[k] + of_p[1] / s[k] ** 2) / (4.0 * s[k])
                    else:
                        vv[r, k, j] = vv[r, j, k] = H[3] / (4.0 * s[k] * s[j])
                    mm[r, k, j] = mm[r, j, k] = H[0]
                    mv[r, k, j], mv[r, j, k] = H[1] / (2.0 * s[j]), H[2] / (2.0 * s[k])
        return mm, mv, np.swapaxes(mv, 1, 2), vv

    def ratio_gradients(
        self, alpha: float, X: Any, Y: Array, m: Array, v: Array, lambda_1: Array, lambda_2: Array
    ) -> tuple[Any, ...]:
        """``Σ (1/α) log E_q[(p/t)^α]`` and its derivatives in m, v, λ₁ and λ₂."""
        chosen = _one_hot(Y, m)
        total = 0.0
        found = [np.empty_like(m) for _ in range(4)]
        for c in self._chunks(m, v):
            r, f = c.rows, c.nodes
            l1, l2, of_y = (x[r].T[:, None] for x in (lambda_1, lambda_2, chosen))  # [L, 1, n]
            h = np.sum(of_y * c.log_p - (l1 - 0.5 * l2 * f) * f, axis=0)  # [Q, n]
            tilted = self.log_weights[:, None] + alpha * h
            largest = np.max(tilted, axis=0)
            weights = np.exp(tilted - largest)
            norm = np.sum(weights, axis=0)
            total += np.sum(np.log(norm) + largest) / alpha
            weights /= norm
            weighted = weights * (of_y - c.p - (l1 - l2 * f))
            found[0][r] = np.sum(weighted, axis=1).T
            found[1][r] = (np.einsum("lqn,lq->ln", weighted, self.z) / (2.0 * c.s)).T
            weighted = weights * f
            found[2][r] = -np.sum(weighted, axis=1).T
            found[3][r] = 0.5 * np.einsum("lqn,lqn->ln", weighted, f).T
        return total, *found


def _one_hot(Y: Array, like: Array) -> Array:
    """``e_y``, ``[N, L]``."""
    return np.eye(like.shape[1], dtype=like.dtype)[Y[:, 0].astype(int)]
