"""What fit(log_dir=...) writes, read back from the event files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

import gpflow_hybrid as gh
from gpflow_hybrid.training import History, NaturalGradientSteps, VEMTrainer
from tests.training.cases import PROBIT, binary, build, cheap_trainer, raising, restart

SCALARS = {
    "objectives/elbo": lambda h: h["elbo"],
    "objectives/ep_like": lambda h: h["ep_like"],
    "objectives/gap": lambda h: h["ep_like"] - h["elbo"],
    "objectives/trained": lambda h: h["objective"],
    "e_step/steps": lambda h: h["e_steps"],
    "e_step/residual": lambda h: h["e_residual"],
    "e_step/min_cavity_precision": lambda h: h["min_cavity_precision"],
    "m_step/gradient_norm": lambda h: h["gradient_norm"],
    "m_step/gain": lambda h: h["m_gain"],
    "predictions/loo_log_predictive_density": lambda h: h["loo_log_predictive_density"],
    "kernel.variance": lambda h: h[".kernel.variance"],
    "kernel.lengthscales": lambda h: h[".kernel.lengthscales"],
}


@pytest.fixture(scope="module")
def plane() -> VEMTrainer:
    return cheap_trainer(build(num_inputs=2))


def read(directory: Any) -> EventAccumulator:
    """Everything in a directory; nothing left out, as TensorBoard does with long runs."""
    return EventAccumulator(str(directory), size_guidance={"tensors": 0}).Reload()


def curve(events: EventAccumulator, tag: str) -> tuple[list[int], np.ndarray]:
    found = events.Tensors(tag)
    return [e.step for e in found], np.array([tf.make_ndarray(e.tensor_proto) for e in found])


def assert_curves(directory: Any, history: History) -> None:
    """Every scalar of every iteration, once, as in the history; TensorBoard's numbers are float32."""
    events = read(directory)
    assert set(events.Tags()["tensors"]) - {"fit"} == set(SCALARS)
    for tag, column in SCALARS.items():
        steps, found = curve(events, tag)
        assert steps == list(range(len(history))), tag
        np.testing.assert_allclose(found, column(history), rtol=1e-6, err_msg=tag)


def images(directory: Any) -> dict[int, bytes]:
    """The encoded images of the fit by step."""
    return {e.step: e.tensor_proto.string_val[2] for e in read(directory).Tensors("fit")}


def test_every_iteration_is_written(trainer: VEMTrainer, tmp_path: Path) -> None:
    result = restart(trainer).fit(4, log_dir=tmp_path / "run", image_period=2, progress=False)
    assert result.log_dir == str(tmp_path / "run")
    assert_curves(tmp_path / "run", result.history)
    pictures = images(tmp_path / "run")
    assert list(pictures) == [0, 2, 4]
    assert all(p.startswith(b"\x89PNG") for p in pictures.values())
    assert len(set(pictures.values())) == 3  # the fit moves


def test_two_inputs(plane: VEMTrainer, tmp_path: Path) -> None:
    result = restart(plane).fit(1, log_dir=tmp_path, image_period=1, progress=False)
    assert_curves(tmp_path, result.history)
    assert list(images(tmp_path)) == [0, 1]


def test_more_inputs_have_no_image(tmp_path: Path) -> None:
    kernel = gpflow.kernels.Matern32(lengthscales=np.ones(5))
    gpflow.set_trainable(kernel, False)  # there is no M-step to compile
    model = gh.CVIModel(binary(num_inputs=5), kernel, PROBIT)
    trainer = VEMTrainer(model, e_step=NaturalGradientSteps(1, 0.5))
    assert trainer.fit(1, log_dir=tmp_path, progress=False).status == "inferred"
    tags = read(tmp_path).Tags()["tensors"]
    assert "fit" not in tags
    assert "objectives/elbo" in tags
    assert "kernel.lengthscales[4]" in tags


def test_a_second_run_has_a_directory_of_its_own(trainer: VEMTrainer, tmp_path: Path) -> None:
    wanted = tmp_path / "run"
    first = restart(trainer).fit(1, log_dir=wanted, progress=False)
    contents = {p: p.read_bytes() for p in wanted.iterdir()}
    second = restart(trainer).fit(2, log_dir=str(wanted), progress=False)
    third = restart(trainer).fit(1, log_dir=f"{wanted}/", progress=False)
    assert [r.log_dir for r in (first, second, third)] == [
        str(wanted),
        f"{wanted}-2",
        f"{wanted}-3",
    ]
    assert {p: p.read_bytes() for p in wanted.iterdir()} == contents
    assert_curves(second.log_dir, second.history)


def test_a_directory_without_events_is_used(trainer: VEMTrainer, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert restart(trainer).fit(1, log_dir=tmp_path, progress=False).log_dir == str(tmp_path)


def test_a_directory_that_was_deleted_is_written_again(trainer: VEMTrainer, tmp_path: Path) -> None:
    restart(trainer).fit(1, log_dir=tmp_path / "run", progress=False)
    shutil.rmtree(tmp_path / "run")
    result = restart(trainer).fit(2, log_dir=tmp_path / "run", progress=False)
    assert_curves(tmp_path / "run", result.history)


def test_a_run_that_did_not_start_leaves_no_events(trainer: VEMTrainer, tmp_path: Path) -> None:
    restart(trainer).model.sites.lambda_2.assign(np.full((15, 1), -50.0))
    with pytest.raises(gh.NonFiniteError, match="iteration 0"):
        trainer.fit(1, log_dir=tmp_path / "run", progress=False)
    result = restart(trainer).fit(1, log_dir=tmp_path / "run", progress=False)
    assert result.log_dir == str(tmp_path / "run")


def test_the_present_directory_twice(
    trainer: VEMTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for _ in range(2):
        restart(trainer).fit(1, log_dir=".", progress=False)


# Resumption


def test_resuming_continues_the_same_curves(trainer: VEMTrainer, tmp_path: Path) -> None:
    kept = {"log_dir": tmp_path / "run", "checkpoint_dir": tmp_path / "saved", "progress": False}
    first = restart(trainer).fit(2, **kept)
    second = trainer.fit(4, resume=True, **kept)
    assert first.log_dir == second.log_dir == str(tmp_path / "run")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "saved"]
    assert_curves(tmp_path / "run", second.history)


def test_iterations_that_are_done_again_are_in_the_curves_once(
    trainer: VEMTrainer, tmp_path: Path
) -> None:
    kept = {
        "log_dir": tmp_path / "run",
        "checkpoint_dir": tmp_path / "saved",
        "checkpoint_period": 3,
        "progress": False,
    }

    with pytest.raises(ZeroDivisionError):  # as a kill would, with nothing saved since 3
        restart(trainer).fit(9, monitor=raising(ZeroDivisionError, 5), **kept)
    result = trainer.fit(6, resume=True, **kept)
    assert_curves(tmp_path / "run", result.history)


def test_a_relative_directory_is_found_from_elsewhere(
    trainer: VEMTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "saved"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    restart(trainer).fit(1, log_dir="run", checkpoint_dir=saved, progress=False)
    monkeypatch.chdir(tmp_path / "elsewhere")
    result = trainer.fit(2, log_dir="../run", checkpoint_dir=saved, resume=True, progress=False)
    assert result.log_dir is not None
    assert Path(result.log_dir).resolve() == (tmp_path / "run").resolve()


def test_a_resumption_without_log_dir_does_not_forget_it(
    trainer: VEMTrainer, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    restart(trainer).fit(1, log_dir=tmp_path / "run", checkpoint_dir=saved, progress=False)
    trainer.fit(2, checkpoint_dir=saved, resume=True, progress=False)
    result = trainer.fit(
        3, log_dir=tmp_path / "run", checkpoint_dir=saved, resume=True, progress=False
    )
    assert result.log_dir == str(tmp_path / "run")


# A user's own monitor


def test_a_users_monitor_beside_ours(trainer: VEMTrainer, tmp_path: Path) -> None:
    task = gpflow.monitor.ScalarToTensorBoard(
        str(tmp_path / "mine"), lambda: float(trainer.model.kernel.variance.numpy()), "variance"
    )
    monitor = gpflow.monitor.Monitor(gpflow.monitor.MonitorTaskGroup(task, period=2))
    result = restart(trainer).fit(4, log_dir=tmp_path / "ours", monitor=monitor, progress=False)
    steps, variance = curve(read(tmp_path / "mine"), "variance")
    assert [s for s in steps if s > 0] == [2, 4]
    np.testing.assert_allclose(variance[-2:], result.history[".kernel.variance"][[2, 4]], rtol=1e-6)
    assert_curves(tmp_path / "ours", result.history)
