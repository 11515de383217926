"""The front door: short, its code runs, and links lead somewhere in a checkout without notebooks."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import records, sklearn_compare

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def links(page: Path) -> list[str]:
    """Where a page's links and pictures lead, those to the web and within the page left out."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    found = re.findall(r"\]\(([^)\s]+)\)", text)
    return [link for link in found if not link.startswith(("http", "#", "mailto"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_words(page: Path) -> None:
    # The site fills in a title for ``[](page.md)``; a reader of the checkout sees nothing there.
    assert re.findall(r"(?<!\!)\[\]\([^)]*\)", page.read_text()) == []


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    missing = []
    for link in links(page):
        target = (page.parent / link.partition("#")[0]).resolve()
        # A notebook may be there where tutorials have been run, and is not in a checkout.
        if not target.exists() or target.suffix == ".ipynb":
            missing.append(link)
    assert missing == []


def test_its_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL):
        exec(compile(code, "README.md", "exec"), namespace)
    printed = capsys.readouterr().out
    assert "Converged" in printed
    density = float(next(x for x in printed.splitlines() if x.startswith("-0.")))
    assert -0.35 < density < -0.2  # rows not seen
    assert np.shape(namespace["probability"]) == (42, 1)


def test_the_comparison_on_the_site_is_what_the_command_wrote() -> None:
    text = (ROOT / "docs/benchmarks.md").read_text()
    path = re.search(r"```{include} (\S*sklearn.md)", text).group(1)
    assert (ROOT / "docs" / path).resolve() == sklearn_compare.RESULTS / "sklearn.md"
    found = records.load(sklearn_compare.RESULTS / "sklearn.json")
    assert (sklearn_compare.RESULTS / "sklearn.md").read_text() == sklearn_compare.table(found)


def test_rows_of_its_tables_are_those_of_the_benchmarks() -> None:
    rows = [x for x in README.splitlines() if x.startswith("|") and re.search(r"\d\.\d", x)]
    assert len(rows) == 9
    benchmarks = (ROOT / "docs/benchmarks.md").read_text().splitlines()
    assert [row for row in rows if row not in benchmarks] == []


def test_pictures_of_the_site_are_those_of_the_results() -> None:
    for copy, original in (
        ("surfaces-sonar.png", "examples/paper/results/figures/surfaces-sonar.png"),
        ("fits.png", "benchmarks/results/fits.png"),
        ("density-magic.png", "benchmarks/results/sparse/density-magic.png"),
    ):
        assert (ROOT / "docs/_static" / copy).read_bytes() == (ROOT / original).read_bytes()


def test_versions_agree() -> None:
    text = (ROOT / "gpflow_hybrid/version.py").read_text()
    version = re.search(r'__version__ = "(.+)"', text).group(1)
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()
    assert not re.search(r"^version = \d", (ROOT / "setup.cfg").read_text(), flags=re.MULTILINE)
