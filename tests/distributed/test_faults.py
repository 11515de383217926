"""Workers that die in the middle of a fit, that come, that cannot take part; a scheduler that is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import dask.array as da
import gpflow
import numpy as np
import pytest
import tensorflow as tf
from dask import delayed
from distributed.core import Status

import gpflow_hybrid as gh
from gpflow_hybrid import tuning
from gpflow_hybrid.distributed import ShardedRows, holding, shard, worker_memory
from gpflow_hybrid.distributed.jobs import run_jobs
from tests.distributed.conftest import ROOT, Processes, problem

EXACT = 1e-9


def at_pass(rows: ShardedRows, happenings: dict[int, Callable[[], None]]) -> None:
    """Let something happen while the workers take a sum."""
    ask = rows.ask

    def ask_and_disturb(*arguments: Any) -> Any:
        happen = happenings.pop(rows.num_passes, None)
        if happen is None:
            return ask(*arguments)
        timer = threading.Timer(0.003, happen)
        timer.start()
        try:
            return ask(*arguments)
        finally:
            timer.join()

    rows.ask = ask_and_disturb  # type: ignore[method-assign]


def learn(model: Any, data: Any) -> Any:
    return gpflow.optimizers.Scipy().minimize(
        model.training_loss_closure(data), model.trainable_variables, options={"maxiter": 6}
    )


def learn_and_listen(model: Any, rows: ShardedRows) -> tuple[Any, list[str]]:
    """The result, and what was said of the cluster."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", gh.ClusterWarning)
        found = learn(model, rows)
    messages = [str(x.message) for x in said if issubclass(x.category, gh.ClusterWarning)]
    assert messages == [event.message for event in rows.events]
    return found, messages


def as_given(kind: str, X: Any, Y: Any) -> tuple[Any, Any]:
    if kind == "sent":
        return X, Y
    return da.from_array(X, chunks=40), da.from_array(Y, chunks=40)


def assert_same_end(found: Any, expected: Any) -> None:
    assert found.nfev == expected.nfev
    assert found.fun == pytest.approx(expected.fun, rel=EXACT)
    np.testing.assert_allclose(found.x, expected.x, rtol=0, atol=EXACT * np.max(np.abs(expected.x)))


def test_worker_killed_in_the_middle_of_a_fit(processes: Processes) -> None:
    for _ in range(2):
        processes.add_worker()
    X, Y, make = problem(120)
    expected = learn(make(), (X, Y))
    rows = gh.distributed.shards(processes.client, X, Y)
    victim = rows.holders[0]
    at_pass(rows, {20: processes.killer(victim)})
    found, messages = learn_and_listen(make(), rows)
    assert_same_end(found, expected)
    assert messages == [f"The worker {victim} was lost; its 1 of 2 shards are sent again."]


def test_nobody_is_left_for_a_while(processes: Processes, monkeypatch: Any) -> None:
    """For longer than an attempt to send rows lasts, and all attempts together."""
    monkeypatch.setattr(holding, "MAX_ATTEMPTS", 3)
    monkeypatch.setattr(holding, "WAIT_SECONDS", 0.5)
    processes.add_worker()
    X, Y, make = problem(120)
    expected = make().infer((X, Y))
    rows = gh.distributed.shards(processes.client, X, Y, num_shards=2)
    kill = processes.killer(rows.holders[0])
    monkeypatch.setattr(processes.client, "_timeout", 0.2)
    later = threading.Timer(3.0, processes.add_worker)

    def leave() -> None:
        kill()
        later.start()

    at_pass(rows, {3: leave})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gh.ClusterWarning)
        found = make().infer(rows)
    assert found.elbo == pytest.approx(expected.elbo, rel=EXACT)
    messages = [event.message for event in rows.events]
    assert [x for x in messages if x.startswith("No")] == ["No worker is left: waiting for one."]
    assert messages[-1].endswith("has joined.")


@pytest.mark.parametrize("seen", [True, False])
def test_all_who_have_read_rows_are_replaced(
    processes: Processes, monkeypatch: Any, seen: bool
) -> None:
    """In the middle of a sum, where it is waited for another; or between two sums, before anybody looks."""
    monkeypatch.setattr(holding, "WAIT_SECONDS", 0.5)
    processes.add_worker()
    X, Y, make = problem(120)
    expected = make().infer((X, Y))
    rows = gh.distributed.shards(processes.client, *as_given("read", X, Y), num_shards=2)
    kill = processes.killer(rows.holders[0])

    def replace() -> None:
        kill()
        while seen and len(rows.events) < 2:  # that it was lost, and that nobody is left
            time.sleep(0.05)
        while processes.client.nthreads():
            time.sleep(0.05)
        processes.add_worker()

    if seen:
        at_pass(rows, {3: replace})
    else:
        replace()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gh.ClusterWarning)
        found = make().infer(rows)
    assert found.elbo == pytest.approx(expected.elbo, rel=EXACT)
    said = " ".join(event.message for event in rows.events)
    assert ("No worker is left: waiting for one." in said) is seen
    assert said.endswith("has joined.")


def test_waiting_for_a_worker_can_be_ended(processes: Processes, monkeypatch: Any) -> None:
    """By one Ctrl-C in gh.fit; in a graph, which none reaches, by itself."""
    monkeypatch.setattr(holding, "WAIT_SECONDS", 0.5)
    processes.add_worker()
    X, Y, make = problem(120)
    model = make()
    rows = gh.distributed.shards(processes.client, X, Y)
    interrupt = threading.Timer(4.0, os.kill, (os.getpid(), signal.SIGINT))
    too_late = threading.Timer(15.0, processes.add_worker)
    kill = processes.killer(rows.holders[0])

    def leave() -> None:
        kill()
        interrupt.start()
        too_late.start()

    at_pass(rows, {30: leave})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gh.ClusterWarning)
        try:
            result = gh.fit(model, data=rows, progress=False)
            assert result.status == "interrupted"
        except KeyboardInterrupt:  # before the first iteration has ended
            pass
        assert rows.num_passes >= 30
        assert interrupt.finished.is_set()
        assert not too_late.finished.is_set()
        too_late.cancel()
        monkeypatch.setattr(holding, "MOST_SECONDS_IN_GRAPHS", 2.0)
        with pytest.raises(
            (gh.ClusterError, tf.errors.OpError), match="No worker has come to tcp://"
        ):
            learn(model, rows)


def work(folder: str, job: int) -> float:
    """Long enough to be killed at, and it is seen that it was begun."""
    Path(folder, f"{job}-{os.getpid()}").touch()
    time.sleep(0.3)
    return 2.0 * job


def test_worker_killed_at_a_job(processes: Processes, tmp_path: Path) -> None:
    for _ in range(2):
        processes.add_worker()
    folder = tmp_path / "begun"
    folder.mkdir()
    victim = sorted(processes.client.nthreads())[0]
    pid = processes.client.run(os.getpid, workers=[victim])[victim]

    def kill() -> None:
        while not list(folder.glob(f"*-{pid}")):
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.warns(gh.ClusterWarning, match=f"The worker {victim} was lost; what it had not"):
        found = run_jobs(processes.client, "work", work, str(folder), list(range(8)))
    killer.join()
    assert found == [2.0 * job for job in range(8)]


def test_scheduler_lost_at_a_job(processes: Processes, tmp_path: Path) -> None:
    processes.add_worker()

    def kill() -> None:
        while not list(tmp_path.glob("0-*")):
            time.sleep(0.01)
        processes.scheduler.kill()

    threading.Thread(target=kill).start()
    with pytest.raises(
        gh.ClusterError, match=r"was lost, or the client was closed\. Start a sched"
    ):
        run_jobs(processes.client, "work", work, str(tmp_path), list(range(8)))


def unreadable(size: int) -> Any:
    raise OSError("the disk is gone")


def test_rows_that_cannot_be_read_are_not_the_cluster_s_fault(processes: Processes) -> None:
    """What reading raises is raised as it is, and once."""
    processes.add_worker()
    X, Y, _ = problem(120)
    block = da.from_delayed(delayed(unreadable)(120), X.shape, float)
    with pytest.raises(OSError, match="the disk is gone"):
        gh.distributed.shards(processes.client, block, da.from_array(Y, chunks=120))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sent", "read"])
def test_two_of_three_killed_and_another_comes(processes: Processes, kind: str) -> None:
    for _ in range(3):
        processes.add_worker()
    X, Y, make = problem(120)
    expected = learn(make(), (X, Y))
    rows = gh.distributed.shards(processes.client, *as_given(kind, X, Y))
    assert len(set(rows.holders)) == 3
    first, second, third = rows.holders
    at_pass(
        rows,
        {
            15: processes.killer(first),
            30: processes.killer(second),
            45: processes.add_worker,
        },
    )
    found, messages = learn_and_listen(make(), rows)
    assert_same_end(found, expected)
    again = "sent" if kind == "sent" else "read"
    assert messages[0] == f"The worker {first} was lost; its 1 of 3 shards are {again} again."
    assert messages[1].startswith(f"The worker {second} was lost; its ")
    joined = messages[2].removeprefix("The worker ").removesuffix(" has joined.")
    assert len(messages) == 3
    assert set(rows.holders) == {third, joined}


@pytest.mark.slow
def test_scheduler_lost_and_the_fit_resumed(processes: Processes, tmp_path: Path) -> None:
    processes.add_worker()
    X, Y, make_all = problem(120)

    def make() -> gh.SparseCVIModel:
        model = make_all()
        gpflow.set_trainable(model.inducing_variable, False)  # with them there are several optima
        return model

    expected = gh.fit(make(), data=(X, Y), progress=False)
    model = make()
    rows = gh.distributed.shards(processes.client, X, Y)
    at_pass(rows, {40: processes.scheduler.kill})
    address = processes.client.scheduler.address
    with pytest.raises(gh.ClusterError, match=f"The scheduler at {address} was lost"):
        gh.fit(model, data=rows, progress=False)
    # The last good state: q(u) belongs to the hyperparameters, and predicts.
    assert not bool(model.sites.is_stale(model._hyperparameter_values()))
    copy = make()
    for mine, given in zip(copy.trainable_variables, model.trainable_variables, strict=True):
        mine.assign(given)
    copy.infer((X, Y))
    np.testing.assert_allclose(model.predict_y(X[:9])[0], copy.predict_y(X[:9])[0], atol=1e-6)
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "checkpoint"))
    (tmp_path / "other").mkdir()
    other, fresh = Processes(tmp_path / "other"), make()
    try:
        other.add_worker()
        tf.train.Checkpoint(model=fresh).read(path).assert_consumed()
        found = gh.fit(fresh, data=gh.distributed.shards(other.client, X, Y), progress=False)
    finally:
        other.close()
    assert found.status == expected.status == "converged"
    assert found.loss == pytest.approx(expected.loss, abs=1e-4)  # another way to the same optimum


def set_status(name: str, dask_worker: Any) -> None:
    dask_worker.status = Status[name]


def test_paused_worker_is_relieved_or_given_up(processes: Processes, monkeypatch: Any) -> None:
    """One without a limit of memory, which Dask neither pauses nor lets go on by itself."""
    monkeypatch.setattr(holding, "WAIT_SECONDS", 0.5)
    processes.add_worker(ROOT, "--memory-limit", "0")
    X, Y, make = problem(120)
    expected = learn(make(), (X, Y))
    rows = gh.distributed.shards(processes.client, X, Y)
    (worker,) = rows.holders
    client = processes.client
    later = threading.Timer(3.0, lambda: client.run(partial(set_status, "running")))

    def pause() -> None:
        client.run(partial(set_status, "paused"))
        later.start()

    at_pass(rows, {20: pause})
    found, messages = learn_and_listen(make(), rows)
    assert_same_end(found, expected)
    assert messages == [
        f"The worker {worker} was paused, as its memory is nearly full; it keeps fewer projections from "
        "now on, and finds them again for every sum."
    ]
    room = client.run(worker_memory.most_kept)[worker]
    assert room <= tuning.KEPT_PROJECTIONS // 2
    kept = client.run(lambda: [x.kept_bytes for x in shard._shards])[worker]
    assert 0 < max(kept) < room  # again
    client.run(shard.forget_projections)
    assert client.run(worker_memory.most_kept)[worker] == room // 2
    assert client.run(lambda: [x.kept_bytes for x in shard._shards])[worker] == [0] * len(kept)
    monkeypatch.setattr(holding, "MOST_PAUSES", 1)
    client.run(partial(set_status, "paused"))
    try:
        with pytest.raises(gh.ClusterError, match=f"The worker {worker} stays paused: its memory"):
            make().infer(rows)
    finally:
        client.run(partial(set_status, "running"))


def package(folder: Path, text: str) -> Path:
    """In the place of gpflow_hybrid."""
    (folder / "gpflow_hybrid").mkdir(parents=True)
    (folder / "gpflow_hybrid" / "__init__.py").write_text(text)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("embedded", [2**22, 0])
def test_workers_that_cannot_take_part(
    processes: Processes, tmp_path: Path, embedded: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr("gpflow_hybrid.distributed.rows.EMBEDDED_BYTES", embedded)
    monkeypatch.setattr(holding, "LOOK_SECONDS", 0.0)  # between one that joins and the next
    X, Y, make = problem(120)
    with pytest.raises(gh.ClusterError, match="has no workers"):
        gh.distributed.shards(processes.client, X, Y)
    missing = package(tmp_path / "missing", "raise ModuleNotFoundError('no gpflow_hybrid')")
    other = package(tmp_path / "other", "__version__ = '0.0.9'")
    processes.add_worker()
    expected = learn(make(), (X, Y))
    rows = gh.distributed.shards(processes.client, X, Y)
    joining = iter([missing, other])
    at_pass(rows, dict.fromkeys((15, 30), lambda: processes.add_worker(next(joining))))
    found, messages = learn_and_listen(make(), rows)
    assert_same_end(found, expected)
    assert len(messages) == 2
    assert "is not used: ModuleNotFoundError: no gpflow_hybrid" in messages[0]
    assert f"gpflow_hybrid 0.0.9 where this process has {gh.__version__}" in messages[1]
    words = r"\(and 1 more\) cannot compute with this process: .*pip install gpflow-hybrid=="
    with pytest.raises(gh.ClusterError, match=words):
        gh.distributed.shards(processes.client, X, Y)
