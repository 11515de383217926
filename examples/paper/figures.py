"""The paper's figures, and one it lacks: how far each estimate is from the truth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from .grids import METHODS, Surfaces
from .plans import title_of

SCALES = {"sonar": (-1.2, -0.2), "ionosphere": (-1.4, -0.1)}
"""The paper's colour scales, where it gives them."""

NUM_LEVELS = 21

STYLE: dict[str, Any] = {"font.size": 8, "axes.titlesize": 9, "pdf.fonttype": 42}

MARKERS = {"mcmc": "o", "ep": "o", "elbo": "o", "ep_like": "v"}


def colour_scale(surfaces: Surfaces) -> tuple[float, float]:
    """The same for all panels of a data set; values below it have the darkest colour."""
    if surfaces.plan.dataset in SCALES:
        return SCALES[surfaces.plan.dataset]
    every = [*surfaces.log_marginal.values(), *surfaces.log_density.values()]
    high = max(np.nanmax(x) for x in every)
    low = min(np.nanmedian(x) for x in every)
    low = min(low, np.log(0.5) - 0.1)  # a coin's toss shall be on the scale
    return float(np.floor(10 * low) / 10), float(np.ceil(10 * high) / 10)


def paper_figure(surfaces: Surfaces) -> Figure:
    """Log marginal likelihood by every method, and log predictive density below, as in Figures 1 to 4."""
    with plt.rc_context(STYLE):
        estimates = surfaces.estimates
        figure, axes = plt.subplots(
            2,
            len(estimates),
            figsize=(2.1 * len(estimates) + 0.8, 4.6),
            layout="constrained",
            squeeze=False,
            sharex=True,
            sharey=True,
        )
        scale = colour_scale(surfaces)
        for column, name in zip(axes.T, estimates, strict=True):
            top, bottom = column
            image = _panel(top, surfaces, surfaces.log_marginal[name], scale)
            if name == "mcmc":
                _cross_out(top, surfaces)
            top.set_title(METHODS[name])
            _mark(top, surfaces, [name])
            if name == "ep_like" and "elbo" in estimates:
                bottom.axis("off")
                bottom.text(
                    0.5,
                    0.5,
                    "VI and Ours have the same\npredictive density surface:\n"
                    "they share the posterior.\n\n● optimum of VI\n▼ optimum of Ours",
                    transform=bottom.transAxes,
                    ha="center",
                    va="center",
                    fontsize=7,
                )
                continue
            method = {"mcmc": "mcmc", "ep": "ep"}.get(name, "vi")
            _panel(bottom, surfaces, surfaces.log_density[method], scale)
            shared = (
                [n for n in ("elbo", "ep_like") if n in estimates] if method == "vi" else [name]
            )
            _mark(bottom, surfaces, shared)
            bottom.set_xlabel("log ℓ")
        axes[0, 0].set_ylabel("Marginal likelihood\nlog σ")
        axes[1, 0].set_ylabel("Predictive density\nlog σ")
        ticks = matplotlib.ticker.MaxNLocator(6).tick_values(*scale)
        ticks = [t for t in ticks if scale[0] <= t <= scale[1]]
        figure.colorbar(image, ax=axes, shrink=0.6, label="nats per datum", ticks=ticks)
        figure.suptitle(
            f"{title_of(surfaces.plan.dataset)}, fold {surfaces.plan.fold}, n = {surfaces.num_data}"
        )
    return figure


def error_figure(surfaces: Surfaces) -> Figure | None:
    """EP, ELBO and EP-like less the annealed estimate, per datum; None without MCMC."""
    names = [n for n in ("elbo", "ep_like", "ep") if n in surfaces.log_marginal]
    if "mcmc" not in surfaces.log_marginal or not names:
        return None
    errors = {n: surfaces.error(n) for n in names}
    largest = max(float(np.nanmax(np.abs(e))) for e in errors.values())
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1,
            len(names),
            figsize=(2.5 * len(names) + 1.0, 3.3),
            layout="constrained",
            squeeze=False,
            sharey=True,
        )
        norm = matplotlib.colors.SymLogNorm(1e-3, vmin=-largest, vmax=largest)
        for axis, name in zip(axes[0], names, strict=True):
            image = axis.pcolormesh(
                *_mesh(surfaces),
                errors[name].T,
                norm=norm,
                cmap="RdBu",
                shading="nearest",
                rasterized=True,
            )
            _decorate(axis)
            _cross_out(axis, surfaces)
            axis.set_title(f"{METHODS[name]}: mean |error| {surfaces.mean_error(name):.4f}")
            axis.set_xlabel("log ℓ")
        axes[0, 0].set_ylabel("log σ")
        figure.colorbar(image, ax=axes, label="estimate − AIS, nats per datum")
        found = surfaces.standard_error[surfaces.trusted]
        figure.suptitle(
            f"{title_of(surfaces.plan.dataset)}: error against annealed importance sampling, whose\n"
            f"standard error is {np.nanmean(found):.4f} on average and {np.nanmax(found):.4f} at most; "
            "× where its chains disagree: not in the means",
            fontsize=8,
        )
    return figure


def _panel(axis: Any, surfaces: Surfaces, values: np.ndarray, scale: tuple[float, float]) -> Any:
    levels = np.linspace(*scale, NUM_LEVELS)
    x, y = _mesh(surfaces)
    clipped = np.ma.masked_invalid(np.clip(values, None, scale[1]).T)  # what is missing stays blank
    image = axis.contourf(x, y, clipped, levels, cmap="gray", extend="min")
    axis.contour(x, y, clipped, levels[::2], colors="black", linewidths=0.3, linestyles="solid")
    _decorate(axis)
    return image


def _cross_out(axis: Any, surfaces: Surfaces) -> None:
    """A small × where MCMC is not trusted."""
    x, y = np.meshgrid(*_mesh(surfaces), indexing="ij")
    doubtful = ~surfaces.trusted
    axis.scatter(x[doubtful], y[doubtful], 6, "black", marker="x", linewidths=0.5, zorder=4)


def _decorate(axis: Any) -> None:
    axis.set_xticks([-1, 1, 3, 5])
    axis.set_yticks([-1, 1, 3, 5])
    axis.set_xticks([0, 2, 4], minor=True)
    axis.set_yticks([0, 2, 4], minor=True)
    axis.grid(which="both", linestyle="--", linewidth=0.4, color="darkgray")
    axis.set_xlim(-1, 5)
    axis.set_ylim(-1, 5)
    axis.set_aspect("equal")


def _mark(axis: Any, surfaces: Surfaces, estimates: Sequence[str]) -> None:
    """A black marker at the optimum and its log predictive density beside it."""
    for i, name in enumerate(estimates):
        best = surfaces.optimum(name)
        x, y = best.log_lengthscale, best.log_sigma
        axis.plot(
            x,
            y,
            MARKERS[name],
            color="black",
            markeredgecolor="white",
            markersize=5.5,
            zorder=5,
            clip_on=False,
        )
        to_left = x > 3.2
        above = -0.15 if i == 0 else 0.3
        axis.text(
            x - 0.25 if to_left else x + 0.25,
            y + above,
            f"${best.log_density:.3f}$",
            fontsize=6.5,
            ha="right" if to_left else "left",
            va="center",
            zorder=6,
            bbox={"facecolor": "white", "alpha": 0.6, "edgecolor": "none", "pad": 0.6},
        )


def _mesh(surfaces: Surfaces) -> tuple[list[float], list[float]]:
    axis = surfaces.plan.log_values
    return axis, axis
