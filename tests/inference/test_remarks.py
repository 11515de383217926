"""What a training loss says beside its value: each kind once, whatever its numbers."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from gpflow_hybrid.errors import ConvergenceWarning
from gpflow_hybrid.inference.options import COLLAPSE, TRAINING
from gpflow_hybrid.inference.remarks import Remark, Remarks, remarks_on


def said(remarks: Remarks, residual: float, *found: Remark) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        remarks.make(residual, found)
    assert all(w.category is ConvergenceWarning for w in caught)
    return [str(w.message) for w in caught]


def test_each_kind_is_said_once_whatever_its_numbers() -> None:
    remarks = Remarks()
    one, two = "{} of the first kind: {}.", "{} of the second."
    assert said(remarks, 0.0, Remark(one, (1, 2))) == ["1 of the first kind: 2."]
    assert said(remarks, 0.0, Remark(one, (3, 4)), Remark(two, (5,))) == ["5 of the second."]
    remarks.forget()
    assert said(remarks, 0.0, Remark(one, (6, 7))) == ["6 of the first kind: 7."]


def test_a_silent_one_says_and_counts_nothing() -> None:
    remarks = Remarks(silent=True)
    assert said(remarks, 1.0, Remark("Anything.")) == []
    assert remarks.count() == 0


@pytest.mark.parametrize(("residual", "is_said"), [(0.5, False), (2.0, True), (np.inf, False)])
def test_a_residual_is_said_where_inference_had_a_start(residual: float, is_said: bool) -> None:
    found = said(Remarks(), residual * TRAINING.warn_residual)
    assert [f"{residual * TRAINING.warn_residual:.1e}" in x for x in found] == [True] * is_said


def test_remarks_on_a_value_and_its_gradient() -> None:
    error = COLLAPSE.gradient_error
    assert remarks_on(0, 9, error) == ()
    wide, inexact = map(str, remarks_on(3, 9, 2.0 * error))
    assert "3 of 9 data" in wide
    assert f"{2.0 * error:.1e}" in inexact
