"""The benchmark of integrated hyperparameters: what it runs, keeps and says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import integration
from benchmarks.integration_report import difference, report


def record(gain: float, index: int = 0, **others: Any) -> dict[str, Any]:
    common = {"accuracy": 0.9, "evaluations": 20, "seconds": 2.0}
    return {
        "dataset": "sonar",
        "size": 50,
        "index": index,
        "method": "ep_like",
        "num_rows": 50,
        "optimised": {"log_density": -0.4, **common},
        "mode": {"log_density": -0.39, "accuracy": 0.9},
        "integrated": {
            "log_density": -0.4 + gain,
            **common,
            "seconds": 9.0,
            "evaluations": 80,
            "converged": True,
        },
        **others,
    }


@pytest.mark.parametrize(
    ("gains", "words"),
    [
        ((0.02, 0.021, 0.019), "helps"),
        ((-0.02, -0.021, -0.019), "hurts"),
        ((0.02, -0.03, 0.02), "within the noise"),
        ((0.02, 0.02), "too few"),
    ],
)
def test_differences_are_paired_and_judged(gains: tuple[float, ...], words: str) -> None:
    text, found = difference([record(gain, i) for i, gain in enumerate(gains)])
    assert found == words
    assert text.startswith(f"{sum(gains) / len(gains):+.4f}")


def test_the_report_has_costs_and_says_what_is_missing() -> None:
    text = report([record(0.02, i) for i in range(3)])
    assert (
        "| sonar | 50 | EP-like | 3 | -0.4000 | -0.3900 | -0.3800 | +0.0200 ± 0.0000 | helps |"
        in text
    )
    assert "| 4.5 (4.5) | 4.0 (4.0) |" in text
    assert f"3 of {len(integration.cases())} training sets" in text
    assert (
        "cost 4.5 fits in the median, 4.5 at the 90 % quantile, and more than 15 in 0 of 3." in text
    )


def test_every_case_is_there_once_and_first_seeds_come_first() -> None:
    cases = integration.cases()
    assert len(set(cases)) == len(cases) == 6 * 3 * 3 * 20 + 4 * 3 * 5
    for size in (0, *integration.SIZES):
        seeds = [c.index for c in cases if c.size == size and c.dataset == "sonar"]
        assert seeds == sorted(seeds)


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.jsonl"
    done = integration.cases()[0]
    path.write_text(json.dumps(record(0.0, **done._asdict())) + '\n{"dataset": "so\n')
    computed = []

    def compute(case: integration.Case) -> dict[str, Any]:
        computed.append(case)
        return record(0.0, **case._asdict())

    monkeypatch.setattr(integration, "compute", compute)
    monkeypatch.setattr(integration.gc, "collect", int)  # of all that other tests have left
    integration.run(path, 60.0, ["sonar"], [50], ["elbo", "ep_like", "ep"])
    assert done not in computed
    assert len(computed) == 59
    assert len(integration.load(path)) == 60
    integration.run(path, 60.0, ["sonar"], [50], ["elbo", "ep_like", "ep"])
    assert len(computed) == 59


def test_training_and_test_rows_are_apart() -> None:
    X, Y, X_test, Y_test = integration.split(integration.Case("sonar", 50, 0, "elbo"))
    assert (len(X), len(Y), len(X_test), len(Y_test)) == (50, 50, 158, 158)
    assert not {tuple(row) for row in X} & {tuple(row) for row in X_test}
    X, _, X_test, _ = integration.split(integration.Case("sonar", 0, 4, "elbo"))
    assert (len(X), len(X_test)) == (167, 41)
