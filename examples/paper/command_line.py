"""``python -m examples.paper``: surfaces, table, both, and a report of what is there."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .execution import (
    DaskCluster,
    Failure,
    InProcess,
    Outcome,
    Processes,
    Runner,
    run_jobs,
)
from .plans import (
    DATASETS,
    QUICK_DATA,
    SURFACE_METHODS,
    WAYS,
    Plan,
    SurfacePlan,
    TablePlan,
    load_plans,
    save_plan,
)
from .provenance import available_cores
from .store import ResultStore

QUICK_DATASETS = ("sonar", "diabetes")

FULL: dict[str, Any] = {
    "output": Path("paper-results"),
    "datasets": DATASETS,
    "grid": 21,
    "chains": 32,
    "temperatures": 200,
    "folds": range(5),
    "max_iterations": 1000,
    "paper_iterations": 1000,
    "max_data": None,
}

QUICK: dict[str, Any] = {
    "output": Path("paper-results-quick"),
    "datasets": QUICK_DATASETS,
    "grid": 5,
    "chains": 4,
    "temperatures": 20,
    "folds": range(2),
    "max_iterations": 3,
    "paper_iterations": 3,
    "max_data": QUICK_DATA,
}

SIZES = ("grid", "chains", "temperatures", "folds", "max_iterations", "paper_iterations")

EXAMPLES = """\
examples:
  python -m examples.paper all --quick                 everything in two minutes, on a few data
  python -m examples.paper surfaces --datasets sonar --methods vi ep
  python -m examples.paper table --methods collapsed --workers 2
  python -m examples.paper all --scheduler tcp://host:8786
  python -m examples.paper report                      figures, tables and page from what is there

Every row of a surface and every fit is stored as soon as it is done: an interrupted run goes on where it
stopped, a finished one costs nothing, and other settings have other files.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m examples.paper",
        description="Reproduce the paper's figures and tables.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="where results, figures and report go; it reports the last settings of each data set "
        "(default: paper-results, or paper-results-quick)",
    )
    running = argparse.ArgumentParser(add_help=False)
    running.add_argument(
        "--datasets",
        nargs="+",
        choices=DATASETS,
        metavar="NAME",
        help=f"of {', '.join(DATASETS)} (default: all)",
    )
    running.add_argument(
        "--quick",
        action="store_true",
        help=f"{QUICK_DATA} rows, a 5×5 grid, two folds, few iterations; {' and '.join(QUICK_DATASETS)}",
    )
    where = running.add_mutually_exclusive_group()
    where.add_argument(
        "--workers",
        type=_positive,
        metavar="N",
        help="processes on this machine, which share its cores (default: one per core)",
    )
    where.add_argument(
        "--scheduler", metavar="ADDRESS", help="a Dask scheduler, tcp://host:port, instead"
    )
    where.add_argument(
        "--serial", action="store_true", help="one job after the other in this process, to debug"
    )
    grid = argparse.ArgumentParser(add_help=False)
    grid.add_argument(
        "--grid", type=_at_least_two, metavar="N", help="points per axis (default: 21)"
    )
    grid.add_argument(
        "--fold", type=int, choices=range(5), default=0, help="training fold (default: 0)"
    )
    grid.add_argument("--seed", type=_not_negative, default=0, help="of MCMC (default: 0)")
    grid.add_argument("--chains", type=_at_least_two, help="of MCMC, per point (default: 32)")
    grid.add_argument("--temperatures", type=_at_least_two, help="of MCMC (default: 200)")
    fits = argparse.ArgumentParser(add_help=False)
    fits.add_argument(
        "--folds",
        type=int,
        nargs="+",
        choices=range(5),
        metavar="K",
        help="of five (default: all)",
    )
    fits.add_argument(
        "--max-iterations",
        type=_positive,
        metavar="N",
        help="of one training run (default: 1000)",
    )
    fits.add_argument(
        "--paper-iterations",
        type=_positive,
        metavar="N",
        help="the same for the paper's training details, whose steps are short (default: 1000)",
    )
    surfaces = commands.add_parser(
        "surfaces",
        parents=[running, grid, shared],
        help="Figures 1 to 4",
        description="Marginal likelihood and predictive density over a grid of log ℓ and log σ.",
    )
    _add_methods(surfaces, SURFACE_METHODS, "of inference; vi gives the surfaces of VI and Ours")
    table = commands.add_parser(
        "table",
        parents=[running, fits, shared],
        help="Table 1",
        description="Cross-validated accuracy and log predictive density.",
    )
    _add_methods(table, WAYS, "of training; the first three for VI and for Ours")
    everything = commands.add_parser(
        "all",
        parents=[running, grid, fits, shared],
        help="surfaces, table and report",
        description="Everything, then the report.",
    )
    _add_methods(
        everything,
        tuple(dict.fromkeys((*SURFACE_METHODS, *WAYS))),
        "of inference for the surfaces and of training for the table",
    )
    commands.add_parser(
        "report",
        parents=[shared],
        help="figures, tables, HTML page and Markdown summary",
        description="Show what is in the output directory.",
    )
    return top


def _add_methods(command: argparse.ArgumentParser, names: Sequence[str], what: str) -> None:
    command.add_argument(
        "--methods", nargs="+", choices=names, default=names, help=f"{what} (default: all)"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 1 if a job failed, 130 if interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(given)
    _complete(options)
    failures: list[Failure] = []
    try:
        if options.command != "report":
            with _ending_in_order():
                _run(options, _command(given), failures)
        if options.command in ("all", "report"):
            _report(options.output)
    except KeyboardInterrupt:
        print("\nInterrupted. What is done is stored: the same command goes on.", file=sys.stderr)
        return 130
    finally:
        for failure in failures:
            print(f"\nFAILED {failure}", file=sys.stderr)
        if failures:
            print(f"\n{len(failures)} job(s) failed; the rest is stored.", file=sys.stderr)
    return 1 if failures else 0


def _complete(options: argparse.Namespace) -> None:
    """Fill in what was not given; a quick run has its own sizes, and its own directory."""
    is_quick = getattr(options, "quick", False)
    for name, value in (QUICK if is_quick else FULL).items():
        if not hasattr(options, name):
            continue
        if getattr(options, name) is None:
            setattr(options, name, value)
        elif is_quick and name in SIZES:
            raise SystemExit(
                f"--quick has its own --{name.replace('_', '-')}; leave one of the two out."
            )
    if hasattr(options, "folds"):
        options.folds = sorted(set(options.folds))
    if hasattr(options, "datasets"):
        options.datasets = list(dict.fromkeys(options.datasets))
    if options.output.exists() and not options.output.is_dir():
        raise SystemExit(f"--output must be a directory; {options.output} is not one.")


def _command(given: Sequence[str]) -> str:
    """The command to repeat it with, wherever the results shall go."""
    words = [w for w in given if not w.startswith("--output=")]
    if "--output" in words:
        i = words.index("--output")
        words = words[:i] + words[i + 2 :]
    return f"python -m examples.paper {' '.join(words)}"


def plans_of(options: argparse.Namespace) -> list[Plan]:
    """What the options ask for."""
    max_data = (QUICK if options.quick else FULL)["max_data"]
    plans: list[Plan] = []
    if options.command in ("surfaces", "all"):
        methods = tuple(m for m in SURFACE_METHODS if m in options.methods)
        plans += [
            SurfacePlan(
                name,
                methods,
                options.grid,
                options.fold,
                options.seed,
                options.chains,
                options.temperatures,
                max_data,
            )
            for name in options.datasets
            if methods
        ]
    if options.command in ("table", "all"):
        ways = tuple(w for w in WAYS if w in options.methods)
        folds = tuple(options.folds)
        limits = (options.max_iterations, options.paper_iterations)
        plans += [TablePlan(d, ways, folds, *limits, max_data) for d in options.datasets if ways]
    return plans


def _run(options: argparse.Namespace, command: str, failures: list[Failure]) -> None:
    store = ResultStore(options.output / "jobs")
    plans = plans_of(options)
    total = sum(len(plan.jobs()) for plan in plans)
    runner = _runner(options)
    with contextlib.closing(runner), tqdm(total=total, disable=None) as bar:
        for plan in plans:
            bar.set_description(f"{plan.kind} {plan.dataset}")
            outcome = Outcome()
            is_new = _is_new(plan, options.output)
            if is_new:
                save_plan(options.output, plan)  # if this is killed, what it did can be reported
            try:
                run_jobs(plan.jobs(), store, runner, bar, outcome)
            finally:
                failures += outcome.failures
                if is_new or outcome.computed or outcome.failures:
                    save_plan(options.output, plan, _run_record(plan, command, outcome))
            bar.write(f"{plan.kind} {plan.dataset}: {_said(outcome)}, {outcome.seconds:.1f} s")


def _is_new(plan: Plan, output: Path) -> bool:
    known = [p for p, _ in load_plans(output, type(plan)) if p.same_settings_as(plan)]
    return not any(plan.after(p).description == p.description for p in known)


def _run_record(plan: Plan, command: str, outcome: Outcome) -> dict[str, Any]:
    return {
        "command": command,
        "computed": outcome.computed,
        "reused": outcome.reused,
        "failed": len(outcome.failures),
        "seconds": outcome.seconds,
        "when": time.strftime("%Y-%m-%d"),
        "settings": plan.description,
        "environment": sorted(outcome.made_with),
    }


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """A request to end (SIGTERM) is an interruption: what is done is remembered."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _said(outcome: Outcome) -> str:
    return f"{outcome.computed} computed, {outcome.reused} reused, {len(outcome.failures)} failed"


def _runner(options: argparse.Namespace) -> Runner:
    if options.scheduler is not None:
        return DaskCluster(options.scheduler)
    return InProcess() if options.serial else Processes(options.workers or available_cores())


def _report(output: Path) -> None:
    if not any(load_plans(output, kind) for kind in (SurfacePlan, TablePlan)):
        raise SystemExit(
            f"Nothing to report: {output} has no results. Run surfaces, table or all with this "
            "--output first; --quick has put its own in paper-results-quick."
        )
    from .report import write_report

    for path in write_report(output):
        print(f"wrote {path}")


def _not_negative(text: str) -> int:
    return _integer(text, 0)


def _positive(text: str) -> int:
    return _integer(text, 1)


def _at_least_two(text: str) -> int:
    return _integer(text, 2)


def _integer(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"must be an integer of at least {least}; found {text!r}")
    return number
