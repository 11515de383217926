"""A model of the time of sums over rows on a cluster: flops, bytes and latency.

A sum over N rows on w workers, in S shards and with M inducing variables of one latent, takes

    t = t₀ + t₁ S + t₂ S M² + c M² N / w,

the round trip to the scheduler, its work for every task, what messages cost, and arithmetic; the third term
is that of one machine. A loss is so many passes. ``t₀, t₁, t₂`` are fitted to sums over hardly any rows,
c to losses of one and two workers, once with projections that are kept and once with such that are found
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import nnls


class Overhead(NamedTuple):
    """Of one sum, as N → 0."""

    inducing: int
    shards: int
    seconds: float

    @classmethod
    def of(cls, record: dict[str, Any]) -> Overhead:
        return cls(record["inducing"], record["shards"], record["sum"])


class TimeModel(NamedTuple):
    """Seconds; the fourth and fifth for every row and M²."""

    round_trip: float
    task: float
    message: float
    kept: float
    again: float
    passes: float
    error: float
    """The largest relative error at what c was fitted to."""

    def sum(self, rows: float, workers: int, shards: int, inducing: int, kept: bool) -> float:
        """Seconds of a sum over rows."""
        fixed = self.round_trip + shards * (self.task + self.message * inducing**2)
        return fixed + (self.kept if kept else self.again) * inducing**2 * rows / workers

    def loss(self, rows: float, workers: int, shards: int, inducing: int, kept: bool) -> float:
        """Seconds of a loss with its gradient."""
        return self.passes * self.sum(rows, workers, shards, inducing, kept)


def fitted(times: Sequence[dict[str, Any]], overheads: Sequence[Overhead]) -> TimeModel:
    """By least squares of relative errors, all terms positive."""
    A = np.array([[1.0, x.shards, x.shards * x.inducing**2] for x in overheads])
    t = np.array([max(x.seconds, 1e-6) for x in overheads])
    fixed, _ = nnls(A / t[:, None], np.ones(len(t)))
    passes = float(np.mean([x["passes"] for x in times]))
    rates, errors = [], []
    for kept in (True, False):
        chosen = [x for x in times if x["kept"] == kept]
        work = np.array(
            [x["passes"] * x["inducing"] ** 2 * x["rows"] / x["workers"] for x in chosen]
        )
        rest = np.array(
            [
                x["passes"] * (fixed[0] + x["shards"] * (fixed[1] + fixed[2] * x["inducing"] ** 2))
                for x in chosen
            ]
        )
        seconds = np.array([x["loss_cluster"] for x in chosen])
        # min Σ ((rest + c work − t)/t)²
        a, b = work / seconds, 1.0 - rest / seconds
        rates.append(float(a @ b / (a @ a)))
        errors.append(float(np.max(np.abs(rest + rates[-1] * work - seconds) / seconds)))
    return TimeModel(*map(float, fixed), *rates, passes, max(errors))


def shards_of(rows: float, workers: int) -> int:
    """As ``gh.distributed.shards`` chooses for nine columns."""
    size = 72.0 * rows
    small = min(np.ceil(size / 2**23), 4 * workers)
    return int(max(workers, np.ceil(size / 2**27), small))


def tables(known: dict[str, Any], model: TimeModel | None) -> str:
    """All that is known, as Markdown."""
    parts = []
    if "machine" in known:
        machine = known["machine"]
        parts.append(f"Measured on {machine['cores']} cores of {machine['processor']}.")
    for x in known.get("loss", []):
        parts.append(
            _table(
                "One loss with its gradient (`python -m benchmarks.cluster loss`)",
                ["rows", "M", "one process, two threads", "two workers of one thread", "ratio"],
                [
                    [
                        f"{x['rows']:,}",
                        x["inducing"],
                        f"{x['loss_here']:.2f} s",
                        f"{x['loss_cluster']:.2f} s",
                        f"{x['ratio']:.2f}",
                    ]
                ],
            )
        )
    if "overhead" in known:
        parts.append(
            _table(
                "Overhead as N → 0 (`python -m benchmarks.cluster overhead`)",
                ["M", "shards", "one sum over rows", "one loss with gradient", "its sums"],
                [
                    [
                        x["inducing"],
                        x["shards"],
                        f"{1e3 * x['sum']:.1f} ms",
                        f"{1e3 * x['loss']:.0f} ms",
                        f"{x['passes']:.0f}",
                    ]
                    for x in known["overhead"]
                ],
            )
        )
    for x in known.get("fit", []):
        parts.append(
            _table(
                "A fit (`python -m benchmarks.cluster fit`)",
                [
                    "rows",
                    "M",
                    "seconds",
                    "losses",
                    "passes over the data",
                    "status",
                    "test log density",
                    "largest memory of a worker",
                ],
                [
                    [
                        f"{x['rows']:,} × 8",
                        x["inducing"],
                        f"{x['seconds']:.0f} (and {x['part_seconds']:.0f} for a part of the rows)",
                        x["losses"],
                        x["passes"],
                        x["status"],
                        f"{x['log_density']:.4f}",
                        f"{x['worker_gb']:.2f} GB",
                    ]
                ],
            )
        )
    if model is not None:
        parts.append(_prediction(model))
    return "\n\n".join(parts) + "\n"


def _prediction(model: TimeModel) -> str:
    words = (
        "Fitted to one and two workers (`python -m benchmarks.cluster times`): a round trip of "
        f"{1e3 * model.round_trip:.1f} ms, {1e3 * model.task:.2f} ms for every task, "
        f"{1e9 * model.message:.2f} ns for every number of a message, "
        f"{1e9 * model.kept:.3f} ns for every row and M² where projections are kept, "
        f"{1e9 * model.again:.3f} ns where they are found again; {model.passes:.1f} sums for a loss. Its "
        f"largest error at what it was fitted to is {100 * model.error:.0f} %.\n\n"
        "**This is a prediction, not a measurement**: nobody has run it. It supposes workers that do not "
        "share a machine's memory or network, and one scheduler."
    )
    lines = []
    for rows, workers in ((10**6, 10), (10**9, 10), (10**9, 100), (10**9, 1000)):
        kept = 16.0 * rows * 200 / workers <= 2**30
        shards = shards_of(rows, workers)
        lines.append(
            [
                f"{rows:,}",
                workers,
                shards,
                "kept" if kept else "found again",
                f"{model.sum(rows, workers, shards, 200, kept):.3g} s",
                f"{model.loss(rows, workers, shards, 200, kept):.3g} s",
            ]
        )
    header = ["rows", "workers", "shards", "projections", "one sum", "one loss with gradient"]
    return words + "\n\n" + _table("Prediction for M = 200", header, lines)


def _table(title: str, header: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return f"**{title}**\n\n" + "\n".join(f"| {' | '.join(map(str, x))} |" for x in lines)
