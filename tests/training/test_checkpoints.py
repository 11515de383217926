"""Runs that are killed, resumed, refused: nothing is lost, and nothing of another run overwritten."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

import gpflow_hybrid as gh
from gpflow_hybrid.errors import CheckpointError
from gpflow_hybrid.training import (
    GradientSteps,
    HeldOutDensity,
    InferToConvergence,
    LBFGSSteps,
    NaturalGradientSteps,
    TimeBudget,
    VEMTrainer,
)
from gpflow_hybrid.training.monitoring import Monitoring
from tests.training.cases import (
    NEVER,
    PROBIT,
    Measuring,
    assert_identical,
    binary,
    build,
    calling,
    cheap_trainer,
    columns,
    hyperparameters,
    raising,
    restart,
    values,
)

ROOT = Path(__file__).parents[2]
FILE = "vem.ckpt"


# Killed


class Server:
    """Starts processes that train; see ``killed.py``."""

    def __init__(self) -> None:
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
        single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.training.killed"],
            cwd=ROOT,
            env={**os.environ, **quiet, **single},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def _answer(self, word: str) -> int:
        assert self._process.stdout is not None
        found, _, number = self._process.stdout.readline().partition(" ")
        assert found == word
        return int(number)

    def start(self, directory: Path, num_iterations: int, period: int, m_step: str) -> int:
        directory.mkdir(exist_ok=True)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{directory} {num_iterations} {period} {m_step}\n")
        self._process.stdin.flush()
        return self._answer("started")

    def end(self) -> int:
        return self._answer("ended")

    def outcome(self, directory: Path, *arguments: Any) -> dict[str, np.ndarray]:
        self.start(directory, *arguments)
        assert self.end() == 0
        with np.load(directory / "outcome.npz") as archive:
            return dict(archive)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def written(directory: Path) -> int:
    """When the checkpoint was last written, in nanoseconds."""
    path = directory / FILE
    return path.stat().st_mtime_ns if path.exists() else 0


def kill(server: Server, directory: Path, arguments: Any, seconds: float, after_save: bool) -> int:
    """Start, wait for this run's first checkpoint if so asked, then so long, and kill."""
    before = written(directory)
    pid = server.start(directory, *arguments)
    patience = time.monotonic() + 60.0
    while after_save and written(directory) == before and time.monotonic() < patience:
        time.sleep(1e-3)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    return server.end()


def test_a_killed_run_ends_as_one_that_was_not(server: Server, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arguments = (60, 1, "adam")
    expected = server.outcome(tmp_path / "whole", *arguments)
    assert len(expected["iteration"]) == 61
    assert len(np.unique(expected["measured"])) == 61
    assert any(name.startswith("optimizer") for name in expected)

    directory = tmp_path / "killed"
    # Before anything is saved, then within the second that the iterations take.
    assert kill(server, directory, arguments, rng.uniform(0.0, 1.0), False) == -signal.SIGKILL
    codes = [kill(server, directory, arguments, rng.uniform(0.0, 0.15), True) for _ in range(2)]
    assert -signal.SIGKILL in codes  # a quick machine may have come to the end
    assert_identical(server.outcome(directory, *arguments), expected)


@pytest.mark.slow
@pytest.mark.parametrize("m_step", ["adam", "lbfgs"])
@pytest.mark.parametrize("period", [1, 3, 7])
def test_killed_many_times(server: Server, tmp_path: Path, m_step: str, period: int) -> None:
    rng = np.random.default_rng(period)
    arguments = (150, period, m_step)
    expected = server.outcome(tmp_path / "whole", *arguments)
    for _ in range(12):
        kill(
            server, tmp_path / "killed", arguments, rng.uniform(0.0, 0.2), bool(rng.random() < 0.8)
        )
    assert_identical(server.outcome(tmp_path / "killed", *arguments), expected)


# Resumed in this process


def scramble(trainer: VEMTrainer) -> VEMTrainer:
    """As another process would have it: other values, which the checkpoint overrules."""
    restart(trainer)
    trainer.model.kernel.variance.assign(7.0)
    trainer.model.sites.lambda_1.assign(np.ones((15, 1)))
    return trainer


@pytest.fixture(scope="module")
def whole(trainer: VEMTrainer) -> tuple[Any, dict[str, Any]]:
    """Six iterations without interruption."""
    result = restart(trainer).fit(6, progress=False)
    return result, values(trainer.model)


def assert_is_whole(trainer: VEMTrainer, result: Any, whole: Any) -> None:
    expected, state = whole
    assert_identical(columns(result.history), columns(expected.history))
    assert_identical(values(trainer.model), state)
    assert (result.status, result.message) == (expected.status, expected.message)
    assert result.num_iterations == result.best_iteration == 6


def test_a_finished_run_goes_on_with_more_iterations(
    trainer: VEMTrainer, whole: Any, tmp_path: Path
) -> None:
    first = restart(trainer).fit(3, checkpoint_dir=tmp_path, progress=False)
    result = scramble(trainer).fit(6, checkpoint_dir=tmp_path, resume=True, progress=False)
    assert_is_whole(trainer, result, whole)
    assert result.history[3].seconds == first.history[3].seconds
    assert [p.name for p in tmp_path.iterdir()] == [FILE]

    # Resumed again, it is finished: the same result, and nothing is computed or written.
    content = (tmp_path / FILE).read_bytes()
    again = scramble(trainer).fit(6, checkpoint_dir=tmp_path, resume=True, progress=False)
    assert_is_whole(trainer, again, whole)
    assert again.seconds == result.seconds
    assert (tmp_path / FILE).read_bytes() == content
    fewer = scramble(trainer).fit(2, checkpoint_dir=tmp_path, resume=True, progress=False)
    assert fewer.num_iterations == 6


@pytest.mark.parametrize("period", [1, 2, 4])
def test_an_interrupted_run_goes_on(
    trainer: VEMTrainer, whole: Any, tmp_path: Path, period: int
) -> None:
    kept = {"checkpoint_dir": tmp_path, "checkpoint_period": period, "progress": False}
    first = restart(trainer).fit(6, monitor=raising(KeyboardInterrupt, 3), **kept)
    assert first.status == "interrupted"
    assert first.num_iterations == 3
    result = scramble(trainer).fit(6, resume=True, **kept)
    assert_is_whole(trainer, result, whole)


def test_an_interrupted_iteration_gives_its_random_numbers_back(
    trainer: VEMTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt_after_drawing() -> None:
        np.random.normal()
        tf.random.get_global_generator().normal([])
        raise KeyboardInterrupt

    restart(trainer)
    monkeypatch.setattr(trainer, "_move_hyperparameters", interrupt_after_drawing)
    np.random.seed(1)
    tf.random.get_global_generator().reset_from_seed(1)
    expected = np.random.get_state()[1].copy(), tf.random.get_global_generator().state.numpy()
    trainer.fit(3, checkpoint_dir=tmp_path, progress=False)
    np.testing.assert_array_equal(np.random.get_state()[1], expected[0])
    np.testing.assert_array_equal(tf.random.get_global_generator().state, expected[1])


def test_what_a_killed_write_left_is_removed_on_resumption(
    trainer: VEMTrainer, tmp_path: Path
) -> None:
    left = tmp_path / f"{FILE}.123.tmp"
    left.write_bytes(b"half")
    restart(trainer).fit(1, checkpoint_dir=tmp_path, progress=False)
    assert left.exists()  # it may be another run's
    trainer.fit(2, checkpoint_dir=tmp_path, resume=True, progress=False)
    assert not left.exists()


def test_a_log_dir_is_known_before_anything_is_written(
    trainer: VEMTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise ZeroDivisionError

    arguments = {"log_dir": tmp_path / "log", "checkpoint_dir": tmp_path, "progress": False}
    with monkeypatch.context() as patch:
        patch.setattr(Monitoring, "write", killed)
        with pytest.raises(ZeroDivisionError):
            restart(trainer).fit(2, **arguments)
    result = trainer.fit(2, resume=True, **arguments)
    assert result.log_dir == str(tmp_path / "log")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log", FILE]


@pytest.mark.parametrize(("period", "saved"), [(1, 4), (2, 4), (3, 3), (9, 0)])
def test_checkpoint_period(
    trainer: VEMTrainer, whole: Any, tmp_path: Path, period: int, saved: int
) -> None:
    kept = {"checkpoint_dir": tmp_path, "checkpoint_period": period, "progress": False}
    with pytest.raises(ZeroDivisionError):
        restart(trainer).fit(6, monitor=raising(ZeroDivisionError, 5), **kept)
    done: list[int] = []
    result = scramble(trainer).fit(6, resume=True, monitor=calling(done.append), **kept)
    assert done == list(range(saved + 1, 7))
    assert_is_whole(trainer, result, whole)


def test_the_best_iteration_survives(trainer: VEMTrainer, tmp_path: Path) -> None:
    rule = Measuring(lambda model: -float(model.kernel.variance.numpy()))  # it grows
    restart(trainer, rule).fit(2, checkpoint_dir=tmp_path, progress=False)
    restart(trainer, rule).model.kernel.variance.assign(7.0)
    result = trainer.fit(4, checkpoint_dir=tmp_path, resume=True, progress=False)
    assert result.best_iteration == 0
    assert_identical(hyperparameters(trainer.model), result.history[0].hyperparameters)
    np.testing.assert_allclose(trainer.model.elbo(), result.history[0].elbo, rtol=1e-10)


def test_rules_without_a_best_leave_the_last(trainer: VEMTrainer, tmp_path: Path) -> None:
    rule = Measuring(lambda model: -float(model.kernel.variance.numpy()))
    restart(trainer, rule).fit(2, checkpoint_dir=tmp_path, progress=False)
    result = restart(trainer).fit(4, checkpoint_dir=tmp_path, resume=True, progress=False)
    assert result.best_iteration == 4


def test_a_held_out_set_can_be_added_later(trainer: VEMTrainer, tmp_path: Path) -> None:
    restart(trainer).fit(2, checkpoint_dir=tmp_path, progress=False)
    rule = HeldOutDensity(binary(9), patience=50)
    result = restart(trainer, rule).fit(4, checkpoint_dir=tmp_path, resume=True, progress=False)
    assert result.num_iterations == 4


def test_a_time_budget_has_been_used_before(trainer: VEMTrainer, tmp_path: Path) -> None:
    first = restart(trainer).fit(3, checkpoint_dir=tmp_path, progress=False)
    rule = TimeBudget(0.5 * first.seconds)
    result = restart(trainer, rule).fit(9, checkpoint_dir=tmp_path, resume=True, progress=False)
    assert result.status == "stopped"
    assert result.num_iterations == 3
    assert result.seconds == first.seconds


def test_random_state(trainer: VEMTrainer, tmp_path: Path) -> None:
    generator = tf.random.get_global_generator()
    np.random.seed(3)
    np.random.normal()  # leaves the second of a pair behind
    generator.reset_from_seed(5)
    restart(trainer).fit(1, checkpoint_dir=tmp_path, progress=False)
    expected = np.random.normal(size=3), generator.normal([3]).numpy()
    np.random.seed(4)
    generator.reset_from_seed(6)
    restart(trainer).fit(1, checkpoint_dir=tmp_path, resume=True, progress=False)
    np.testing.assert_array_equal(np.random.normal(size=3), expected[0])
    np.testing.assert_array_equal(generator.normal([3]), expected[1])


def test_progress_goes_on(
    trainer: VEMTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    restart(trainer).fit(2, checkpoint_dir=tmp_path, progress=False)
    restart(trainer).fit(3, checkpoint_dir=tmp_path, resume=True, progress=True)
    printed = capsys.readouterr().err
    assert "2/3" in printed
    assert "3/3" in printed
    assert "1/3" not in printed


def test_resume_without_a_checkpoint_begins(
    trainer: VEMTrainer, whole: Any, tmp_path: Path
) -> None:
    directory = tmp_path / "not" / "yet"
    result = restart(trainer).fit(6, checkpoint_dir=directory, resume=True, progress=False)
    assert_is_whole(trainer, result, whole)
    assert (directory / FILE).exists()


def test_another_trainer_of_the_same_kind_resumes(trainer: VEMTrainer, tmp_path: Path) -> None:
    restart(trainer).fit(1, checkpoint_dir=tmp_path, progress=False)
    cheap_trainer().fit(1, checkpoint_dir=tmp_path, resume=True, progress=False)


# Refused


@pytest.fixture(scope="module")
def content(trainer: VEMTrainer, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A good checkpoint."""
    directory = tmp_path_factory.mktemp("good")
    restart(trainer).fit(1, checkpoint_dir=directory, progress=False)
    return (directory / FILE).read_bytes()


def refuse(
    trainer: VEMTrainer, directory: Path, content: bytes, match: str, resume: bool = True
) -> None:
    """An error, and neither the file nor the model is touched."""
    (directory / FILE).write_bytes(content)
    before = values(trainer.model)
    with pytest.raises(CheckpointError, match=match):
        trainer.fit(2, checkpoint_dir=directory, resume=resume, progress=False)
    assert (directory / FILE).read_bytes() == content
    assert [p.name for p in directory.iterdir()] == [FILE]
    assert_identical(values(trainer.model), before)


def test_truncated(trainer: VEMTrainer, content: bytes, tmp_path: Path) -> None:
    for length in (0, 1, 26, 27, 40, 59, 60, len(content) // 2, len(content) - 1):
        refuse(trainer, tmp_path, content[:length], "(truncated|not a checkpoint).*not overwritten")


def test_damaged(trainer: VEMTrainer, content: bytes, tmp_path: Path) -> None:
    for position in (30, 70, len(content) // 2, len(content) - 5):
        damaged = bytearray(content)
        damaged[position] ^= 1
        refuse(trainer, tmp_path, bytes(damaged), "truncated or damaged.*not overwritten")
    refuse(trainer, tmp_path, content + b"more", "truncated or damaged.*not overwritten")


def test_foreign(trainer: VEMTrainer, tmp_path: Path) -> None:
    for foreign in (b"PK\x03\x04 a model of someone else", b"\x00" * 500, "λ".encode() * 99):
        refuse(
            trainer, tmp_path, foreign, "not a checkpoint.*not overwritten.*another checkpoint_dir"
        )


def test_not_overwritten_unasked(trainer: VEMTrainer, content: bytes, tmp_path: Path) -> None:
    match = "has the checkpoint of another run.*resume=True.*not overwritten"
    refuse(trainer, tmp_path, content, match, resume=False)
    refuse(trainer, tmp_path, b"whatever", match, resume=False)
    with pytest.raises(CheckpointError, match="resume=True needs checkpoint_dir"):
        trainer.fit(1, resume=True)


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "objective": "elbo",
        "e_step": NaturalGradientSteps(5, 0.5),
        "m_step": LBFGSSteps(1),
        "stopping": NEVER,
    } | changes


def fixed(part: gpflow.Module) -> Any:
    gpflow.set_trainable(part, False)
    return part


def fixed_model(kernel: Any = None, data: Any = None, **kwargs: Any) -> gh.CVIModel:
    """Nothing to train: quick to save, and a resumption that is not refused computes nothing."""
    kernel = gpflow.kernels.Matern32() if kernel is None else kernel
    return gh.CVIModel(binary() if data is None else data, fixed(kernel), PROBIT, **kwargs)


@pytest.fixture(scope="module")
def of_fixed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = tmp_path_factory.mktemp("fixed")
    VEMTrainer(fixed_model(), **settings()).fit(1, checkpoint_dir=directory, progress=False)
    return (directory / FILE).read_bytes()


def test_the_same_again_is_not_refused(of_fixed: bytes, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(of_fixed)
    result = VEMTrainer(fixed_model(), **settings()).fit(
        1, checkpoint_dir=tmp_path, resume=True, progress=False
    )
    assert result.status == "inferred"


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: VEMTrainer(fixed_model(), **settings(objective="ep_like")), "its objective is"),
        (
            lambda: VEMTrainer(fixed_model(), **settings(e_step=NaturalGradientSteps(6, 0.5))),
            "its e_step is .*num_steps=5.*here it is .*num_steps=6",
        ),
        (lambda: VEMTrainer(fixed_model(), **settings(e_step=InferToConvergence())), "its e_step"),
        (lambda: VEMTrainer(fixed_model(), **settings(m_step=LBFGSSteps(2))), "its m_step is"),
        (
            lambda: VEMTrainer(fixed_model(), **settings(m_step=GradientSteps(1, "sgd", 0.1))),
            "its m_step is LBFGSSteps",
        ),
        (lambda: VEMTrainer(fixed_model(data=binary(1)), **settings()), "its data is"),
        (lambda: VEMTrainer(fixed_model(data=binary(num=14)), **settings()), "its data is"),
        (lambda: VEMTrainer(build(), **settings()), "its variables is"),
        (
            lambda: VEMTrainer(
                gh.CVIModel(
                    binary(), fixed(gpflow.kernels.Matern32()), gpflow.likelihoods.Bernoulli()
                ),
                **settings(),
            ),
            "its likelihood is ProbitBernoulli, here it is Bernoulli",
        ),
        (
            lambda: VEMTrainer(
                gh.EPModel(binary(), fixed(gpflow.kernels.Matern32()), PROBIT),
                **settings(e_step=InferToConvergence()),
            ),
            "its model is CVIModel, here it is EPModel",
        ),
        pytest.param(
            lambda: VEMTrainer(fixed_model(gpflow.kernels.SquaredExponential()), **settings()),
            "another run",
        ),
        pytest.param(
            lambda: VEMTrainer(fixed_model(gpflow.kernels.Matern32(variance=2.0)), **settings()),
            "another run",
        ),
        pytest.param(
            lambda: VEMTrainer(
                fixed_model(mean_function=fixed(gpflow.functions.Constant(1.0))), **settings()
            ),
            "another run",
        ),
    ],
    ids=[
        "objective",
        "number_of_e_steps",
        "kind_of_e_step",
        "number_of_m_steps",
        "kind_of_m_step",
        "data",
        "number_of_data",
        "variables",
        "likelihood",
        "model",
        "kernel",
        "fixed_value",
        "mean_function",
    ],
)
def test_a_checkpoint_of_another_run(
    make: Callable[[], VEMTrainer], match: str, of_fixed: bytes, tmp_path: Path
) -> None:
    refuse(make(), tmp_path, of_fixed, match)


def test_a_checkpoint_made_without_the_prior(
    trainer: VEMTrainer, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prior = tfp.distributions.Gamma(np.float64(2.0), np.float64(3.0))
    monkeypatch.setattr(trainer.model.kernel.variance, "prior", prior)
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match="another run"):
        trainer.fit(1, checkpoint_dir=tmp_path, resume=True, progress=False)


def test_a_directory_that_cannot_be_is_refused_first(trainer: VEMTrainer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    before = values(restart(trainer).model)
    with pytest.raises(CheckpointError, match="cannot be a directory"):
        trainer.fit(1, checkpoint_dir=tmp_path / "file", progress=False)
    assert_identical(values(trainer.model), before)


# Written


def test_a_write_that_fails_leaves_the_previous_one(
    trainer: VEMTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restart(trainer).fit(1, checkpoint_dir=tmp_path, progress=False)
    content = (tmp_path / FILE).read_bytes()

    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        trainer.fit(3, checkpoint_dir=tmp_path, resume=True, progress=False)
    assert (tmp_path / FILE).read_bytes() == content
    assert [p.name for p in tmp_path.iterdir()] == [FILE]


def test_a_measurement_may_be_a_tensor(trainer: VEMTrainer, tmp_path: Path) -> None:
    rule = Measuring(lambda model: tf.constant(1.0))
    restart(trainer, rule).fit(1, checkpoint_dir=tmp_path, progress=False)


def test_a_checkpoint_of_other_data_says_how_many_rows_there_are(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def trainer(num: int) -> gh.VEMTrainer:
        X = rng.normal(size=(num, 1))
        data = (X, (X > 0.0).astype(float))
        model = gh.CVIModel(data, gpflow.kernels.Matern52(), gh.likelihoods.ProbitBernoulli())
        return gh.VEMTrainer(model)

    trainer(15).fit(1, checkpoint_dir=tmp_path, progress=False)
    message = r"its data is 15 rows of 1 inputs and 1 outputs, .* here it is 10 rows of 1 inputs"
    with pytest.raises(gh.CheckpointError, match=message):
        trainer(10).fit(1, checkpoint_dir=tmp_path, resume=True, progress=False)
