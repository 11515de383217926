"""Which cases run in every test run: a trace takes seconds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def by_speed(cases: Iterable[tuple[Any, ...]], fast: list[tuple[Any, ...]]) -> list[Any]:
    """All cases as parameters, those that are not in ``fast`` marked as slow."""
    cases = list(cases)
    assert all(case in cases for case in fast)
    return [pytest.param(*c, marks=() if c in fast else pytest.mark.slow) for c in cases]
