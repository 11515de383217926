"""Whatever model meets whatever data, the answer is finite or an error of this package says why not."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from tests import fuzz

# The same cases in every run; what fails is reported as it is, since shrinking takes minutes.
always = {"deadline": None, "derandomize": True, "database": None, "report_multiple_bugs": False}
suppressed = list(HealthCheck)


@settings(max_examples=25, suppress_health_check=suppressed, **always)
@given(fuzz.cases)
def test_a_few_models(case: fuzz.Case) -> None:
    fuzz.check(case)


@pytest.mark.slow
@settings(max_examples=2000, suppress_health_check=suppressed, **always)
@given(fuzz.cases)
def test_two_thousand_models(case: fuzz.Case) -> None:
    fuzz.check(case)
