"""The documentation site: it builds without a warning, has every public name, and its examples run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import io
import shutil
import warnings
from pathlib import Path
from types import ModuleType

import jupytext
import pytest
from sphinx.application import Sphinx
from sphinx.util.inventory import InventoryFile

import gpflow_hybrid as gh

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TUTORIALS = sorted(
    path for path in (ROOT / "examples" / "tutorials").glob("*.py") if path.stem != "tutorial_tools"
)


@pytest.fixture(scope="session")  # Sphinx registers its classes once
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site, its tutorials without outputs: running them is other tests' business."""
    source = tmp_path_factory.mktemp("docs") / "source"
    for page in ("CONTRIBUTING.md", "benchmarks/results/sklearn.md"):
        (source.parent / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / page, source.parent / page)
    shutil.copytree(DOCS, source, ignore=shutil.ignore_patterns("_build", "*.ipynb"))
    for tutorial in TUTORIALS:
        notebook = jupytext.read(tutorial, fmt="py:percent")
        jupytext.write(notebook, source / "tutorials" / f"{tutorial.stem}.ipynb")
    output, complaints = source.parent / "html", io.StringIO()
    with warnings.catch_warnings():
        # What extensions call of Sphinx is theirs; a warning about the pages is an error.
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        app = Sphinx(
            str(source),
            str(source),
            str(output),
            str(source.parent / "doctrees"),
            "html",
            status=None,
            warning=complaints,
        )
        app.build()
    assert complaints.getvalue() == ""
    return output


def public_names() -> dict[str, object]:
    """Every public object by its full name, those of the public modules included."""
    names: dict[str, object] = {}
    modules: list[ModuleType] = [gh, importlib.import_module("gpflow_hybrid.sklearn")]
    while modules:
        module = modules.pop()
        for name in module.__all__:
            value = getattr(module, name)
            if isinstance(value, ModuleType):
                modules.append(importlib.import_module(value.__name__))
            else:
                names[f"{module.__name__}.{name}"] = value
    return names


def documented_names(site: Path) -> set[str]:
    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    return {
        name for role, names in inventory.data.items() if role.startswith("py:") for name in names
    }


def members(cls: type) -> set[str]:
    """Public methods, properties and fields that this package defines, inherited ones included."""
    found: set[str] = set()
    for part in cls.__mro__:
        if part.__module__.startswith("gpflow_hybrid"):
            fields = getattr(part, "__dataclass_fields__", {})
            defined = {n for n, x in vars(part).items() if callable(x) or isinstance(x, property)}
            found |= {name for name in {*fields, *defined} if not name.startswith("_")}
    return found


def test_every_public_name_and_member_is_on_the_site(site: Path) -> None:
    documented = documented_names(site)
    missing = []
    for name, value in public_names().items():
        short = name.rpartition(".")[2]
        if not any(found.endswith(f".{short}") for found in documented):
            missing.append(name)
        if inspect.isclass(value):
            owners = [part.__name__ for part in value.__mro__]
            on_site = {
                found.rpartition(".")[2]
                for found in documented
                if found.rpartition(".")[0].rpartition(".")[2] in owners
            }
            missing += [f"{name}.{member}" for member in members(value) - on_site]
    assert not missing


@pytest.mark.parametrize("name", sorted(public_names()))
def test_every_public_name_has_a_docstring_of_its_own(name: str) -> None:
    value = public_names()[name]
    text = vars(value).get("__doc__") if inspect.isclass(value) else inspect.getdoc(value)
    assert text
    assert not text.startswith(f"{name.rpartition('.')[2]}(")  # what a dataclass writes itself


def test_every_tutorial_is_on_the_site(site: Path) -> None:
    index = (DOCS / "tutorials" / "index.md").read_text()
    for tutorial in TUTORIALS:
        assert f"\n{tutorial.stem}\n" in index
        assert (site / "tutorials" / f"{tutorial.stem}.html").exists()


@pytest.mark.parametrize(
    "page",
    [page for page in sorted(DOCS.rglob("*.md")) if ">>> " in page.read_text()],
    ids=lambda page: page.stem,
)
def test_the_lines_behind_the_prompt_print_what_they_say(page: Path) -> None:
    failed, attempted = doctest.testfile(str(page), module_relative=False)
    assert attempted > 0
    assert failed == 0
