"""The benchmark of a cluster on a few rows, and its model of the time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
from distributed import Client

from benchmarks import cluster, cluster_model
from benchmarks.cluster_model import Overhead, TimeModel


def test_times_of_a_few_rows(client: Client) -> None:
    found = cluster.measure(client, 300, 10, 1)
    assert found["workers"] == found["shards"] == 2
    assert found["passes"] > 3
    assert all(found[name] > 0.0 for name in ("loss_here", "loss_cluster", "sum_cluster"))


def test_generated_rows_are_the_same_every_time() -> None:
    X, Y = cluster.generated(250, 100)
    assert X.chunks == ((100, 100, 50), (8,))
    assert Y.shape == (250, 1)
    np.testing.assert_array_equal(X.compute(), cluster.generated(250, 100)[0].compute())
    assert set(np.unique(Y.compute())) == {0.0, 1.0}
    assert not np.array_equal(X[:100].compute(), X[100:200].compute())


TRUE = TimeModel(5e-3, 1e-3, 2e-9, 3e-10, 8e-10, 12.0, 0.0)


def records() -> tuple[list[dict[str, float]], list[Overhead]]:
    """What a cluster of this model would be measured to take."""
    times = [
        {
            "rows": rows,
            "workers": workers,
            "shards": 4 * workers,
            "inducing": 200,
            "passes": 12.0,
            "kept": kept,
            "loss_cluster": TRUE.loss(rows, workers, 4 * workers, 200, kept),
        }
        for rows in (50_000, 200_000)
        for workers in (1, 2)
        for kept in (True, False)
    ]
    overheads = [
        Overhead(M, S, TRUE.sum(0.0, 2, S, M, True)) for M in (20, 200) for S in (2, 8, 32)
    ]
    return times, overheads


def test_the_model_is_found_again_from_what_it_predicts() -> None:
    found = cluster_model.fitted(*records())
    np.testing.assert_allclose(found[:-1], TRUE[:-1], rtol=1e-6)
    assert found.error < 1e-6


def test_shards_are_counted_as_they_are_chosen() -> None:
    from gpflow_hybrid.distributed import sources

    for rows, workers in ((1_000, 2), (10**6, 2), (10**7, 4)):
        expected = sources._count(72 * rows, workers, None, rows)
        assert cluster_model.shards_of(rows, workers) == expected


def test_report_writes_between_the_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, results = tmp_path / "page.md", tmp_path / "results.json"
    page.write_text("before\n<!-- measured -->\nold\n<!-- end -->\nafter\n")
    monkeypatch.setattr(cluster, "PAGE", page)
    monkeypatch.setattr(cluster, "RESULTS", results)
    times, overheads = records()
    known = [{"inducing": x.inducing, "shards": x.shards, "sum": x.seconds} for x in overheads]
    cluster.save("overhead", [{**x, "loss": 0.2, "passes": 12.0} for x in known])
    cluster.save("times", times)
    assert set(json.loads(results.read_text())) == {"overhead", "times", "machine"}
    cluster.report(argparse.Namespace())
    text = page.read_text()
    assert text.startswith("before\n<!-- measured -->\n")
    assert text.endswith("<!-- end -->\nafter\n")
    assert "old" not in text
    assert "This is a prediction, not a measurement" in text
    seconds = TRUE.loss(10**9, 1000, cluster_model.shards_of(10**9, 1000), 200, False)
    assert (
        f"| 1,000,000,000 | 1000 | 4000 | found again | {seconds / 12:.3g} s | {seconds:.3g} s |"
        in text
    )
