"""Result files and how jobs are run: nothing lost, nothing done twice, nothing damaged believed."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tqdm import tqdm

from examples.paper import execution
from examples.paper.execution import Failure, Found, InProcess, Outcome, Processes, run_jobs
from examples.paper.jobs import Job
from examples.paper.plans import SurfacePlan, TablePlan, load_plans, save_plan
from examples.paper.provenance import environment
from examples.paper.store import ResultStore, write_atomically

JOBS = SurfacePlan("sonar", ("vi",), num_grid=4).jobs()


class Fake:
    """Computes nothing; remembers what it was asked for, and stops or fails where told to."""

    def __init__(self, interrupt_after: int | None = None, failing: Sequence[Job] = ()) -> None:
        self.asked: list[Job] = []
        self.interrupt_after = interrupt_after
        self.failing = failing

    def results(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Found]]:
        for i, job in enumerate(jobs):
            if i == self.interrupt_after:
                raise KeyboardInterrupt
            self.asked.append(job)
            if job in self.failing:
                yield job, Failure(job, "ValueError: no", "traceback")
            else:
                yield (
                    job,
                    {
                        "result": {"value": job.settings["log_lengthscale"]},
                        "seconds": 0.0,
                        "made_with": [
                            ["machine", f"worker {job.settings['log_lengthscale'] > 1.0:d}"]
                        ],
                    },
                )

    def close(self) -> None:
        pass


@pytest.fixture
def store(tmp_path: Path) -> ResultStore:
    return ResultStore(tmp_path)


def run(store: ResultStore, runner: Any, jobs: Sequence[Job] = JOBS) -> Outcome:
    outcome = Outcome()
    with tqdm(disable=True) as bar:
        run_jobs(jobs, store, runner, bar, outcome)
    return outcome


def test_an_interrupted_run_goes_on_where_it_stopped(store: ResultStore) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(store, Fake(interrupt_after=2))
    rest = Fake()
    outcome = run(store, rest)
    assert rest.asked == JOBS[2:]
    assert (outcome.computed, outcome.reused) == (2, 2)


def test_a_finished_run_costs_nothing(store: ResultStore) -> None:
    run(store, Fake())
    again = Fake()
    outcome = run(store, again)
    assert again.asked == []
    assert (outcome.computed, outcome.reused) == (0, 4)


def test_versions_and_machines_are_those_of_the_workers(store: ResultStore) -> None:
    assert run(store, Fake()).made_with == {("machine", "worker 0"), ("machine", "worker 1")}
    assert (
        execution.execute("row", {**JOBS[0].settings, "max_data": 12, "method": "vi"})["made_with"]
        == environment()
    )
    assert {"Python", "gpflow", "tensorflow", "machine"} <= {name for name, _ in environment()}


@pytest.mark.parametrize(
    "change", [{"num_grid": 5}, {"fold": 1}, {"max_data": 30}], ids=["num_grid", "fold", "max_data"]
)
def test_other_settings_do_not_reuse_results(store: ResultStore, change: dict[str, Any]) -> None:
    run(store, Fake())
    other = Fake()
    jobs = SurfacePlan("sonar", ("vi",), **{"num_grid": 4, **change}).jobs()
    run(store, other, jobs)
    assert other.asked == jobs


def test_only_what_mcmc_depends_on_is_in_its_jobs() -> None:
    first = SurfacePlan("sonar")
    for change in ({"seed": 1}, {"num_chains": 8}, {"num_temperatures": 50}):
        second = dataclasses.replace(first, **change)
        assert first.row("vi", 0.0).key == second.row("vi", 0.0).key
        assert first.row("mcmc", 0.0).key != second.row("mcmc", 0.0).key


def test_only_the_papers_fits_depend_on_its_iterations() -> None:
    first, second = TablePlan("sonar"), TablePlan("sonar", paper_iterations=7)
    assert first.fit("ep", 0).key == second.fit("ep", 0).key
    assert first.fit("paper-vi", 0).key != second.fit("paper-vi", 0).key


@pytest.mark.parametrize(
    "damage", ["truncated", "a digit", "empty", "not ours", "renamed", "not text"]
)
def test_damaged_files_are_detected_and_redone(store: ResultStore, damage: str) -> None:
    run(store, Fake())
    path = store.path(JOBS[1])
    text = path.read_text()
    path.write_bytes(
        {
            "truncated": text[: len(text) // 2].encode(),
            "a digit": text.replace('"value": 1', '"value": 2').encode(),
            "empty": b"",
            "not ours": b"[1, 2]",
            "renamed": store.path(JOBS[2]).read_bytes(),
            "not text": b"\xff\xfe\x00",
        }[damage]
    )
    assert path.read_bytes() != text.encode()
    again = Fake()
    outcome = run(store, again)
    assert again.asked == [JOBS[1]]
    assert store.corrupt == [path]
    assert (outcome.computed, outcome.reused) == (1, 3)
    assert path.read_text() == text


def test_a_write_that_fails_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.json"
    write_atomically(path, b"old")

    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_failures_do_not_stop_the_others(store: ResultStore) -> None:
    outcome = run(store, Fake(failing=JOBS[:1]))
    assert (outcome.computed, len(outcome.failures)) == (3, 1)
    message = str(outcome.failures[0])
    assert "row-sonar-vi-fold0--1.00: ValueError: no" in message
    assert "log_lengthscale=-1.0" in message
    assert store.load(JOBS[0]) is None


def test_an_error_in_a_job_is_a_failure_with_its_traceback() -> None:
    job = Job("fit", {"dataset": "sonar", "method": "nonsense", "fold": 0, "max_data": 5})
    ((found_job, failure),) = InProcess().results([job])
    assert found_job is job
    assert isinstance(failure, Failure)
    assert "Traceback" in failure.details


def test_a_process_that_dies_is_replaced_and_one_that_always_dies_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[str] = []

    class Dying(Processes):
        """The first job's process dies always, the second's once."""

        def _submit(self, job: Job) -> Any:
            tried.append(job.name)
            future: Any = concurrent.futures.Future()
            if job is JOBS[0] or (job is JOBS[1] and tried.count(job.name) == 1):
                future.set_exception(execution.BrokenProcessPool("a process died"))
            else:
                future.set_result({"result": {}, "seconds": 0.0})
            return future

    results = dict(Dying(2).results(JOBS))
    assert [job for job, found in results.items() if isinstance(found, Failure)] == JOBS[:1]
    assert [tried.count(job.name) for job in JOBS] == [execution.MAX_DEATHS + 1, 2, 1, 1]


def test_a_death_is_not_charged_to_who_ran_beside_it() -> None:
    class Pool(Processes):
        """The first job kills the pool, and with it whatever else runs."""

        running: ClassVar[list[tuple[Job, Any]]] = []

        def _submit(self, job: Job) -> Any:
            future: Any = concurrent.futures.Future()
            self.running.append((job, future))
            if len(self.running) == 1:  # the other one follows at once, or not at all
                threading.Timer(0.1, self._end).start()
            return future

        def _end(self) -> None:
            is_fatal = any(job is JOBS[0] for job, _ in self.running)
            while self.running:
                _, future = self.running.pop()
                if is_fatal:
                    future.set_exception(execution.BrokenProcessPool("a process died"))
                else:
                    future.set_result({"result": {}, "seconds": 0.0})

    results = dict(Pool(2).results(JOBS[:2]))
    assert [isinstance(results[job], Failure) for job in JOBS[:2]] == [True, False]


def test_a_process_that_dies_between_two_jobs_is_replaced() -> None:
    closed: list[int] = []

    class Idle(Processes):
        def _submit(self, job: Job) -> Any:
            if not closed:
                raise execution.BrokenProcessPool("a process died")
            future: Any = concurrent.futures.Future()
            future.set_result({"result": {}, "seconds": 0.0})
            return future

        def close(self) -> None:
            closed.append(1)

    assert [job for job, _ in Idle(1).results(JOBS)] == JOBS
    assert closed == [1]


def test_a_killed_process_loses_nothing() -> None:
    """A real one, at work on a real job."""
    runner = Processes(1)
    job = SurfacePlan("sonar", ("vi",), num_grid=2, max_data=10).jobs()[0]

    def kill() -> None:
        while runner.pool is None or not runner.pool._processes:
            time.sleep(0.01)
        time.sleep(1.0)
        for process in runner.pool._processes.values():
            process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    ((found_job, found),) = runner.results([job])
    killer.join()
    runner.close()
    assert found_job is job
    assert not isinstance(found, Failure)
    assert len(found["result"]["elbo"]) == 2


def test_processes_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "parent.py"
    program.write_text(
        """
import time
from examples.paper.execution import Processes
from examples.paper.plans import TablePlan

if __name__ == "__main__":
    runner = Processes(1)
    runner._submit(TablePlan("usps").fit("paper-vi", 0))  # hours
    while not runner.pool._processes:
        time.sleep(0.01)
    print(next(iter(runner.pool._processes)), flush=True)
    time.sleep(600.0)
"""
    )
    parent = subprocess.Popen(
        [sys.executable, str(program)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(3.0)  # the child has started
    parent.kill()
    parent.communicate()
    for _ in range(100):
        if not _is_running(child):
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    pytest.fail("a process has outlived its parent")


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_cores_are_shared_among_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "7")
    with execution._environment(dict.fromkeys(execution.THREAD_VARIABLES, "1")):
        assert execution.os.environ["OMP_NUM_THREADS"] == "1"
        assert execution.os.environ["OPENBLAS_NUM_THREADS"] == "7"  # the user's
    assert "OMP_NUM_THREADS" not in execution.os.environ


def test_processes_start_with_their_part_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    class Pool:
        def submit(self, *_: Any) -> None:
            seen.update({v: execution.os.environ.get(v) for v in execution.THREAD_VARIABLES})

    for variable in execution.THREAD_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(execution, "available_cores", lambda: 8)
    runner = Processes(2)
    runner.pool = Pool()  # type: ignore[assignment]
    runner._submit(JOBS[0])
    assert set(seen.values()) == {"4"}


def test_a_damaged_plan_is_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "surfaces-sonar.json").write_text("{")
    (tmp_path / "surfaces-usps.json").write_text('{"plan": {"unknown": 1}, "runs": []}')
    assert load_plans(tmp_path, SurfacePlan) == []
    assert capsys.readouterr().err.count("damaged or of another version") == 2


def test_plans_remember_their_runs(tmp_path: Path) -> None:
    first = SurfacePlan("sonar", ("vi",))
    save_plan(tmp_path, first, {"seconds": 1.0})
    save_plan(tmp_path, SurfacePlan("sonar", ("mcmc",)), {"seconds": 2.0})
    ((plan, runs),) = load_plans(tmp_path, SurfacePlan)
    assert plan.methods == ("mcmc",)
    assert [r["seconds"] for r in runs] == [1.0, 2.0]
    save_plan(tmp_path, SurfacePlan("sonar", ("vi",), num_grid=5), {"seconds": 3.0})
    ((plan, runs),) = load_plans(tmp_path, SurfacePlan)
    assert (plan.num_grid, len(runs)) == (5, 1)
    save_plan(tmp_path, TablePlan("usps"), {"seconds": 4.0})
    ((table, _),) = load_plans(tmp_path, TablePlan)
    assert table == TablePlan("usps")
    # The paper's way to another limit belongs to the same table, and is the one that is looked for.
    save_plan(tmp_path, TablePlan("usps", ("paper",), paper_iterations=25), {"seconds": 5.0})
    save_plan(tmp_path, TablePlan("usps", ("ep",)), {"seconds": 6.0})
    ((table, runs),) = load_plans(tmp_path, TablePlan)
    assert table == TablePlan("usps", ("ep",), paper_iterations=25)
    assert [r["seconds"] for r in runs] == [4.0, 5.0, 6.0]
    assert json.loads((tmp_path / "table-usps.json").read_text())["plan"]["dataset"] == "usps"
