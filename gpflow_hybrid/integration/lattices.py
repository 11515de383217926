"""Integration over up to three hyperparameters: a lattice that grows until it has the mass."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import logsumexp

from .axes import Axes
from .movable import Node

Array = npt.NDArray[np.float64]
Key = tuple[int, ...]

FIRST_CUTOFF = 5.0
"""Nats below the maximum at which a lattice ends at first."""

LAST_CUTOFF = 20.0
"""At which nothing is left to be found."""

SHELL = 1.5
"""Nats of the outermost nodes: a lattice without them tells whether it has all that counts."""

SHELL_FACTOR = 0.33
"""Part of what the shell moves that the rest beyond it moves: a nat further out has a third of the mass."""

HALF_FACTOR = 0.2
"""Part of what half of the nodes miss that all of them miss; less, where the density is smooth."""

MAX_HALVINGS = 4
"""Of the step, which begins at one standard deviation."""


class Quadrature(NamedTuple):
    """Nodes and their share of the posterior."""

    nodes: list[Node]
    z: Array  # [K, d]
    log_weights: Array  # [K], normalised
    log_evidence: float
    change: float
    """The last change of a log predictive density."""
    has_converged: bool
    description: str
    log_evidence_error: float = 0.0
    step: float | None = None
    """Of a lattice, in standard deviations."""


def predictive(nodes: list[Node], log_weights: Array) -> Array:
    """Log predictive densities of the mixture."""
    kept = [i for i, w in enumerate(log_weights) if w > -np.inf]
    each = np.stack([nodes[i].log_predictive for i in kept])
    return logsumexp(each + log_weights[kept, None], axis=0)


def largest_change(one: Array, other: Array) -> float:
    """Of any log predictive density."""
    return float(np.max(np.abs(one - other)))


class Lattice:
    """``z = h k`` with integers k, grown from the mode as long as the density is worth it.

    The trapezoidal rule, which for smooth densities that vanish at both ends converges faster than any
    power of h.
    """

    def __init__(self, look: Callable[[Array], Node], axes: Axes, max_evaluations: int) -> None:
        self._look, self._axes, self._left = look, axes, max_evaluations
        self._nodes: dict[Key, Node] = {}
        self._step = 1.0
        self._cutoff = FIRST_CUTOFF
        self._halvings = 0

    def integrate(self, tolerance: float) -> Quadrature:
        """Refine until no log predictive density of the data moves by more than ``tolerance``."""
        self._grow()
        before: Array | None = None
        while True:
            keys, log_weights, _ = self._weights()
            now = self._predictive(keys, log_weights)
            outermost = log_weights.max() - log_weights > self._cutoff - SHELL
            shell = SHELL_FACTOR * self._change_without(outermost, keys, log_weights, now)
            # Half of the nodes are a lattice too, √2 coarser.
            step = HALF_FACTOR * self._change_without(_odd(keys), keys, log_weights, now)
            if before is not None:
                step = min(step, largest_change(before, now))
            change = max(shell, step)
            is_last = self._left <= 0 or (
                self._halvings == MAX_HALVINGS and self._cutoff >= LAST_CUTOFF
            )
            if change <= tolerance or is_last:
                return self._result(change, change <= tolerance)
            if shell >= step and self._cutoff < LAST_CUTOFF:
                self._cutoff += 2.0 * SHELL
                before = None if before is None else now
            else:
                before = now
                self._halve()
            self._grow()

    def _grow(self) -> None:
        d = len(self._axes.mode)
        front: list[Key] = [(0,) * d, *self._nodes]
        seen = set(front)
        while front:
            # Outwards: neighbours in turn, so that inference starts close by.
            for key in front:
                if key not in self._nodes and self._left > 0:
                    self._left -= 1
                    z = self._step * np.array(key, np.float64)
                    self._nodes[key] = self._look(self._axes.position(z))
            top = max(self._log_mass(key) for key in self._nodes)
            inside = [
                key
                for key in front
                if key in self._nodes and top - self._log_mass(key) < self._cutoff
            ]
            beyond = [
                _neighbour(key, axis, side)
                for key in inside
                for axis, side in itertools.product(range(d), (-1, 1))
            ]
            front = [key for key in dict.fromkeys(beyond) if key not in seen]
            seen.update(front)
            if self._left <= 0:
                break

    def _halve(self) -> None:
        self._nodes = {tuple(2 * i for i in key): node for key, node in self._nodes.items()}
        self._step *= 0.5
        self._halvings += 1

    def _log_mass(self, key: Key) -> float:
        """``log p(x) |dx/dz|``."""
        z = self._step * np.array(key, np.float64)
        return self._nodes[key].log_density + float(self._axes.log_volume(z))

    def _weights(self) -> tuple[list[Key], Array, float]:
        """Nodes with a density, their normalised log weights, and the log of the integral."""
        keys = [key for key, node in self._nodes.items() if node.log_density > -np.inf]
        masses = np.array([self._log_mass(key) for key in keys])
        total = float(logsumexp(masses))
        return keys, masses - total, total + len(keys[0]) * np.log(self._step)

    def _predictive(self, keys: list[Key], log_weights: Array) -> Array:
        return predictive([self._nodes[key] for key in keys], log_weights)

    def _change_without(
        self, left_out: npt.NDArray[np.bool_], keys: list[Key], log_weights: Array, now: Array
    ) -> float:
        rest = np.where(left_out, -np.inf, log_weights)
        if not np.any(rest > -np.inf):
            return np.inf
        return largest_change(self._predictive(keys, rest - logsumexp(rest)), now)

    def _result(self, change: float, has_converged: bool) -> Quadrature:
        keys, log_weights, log_evidence = self._weights()
        return Quadrature(
            [self._nodes[key] for key in keys],
            self._step * np.array(keys, np.float64),
            log_weights,
            log_evidence,
            change,
            has_converged,
            f"a lattice of {len(keys)} settings, {self._step:g} standard deviations apart",
            step=self._step,
        )


def _odd(keys: list[Key]) -> npt.NDArray[np.bool_]:
    return np.array([sum(key) % 2 == 1 for key in keys])


def _neighbour(key: Key, axis: int, side: int) -> Key:
    return (*key[:axis], key[axis] + side, *key[axis + 1 :])
