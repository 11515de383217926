"""How results look on a terminal and in a notebook."""

from __future__ import annotations

import html
import importlib.util
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

NOTE_WIDTH = 90
"""Characters that a note beside a table may have; longer ones go below it."""

LINE_WIDTH = 100
"""Characters of a line below a table."""


class ShownAsText:
    """Shown by Python's prompt and by a notebook as it prints, in the letters of a table."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def in_rows(rows: Sequence[tuple[str, str]]) -> str:
    """Names and what they are, the latter in one column."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}".rstrip() for name, text in rows)


def with_footnotes(notes: Sequence[str]) -> tuple[list[str], list[str]]:
    """Notes for a column, and lines below the table: those too long for the column, each once."""
    long = list(dict.fromkeys(note for note in notes if len(note) > NOTE_WIDTH))
    marks = {note: f"[{i}]" for i, note in enumerate(long, start=1)}
    indent = " " * 4
    below = [
        textwrap.fill(f"{mark} {note}", LINE_WIDTH, subsequent_indent=indent)
        for note, mark in marks.items()
    ]
    return [marks.get(note, note) for note in notes], below


def values_in_short(value: Any) -> str:
    """A parameter for a table, the end of it left out where it is long."""
    array = np.asarray(value)
    if array.size == 1:
        return f"{array.item():.4g}"
    numbers = ", ".join(f"{x:.3g}" for x in array.ravel()[:4])
    return f"[{numbers}, …]" if array.size > 4 else f"[{numbers}]"


def is_notebook() -> bool:
    """Whether Python runs behind a notebook, which shows progress although it is no terminal."""
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell"


def progress_bar(progress: bool | None, **options: Any) -> tqdm:
    """A bar on a terminal and in a notebook, or as ``progress`` says; options are those of tqdm."""
    in_notebook = is_notebook()
    kind = tqdm
    if in_notebook and importlib.util.find_spec("ipywidgets") is not None:
        kind = importlib.import_module("tqdm.notebook").tqdm
    if progress is None:
        options["disable"] = False if in_notebook else None  # None: unless it is a terminal
    else:
        options["disable"] = not progress
    return kind(**options)
