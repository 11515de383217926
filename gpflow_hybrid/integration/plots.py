"""The posterior over hyperparameters as a figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..plotting import pyplot

if TYPE_CHECKING:
    from .results import HyperparameterPosterior

Array = npt.NDArray[np.float64]

MAX_PAIRS = 5
"""Scalars up to which every pair is drawn; of more, the marginals alone."""

NUM_BINS = 60
"""Of a marginal."""


def plot(result: HyperparameterPosterior) -> Any:
    """Marginals on the diagonal, joint densities below with the settings on them."""
    plt = pyplot()
    names = [m.name.lstrip(".") for m in result.marginals]
    draws = _scalars(result.mixture.values(result.draws.x))
    nodes = _scalars({path: np.stack([s[path] for s in result.settings]) for path in result.priors})
    is_log = [bool(np.all(column > 0.0)) for column in draws.T]
    d = len(names)
    if d > MAX_PAIRS:
        rows = -(-d // 4)
        figure, axes = plt.subplots(
            rows, 4, figsize=(12, 2.4 * rows), squeeze=False, constrained_layout=True
        )
        for i, axis in enumerate(axes.flat):
            if i < d:
                _marginal(axis, draws[:, i], result.draws.weights, is_log[i])
                axis.set_xlabel(names[i])
            else:
                axis.remove()
        return figure
    figure, axes = plt.subplots(
        d, d, figsize=(1 + 2.9 * d, 0.6 + 2.6 * d), squeeze=False, constrained_layout=True
    )
    for i in range(d):
        for j in range(d):
            axis = axes[i][j]
            if j > i:
                axis.remove()
                continue
            if i == j:
                _marginal(axis, draws[:, i], result.draws.weights, is_log[i])
            else:
                _joint(axis, draws[:, [j, i]], nodes[:, [j, i]], result, (is_log[j], is_log[i]))
                if j == 0:
                    axis.set_ylabel(names[i])
            if i == d - 1:
                axis.set_xlabel(names[j])
    return figure


def _scalars(values: dict[str, Array]) -> Array:
    return np.concatenate([v.reshape(len(v), -1) for v in values.values()], axis=1)


def _marginal(axis: Any, values: Array, weights: Array, is_log: bool) -> None:
    at = np.log(values) if is_log else values
    low, high = np.interp([0.002, 0.998], *_distribution(at, weights))
    heights, edges = np.histogram(at, NUM_BINS, (low, high), weights=weights, density=True)
    kernel = np.exp(-0.5 * (np.arange(-4, 5) / 1.5) ** 2)
    smooth = np.convolve(heights, kernel / kernel.sum(), mode="same")
    middle = 0.5 * (edges[1:] + edges[:-1])
    axis.fill_between(np.exp(middle) if is_log else middle, smooth, alpha=0.4)
    axis.plot(np.exp(middle) if is_log else middle, smooth)
    axis.set(xscale="log" if is_log else "linear", yticks=[], ylim=(0.0, None))
    if is_log:
        axis.xaxis.set_minor_formatter("")


def _distribution(values: Array, weights: Array) -> tuple[Array, Array]:
    order = np.argsort(values)
    return np.cumsum(weights[order]), values[order]


def _joint(
    axis: Any,
    draws: Array,
    nodes: Array,
    result: HyperparameterPosterior,
    is_log: tuple[bool, bool],
) -> None:
    at = [np.log(c) if log else c for c, log in zip(draws.T, is_log, strict=True)]
    limits = [np.interp([0.002, 0.998], *_distribution(c, result.draws.weights)) for c in at]
    bins: dict[str, Any] = {"bins": 40, "range": limits, "weights": result.draws.weights}
    heights, *edges = np.histogram2d(at[0], at[1], **bins)
    shown = [np.exp(e) if log else e for e, log in zip(edges, is_log, strict=True)]
    axis.pcolormesh(*shown, heights.T, cmap="Blues", rasterized=True)
    size = 60.0 * np.sqrt(result.weights / result.weights.max())
    axis.scatter(*nodes.T, s=size, facecolors="none", edgecolors="tab:red", linewidths=0.8)
    scales = ["log" if log else "linear" for log in is_log]
    axis.set(xscale=scales[0], yscale=scales[1])
    for log, side in zip(is_log, (axis.xaxis, axis.yaxis), strict=True):
        if log:
            side.set_minor_formatter("")
    middle = [(np.min(e), np.max(e)) for e in shown]
    axis.set(xlim=middle[0], ylim=middle[1])


__all__ = ["plot"]
