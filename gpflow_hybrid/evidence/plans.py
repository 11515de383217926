"""The arguments of annealing, checked before anything is computed."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
from gpflow.base import RegressionData
from gpflow.utilities import is_variable

from ..errors import InvalidDataError
from ..models import SiteModel
from ..validation import is_integer, is_number, prepare_data
from .results import Average

Start = Literal["posterior", "prior"]

DEFAULTS: dict[str, dict[str, Any]] = {
    "posterior": {"num_temperatures": 200, "power": 3.0, "block_size": 8},
    "prior": {"num_temperatures": 8000, "power": 4.0, "block_size": 0},
}
"""What depends on where annealing starts."""

LEAST = {
    "num_chains": 1,
    "num_temperatures": 1,
    "block_size": 0,
    "num_samples": 0,
    "thinning": 1,
    "seed": 0,
}
"""The smallest value of every integer."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to do at every setting; see :func:`annealed_importance_sampling` for the arguments."""

    start: Start
    power: float
    average: Average
    bidirectional: bool
    num_chains: int
    num_temperatures: int
    block_size: int
    num_samples: int
    thinning: int
    seed: int
    effort: float = 1.0
    round: int = 0
    """How often settings whose weights were uneven have annealed again."""

    @property
    def num_burn_in(self) -> int:
        """Sweeps at τ = 1 before the way back."""
        return -(-self.num_temperatures // 2) if self.bidirectional else 0

    @property
    def num_sweeps(self) -> int:
        """Sweeps of every chain, in all."""
        back = self.num_temperatures if self.bidirectional else 0
        return self.num_temperatures + self.num_samples * self.thinning + self.num_burn_in + back

    @property
    def keys(self) -> tuple[int, ...]:
        """Five unrelated streams of random numbers."""
        entropy = [self.seed, self.round] if self.round else self.seed
        state = np.random.SeedSequence(entropy).generate_state(5, np.uint64)
        return tuple(int(k >> np.uint64(2)) for k in state)


def make_plan(
    start: Any, power: Any, average: Any, bidirectional: Any, effort: Any = 1.0, **integers: Any
) -> Plan:
    """The arguments with their defaults, refused in words where they make no sense."""
    if start not in DEFAULTS:
        raise InvalidDataError(f'start must be "posterior" or "prior"; found {start!r}.')
    if average not in ("arithmetic", "geometric"):
        raise InvalidDataError(f'average must be "arithmetic" or "geometric"; found {average!r}.')
    if not isinstance(bidirectional, bool):
        raise InvalidDataError(f"bidirectional must be True or False; found {bidirectional!r}.")
    power = DEFAULTS[start]["power"] if power is None else power
    if not is_number(power) or not 0 < float(power) < np.inf:
        raise InvalidDataError(f"power must be a positive number; found {power!r}.")
    if not is_number(effort) or not 1 <= float(effort) < np.inf:
        raise InvalidDataError(f"effort must be a number, at least 1; found {effort!r}.")
    for name, least in LEAST.items():
        value = integers[name]
        if value is None and name in DEFAULTS[start]:
            value = DEFAULTS[start][name]
        if not is_integer(value) or not least <= int(value) < 2**31:
            raise InvalidDataError(f"{name} must be an integer, at least {least}; found {value!r}.")
        integers[name] = int(value)
    return Plan(start, float(power), average, bidirectional, effort=float(effort), **integers)


def check_test_data(test_data: Any, plan: Plan, model: SiteModel) -> RegressionData:
    """``(X*, Y*)`` as tensors, with the columns of the model's data."""
    if plan.num_samples == 0:
        raise InvalidDataError(
            "num_samples must be at least 1 with test_data: predictions are averages over samples; "
            "found 0."
        )
    try:
        test = prepare_data(test_data, model.likelihood)
    except InvalidDataError as error:
        raise InvalidDataError(f"test_data: {error}") from None
    for name, array, model_array in zip("XY", test, model.data, strict=True):
        if is_variable(array):
            raise InvalidDataError(f"test_data: {name} must be an array; found a tf.Variable.")
        num, expected = array.shape[1], model_array.shape[1]
        if num != expected:
            raise InvalidDataError(
                f"test_data: {name} must have the {expected} column(s) of the model's data; "
                f"found {num}."
            )
    return test
