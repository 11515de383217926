"""What ``python -m benchmarks.sparse`` says of its records: times to a density and to a bound, tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .peers.sparse_contenders import SAME_BOUND, SPARSE
from .peers.stopping import TOLERANCE
from .records import Record

REGRESSION = ("protein",)
NEAR = 0.002
"""A density this much below its final value has arrived."""


def arrival(record: Record) -> float | None:
    """Seconds until the final test log density, less 0.002, was first seen; None without a trace.

    As fine as the trace: the fit's own seconds are its last entry.
    """
    if not record.get("trace"):
        return None
    final = record["log_density"] - NEAR
    seen = (seconds for seconds, density, _ in record["trace"] if density >= final)
    return float(next(seen, record["seconds"]))


def time_to_bound(record: Record, bound: float) -> float | None:
    """Seconds until an ELBO, less 1e-5 per datum, was first seen; None if never."""
    enough = bound - TOLERANCE * record["num_data"]
    seen = [(seconds, elbo) for seconds, _, elbo in record["trace"]]
    return next(
        (s for s, elbo in [*seen, (record["seconds"], record["elbo"])] if elbo >= enough), None
    )


def ours_with_its_bound(peer: Record, found: Iterable[Record]) -> Record | None:
    """The fit of ours that maximises what a peer does, if there is one."""
    if peer["contender"] not in SAME_BOUND:
        return None
    ours = SAME_BOUND[peer["contender"]][peer["dataset"] in REGRESSION]
    return next((r for r in found if r["contender"] == ours and "failure" not in r), None)


def against_ours(peer: Record, found: Iterable[Record]) -> tuple[str, str]:
    """Seconds of ours until a peer's final ELBO, and the peer's own as a multiple of them."""
    ours = ours_with_its_bound(peer, found)
    if ours is None:
        return "–", "–"
    theirs, seconds = (time_to_bound(record, peer["elbo"]) for record in (peer, ours))
    if seconds is None or theirs is None:
        return "never", "–"
    return f"{seconds:.3g}", f"{theirs / seconds:.1f}"


def describe(record: Record) -> str:
    """A record in one line."""
    size = f", M = {record['num_inducing']}" if record["num_inducing"] else ""
    start = f"{record['dataset']}{size}, {record['contender']}:"
    if "failure" in record:
        return f"{start} {record['failure']}"
    ended = f" ({record['note']})" if record["note"] else ""
    return f"{start} {record['seconds']:.4g} s, test log density {record['log_density']:.4f}{ended}"


def _number(value: float | None, digits: str) -> str:
    return "–" if value is None else format(value, digits)


def _own_time(record: Record) -> float | None:
    return None if record["elbo"] is None else time_to_bound(record, record["elbo"])


def _row(record: Record, third: str, found: Sequence[Record]) -> str:
    name = SPARSE[record["contender"]].label
    if "failure" in record:
        cells = [record["failure"], *8 * [""]]
    else:
        cells = [
            _number(record["seconds"], ".3g"),
            _number(arrival(record), ".3g"),
            _number(record["log_density"], ".4f"),
            _number(record[third], ".4f"),
            _number(record["elbo"], ".1f"),
            _number(_own_time(record), ".3g"),
            *against_ours(record, found),
            record["note"],
        ]
    return f"| {' | '.join([name, *cells])} |"


def table(found: Iterable[Record]) -> str:
    """Fits on one data set, with one M, as a table; those without inducing inputs stand in each."""
    rows = sorted(found, key=lambda record: list(SPARSE).index(record["contender"]))
    regression = rows[0]["dataset"] in REGRESSION
    third = "rmse" if regression else "accuracy"
    heads = [
        "",
        "seconds",
        "to its density",
        "test log density",
        "RMSE" if regression else "accuracy",
        "ELBO",
        "to its ELBO",
        "ours to it",
        "ratio",
        "remark",
    ]
    lines = [f"| {' | '.join(heads)} |", "|---|" + 8 * "---:|" + "---|"]
    return "\n".join(lines + [_row(record, third, rows) for record in rows])


def markdown(found: Iterable[Record]) -> str:
    """All tables, and the versions."""
    found = list(found)
    settings = sorted(
        {
            (r["dataset"], r["num_inducing"], r["train_z"], r["rows"])
            for r in found
            if r["num_inducing"]
        },
        key=lambda s: (s[0], s[2], s[3] or 0, s[1]),
    )
    parts = [
        "# Sparse models: whole fits\n",
        "Seconds from building the model until it is trained; *to its density*: until its own final "
        f"test log density, less {NEAR:g}, was first seen; *to its ELBO*: until its own final ELBO, less "
        f"{TOLERANCE:g} per datum, was; *ours to it*: seconds of SparseCVIModel, with the same "
        "likelihood and bound, until then; *ratio*: of the two. The first of five folds; "
        "`python -m benchmarks.sparse --help` says what is the same for all.\n",
    ]
    for dataset, num_inducing, train_z, rows in settings:
        here = [
            r
            for r in found
            if (r["dataset"], r["rows"]) == (dataset, rows)
            and (r["num_inducing"], r["train_z"]) in ((num_inducing, train_z), (None, False))
        ]
        trained = "trained" if train_z else "fixed"
        title = (
            f"{dataset}, N = {here[0]['num_data']}, M = {num_inducing}, inducing inputs {trained}"
        )
        parts.append(f"## {title}\n\n{table(here)}\n")
    versions = sorted(
        {f"{name} {v}" for r in found for name, v in r.get("versions", {}).items()}
        | {f"Python {r['python']}" for r in found}
    )
    machines = sorted({f"{r['processor']}, {r['threads']} threads" for r in found})
    parts.append(f"{'; '.join(machines)}. {', '.join(versions)}.\n")
    return "\n".join(parts)
