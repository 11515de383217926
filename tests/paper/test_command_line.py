"""The command as its users run it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.paper import command_line, surfaces
from examples.paper.execution import THREAD_VARIABLES
from examples.paper.fits import compute_fit
from examples.paper.plans import SurfacePlan, load_plans
from examples.paper.store import ResultStore

ROOT = Path(__file__).parents[2]
SMALL = {"dataset": "sonar", "fold": 0, "max_data": 30}


def test_help_reads_well(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["surfaces", "--help"], ["table", "--help"], ["all", "--help"]):
        with pytest.raises(SystemExit) as stopped:
            command_line.main(arguments)
        assert stopped.value.code == 0
    text = capsys.readouterr().out
    for word in ("--datasets", "--grid", "--folds", "--workers", "--scheduler", "--quick"):
        assert word in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["surfaces", "--datasets", "mnist"], "invalid choice: 'mnist'"),
        (["surfaces", "--grid", "1"], "must be an integer of at least 2; found '1'"),
        (["table", "--workers", "many"], "must be an integer of at least 1; found 'many'"),
        (["surfaces", "--seed", "-1"], "must be an integer of at least 0; found '-1'"),
        (["table", "--workers", "2", "--serial"], "not allowed with"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        command_line.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_quick_run_has_its_own_sizes() -> None:
    with pytest.raises(SystemExit, match="--quick has its own --grid; leave one of the two out"):
        command_line.main(["surfaces", "--quick", "--grid", "7"])


def test_the_output_must_be_a_directory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SystemExit, match="--output must be a directory"):
        command_line.main(["table", "--output", str(file)])


@pytest.mark.parametrize("address", ["", "localhost", "foo://x:1", "tcp://127.0.0.1:notaport"])
def test_a_scheduler_that_is_none(address: str, tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    with pytest.raises(SystemExit, match="--scheduler"):
        command_line.main(["table", "--output", str(tmp_path), "--scheduler", address])


def test_a_run_that_is_killed_can_be_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def kill(**_: Any) -> None:
        (plan, runs), *_ = load_plans(tmp_path, SurfacePlan)  # it is known what was asked for
        assert (plan.dataset, plan.num_grid, runs) == ("sonar", 4, [])
        os.kill(os.getpid(), signal.SIGTERM)
        raise Killed

    monkeypatch.setattr(surfaces, "compute_row", kill)
    arguments = ["surfaces", "--datasets", "sonar", "sonar", "--grid", "4", "--methods", "vi"]
    assert command_line.main([*arguments, "--serial", "--output", str(tmp_path)]) == 130
    ((_, runs),) = load_plans(tmp_path, SurfacePlan)
    assert [run["computed"] for run in runs] == [0]  # remembered, and once


def test_failed_jobs_are_shown_and_make_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compute(method: str, log_lengthscale: float, **_: Any) -> dict[str, Any]:
        if log_lengthscale > 4.0:
            raise ValueError("too long")
        return {"elbo": [0.0]}

    monkeypatch.setattr(surfaces, "compute_row", compute)
    arguments = ["surfaces", "--datasets", "sonar", "--grid", "4", "--methods", "vi", "--serial"]
    arguments += ["--output", str(tmp_path)]
    assert command_line.main(arguments) == 1
    captured = capsys.readouterr()
    assert "3 computed, 0 reused, 1 failed" in captured.out
    assert "row-sonar-vi-fold0-+5.00: ValueError: too long" in captured.err
    assert "1 job(s) failed; the rest is stored." in captured.err
    monkeypatch.setattr(surfaces, "compute_row", lambda **_: {"elbo": [1.0]})
    assert command_line.main(arguments) == 0
    assert "1 computed, 3 reused, 0 failed" in capsys.readouterr().out


def test_the_recorded_command_names_no_directory() -> None:
    given = ["table", "--output", "/somewhere", "--methods", "ep"]
    assert command_line._command(given) == "python -m examples.paper table --methods ep"
    assert "/x" not in command_line._command(["all", "--output=/x"])


def test_a_report_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no results. Run surfaces, table or all"):
        command_line.main(["report", "--output", str(tmp_path)])


def test_a_row_is_what_inference_gives_point_by_point() -> None:
    """Warm starts along a row change nothing."""
    sigmas = [-1.0, 2.0, 5.0]
    row = surfaces.compute_row("vi", **SMALL, log_lengthscale=1.7, log_sigmas=sigmas)
    ep = surfaces.compute_row("ep", **SMALL, log_lengthscale=1.7, log_sigmas=sigmas)
    assert row["num_data"] == 30
    for i, sigma in enumerate(sigmas):
        alone = surfaces.compute_row("vi", **SMALL, log_lengthscale=1.7, log_sigmas=[sigma])
        for name in ("elbo", "ep_like", "test_log_density"):
            np.testing.assert_allclose(row[name][i], alone[name][0], rtol=1e-6)
    assert np.all(np.array(row["elbo"]) < row["ep_like"])
    np.testing.assert_allclose(ep["ep"], row["ep_like"], rtol=0.05)
    assert all(row["converged"])
    assert all(ep["converged"])


def test_a_fit_is_tested_on_its_other_part() -> None:
    fit = compute_fit(**SMALL, method="collapsed-vi", max_iterations=30)
    assert fit["converged"]
    assert 0.4 < fit["accuracy"] <= 1.0
    assert -1.0 < fit["test_log_density"] < -0.2
    assert -1.0 < fit["log_lengthscale"] < 6.0


def run(*arguments: str, **environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "examples.paper", *arguments],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
    ).stdout


def test_a_quick_run_of_everything(tmp_path: Path) -> None:
    """Interrupted once, finished, and looked at again."""
    output = tmp_path / "results"
    arguments = ("all", "--quick", "--datasets", "sonar", "--workers", "1", "--output", str(output))

    interrupted = subprocess.Popen(
        [sys.executable, "-m", "examples.paper", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    while len(list((output / "jobs").rglob("row-*.json"))) < 3 and interrupted.poll() is None:
        time.sleep(0.05)
    interrupted.send_signal(signal.SIGINT)
    _, said = interrupted.communicate(timeout=60)
    assert interrupted.returncode == 130
    assert "Interrupted. What is done is stored" in said

    text = run(*arguments)
    found = re.search(r"surfaces sonar: (\d+) computed, (\d+) reused, 0 failed", text)
    assert found is not None
    computed, reused = map(int, found.groups())
    assert computed + reused == 15
    assert reused >= 3
    assert "table sonar: 16 computed, 0 reused, 0 failed" in text
    for name in ("surfaces-sonar", "errors-sonar"):
        assert (output / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (output / "figures" / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    page = (output / "report.html").read_text()
    assert page.count("src='data:image/png;base64,") == 2
    assert not re.search(r"(src|href)='(?!data:)", page)  # nothing outside the page
    summary = (output / "summary.md").read_text()
    for words in ("the paper's numbers", "its training details", "VEM to convergence", "Laplace"):
        assert words in summary
        assert words.replace("'", "&#x27;") in page
    assert (output / "table.csv").read_text().count("\n") == 7

    before = {p: p.stat().st_mtime_ns for p in (output / "jobs").rglob("*.json")}
    assert len(before) == 31
    again = run(*arguments)
    assert "0 computed, 15 reused" in again
    assert "0 computed, 16 reused" in again
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_a_dask_cluster_that_loses_a_worker_gives_the_same_results(tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    one_thread = dict.fromkeys(THREAD_VARIABLES, "1")
    shared = ("surfaces", "--quick", "--datasets", "sonar", "--methods", "vi")
    run(*shared, "--serial", "--output", str(tmp_path / "serial"), **one_thread)

    killer = """
import os, signal, sys, threading, time
import distributed
from examples.paper import command_line

def main():
    cluster = distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
    )
    def kill_one():
        scheduler = cluster.scheduler
        while True:  # a worker that is at work on a job
            busy = [w for w in scheduler.workers.values() if w.processing]
            if len(busy) == 2:
                break
            time.sleep(0.02)
        time.sleep(0.5)
        assert busy[0].processing
        nanny = next(n for n in cluster.workers.values() if n.worker_address == busy[0].address)
        os.kill(nanny.pid, signal.SIGKILL)
        print("killed", flush=True)
    threading.Thread(target=kill_one, daemon=True).start()
    code = command_line.main([*sys.argv[1:], "--scheduler", cluster.scheduler_address])
    cluster.close()
    sys.exit(code)

if __name__ == "__main__":
    main()
"""
    program = tmp_path / "cluster.py"
    program.write_text(killer)
    done = subprocess.run(
        [sys.executable, str(program), *shared, "--output", str(tmp_path / "dask")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT), **one_thread},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "killed" in done.stdout
    assert "5 computed, 0 reused, 0 failed" in done.stdout
    plan = SurfacePlan("sonar", ("vi",), num_grid=5, max_data=command_line.QUICK_DATA)
    for job in plan.jobs():
        results = [ResultStore(tmp_path / where / "jobs").load(job) for where in ("serial", "dask")]
        assert all(results)
        assert results[0]["result"] == results[1]["result"]
