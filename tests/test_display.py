"""Results and progress on terminals and in notebooks."""

from __future__ import annotations

import io
import sys
import types
from typing import Any

import gpflow
import numpy as np
import pytest

import gpflow_hybrid as gh
from gpflow_hybrid.display import progress_bar, with_footnotes
from gpflow_hybrid.evidence import EvidenceComparison, EvidenceEstimate


def notebook(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    shell = type(name, (), {})()
    module = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", module)


@pytest.mark.parametrize(
    ("shell", "progress", "shown"),
    [
        ("ZMQInteractiveShell", None, True),
        ("ZMQInteractiveShell", False, False),
        ("TerminalInteractiveShell", None, False),
        ("TerminalInteractiveShell", True, True),
    ],
)
def test_progress_is_shown_in_notebooks(
    monkeypatch: pytest.MonkeyPatch, shell: str, progress: bool | None, shown: bool
) -> None:
    notebook(monkeypatch, shell)
    text = io.StringIO()  # no terminal
    with progress_bar(progress, total=2, file=text) as bar:
        bar.update(2)
    assert ("100%" in text.getvalue()) == shown


def test_long_notes_stand_below_a_table_once() -> None:
    long = "Not converged: " + 20 * "one word after the other "
    estimates = [
        EvidenceEstimate(name, -10.0, None, 0.1, note)
        for name, note in [("elbo", long), ("ep_like", long), ("ep", "short")]
    ]
    table = EvidenceComparison(tuple(estimates), 5)
    text = str(table)
    assert text.count("Not converged") == 1
    assert text.count("[1]") == 3
    assert max(map(len, text.splitlines())) <= 100
    assert "short" in text
    assert "<pre>" in table._repr_html_()
    assert with_footnotes(["a", "b"]) == (["a", "b"], [])


def test_html_shows_what_is_not_html() -> None:
    estimate = EvidenceEstimate("elbo", np.nan, None, 0.1, "no value: 1/v < 0 & less")
    assert "1/v &lt; 0 &amp; less" in EvidenceComparison((estimate,), 1)._repr_html_()


@pytest.mark.parametrize("cls", [gh.CVIModel, gh.EPModel, gh.LaplaceModel])
def test_single_precision_converges_to_what_it_can(cls: Any) -> None:
    gpflow.config.set_default_float(np.float32)
    gpflow.config.set_default_jitter(1e-4)
    rng = np.random.default_rng(0)
    X = rng.normal(size=(30, 2)).astype(np.float32)
    Y = (X[:, :1] > 0.0).astype(np.float32)
    model = cls((X, Y), gpflow.kernels.Matern52(), gh.likelihoods.ProbitBernoulli())
    result = model.infer()
    assert result.converged
    assert result.residual < 1.3e-4
