"""One self-contained page and a Markdown summary of everything that is in an output directory."""

from __future__ import annotations

import base64
import csv
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import tables
from .figures import error_figure, paper_figure
from .grids import METHODS, Surfaces, load_surfaces
from .plans import AXIS, Plan, SurfacePlan, TablePlan, load_plans, title_of
from .store import ResultStore, write_atomically

DEVIATIONS = """\
What differs from the paper, and is not tuned away:

- The paper does not say when its alternation stops. "Its training details" (20 natural-gradient steps at
  0.1, then 20 gradient steps at 0.001 in GPflow's unconstrained parameters, from ℓ = σ = 1) stops at the
  first decrease of the objective and keeps what was before it, or at a limit of iterations, whichever comes
  first; the column "training ended" tells which, and the limit. "VEM to convergence"
  alternates an exact E-step with L-BFGS; with the EP-like objective the alternation has no fixed point on
  some data sets, which it detects ("drift"), keeping the best state. L-BFGS is begun again, up to five
  times, where its line search gave up on a slope.
- MCMC is annealed importance sampling from a moment-matched Gaussian with hundreds of temperatures and the
  mean of the weights, not from the prior with 8000 temperatures and the geometric mean of three. All points
  of a grid share their random numbers, so that neighbours have similar errors. Its standard error is
  stated; points whose chains disagree (an effective number below 30 % of them) are marked, are in no mean,
  and are not taken for the optimum. A short lengthscale with a large σ is where it is hardest.
- Folds are those of scikit-learn's `KFold(5, shuffle=True, random_state=42)`; the paper does not give its
  own. Inputs are standardised with the training rows' statistics. USPS is digits 3 and 5 of the resampled
  set, all 1540 images.
- Standard deviations are over folds, with their number as the divisor, not one less."""

STYLE = """\
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }
img { max-width: 100%; height: auto } figure { margin: 1.5rem 0 } figcaption { color: #555 }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: 14px }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #ddd; text-align: left; white-space: nowrap }
th { border-bottom: 2px solid #888 }"""

COIN = -0.69
"""Log density below which a method has not learnt anything about two classes."""

Tab = tuple[Sequence[str], list[tuple[str, ...]]]


def write_report(output: Path) -> list[Path]:
    """Figures (PNG and PDF), ``table.csv``, ``summary.md`` and ``report.html``; what was written."""
    store = ResultStore(output / "jobs")
    surface_plans = load_plans(output, SurfacePlan)
    loaded = (load_surfaces(plan, store) for plan, _ in surface_plans)
    surfaces = [found for found in loaded if found is not None]
    table_plans = load_plans(output, TablePlan)
    lines = [line for plan, _ in table_plans for line in tables.lines(plan, store)]
    written, pictures = [], []
    for found in surfaces:
        for kind, figure in (("surfaces", paper_figure(found)), ("errors", error_figure(found))):
            if figure is None:
                continue
            name = f"{kind}-{found.plan.dataset}"
            for suffix in ("png", "pdf"):
                path = output / "figures" / f"{name}.{suffix}"
                write_atomically(path, _drawn(figure, suffix))
                written.append(path)
            pictures.append((name, _caption(kind, found), (output / "figures" / f"{name}.png")))
            _close(figure)
    sections: list[tuple[str, Tab]] = []
    if lines:
        sections.append(("Table 1, three ways", (tables.HEADER, tables.as_rows(lines))))
        written.append(_write_csv(output / "table.csv", sections[0][1]))
    if surfaces:
        sections.append(("Optima of the surfaces", _optima(surfaces)))
    if sampled := [s for s in surfaces if s.standard_error is not None]:
        sections.append(("Errors against MCMC, nats per datum", _errors(sampled)))
    remarks = _remarks(surfaces, table_plans, store)
    if remarks:
        sections.append(("Remarks", (("data set", "remark"), remarks)))
    sections.append(("Runs", _runs([*surface_plans, *table_plans])))
    made_with = sorted(
        {
            item
            for _, runs in [*surface_plans, *table_plans]
            for run in runs
            for item in _made_with(run)
        }
    )
    for name, content in (
        ("summary.md", _markdown(sections, pictures, made_with)),
        ("report.html", _page(sections, pictures, made_with)),
    ):
        write_atomically(output / name, content.encode())
        written.append(output / name)
    return written


def _drawn(figure: Any, suffix: str) -> bytes:
    buffer = io.BytesIO()
    # No date inside: the same results give the same file.
    undated = {"png": {"Software": None}, "pdf": {"CreationDate": None}}[suffix]
    figure.savefig(buffer, format=suffix, dpi=130, metadata=undated)
    return _with_palette(buffer) if suffix == "png" else buffer.getvalue()


def _with_palette(picture: io.BytesIO) -> bytes:
    """A PNG in 256 colours, half the size."""
    from PIL import Image

    smaller = io.BytesIO()
    Image.open(picture).convert("RGB").quantize(256).save(smaller, "png", optimize=True)
    return smaller.getvalue()


def _close(figure: Any) -> None:
    import matplotlib.pyplot as plt

    plt.close(figure)


def _caption(kind: str, found: Surfaces) -> str:
    name = title_of(found.plan.dataset)
    if kind == "errors":
        return f"{name}: what each estimate of the log marginal likelihood is off, per datum."
    return (
        f"{name}: log marginal likelihood and test log predictive density per datum. Markers: the optimum "
        "on the grid, with its log predictive density."
    )


def _optima(found: Sequence[Surfaces]) -> Tab:
    header = ("data set", "estimate", "log ℓ", "log σ", "log p(y) / n", "log density there")
    rows = [
        (
            s.plan.dataset,
            METHODS[name],
            f"{best.log_lengthscale:.1f}",
            f"{best.log_sigma:.1f}",
            f"{best.value:.4f}",
            f"{best.log_density:.4f}",
        )
        for s in found
        for name in s.estimates
        for best in (s.optimum(name),)
    ]
    return header, rows


def _errors(found: Sequence[Surfaces]) -> Tab:
    header = ("data set", "estimate", "mean absolute error", "MCMC's standard error", "points")
    rows = [
        (
            s.plan.dataset,
            METHODS[name],
            f"{s.mean_error(name):.5f}",
            f"{s.standard_error[s.trusted].mean():.5f}",
            f"{int(s.trusted.sum())} of {s.trusted.size}",
        )
        for s in found
        if s.standard_error is not None and s.trusted is not None and s.trusted.any()
        for name in s.estimates
        if name != "mcmc"
    ]
    return header, rows


def _runs(plans: Sequence[tuple[Plan, list[dict[str, Any]]]]) -> Tab:
    header = (
        "what",
        "data set",
        "settings",
        "command",
        "wall time",
        "computed",
        "reused",
        "failed",
    )
    rows = [
        (
            plan.kind,
            plan.dataset,
            run.get("settings", plan.description),
            f"`{run['command']}`",
            f"{run['seconds']:.0f} s",
            str(run["computed"]),
            str(run["reused"]),
            str(run["failed"]),
        )
        for plan, runs in plans
        for run in runs
    ]
    return header, rows


def _remarks(
    surfaces: Sequence[Surfaces],
    table_plans: Sequence[tuple[TablePlan, Any]],
    store: ResultStore,
) -> list[tuple[str, ...]]:
    """What a reader should know before believing a figure."""
    found = []
    for s in surfaces:
        name = s.plan.dataset
        for method, count in s.not_converged.items():
            if count:
                found.append((name, f"{method}: inference did not converge at {count} points"))
        if s.trusted is not None and not s.trusted.all():
            count = int((~s.trusted).sum())
            found.append((name, f"mcmc: chains disagree at {count} of {s.trusted.size} points"))
        found += [
            (name, f"{METHODS[estimate]}: the optimum is on the border of the grid")
            for estimate in s.estimates
            if {s.optimum(estimate).log_lengthscale, s.optimum(estimate).log_sigma} & set(AXIS)
        ]
        found += [(name, f"{m}: some rows are missing, not shown") for m in s.incomplete]
    for plan, _ in table_plans:
        names = tables.incomplete(plan, store)
        found += [(plan.dataset, f"{m}: some folds are missing, not shown") for m in names]
        found += [
            (
                plan.dataset,
                f"{tables.WAY_TITLES[line.way]}: no better than a coin where training ended",
            )
            for line in tables.lines(plan, store)
            if max(cell.mean for cell in line.log_density) < COIN
        ]
    return found


def _made_with(run: dict[str, Any]) -> list[tuple[str, str]]:
    return [(name, version) for name, version in run.get("environment", [])]


def _write_csv(path: Path, table: Tab) -> Path:
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerows([table[0], *([cell.replace("**", "") for cell in row] for row in table[1])])
    write_atomically(path, buffer.getvalue().encode())
    return path


def _markdown(
    sections: Sequence[tuple[str, Tab]],
    pictures: Sequence[tuple[str, str, Path]],
    made_with: Sequence[tuple[str, str]],
) -> str:
    parts = ["# The paper, reproduced", DEVIATIONS]
    for title, (header, rows) in sections:
        table = [header, ["---"] * len(header), *rows]
        parts.append(f"## {title}\n\n" + "\n".join("| " + " | ".join(row) + " |" for row in table))
    parts.append("## Figures")
    parts += [f"![{name}](figures/{name}.png)\n\n{caption}" for name, caption, _ in pictures]
    parts.append("## Made with\n\n" + "\n".join(f"- {k} {v}" for k, v in made_with))
    return "\n\n".join(parts) + "\n"


def _page(
    sections: Sequence[tuple[str, Tab]],
    pictures: Sequence[tuple[str, str, Path]],
    made_with: Sequence[tuple[str, str]],
) -> str:
    body = ["<h1>The paper, reproduced</h1>"]
    head, *items = DEVIATIONS.split("\n- ")
    body.append(f"<p>{html.escape(head)}</p><ul>")
    body += [f"<li>{html.escape(item)}</li>" for item in items]
    body.append("</ul>")
    for title, (header, rows) in sections:
        body.append(f"<h2>{html.escape(title)}</h2>\n<div class='scroll'><table>")
        body.append("<tr>" + "".join(f"<th>{html.escape(h)}</th>" for h in header) + "</tr>")
        body += ["<tr>" + "".join(f"<td>{_cell(c)}</td>" for c in row) + "</tr>" for row in rows]
        body.append("</table></div>")
    body.append("<h2>Figures</h2>")
    for name, caption, path in pictures:
        data = base64.b64encode(path.read_bytes()).decode()
        body.append(
            f"<figure><img alt='{html.escape(name)}' src='data:image/png;base64,{data}'>"
            f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        )
    body.append("<h2>Made with</h2><ul>")
    body += [f"<li>{html.escape(k)} {html.escape(v)}</li>" for k, v in made_with]
    body.append("</ul>")
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>The paper, reproduced</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _cell(text: str) -> str:
    bold = text.startswith("**") and text.endswith("**")
    text = html.escape(text.strip("*`"))
    return f"<b>{text}</b>" if bold else text
