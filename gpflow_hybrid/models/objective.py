"""What a model learns from, as a property that is checked."""

from __future__ import annotations

from ..objectives import Objective, power_of


class WithObjective:
    """A model with a learning objective of the family L_α."""

    _objective: Objective

    @property
    def objective(self) -> Objective:
        """What the training loss maximises, and a sparse model infers for: ``"elbo"``, ``"ep_like"`` or a
        power α."""
        return self._objective

    @objective.setter
    def objective(self, value: Objective) -> None:
        power_of(value)
        self._objective = value
