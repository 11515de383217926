"""BLAS has one thread wherever matrices are small, and as many as before afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf

import gpflow_hybrid as gh
from gpflow_hybrid import tuning
from gpflow_hybrid.inference import blocks, inducing
from gpflow_hybrid.linalg import threads
from gpflow_hybrid.linalg.host import call_on_host

ROOT = Path(__file__).parents[2]


class Controller:
    """How often and when threads are limited."""

    def __init__(self) -> None:
        self.inside = 0
        self.count = 0

    def limit(self, limits: int, user_api: str) -> Controller:
        assert (limits, user_api) == (1, "blas")
        return self

    def __enter__(self) -> None:
        self.inside += 1
        self.count += 1

    def __exit__(self, *_: Any) -> None:
        self.inside -= 1


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Controller:
    found = Controller()
    monkeypatch.setattr(threads, "_controller", lambda: found)
    monkeypatch.setattr(threads, "_has_one", lambda: False)  # whatever the tests were started with
    return found


def test_blas_that_was_started_with_one_thread_is_not_limited(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_has_one", lambda: True)
    with threads.blas_threads_for_rows(10):
        assert controller.inside == 0
    assert controller.count == 0


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"OMP_NUM_THREADS": "1"}, True),
        ({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "2"}, False),
        ({"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1"}, False),
        ({"OPENBLAS_NUM_THREADS": "1"}, False),  # another library may have more
    ],
)
def test_with_how_many_threads_blas_was_started(
    variables: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP", "OPENBLAS", "MKL", "BLIS"):
        monkeypatch.delenv(f"{name}_NUM_THREADS", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert threads._has_one.__wrapped__() is expected


def test_two_threads_are_left_where_they_pay(controller: Controller) -> None:
    for rows, limited in ((300, 1), (724, 1), (725, 0), (2000, 0)):
        with threads.blas_threads_for_rows(rows):
            assert controller.inside == limited
        assert controller.inside == 0


def test_the_limit_holds_as_long_as_anybody_is_inside(controller: Controller) -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with threads.blas_threads_for_rows(10):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with threads.blas_threads_for_rows(10):
        thread.start()
        assert entered.wait(10)
    assert controller.inside == 1
    leave.set()
    thread.join()
    assert controller.inside == 0
    assert controller.count == 1


def test_host_calls_of_graphs_are_limited_by_their_rows(controller: Controller) -> None:
    seen: list[int] = []

    def on_host(x: np.ndarray) -> tuple[np.ndarray]:
        seen.append(controller.inside)
        return (x,)

    call = tf.function(lambda x: call_on_host(on_host, [x], [x.shape]))
    for rows in (20, 1000):
        call(tf.zeros([rows, 2], tf.float64))
    assert seen == [1, 0]


@pytest.mark.parametrize("cls", [gh.CVIModel, gh.EPModel, gh.LaplaceModel])
def test_inference_and_training_are_limited(cls: Any, controller: Controller) -> None:
    seen: list[int] = []
    rng = np.random.default_rng(0)
    X = rng.normal(size=(20, 1))
    model = cls((X, (X > 0).astype(float)), gpflow.kernels.RBF(), gh.likelihoods.ProbitBernoulli())
    posterior = gh.priors.dense.lapack.posterior

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(controller.inside)
        return posterior(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gh.priors.dense.lapack, "posterior", watched)
        model.infer()
        model.training_loss()
        tf.function(model.training_loss, autograph=False)()
    assert len(seen) > 5
    assert set(seen) == {1}
    assert controller.inside == 0


def test_sizes_are_read_when_they_are_needed(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "THREADED_ELEMENTS", -1)
    with threads.blas_threads_for_rows(1):
        assert controller.count == 0


def test_sparse_models_are_limited(controller: Controller, monkeypatch: Any) -> None:
    """In all of M×M numbers and in blocks of rows, which threads take."""
    monkeypatch.setattr(tuning, "THREADED_PROJECTIONS", 1000)
    monkeypatch.setattr("gpflow_hybrid.inference.projected_rows.num_threads", lambda: 2)
    rng = np.random.default_rng(0)
    X = rng.normal(size=(600, 1))
    Y = (X > 0).astype(float)
    model = gh.SparseCVIModel(gpflow.kernels.RBF(), gh.likelihoods.ProbitBernoulli(), X[:9].copy())
    seen: list[tuple[int, str]] = []

    def watch(room: Any, name: str) -> None:
        function = getattr(room, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            seen.append((controller.inside, threading.current_thread().name))
            return function(*args, **kwargs)

        monkeypatch.setattr(room, name, watched)

    for room, name in (
        (inducing, "cholesky"),
        (inducing, "congruence"),
        (blocks, "solve_lower"),
    ):
        watch(room, name)
    with tf.GradientTape() as tape:
        loss = model.training_loss((X, Y))
    tape.gradient(loss, model.trainable_variables)
    model.infer((X, Y))
    model.ep_like_log_marginal((X, Y))
    batches = gh.SparseCVIModel(
        gpflow.kernels.RBF(), gh.likelihoods.ProbitBernoulli(), X[:9].copy(), num_data=600
    )
    batches.training_loss((X[:50], Y[:50]))
    batches.natgrad_step((X[:50], Y[:50]))
    assert {inside for inside, _ in seen} == {1}
    assert len({thread for _, thread in seen}) >= 3
    assert controller.inside == 0


def test_as_many_threads_as_blas_was_given() -> None:
    body = """
from gpflow_hybrid.linalg.threads import num_threads, one_blas_thread
with one_blas_thread():
    print(num_threads())
"""
    for given in (1, 2):
        env = {**os.environ, "OMP_NUM_THREADS": str(given), "TF_CPP_MIN_LOG_LEVEL": "3"}
        env.pop("OPENBLAS_NUM_THREADS", None)
        done = subprocess.run([sys.executable, "-c", body], cwd=ROOT, env=env, capture_output=True)
        assert int(done.stdout) == min(given, os.cpu_count() or 1)


def test_parallel_results_are_in_order_and_read_in_turn() -> None:
    read: list[int] = []
    release = threading.Event()

    def items() -> Iterator[int]:
        for i in range(9):
            read.append(i)
            yield i

    def slow_first(i: int) -> float:
        if i == 0:
            assert release.wait(10)
        if i == 1:
            release.set()
        return i / np.float64(0.0)  # no warning, in any thread

    found = threads.in_parallel(slow_first, items(), 2)
    assert np.isnan(next(found))
    assert read == [0, 1, 2]
    assert list(found) == [np.inf] * 8
    with pytest.raises(ZeroDivisionError):
        list(threads.in_parallel(lambda i: 1 // i, range(3), 2))


@pytest.mark.slow
def test_a_fit_beside_other_work_takes_at_most_three_times_as_long() -> None:
    limits = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    free = {name: value for name, value in os.environ.items() if name not in limits}
    command = [sys.executable, "-m", "benchmarks.busy", "--datasets", "sonar", "banana"]
    done = subprocess.run(command, cwd=ROOT, env=free, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
