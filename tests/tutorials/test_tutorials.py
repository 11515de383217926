"""Every tutorial in its short form: it runs, draws, and what its text claims holds."""

from __future__ import annotations

import importlib
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import matplotlib
import pytest

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from tests.tutorials import claims

FOLDER = Path(__file__).parents[2] / "examples" / "tutorials"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "tutorial_tools")

CLASSES = dict.fromkeys(
    ("more_data", "sparse_multiclass", "a_million_rows"), ("SVGP", "SparseCVIModel")
)
"""GPflow's class and ours, where they are not the dense ones."""


def classes_of(name: str) -> tuple[str, str]:
    return CLASSES.get(name, ("VGP", "CVIModel"))


@pytest.fixture(autouse=True)
def _as_in_a_notebook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPFLOW_HYBRID_SHORT_TUTORIALS", "1")
    yield
    plt.close("all")


# A line search may try hyperparameters at which the EP-like value does not exist.
@pytest.mark.filterwarnings("ignore:A cavity does not exist:gpflow_hybrid.ConvergenceWarning")
@pytest.mark.parametrize("name", NAMES)
def test_the_short_run_bears_out_what_the_text_says(name: str) -> None:
    run = runpy.run_path(str(FOLDER / f"{name}.py"))
    axes = [axis for number in plt.get_fignums() for axis in plt.figure(number).axes]
    assert axes
    assert all(axis.has_data() for axis in axes)
    assert classes_of(name)[0] in {row.name for row in run["comparison"].rows}
    getattr(claims, name)(run)


@pytest.mark.parametrize("name", NAMES)
def test_it_opens_as_a_notebook_and_ends_with_the_same_model_in_both_classes(name: str) -> None:
    jupytext = importlib.import_module("jupytext")
    notebook = jupytext.read(FOLDER / f"{name}.py")
    first, *others = notebook.cells
    assert first.cell_type == "markdown"
    assert first.source.startswith("# ")
    sections = [i for i, cell in enumerate(others) if "## " in cell.source.replace("###", "")]
    last = others[sections[-1] :]
    assert "## The same model in `{}` and in `{}`".format(*classes_of(name)) in last[0].source
    code = "".join(cell.source for cell in last if cell.cell_type == "code")
    assert "compare(models, test_data" in code
    assert "plt.subplots(" in code


def test_full_and_short(monkeypatch: pytest.MonkeyPatch) -> None:
    tools: ModuleType = importlib.import_module("tutorial_tools")
    assert tools.shortened(2, 1) == 1
    monkeypatch.delenv(tools.SHORT)
    assert tools.shortened(2, 1) == 2
