"""The arguments of annealing, checked before anything is computed."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any, Literal

import numpy as np
from gpflow.base import RegressionData
from gpflow.utilities import is_variable

from ..errors import InvalidDataError
from ..models import SiteModel
from ..validation import prepare_data
from .results import Average

Start = Literal["posterior", "prior"]

NUM_TEMPERATURES: dict[str, int] = {"posterior": 200, "prior": 8000}
POWER: dict[str, float] = {"posterior": 3.0, "prior": 4.0}
BLOCK_SIZE: dict[str, int] = {"posterior": 8, "prior": 0}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to do at every setting; see :func:`annealed_importance_sampling` for the arguments."""

    start: Start
    num_chains: int
    num_temperatures: int
    power: float
    block_size: int
    average: Average
    bidirectional: bool
    num_samples: int
    thinning: int
    seed: int

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
        state = np.random.SeedSequence(self.seed).generate_state(5, np.uint64)
        return tuple(int(k >> np.uint64(2)) for k in state)


def make_plan(
    start: Any,
    num_chains: Any,
    num_temperatures: Any,
    power: Any,
    block_size: Any,
    average: Any,
    bidirectional: Any,
    num_samples: Any,
    thinning: Any,
    seed: Any,
) -> Plan:
    """The arguments with their defaults, refused in words where they make no sense."""
    if start not in NUM_TEMPERATURES:
        raise InvalidDataError(f'start must be "posterior" or "prior"; found {start!r}.')
    if average not in ("arithmetic", "geometric"):
        raise InvalidDataError(f'average must be "arithmetic" or "geometric"; found {average!r}.')
    if not isinstance(bidirectional, bool):
        raise InvalidDataError(f"bidirectional must be True or False; found {bidirectional!r}.")
    power = POWER[start] if power is None else power
    if (
        not isinstance(power, numbers.Real)
        or isinstance(power, bool)
        or not 0 < float(power) < np.inf
    ):
        raise InvalidDataError(f"power must be a positive number; found {power!r}.")
    return Plan(
        start=start,
        num_chains=_integer("num_chains", num_chains, 1),
        num_temperatures=_integer(
            "num_temperatures",
            NUM_TEMPERATURES[start] if num_temperatures is None else num_temperatures,
            1,
        ),
        power=float(power),
        block_size=_integer(
            "block_size", BLOCK_SIZE[start] if block_size is None else block_size, 0
        ),
        average=average,
        bidirectional=bidirectional,
        num_samples=_integer("num_samples", num_samples, 0),
        thinning=_integer("thinning", thinning, 1),
        seed=_integer("seed", seed, 0),
    )


def _integer(name: str, value: Any, least: int) -> int:
    if (
        not isinstance(value, numbers.Integral)
        or isinstance(value, bool)
        or not least <= int(value) < 2**31
    ):
        raise InvalidDataError(f"{name} must be an integer, at least {least}; found {value!r}.")
    return int(value)


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
    for name, found, known in zip("XY", test, model.data, strict=True):
        if is_variable(found):
            raise InvalidDataError(f"test_data: {name} must be an array; found a tf.Variable.")
        if found.shape[1] != known.shape[1]:
            raise InvalidDataError(
                f"test_data: {name} must have the {known.shape[1]} column(s) of the model's data; "
                f"found {found.shape[1]}."
            )
    return test
