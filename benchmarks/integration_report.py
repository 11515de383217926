"""Tables of integrated against optimised hyperparameters."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
from scipy.stats import t

Record = dict[str, Any]

TITLES = {"elbo": "ELBO", "ep_like": "EP-like", "ep": "EP"}

MANY = 3
"""Training sets from which a difference has an error."""

MOST_ROWS, ASKED_COST = 600, 15
"""Up to so many rows an integration is to cost no more than so many fits."""

INTRODUCTION = """# Hyperparameters: optimised, integrated

`python -m benchmarks.integration run` and `report`. Mean test log density, in nats per datum.

- *Optimised*: `gh.fit(model, start="data")`, no priors.
- *Mode*: the setting with the highest posterior density under the default priors.
- *Integrated*: `gh.integrate_hyperparameters(model)`.
- The *difference*, integrated less optimised, is paired over training sets, with its standard error over
  them; it *helps* or *hurts* where a paired t-test says so at 0.05. Training sets of one data set share
  rows, so that the errors are too small if anything.
- *Cost*: seconds of the processor for the whole integration, its own fit and tracing included, over those
  of one fit, and evaluations of the training loss likewise; medians, with the largest.
"""


def report(records: list[Record]) -> str:
    """All tables as Markdown."""
    parts = [INTRODUCTION]
    for size in sorted({r["size"] for r in records}, key=lambda s: s or np.inf):
        chosen = [r for r in records if r["size"] == size]
        title = f"Training sets of {size} rows" if size else "Five-fold cross-validation"
        parts.append(f"## {title}\n\n{_table(chosen)}\n")
    return "\n".join([*parts, _summary(records), _missing(records)])


def _table(records: list[Record]) -> str:
    lines = [
        "| data set | rows | objective | training sets | optimised | mode | integrated | difference | "
        "| cost: seconds | cost: evaluations |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[Record]] = collections.defaultdict(list)
    for record in records:
        groups[record["dataset"], record["method"]].append(record)
    for (dataset, method), group in sorted(groups.items()):
        means = [np.mean(_column(group, kind)) for kind in ("optimised", "mode", "integrated")]
        cells = [
            dataset,
            f"{np.mean([r['num_rows'] for r in group]):.0f}",
            TITLES[method],
            str(len(group)),
            *(f"{m:.4f}" for m in means),
            *difference(group),
            *(_ratio(group, key) for key in ("seconds", "evaluations")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def difference(group: list[Record]) -> tuple[str, str]:
    """Integrated less optimised, with its error, and the verdict."""
    found = _column(group, "integrated") - _column(group, "optimised")
    mean = float(np.mean(found))
    if len(found) < MANY:
        return f"{mean:+.4f}", "too few"
    error = float(np.std(found, ddof=1) / np.sqrt(len(found)))
    limit = float(t.ppf(0.975, len(found) - 1)) * error
    words = "within the noise" if abs(mean) < limit else "helps" if mean > 0.0 else "hurts"
    return f"{mean:+.4f} ± {error:.4f}", words


def _column(group: list[Record], kind: str) -> np.ndarray:
    return np.array([r[kind]["log_density"] for r in group])


def _ratio(group: list[Record], key: str) -> str:
    ratios = [r["integrated"][key] / r["optimised"][key] for r in group]
    return f"{np.median(ratios):.1f} ({np.max(ratios):.1f})"


def _summary(records: list[Record]) -> str:
    """How often it helps, over all data sets and sizes, and how often a lattice did not converge."""
    verdicts = collections.Counter()
    groups: dict[tuple[Any, ...], list[Record]] = collections.defaultdict(list)
    for r in records:
        groups[r["size"], r["dataset"], r["method"]].append(r)
    for group in groups.values():
        verdicts[difference(group)[1]] += 1
    failed = sum(not r["integrated"]["converged"] for r in records)
    found = [r["integrated"]["log_density"] - r["optimised"]["log_density"] for r in records]
    better = np.mean(np.array(found) > 0.0) if found else np.nan
    counts = ", ".join(f"{words} in {count}" for words, count in verdicts.most_common())
    return (
        f"## In all\n\nOf {len(groups)} rows integration {counts}. Of {len(records)} single training sets "
        f"and objectives it was better in {100.0 * better:.0f} %; mean difference {np.mean(found):+.4f}. "
        f"{failed} integrations did not converge within their evaluations. {_cost(records)}\n"
    )


def _cost(records: list[Record]) -> str:
    """Of small training sets, and how often it is above what was asked for."""
    small = [r for r in records if r["num_rows"] <= MOST_ROWS]
    if not small:
        return ""
    ratios = np.array([r["integrated"]["seconds"] / r["optimised"]["seconds"] for r in small])
    above = f"{np.sum(ratios > ASKED_COST)} of {len(ratios)}"
    return (
        f"Up to {MOST_ROWS} rows an integration cost {np.median(ratios):.1f} fits in the median, "
        f"{np.quantile(ratios, 0.9):.1f} at the 90 % quantile, and more than {ASKED_COST} in {above}."
    )


def _missing(records: list[Record]) -> str:
    from .integration import cases

    total = len(cases())
    if len(records) >= total:
        return ""
    return (
        f"{len(records)} of {total} training sets and objectives are done; the rest were not run.\n"
    )
