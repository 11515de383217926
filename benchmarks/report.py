"""The Markdown tables and the plot of ``python -m benchmarks.compare``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from .peers.contenders import CONTENDERS
from .records import Record

OURS = "cvi_ep_like"
COLLAPSED = (OURS, "cvi_elbo")
SAME_DENSITY = 0.001
"""Nats per test datum; a peer that is no worse than this below ours counts as equal."""
VANISHED = -4.0
"""log σ below which a fit has explained nothing."""
COIN = -0.69
"""Test log density below which a fit predicts no better than a coin."""
STARVED = 0.7
"""Processor time by wall time below which a fit has waited for others; one thread alone gives 1."""

HEADER = (
    "| contender | version | seconds | again | × floor | × ours | test log density | accuracy "
    "| log ℓ | log σ | evaluations | remarks |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def of(records: Iterable[Record], dataset: str, contender: str) -> list[Record]:
    """The records of one contender on one data set, by fold."""
    found = [r for r in records if r["dataset"] == dataset and r["contender"] == contender]
    return sorted(found, key=lambda r: int(r["fold"]))


def mean(records: Sequence[Record], field: str) -> float | None:
    """The mean of a field over the folds, if all of them have it."""
    values = [r.get(field) for r in records]
    return float(np.mean(values)) if values and None not in values else None


def limit(records: Sequence[Record]) -> float | None:
    """The seconds after which a fold was stopped, if one was."""
    return max((r["at_least"] for r in records if "at_least" in r), default=None)


def datasets(records: Iterable[Record]) -> list[str]:
    """The data sets by their number of training data."""
    sizes = {r["dataset"]: r["num_data"] for r in records}
    return sorted(sizes, key=lambda name: (sizes[name], name))


def on_shared_folds(records: Sequence[Record]) -> list[Record]:
    """Of each data set the folds that every contender has: means over others could not be compared."""
    kept: list[Record] = []
    for dataset in datasets(records):
        rows = [r for r in records if r["dataset"] == dataset]
        folds = {
            r["contender"]: {s["fold"] for s in of(rows, dataset, r["contender"])} for r in rows
        }
        shared = set.intersection(*folds.values())
        kept += [r for r in rows if r["fold"] in shared]
    return kept


def on_all_folds(records: Sequence[Record]) -> list[Record]:
    """Of one data set the contenders that have all of its folds."""
    folds = {r["fold"] for r in records}
    have: dict[str, set[int]] = {}
    for r in records:
        have.setdefault(r["contender"], set()).add(r["fold"])
    return [r for r in records if have[r["contender"]] == folds]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _ratio(value: float | None, reference: float | None) -> str:
    if value is None or reference is None:
        return ""
    ratio = value / reference
    return f"{ratio:.3g}" if ratio < 100 else f"{ratio:,.0f}"


def row(name: str, fits: Sequence[Record], floor: float | None, ours: float | None) -> str:
    """One contender's line of a table, the mean over its folds."""
    contender = CONTENDERS[name]
    versions: dict[str, str] = next((r["versions"] for r in fits if "versions" in r), {})
    seconds = mean(fits, "seconds")
    remarks = [contender.remark] if contender.remark else []
    for record in fits:
        found = [record.get("failure"), record.get("note")]
        if record.get("log_sigma", 0.0) < VANISHED:
            found.append("no fit: the kernel variance went to zero")
        elif record.get("log_density", 0.0) < COIN:
            found.append("no fit: predicts no better than a coin")
        if record.get("processor_seconds", np.inf) < STARVED * record.get("seconds", 0.0):
            found.append("the machine was busy with other work: run again")
        remarks += [remark for remark in found if remark and remark not in remarks]
    cells = [
        contender.label,
        versions.get(contender.packages[0], ""),
        _seconds(seconds),
        _seconds(mean(fits, "seconds_again")),
        _ratio(seconds, floor),
        _ratio(seconds, ours),
        _number(mean(fits, "log_density"), ".4f"),
        _number(mean(fits, "accuracy"), ".3f"),
        _number(mean(fits, "log_lengthscale"), ".2f"),
        _number(mean(fits, "log_sigma"), ".2f"),
        _number(mean(fits, "evaluations"), ".0f"),
        "; ".join(remarks).replace("|", "/"),
    ]
    return f"| {' | '.join(cells)} |"


def table(records: Sequence[Record], dataset: str) -> str:
    """The table of one data set, the fastest first, those without a result last."""
    floor = mean(of(records, dataset, "floor"), "seconds")
    ours = mean(of(records, dataset, OURS), "seconds")
    rows = {name: of(records, dataset, name) for name in CONTENDERS}
    present = [name for name in rows if rows[name]]
    present.sort(key=lambda name: mean(rows[name], "seconds") or np.inf)
    lines = [HEADER, *(row(name, rows[name], floor, ours) for name in present)]
    return "\n".join(lines)


def verdict(records: Sequence[Record], dataset: str, ours: str) -> str:
    """In words: the fastest peer whose predictive density is equal to that of ``ours`` or better."""
    label, fits = CONTENDERS[ours].label, of(records, dataset, ours)
    seconds, density = mean(fits, "seconds"), mean(fits, "log_density")
    if seconds is None or density is None:
        return f"{label}: no result."
    equal: dict[str, float] = {}
    unknown: list[str] = []
    for name, contender in CONTENDERS.items():
        if contender.module == "ours":
            continue
        fits = of(records, dataset, name)
        time, reached = mean(fits, "seconds"), mean(fits, "log_density")
        if time is not None and reached is not None:
            if reached >= density - SAME_DENSITY:
                equal[name] = time
        elif (stopped_at := limit(fits)) is not None:
            ratio = stopped_at / seconds
            unknown.append(f"{contender.label} (more than {ratio:.3g} times as long)")
    nearest = min(equal, key=lambda name: equal[name], default=None)
    said = (
        "no peer that finished has an equal or better predictive density."
        if nearest is None
        else f"of the peers with an equal or better predictive density the fastest is "
        f"{CONTENDERS[nearest].label}, which takes {equal[nearest] / seconds:.3g} times as long."
    )
    stopped = f" Stopped by the limit, density unknown: {', '.join(unknown)}." if unknown else ""
    return f"{label}: {said}{stopped}"


def verdicts(records: Sequence[Record], dataset: str) -> str:
    """The verdicts on our two collapsed fits."""
    return "\n".join(f"- {verdict(records, dataset, name)}" for name in COLLAPSED)


def _machine(records: Sequence[Record]) -> str:
    processors = sorted({r["processor"] for r in records})
    threads = sorted({r["threads"] for r in records})
    pythons = sorted({r["python"] for r in records})
    return (
        f"Processor: {'; '.join(processors)}. Threads: {', '.join(map(str, threads))}. "
        f"Python {', '.join(pythons)}."
    )


def _versions(records: Sequence[Record]) -> str:
    lines = []
    for name, contender in CONTENDERS.items():
        found = {
            ", ".join(f"{package} {r['versions'][package]}" for package in contender.packages)
            for r in records
            if r["contender"] == name and "versions" in r
        }
        lines += [f"- {contender.label}: {text}" for text in sorted(found)]
    return "\n".join(lines)


def markdown(records: Sequence[Record]) -> str:
    """The whole report."""
    parts = [
        "# Whole fits, side by side",
        "Written by `python -m benchmarks.compare`. Matérn-5/2 with one lengthscale and one variance "
        "from ℓ = σ = 1, a probit likelihood where the library has one, zero mean, standardised "
        "inputs. *Seconds* are those of the first fit in a fresh process, from building the model "
        "until it is trained, tracing and compilation included and imports excluded; *again* is a "
        "second fit in the same process. L-BFGS stops by SciPy's default tolerance; loops of Adam "
        "or natural gradients stop when 20 iterations gain less than 1e-5 nats per datum, and "
        "VEMTrainer when one iteration does. *× floor* is a multiple of one LAPACK dpotrf and one "
        f"dtrtri of size n, *× ours* of {CONTENDERS[OURS].label}. *Test log density* is the mean over "
        "the test part, from each library's own predicted probabilities.",
        _machine(records),
        "![Seconds of the whole fit against n](fits.png)\n\nHollow: predicts no better than a coin; "
        "triangles: stopped by the limit, which counts the start of Python and imports as well.",
    ]
    for dataset in datasets(records):
        rows = [r for r in records if r["dataset"] == dataset]
        parts += [f"## {dataset.capitalize()}, n = {rows[0]['num_data']}"]
        shared, complete = on_shared_folds(rows), on_all_folds(rows)
        parts += _section(shared, dataset)
        if complete != shared and {r["contender"] for r in complete} != {"floor"}:
            parts += ["Those that ran more folds:", *_section(complete, dataset)]
    parts += ["## Versions", _versions(records)]
    return "\n\n".join(parts) + "\n"


def _section(rows: Sequence[Record], dataset: str) -> list[str]:
    """Table and verdicts on the same folds for all."""
    folds = sorted({r["fold"] for r in rows})
    floor = mean(of(rows, dataset, "floor"), "seconds")
    return [
        f"{'Fold' if len(folds) == 1 else 'Folds'} {', '.join(map(str, folds))}."
        + ("" if floor is None else f" The floor is {1e3 * floor:.3g} ms."),
        table(rows, dataset),
        verdicts(rows, dataset),
    ]


def plot(records: Sequence[Record], path: Path) -> None:
    """Seconds of the whole fit against n on logarithmic axes, one line each, and the floor.

    A hollow triangle is a fit that the limit stopped, another hollow marker one no better than a coin.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = on_shared_folds(records)

    figure, axes = plt.subplots(figsize=(10, 6), layout="constrained")
    colours = plt.get_cmap("tab20")
    for i, (name, contender) in enumerate(CONTENDERS.items()):
        ours = contender.module == "ours"
        style = {"marker": "o" if ours else "s", "linewidth": 2.5 if ours else 1.2}
        if points := _points(records, name, "seconds"):
            axes.plot(*zip(*points, strict=True), color=colours(i), label=contender.label, **style)
        density = dict(_points(records, name, "log_density"))
        if bad := [(n, t) for n, t in points if density.get(n, 0.0) < COIN]:
            axes.plot(*zip(*bad, strict=True), style["marker"], color=colours(i), mfc="white")
        if stopped := _points(records, name, "at_least"):
            label = None if points else f"{contender.label} (stopped)"
            axes.plot(*zip(*stopped, strict=True), "^", mfc="none", color=colours(i), label=label)
    if floor := _points(records, "floor", "seconds"):
        axes.plot(
            *zip(*floor, strict=True), "k:o", markersize=3, label="the floor: dpotrf + dtrtri"
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="training data n",
        ylabel="seconds of the whole fit",
    )
    sizes = sorted({r["num_data"] for r in records})
    axes.set_xticks(sizes, [str(n) for n in sizes])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small", frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _points(records: Sequence[Record], name: str, field: str) -> list[tuple[int, float]]:
    """``(n, value)`` for each data set on which the contender has this field."""
    points = []
    for dataset in datasets(records):
        found = of(records, dataset, name)
        value = mean(found, field)
        if value is not None:
            points.append((found[0]["num_data"], value))
    return points
