"""One small trainer for all tests that need no other: compiling it takes seconds."""

import pytest

from gpflow_hybrid.training import VEMTrainer
from tests.training.cases import cheap_trainer


@pytest.fixture(scope="session")
def trainer() -> VEMTrainer:
    """``restart(trainer)`` before use."""
    return cheap_trainer()
