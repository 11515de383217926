"""What is trained: a model that owns its data, or a sparse one with the data that it is given."""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from .. import objectives, tuning
from ..errors import InvalidDataError
from ..inference.reports import InferenceResult
from ..inference.servers import run
from ..inference.variational import natural_gradient_steps
from ..linalg import marginals
from ..models import CollapsedModel, SparseCVIModel
from ..models.sparse_validation import check_data_for
from ..objectives import power_of
from ..sites import SiteValues

Array = npt.NDArray[Any]

DRAWN_ROWS = 2000
"""Of data that need not fit in memory, for an image of the fit."""


class Moved(NamedTuple):
    """Where natural-gradient steps have led; without a finite ELBO there is no valid q."""

    sites: SiteValues
    elbo: float
    residual: float


class Subject(abc.ABC):
    """What the two steps, their records and their checkpoints ask of a model and its data."""

    model: Any
    diagnose: Callable[[], dict[str, Any]]
    """What an :class:`~gpflow_hybrid.training.IterationRecord` says of objectives and cavities."""

    @property
    @abc.abstractmethod
    def num_data(self) -> int:
        """N."""

    @abc.abstractmethod
    def infer(self, tolerance: float, max_steps: int) -> InferenceResult:
        """The model's ``infer``."""

    @abc.abstractmethod
    def natural_gradient_steps(self, num_steps: int, lr: float) -> Moved:
        """So many from the present sites, which are not changed."""

    @abc.abstractmethod
    def objective(self, alpha: float) -> tf.Tensor:
        """``L_α`` at the present sites, with its gradient."""

    @abc.abstractmethod
    def description(self) -> str:
        """Of the data, first what can be compared by eye."""

    @abc.abstractmethod
    def drawn(self) -> tuple[Array, Array]:
        """X and Y of an image of the fit."""


class OwnData(Subject):
    """A model that was built with its data; its diagnosis is compiled."""

    def __init__(self, model: CollapsedModel, alpha: float) -> None:
        self.model, self.alpha = model, alpha
        self.diagnose = tf.function(self._diagnose, autograph=False)

    @property
    def num_data(self) -> int:
        return int(tf.shape(self.model.sites.values.lambda_1)[0])

    def infer(self, tolerance: float, max_steps: int) -> InferenceResult:
        return self.model.infer(tolerance=tolerance, max_steps=max_steps)

    def natural_gradient_steps(self, num_steps: int, lr: float) -> Moved:
        model = self.model
        prior = model.host_prior()
        start = SiteValues(*(x.numpy() for x in model.sites.values))
        steps = natural_gradient_steps(prior, start, num_steps, lr)
        at = run(steps, model.likelihood, tuple(tf.convert_to_tensor(d) for d in model.data))
        prior.close()
        return Moved(at.sites, at.elbo, at.residual_norm)

    def objective(self, alpha: float) -> tf.Tensor:
        return self.model.objective_at_fixed_sites(alpha)

    def _diagnose(self) -> dict[str, tf.Tensor]:
        model, sites = self.model, self.model.sites.values
        # In a graph of this process.
        q = marginals(*model.prior(exportable=False), *sites, exportable=False)
        data = tuple(tf.convert_to_tensor(d) for d in model.data)
        values = {
            alpha: objectives.power_ep(q, sites, model.likelihood, data, alpha)
            for alpha in {0.0, 1.0, self.alpha}
        }
        loo = objectives.loo_log_predictive_density(q, sites, model.likelihood, data)
        return {
            "elbo": values[0.0],
            "ep_like": values[1.0],
            "objective": values[self.alpha] + model.log_prior_density(),
            "min_cavity_precision": tf.reduce_min(1.0 / q.variance - sites.lambda_2),
            "loo_log_predictive_density": tf.reduce_mean(loo),
        }

    def description(self) -> str:
        X, Y = self.model.data
        return _described(self.num_data, X.shape[1], Y.shape[1], digest((X, Y)))

    def drawn(self) -> tuple[Array, Array]:
        X, Y = (np.asarray(tf.convert_to_tensor(d)) for d in self.model.data)
        return X, Y


class GivenData(Subject):
    """A sparse model and all of its data, arrays or a stream."""

    def __init__(self, model: SparseCVIModel, data: Any, alpha: float) -> None:
        self.model, self.alpha = model, alpha
        self.rows = model.all_rows(data)
        self.diagnose = self._diagnose

    @property
    def num_data(self) -> int:
        return self.rows.num_rows

    def require_objective(self) -> None:
        """Refuse another objective than that which q(u) is inferred for."""
        if power_of(self.model.objective) != self.alpha:
            raise InvalidDataError(
                "objective must be that of a SparseCVIModel, whose q(u) is inferred for it; found the "
                f"power {self.alpha:g} here and {self.model.objective!r} there. Set model.objective."
            )

    def infer(self, tolerance: float, max_steps: int) -> InferenceResult:
        self.require_objective()
        return self.model.infer(self.rows, tolerance=tolerance, max_steps=max_steps)

    def natural_gradient_steps(self, num_steps: int, lr: float) -> Moved:
        self.require_objective()
        return Moved(*self.model.natural_gradient_steps(self.rows, num_steps, lr))

    def objective(self, alpha: float) -> tf.Tensor:
        return self.model.objective_at_fixed_sites(self.rows, alpha)

    def _diagnose(self) -> dict[str, Any]:
        found = self.model.diagnose_at_fixed_sites(self.rows, {0.0, 1.0, self.alpha})
        return {
            "elbo": found.values[0.0],
            "ep_like": found.values[1.0],
            "objective": found.values[self.alpha] + float(self.model.log_prior_density()),
            "min_cavity_precision": found.min_cavity_precision,
            "loo_log_predictive_density": found.loo_log_predictive_density / self.num_data,
        }

    def description(self) -> str:
        parts = [hashlib.sha256(), hashlib.sha256()]
        for block in self.rows.blocks(tuning.SCANNED_ROWS):
            for part, x in zip(parts, block, strict=True):
                part.update(f"{x.dtype}".encode() + np.ascontiguousarray(x).tobytes())
        values = hashlib.sha256("".join(x.hexdigest() for x in parts).encode()).hexdigest()
        rows = self.rows
        return _described(rows.num_rows, rows.num_columns, rows.num_outputs, values[:16])

    def drawn(self) -> tuple[Array, Array]:
        return next(iter(self.rows.blocks(DRAWN_ROWS)))


def subject_of(model: Any, data: Any, alpha: float) -> Subject:
    """The model with its own data, or with those given for a sparse one."""
    if not isinstance(model, (CollapsedModel, SparseCVIModel)):
        raise InvalidDataError(
            f"model must be a model with sites, such as CVIModel; found {type(model).__name__}."
        )
    check_data_for(model, data)
    if not isinstance(model, SparseCVIModel):
        return OwnData(model, alpha)
    found = GivenData(model, data, alpha)
    found.require_objective()
    return found


def _described(rows: int, inputs: int, outputs: int, values: str) -> str:
    return f"{rows} rows of {inputs} inputs and {outputs} outputs, their values {values}"


def digest(tensors: Iterable[Any]) -> str:
    """SHA-256 of arrays, with their types and shapes."""
    found = hashlib.sha256()
    for tensor in tensors:
        array = np.ascontiguousarray(np.asarray(tf.convert_to_tensor(tensor)))
        found.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
    return found.hexdigest()[:16]
