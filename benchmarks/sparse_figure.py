"""Test log density against M and against time, from the records of the two sparse comparisons.

    python -m benchmarks.sparse_figure magic

Left what ``benchmarks.sparse_folds`` found: mean and standard error over five folds for both objectives.
Right what ``benchmarks.sparse`` did on the first fold: final densities of all and the seconds to them,
a point for every M; without such records there is no right side. Writes ``density-DATASET.png``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter

from . import sparse, sparse_folds
from .peers.sparse_contenders import SPARSE, WITHOUT_INDUCING
from .records import Record
from .sparse_tables import arrival

LABELS = {"elbo": "ELBO", "ep_like": "EP-like"}
STYLES = {
    "sparse_cvi_ep_like": ("C1", "o-"),
    "sparse_cvi_elbo": ("C0", "o-"),
    "sparse_svgp_lbfgs": ("C2", "s--"),
    "sparse_svgp_natgrad": ("C3", "s--"),
    "sparse_gpytorch_natgrad": ("C4", "^:"),
    "sparse_gpytorch_adam": ("C5", "^:"),
}


def against_size(axis: Any, pairs: Iterable[sparse_folds.Pair]) -> None:
    """Densities over folds, with their standard errors."""
    pairs = list(pairs)
    sizes = [pair.num_inducing for pair in pairs]
    for colour, objective in enumerate(sparse_folds.OBJECTIVES):
        folds = np.array([[r["test_log_density"] for r in getattr(p, objective)] for p in pairs])
        errors = folds.std(axis=1, ddof=1) / np.sqrt(folds.shape[1])
        axis.errorbar(
            sizes,
            folds.mean(axis=1),
            errors,
            fmt="o-",
            color=f"C{colour}",
            capsize=3,
            label=f"SparseCVIModel, {LABELS[objective]}",
        )
    axis.set(xscale="log", xticks=sizes, xticklabels=sizes, xlabel="inducing points M")
    axis.minorticks_off()
    axis.set(ylabel="test log density", title="Five folds, mean ± standard error")
    axis.legend()


def against_time(axis: Any, found: Sequence[Record]) -> None:
    """The end of every fit; those without inducing inputs as lines."""
    for contender, (colour, style) in STYLES.items():
        fits = sorted(
            (r for r in found if r["contender"] == contender and "failure" not in r),
            key=lambda r: r["num_inducing"],
        )
        points = [(arrival(r), r["log_density"]) for r in fits]
        if points:
            axis.plot(
                *zip(*points, strict=True), style, color=colour, label=SPARSE[contender].label
            )
        for record, point in zip(fits, points, strict=True):
            axis.annotate(
                str(record["num_inducing"]),
                point,
                textcoords="offset points",
                xytext=(4, 4),
                fontsize="x-small",
            )
    for contender, style in zip(WITHOUT_INDUCING, (":", "-."), strict=True):
        for record in found:
            if record["contender"] == contender and "failure" not in record:
                axis.axhline(
                    record["log_density"],
                    color="0.6",
                    linestyle=style,
                    label=SPARSE[contender].label,
                )
    axis.set(xscale="log", xlabel="seconds to its density", title="Whole fits by M, one fold")
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5))


def draw(dataset: str, output: Path) -> Path:
    """The figure of what is there."""
    folds = sparse_folds.load(output / "folds.jsonl").values()
    pairs = [p for p in sparse_folds.complete(folds) if p.dataset == dataset and p.rows is None]
    fits = [
        r
        for r in sparse.load(output / "fits.jsonl").values()
        if r["dataset"] == dataset and r["rows"] is None and not r["train_z"]
    ]
    columns = 2 if fits else 1
    figure, axes = plt.subplots(
        1, columns, figsize=(12 if fits else 5, 4), squeeze=False, layout="constrained"
    )
    figure.suptitle(dataset)
    against_size(axes[0, 0], pairs)
    if fits:
        against_time(axes[0, 1], fits)
    path = output / f"density-{dataset}.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def main() -> None:
    """Parse the command line and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("datasets", nargs="*", default=["magic"])
    parser.add_argument("--output", type=Path, default=sparse.RESULTS, help="where the records are")
    arguments = parser.parse_args()
    for dataset in arguments.datasets:
        print(draw(dataset, arguments.output))


if __name__ == "__main__":
    main()
