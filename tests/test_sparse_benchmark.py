"""The comparison of sparse models: two contenders on a few rows, its files, and what its tables say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gpflow
import numpy as np
import pytest

import gpflow_hybrid as gh
from benchmarks import (
    sparse,
    sparse_figure,
    sparse_floor,
    sparse_folds,
    sparse_grid,
    sparse_tables,
)
from benchmarks.peers import environments, minibatches, sparse_outcome
from benchmarks.peers.contenders import CONTENDERS
from benchmarks.peers.sparse_contenders import SPARSE
from benchmarks.peers.sparse_outcome import Clock


def fit(contender: str, **others: Any) -> dict[str, Any]:
    return {
        "contender": contender,
        "dataset": "banana",
        "num_data": 240,
        "num_inducing": 10,
        "train_z": False,
        "rows": None,
        "processor": "one",
        "threads": 2,
        "python": "3",
        "seconds": 9.0,
        "log_density": -0.25,
        "accuracy": 0.9,
        "rmse": None,
        "elbo": -80.0,
        "note": "",
        "trace": [(1.0, -0.6, -99.0), (2.0, -0.2515, -90.0), (3.0, -0.24, -80.001)],
        "versions": {"numpy": "1.0"},
        **others,
    }


def test_two_contenders_agree_and_are_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def compare() -> dict[sparse.Key, sparse.Record]:
        return sparse.compare(
            ["banana"],
            [10],
            ["sparse_cvi_squeezed", "sparse_svgp_lbfgs"],
            60.0,
            tmp_path,
            train_z=False,
            rows=300,
            peers=False,
            again=False,
        )

    ours, svgp = compare().values()
    assert ours["converged"]
    assert svgp["converged"]
    assert ours["num_data"] == 240
    # L-BFGS over all of q(u) ends a little earlier than over the hyperparameters alone.
    assert ours["elbo"] == pytest.approx(svgp["elbo"], abs=0.01)
    assert ours["log_density"] == pytest.approx(svgp["log_density"], abs=1e-3)
    assert ours["log_lengthscale"] == pytest.approx(svgp["log_lengthscale"], abs=0.02)
    assert ours["elbo"] == pytest.approx(ours["objective"], abs=1e-4)
    assert {"gpflow", "tensorflow"} <= set(svgp["versions"])
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert list(compare().values()) == [ours, svgp]
    assert capsys.readouterr().out == ""
    assert len((tmp_path / "fits.jsonl").read_text().splitlines()) == 2
    assert "| GPflow SVGP, L-BFGS | " in (tmp_path / "fits.md").read_text()


def test_a_regressor_without_inducing_inputs() -> None:
    record = sparse.run("sparse_boosting", "protein", None, 60.0, rows=500, threads=1)
    assert 0.5 < record["rmse"] < 1.1
    assert -1.8 < record["log_density"] < -1.0
    assert record["elbo"] is None


def test_names_are_not_those_of_the_other_comparison() -> None:
    assert not set(SPARSE) & set(CONTENDERS)


@pytest.mark.parametrize("dataset", sparse.DATASETS)
def test_rows_are_split_and_standardised(dataset: str) -> None:
    data = sparse.split(dataset, 1000)
    assert len(data["X_train"]) == len(data["Y_train"]) == 800
    assert len(data["X_test"]) == len(data["Y_test"]) == 200
    np.testing.assert_allclose(data["X_train"].mean(axis=0), 0.0, atol=1e-10)
    labels = set(np.unique(data["Y_train"])) == {0.0, 1.0}
    assert labels != (dataset in sparse.REGRESSION)
    if not labels:
        np.testing.assert_allclose(data["Y_train"].std(), 1.0)


def test_the_last_of_equal_fits_counts(tmp_path: Path) -> None:
    path = tmp_path / "some" / "fits.jsonl"
    assert sparse.load(path) == {}
    for record in (
        fit("sparse_cvi_elbo"),
        fit("sparse_cvi_elbo", seconds=5.0),
        fit("sparse_cvi_elbo", train_z=True),
    ):
        sparse.append(path, record)
    first, second = sparse.load(path).values()
    assert first["seconds"] == 5.0
    assert second["train_z"]


def test_the_first_time_its_density_was_seen() -> None:
    assert sparse_tables.arrival(fit("sparse_cvi_elbo")) == 2.0
    assert sparse_tables.arrival(fit("sparse_cvi_elbo", log_density=-0.2)) == 9.0
    assert sparse_tables.arrival(fit("sparse_boosting", trace=[])) is None


def test_the_first_time_ours_had_its_bound() -> None:
    peer, ours = fit("sparse_svgp_lbfgs"), fit("sparse_cvi_squeezed")
    late = {**peer, "trace": [(6.0, -0.2, -80.002)]}  # near enough for 240 data
    assert sparse_tables.against_ours(peer, [peer, ours]) == ("3", "1.0")
    assert sparse_tables.against_ours(late, [peer, ours]) == ("3", "2.0")
    assert sparse_tables.against_ours({**late, "elbo": -90.0}, [ours]) == ("2", "3.0")
    assert sparse_tables.against_ours(late, [{**ours, "trace": []}]) == ("9", "0.7")
    below = {**ours, "trace": [], "elbo": -81.0}
    assert sparse_tables.against_ours(peer, [peer, below]) == ("never", "–")
    assert sparse_tables.against_ours(peer, [fit("sparse_cvi_elbo")]) == ("–", "–")
    assert sparse_tables.against_ours(ours, [peer, ours]) == ("–", "–")
    regression = {**peer, "dataset": "protein"}
    assert sparse_tables.against_ours(regression, [fit("sparse_cvi_elbo")]) == ("3", "1.0")


def test_tables() -> None:
    rows = [
        fit("sparse_svgp_lbfgs", note="stopped after 600 s"),
        fit("sparse_cvi_elbo"),
        fit("sparse_cvi_elbo", num_inducing=20),
        fit("sparse_boosting", num_inducing=None, trace=[], elbo=None),
        {**fit("sparse_gpytorch_adam"), "failure": "not installed; --peers installs it"},
    ]
    text = sparse.markdown(rows)
    first, second = text.split("## banana")[1:]
    assert "N = 240, M = 10, inducing inputs fixed" in first
    assert first.index("SparseCVIModel, ELBO") < first.index("GPflow SVGP, L-BFGS")
    assert "| 9 | 2 | -0.2500 | 0.9000 | -80.0 | 3 | – | – | stopped after 600 s |" in first
    assert "| not installed; --peers installs it |" in first
    assert "M = 20" in second
    for part in (first, second):
        assert (
            "| scikit-learn HistGradientBoosting | 9 | – | -0.2500 | 0.9000 | – | – | – | – |  |"
            in part
        )
    assert text.rstrip().endswith("one, 2 threads. Python 3, numpy 1.0.")


def test_a_peer_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "ROOT", tmp_path)
    record = sparse.run("sparse_gpytorch_adam", "banana", 5, 10.0, rows=100)
    assert record["failure"] == "not installed; --peers installs it"
    assert record["installed"] is False


class Time:
    """A clock for the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(sparse_outcome.time, "perf_counter", lambda: self.now)

    def passes(self, seconds: float, value: float = 0.0) -> float:
        self.now += seconds
        return value


def test_looking_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time(monkeypatch)
    clock = Clock(10.0)
    clock.look(lambda: (time.passes(50.0, -1.0), -9.0))
    assert clock.trace == []
    time.passes(1.0)
    clock.look(lambda: (time.passes(50.0, -0.5), -8.0))
    assert clock.trace == [(1.0, -0.5, -8.0)]
    assert clock.seconds == pytest.approx(1.0)
    assert not clock.is_over
    time.passes(9.5)
    assert clock.is_over
    assert sparse_outcome.finished(clock, False, "said") == {
        "converged": False,
        "note": "stopped after 10 s",
    }
    assert sparse_outcome.finished(clock, True, "said") == {"converged": True, "note": ""}


def test_batches_cover_all_rows_and_the_loop_ends() -> None:
    seen: list[np.ndarray] = []

    def step(count: int, rows: np.ndarray) -> float:
        assert count == len(seen)
        seen.append(rows)
        return 1000.0 * 0.5 ** (count // 2)

    found = minibatches.minimise(step, 1100, Clock(60.0), lambda: (0.0, 0.0))
    assert found["converged"]
    assert [len(rows) for rows in seen[:2]] == [550, 550]
    np.testing.assert_array_equal(np.sort(np.concatenate(seen[:2])), np.arange(1100))
    assert len(seen) == found["evaluations"]
    assert 400 < len(seen) < 500


def test_a_loop_that_fails_says_where() -> None:
    with pytest.raises(FloatingPointError, match="the loss is nan at step 0"):
        minibatches.minimise(lambda *_: float("nan"), 600, Clock(60.0), lambda: (0.0, 0.0))


def test_floor_counts_nothing_twice() -> None:
    ratios = sparse_floor.measure(600, 20, 1, "ep_like")
    assert ratios.floor_seconds > 0.0
    assert ratios.posterior > 0.0
    # A loss holds several evaluations of the posterior.
    assert ratios.loss > ratios.posterior
    assert 2 <= ratios.evaluations <= 12


def test_grid_has_rows_of_both_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    infer = gh.SparseCVIModel.infer

    def spy(model: gh.SparseCVIModel, data: Any, **kwargs: Any) -> Any:
        seen.append(np.mean(data[1]))
        return infer(model, data, **kwargs)

    monkeypatch.setattr(gh.SparseCVIModel, "infer", spy)
    counts, failures = sparse_grid.count("magic", 10, "ep_like", 2, 300)
    assert len(counts) == 4
    assert failures == 0
    assert all(0.4 < share < 0.9 for share in seen)  # 0.65 of all


def folds_of(dataset: str = "banana", num_inducing: int = 5, **others: Any) -> list[dict[str, Any]]:
    """Records of all folds with both objectives; EP-like is better by 0.01 and a little."""
    return [
        {
            **sparse_folds.Fit(dataset, num_inducing, objective, fold, None, 100)._asdict(),
            "num_data": 240,
            "test_log_density": -0.3 + 0.02 * fold + 0.01 * gain + 1e-4 * fold * gain,
            "accuracy": 0.9 + 0.01 * (gain if fold == 2 else 0),
            "log_lengthscale": float(fold),
            "log_sigma": 1.0 + gain,
            "evaluations": 10 + 5 * gain,
            "status": "max_iterations" if fold == 4 else "converged",
            **others,
        }
        for fold in range(5)
        for gain, objective in enumerate(sparse_folds.OBJECTIVES)
    ]


def test_five_folds_are_compared_in_pairs() -> None:
    partial = folds_of(num_inducing=10)[:-1]
    lines = sparse_folds.markdown([*folds_of("usps", 20), *partial, *folds_of()]).splitlines()
    banana, usps = lines[-2:]
    assert banana.startswith(
        "| banana | 240 | 5 | -0.2600 ± 0.0283 | **-0.2498 ± 0.0284** | +0.0102 ± 0.0001 | < 0.001 |"
    )
    # One fold of five differs: t = 1 with four degrees of freedom.
    assert (
        "| 0.9000 ± 0.0000 | 0.9020 ± 0.0040 | 0.374 | 2.00, 1.00 | 2.00, 2.00 | 10 / 15 |"
        in banana
    )
    assert banana.endswith("| 8 converged, 2 at the limit of 100 |")
    assert usps.startswith("| usps | 240 | 20 |")
    assert "| banana | 240 | 10 |" not in "\n".join(lines)  # a fold is missing


def test_a_run_over_folds_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sparse_folds, "NUM_FOLDS", 2)
    fits = list(sparse_folds.plan(["banana"], [10], sparse_folds.OBJECTIVES, 200, 30))
    sparse_folds.carry_out(fits[:3], tmp_path)
    assert "| banana, 200 rows | 200 | 10 |" not in (tmp_path / "folds.md").read_text()
    capsys.readouterr()
    sparse_folds.carry_out(fits, tmp_path)
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert "| banana, 200 rows | 200 | 10 |" in (tmp_path / "folds.md").read_text()
    found = sparse_folds.load(tmp_path / "folds.jsonl")
    assert list(found) == fits
    for fit, record in found.items():
        # The record is that of the model it says: its objective has its optimum there.
        assert record["status"] == "converged"
        assert record["num_data"] == 200
        problem = sparse_folds.load_problem("banana", fit.fold, 200)
        value = value_at(problem, fit.objective, record["log_lengthscale"], record["log_sigma"])
        assert value == pytest.approx(record["value"], abs=1e-6)
        for step in (-0.1, 0.1):
            aside = value_at(
                problem, fit.objective, record["log_lengthscale"] + step, record["log_sigma"]
            )
            assert aside < value


def value_at(problem: Any, objective: Any, log_lengthscale: float, log_sigma: float) -> float:
    kernel = gpflow.kernels.Matern52(np.exp(2.0 * log_sigma), np.exp(log_lengthscale))
    Z = gh.inducing_points(problem.X_train, 10)
    likelihood = gh.likelihoods.ProbitBernoulli()
    model = gh.SparseCVIModel(kernel, likelihood, Z, objective=objective)
    return -float(model.training_loss((problem.X_train, problem.Y_train)))


def test_a_figure_of_both_comparisons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for record in (*folds_of(), *folds_of(num_inducing=10), *folds_of("usps")):
        sparse.append(tmp_path / "folds.jsonl", record)
    drawn: list[Any] = []
    monkeypatch.setattr(sparse_figure.plt, "close", drawn.append)
    assert sparse_figure.draw("banana", tmp_path).stat().st_size > 10_000
    (axis,) = drawn[-1].axes
    assert list(axis.get_xticks()) == [5, 10]
    for record in (
        fit("sparse_svgp_lbfgs"),
        fit("sparse_svgp_lbfgs", num_inducing=20, log_density=-0.2),
        fit("sparse_cvi_ep_like", rows=200),
        fit("sparse_boosting", num_inducing=None, trace=[], log_density=-0.3),
        {**fit("sparse_gpytorch_adam"), "failure": "not installed"},
    ):
        sparse.append(tmp_path / "fits.jsonl", record)
    sparse_figure.draw("banana", tmp_path)
    _, right = drawn[-1].axes
    svgp, boosting = right.lines
    # Seconds to the final density, less 0.002; only what is seen at the end has the other one.
    np.testing.assert_array_equal(svgp.get_xydata(), [[2.0, -0.25], [9.0, -0.2]])
    assert set(boosting.get_ydata()) == {-0.3}
    assert [text.get_text() for text in right.texts] == ["10", "20"]


def test_natural_gradients_take_the_largest_step_size_that_runs() -> None:
    tried = []

    def attempt(lr: float) -> float:
        tried.append(lr)
        if lr > 0.02:
            raise FloatingPointError
        if lr > 0.005:
            raise ValueError
        return lr

    assert minibatches.first_that_runs(attempt, (ValueError,)) == minibatches.NATGRAD_LRS[-1]
    assert tried == list(minibatches.NATGRAD_LRS)
    with pytest.raises(ValueError):
        minibatches.first_that_runs(lambda lr: attempt(0.01), (ValueError,))
    steps = [minibatches.natgrad_lr(step, 0.01) for step in (0, 20, 1000)]
    np.testing.assert_allclose(steps, [0.001, 0.01, 0.01])
