"""The table's statistics, and the paper's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import t as student

from examples.paper import report, tables
from examples.paper.plans import TablePlan
from examples.paper.store import ResultStore

RNG = np.random.default_rng(0)
VI = RNG.normal(-0.4, 0.05, size=5)
BETTER = VI + RNG.normal(0.02, 0.002, size=5)
NOISE = VI + np.array([0.02, -0.01, 0.01, -0.02, 0.01])


def filled(directory: Path, plan: TablePlan, ours: np.ndarray) -> ResultStore:
    store = ResultStore(directory)
    for method, densities in (("collapsed-vi", VI), ("collapsed-ours", ours), ("ep", VI)):
        for fold, density in zip(plan.folds, densities, strict=False):
            result = {
                "accuracy": 0.8,
                "test_log_density": float(density),
                "status": "stopped" if fold == 2 else "converged",
                "training_seconds": 2.0,
            }
            store.save(plan.fit(method, fold), {"result": result, "seconds": 2.5})
    return store


def test_the_test_is_the_paired_one() -> None:
    difference = BETTER - VI
    statistic = difference.mean() / (difference.std(ddof=1) / np.sqrt(5))
    expected = 2.0 * student.sf(abs(statistic), df=4)
    np.testing.assert_allclose(tables.paired_p_value(VI, BETTER), expected, rtol=1e-10)
    assert tables.paired_p_value(VI, VI) == 1.0
    assert tables.paired_p_value(VI[:1], BETTER[:1]) == 1.0


@pytest.mark.parametrize(("ours", "bold"), [(BETTER, True), (NOISE, False)])
def test_lines(tmp_path: Path, ours: np.ndarray, bold: bool) -> None:
    plan = TablePlan("sonar")
    published, collapsed, ep = tables.lines(plan, filled(tmp_path, plan, ours))
    assert [line.way for line in (published, collapsed, ep)] == ["published", "collapsed", "ep"]
    assert collapsed.log_density[1].is_better is bold
    assert not collapsed.log_density[0].is_better
    row = tables.as_rows([collapsed])[0]
    assert row[5].startswith("**") is bold
    assert not row[4].startswith("**")
    np.testing.assert_allclose(
        [collapsed.log_density[0].mean, collapsed.log_density[0].deviation], [VI.mean(), VI.std()]
    )
    assert collapsed.p_values is not None
    assert collapsed.p_values[0] == 1.0  # equal accuracies
    assert collapsed.endings == "8 converged, 2 stopped"
    assert ep.p_values is None
    assert str(published.log_density[1]) == "**-0.340 ± 0.015**"


def test_limits_and_few_rows_are_told(tmp_path: Path) -> None:
    plan = TablePlan("sonar", paper_iterations=7, max_data=40)
    store = ResultStore(tmp_path)
    for method in ("paper-vi", "paper-ours"):
        for fold in plan.folds:
            result: dict[str, Any] = {"accuracy": 0.8, "test_log_density": -0.4}
            result["training_seconds"] = 1.0
            result["status"] = "converged" if fold == 0 else "max_iterations"
            store.save(plan.fit(method, fold), {"result": result, "seconds": 1.0})
    _, line = tables.lines(plan, store)
    assert line.endings == "2 converged, 8 at the limit of 7"
    assert line.dataset == "sonar, 40 rows"


def test_one_fold_is_told_and_not_tested(tmp_path: Path) -> None:
    plan = TablePlan("sonar", folds=(2,))
    _, line, _ = tables.lines(plan, filled(tmp_path, plan, BETTER))
    assert line.dataset == "sonar, 1 of 5 folds"
    assert line.p_values is None
    assert tables.as_rows([line])[0][6:8] == ("", "")


def test_incomplete_folds_are_not_shown(tmp_path: Path) -> None:
    plan = TablePlan("sonar")
    store = filled(tmp_path, plan, BETTER)
    store.path(plan.fit("collapsed-ours", 3)).unlink()
    assert [line.way for line in tables.lines(plan, store)] == ["published", "ep"]
    assert tables.incomplete(plan, store) == ["collapsed-ours"]


def test_the_worse_of_the_two_is_never_bold(tmp_path: Path) -> None:
    plan = TablePlan("sonar")
    _, collapsed, _ = tables.lines(plan, filled(tmp_path, plan, 2.0 * VI - BETTER))
    assert [cell.is_better for cell in collapsed.log_density] == [True, False]


def test_what_is_no_better_than_a_coin_is_remarked(tmp_path: Path) -> None:
    plan = TablePlan("sonar")
    store = filled(tmp_path, plan, BETTER)
    assert report._remarks([], [(plan, [])], store) == []
    for fold in plan.folds:
        found = store.load(plan.fit("ep", fold))
        assert found is not None
        found["result"]["test_log_density"] = -0.693
        store.save(plan.fit("ep", fold), found)
    ((dataset, text),) = report._remarks([], [(plan, [])], store)
    assert (dataset, text) == ("sonar", "EP, L-BFGS: no better than a coin where training ended")
