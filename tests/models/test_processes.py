"""Threads that train and predict at once, processes by spawn, fork and joblib, and three hundred fits."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import gpflow
import numpy as np
import pytest

import gpflow_hybrid as gh

ROOT = Path(__file__).parents[2]


def problem(seed: int) -> gh.CVIModel:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(25, 2))
    Y = (X[:, :1] + 0.5 * rng.normal(size=(25, 1)) > 0.0).astype(float)
    return gh.CVIModel((X, Y), gpflow.kernels.Matern52(), gh.likelihoods.ProbitBernoulli())


def fitted(seed: int) -> tuple[float, np.ndarray]:
    """Loss and predictions of a fit, for other processes too."""
    model = problem(seed)
    loss = gh.fit(model, max_iterations=20, progress=False).loss
    return loss, model.predict_y(np.ones((2, 2)))[0].numpy()


def test_two_threads_train_while_four_predict() -> None:
    expected = [fitted(seed) for seed in range(2)]
    served = problem(7)
    served.infer()
    X = np.random.default_rng(0).normal(size=(50, 2))
    answers = [x.numpy() for x in served.predict_y(X)]

    def predict(_: int) -> list[np.ndarray]:
        return [x.numpy() for _ in range(20) for x in served.predict_y(X)]

    with ThreadPoolExecutor(6) as pool:
        training = [pool.submit(fitted, seed) for seed in range(2)]
        predicting = [pool.submit(predict, i) for i in range(4)]
        for future, (loss, mean) in zip(training, expected, strict=True):
            found = future.result(timeout=200)
            np.testing.assert_allclose(found[0], loss, rtol=1e-9)
            np.testing.assert_allclose(found[1], mean, rtol=1e-6)
        for future in predicting:
            found = future.result(timeout=200)
            np.testing.assert_allclose(found, answers * 20, rtol=1e-12)


def test_a_forked_child_refuses_in_words_instead_of_waiting_for_ever() -> None:
    model = problem(0)  # work has begun
    for attempt in (
        lambda: problem(1),
        model.infer,
        model.training_loss,
        lambda: model.predict_f(np.ones((1, 2))),
    ):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            words = "nothing was refused"
            try:
                attempt()
            except gh.ForkedProcessError as error:
                words = str(error)
            except BaseException as error:  # the test's own process goes on elsewhere
                words = repr(error)
            os.write(writer, words.encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, encoding="utf-8") as file:
            words = file.read()
        assert os.waitpid(child, 0)[1] == 0
        assert words.startswith("This process was forked after models had computed")
        assert "spawn" in words


def script(body: str) -> str:
    """What a fresh interpreter prints."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", body],
        capture_output=True,
        text=True,
        env=env,
        timeout=1800,  # three hundred fits take 45 s of a processor, and many times that beside other work
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_fork_before_the_first_model_computes() -> None:
    body = """
import os, gpflow_hybrid
child = os.fork()
if child == 0:
    from tests.models.test_processes import problem
    print(float(problem(0).training_loss()), flush=True)
    os._exit(0)
raise SystemExit(os.waitpid(child, 0)[1])
"""
    np.testing.assert_allclose(float(script(body)), float(problem(0).training_loss()), rtol=1e-9)


@pytest.mark.slow
def test_spawned_processes_fit() -> None:
    expected = [fitted(seed) for seed in range(2)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        found = list(pool.map(fitted, range(2)))
    for (loss, mean), (other_loss, other_mean) in zip(found, expected, strict=True):
        np.testing.assert_allclose(loss, other_loss, rtol=1e-6)
        np.testing.assert_allclose(mean, other_mean, rtol=1e-4)


@pytest.mark.slow
def test_joblib_fits() -> None:
    joblib = pytest.importorskip("joblib")
    body = """
import joblib
from tests.models.test_processes import fitted
print(*(loss for loss, _ in joblib.Parallel(2)(joblib.delayed(fitted)(i) for i in range(2))))
"""
    assert joblib
    found = [float(x) for x in script(body).split()]
    np.testing.assert_allclose(found, [fitted(seed)[0] for seed in range(2)], rtol=1e-6)


@pytest.mark.slow
def test_three_hundred_fits_take_no_more_memory_than_fifty() -> None:
    early, late = (int(x) for x in script("from tests.soak import main; main(300)").split())
    assert late <= 1.1 * early
