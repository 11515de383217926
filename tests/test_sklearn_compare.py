"""The comparison with scikit-learn's classifier: what it records, how it goes on, what the table says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import records, sklearn_compare


def test_a_fold_of_iris(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    command = ["iris", "--folds", "1", "--contenders", "hybrid", "laplace", "--output"]
    sklearn_compare.main([*command, str(tmp_path)], said.append)
    found = records.load(tmp_path / "sklearn.json")
    ours, theirs = (found["iris", name, 0] for name in ("hybrid", "laplace"))
    assert ours["log_loss"] < theirs["log_loss"]
    assert ours["num_data"] == theirs["num_data"] == 120
    assert ours["num_classes"] == 3
    monkeypatch.setattr(sklearn_compare, "run_fold", lambda *_: pytest.fail("it is there already"))
    sklearn_compare.main([*command, str(tmp_path)], said.append)
    assert "| iris |" not in said[-1]  # four folds are missing


def test_the_table_has_means_and_whole_times() -> None:
    rows = [
        {
            "dataset": "sonar",
            "contender": name,
            "fold": fold,
            "num_data": 166,
            "num_classes": 2,
            "log_loss": loss + 0.1 * fold,
            "accuracy": 0.8,
            "seconds": seconds,
        }
        for name, loss, seconds in (("hybrid", 0.1, 0.5), ("laplace", 0.2, 0.25))
        for fold in range(5)
    ]
    text = sklearn_compare.table({records.key(row): row for row in rows})
    cells = [cell.strip() for cell in text.splitlines()[-1].strip("|").split("|")]
    expected = "sonar 166 2 0.300 0.400 – 0.800 0.800 – 2.50 1.25 – 0.50"
    assert cells == expected.split()


def test_a_fold_that_takes_too_long_is_stopped_and_said(tmp_path: Path) -> None:
    said: list[str] = []
    command = ["diabetes", "--contenders", "laplace", "--limit", "0.05", "--output", str(tmp_path)]
    sklearn_compare.main(command, said.append)
    found = records.load(tmp_path / "sklearn.json")
    assert list(found) == [("diabetes", "laplace", 0)]  # the others are left out
    stopped = found["diabetes", "laplace", 0]
    assert stopped["log_loss"] is None
    assert stopped["seconds"] >= 0.04  # the timer counts in ticks of some milliseconds
    assert "stopped" in said[0]
    ours = {**stopped, "contender": "hybrid", "log_loss": 0.5, "accuracy": 0.8, "seconds": 2.0}
    rows = [stopped | {"seconds": 30.0}, *({**ours, "fold": fold} for fold in range(5))]
    text = sklearn_compare.table({records.key(row): row for row in rows})
    cells = [cell.strip() for cell in text.splitlines()[-1].strip("|").split("|")]
    assert cells[3:6] == ["0.500", "–", "–"]
    assert cells[9:] == ["10.00", "> 30", "–", "> 3.00"]


def test_bundled_sets_have_labels() -> None:
    X, y = sklearn_compare.load("banana")
    assert X.shape == (2000, 2)
    assert set(y) == {0, 1}
    with pytest.raises(SystemExit):
        sklearn_compare.main(["mnist"])
