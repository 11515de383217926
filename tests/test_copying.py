"""Copies are made again where a cache has lost an entry meanwhile."""

from __future__ import annotations

from typing import Any

import gpflow
import pytest

from gpflow_hybrid import copying


def test_a_copy_is_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts, deepcopy = [], copying.deepcopy

    def fails_once(module: Any) -> Any:
        attempts.append(module)
        if len(attempts) == 1:
            raise KeyError("an entry that is gone")
        return deepcopy(module)

    monkeypatch.setattr(copying, "deepcopy", fails_once)
    kernel = gpflow.kernels.RBF(variance=3.0)
    found = copying.copied(kernel)
    assert len(attempts) == 2
    assert found is not kernel
    assert float(found.variance.numpy()) == pytest.approx(3.0)


def test_an_error_that_stays_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Any) -> Any:
        raise KeyError("no copy")

    monkeypatch.setattr(copying, "deepcopy", fails)
    with pytest.raises(KeyError, match="no copy"):
        copying.copied(gpflow.kernels.RBF())
