"""The rows of data that a model does not own: arrays or a stream, a block at a time."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from gpflow.base import AnyNDArray
from gpflow.inducing_variables import InducingVariables
from gpflow.kernels import Kernel
from gpflow.likelihoods import Likelihood
from gpflow.mean_functions import MeanFunction
from gpflow.utilities import is_variable

from . import tuning
from .errors import InvalidDataError
from .validation import prepare_data

Pair = tuple[AnyNDArray, AnyNDArray]


class ModelParts(NamedTuple):
    """What sums over rows are taken for."""

    kernel: Kernel
    inducing_variable: InducingVariables
    mean_function: MeanFunction
    likelihood: Likelihood
    num_latent: int


class DataRows(abc.ABC):
    """X and Y, read from the beginning every time they are iterated over."""

    num_rows: int
    num_columns: int
    """Of X."""
    num_outputs: int
    """Columns of Y."""
    failure: Exception | None = None
    """Why a sum over the rows has failed, which a graph tells in TensorFlow's words."""

    @abc.abstractmethod
    def blocks(self, size: int) -> Iterator[Pair]:
        """At most so many rows at a time."""

    def sums_elsewhere(self, parts: ModelParts, prior: Any, alpha: float, in_parts: bool) -> Any:
        """Where sums over these rows are not taken in this process: a
        :class:`~gpflow_hybrid.inference.row_sums.RowSums` that has them taken. None where they are.

        :param prior: the :class:`~gpflow_hybrid.priors.inducing.InducingPrior` of the parts.
        :param in_parts: as of such sums.
        """
        return None

    def first_rows(self, number: int) -> Pair:
        """So many, or all, as arrays."""
        X, Y = next(iter(self.blocks(number)))
        return X, Y

    def random_rows(self, number: int, rng: np.random.Generator) -> Pair:
        """So many different ones in a random order, by reading all once."""
        chosen = rng.choice(self.num_rows, number, replace=False)
        order, found, first = np.argsort(chosen), [], 0
        numbers = chosen[order]
        for X, Y in self.blocks(tuning.SCANNED_ROWS):
            here = numbers[
                np.searchsorted(numbers, first) : np.searchsorted(numbers, first + len(X))
            ]
            found.append((X[here - first], Y[here - first]))
            first += len(X)
        X, Y = (np.concatenate(x) for x in zip(*found, strict=True))
        back = np.argsort(order)
        return X[back], Y[back]


class ArrayRows(DataRows):
    """In memory."""

    def __init__(self, X: AnyNDArray, Y: AnyNDArray) -> None:
        self.X, self.Y = X, Y
        self.num_rows, self.num_columns = X.shape
        self.num_outputs = Y.shape[1]

    def blocks(self, size: int) -> Iterator[Pair]:
        """Views of the arrays."""
        for start in range(0, self.num_rows, size):
            yield self.X[start : start + size], self.Y[start : start + size]

    def random_rows(self, number: int, rng: np.random.Generator) -> Pair:
        """Read where they are."""
        chosen = rng.choice(self.num_rows, number, replace=False)
        return self.X[chosen], self.Y[chosen]


class DatasetRows(DataRows):
    """A ``tf.data.Dataset`` of pairs, batched or not; checked when it is read for the first time."""

    def __init__(self, dataset: tf.data.Dataset, likelihood: Likelihood) -> None:
        spec = dataset.element_spec
        if not isinstance(spec, tuple) or len(spec) != 2:
            raise InvalidDataError(
                f"data must be a Dataset of pairs (X, Y); found elements {spec}. Build it with "
                "tf.data.Dataset.from_tensor_slices((X, Y))."
            )
        if tf.data.experimental.cardinality(dataset) == tf.data.INFINITE_CARDINALITY:
            raise InvalidDataError(
                "data is a Dataset without an end; found one that repeats for ever. Leave .repeat() out "
                "for full data, or pass iter(dataset) and num_data for minibatches."
            )
        self.dataset, self.likelihood = dataset, likelihood
        self.is_batched, (self.num_columns, self.num_outputs) = _columns_of(*spec)
        self._kind_of_Y: Any = None  # known once all of it was checked
        self.num_rows = 0
        for _ in self._batches(tuning.SCANNED_ROWS):
            pass
        if self.num_rows == 0:
            raise InvalidDataError("data must be a Dataset with at least one row; found none.")

    def blocks(self, size: int) -> Iterator[Pair]:
        """Batches joined, or cut, to so many rows; the last block has what is left."""
        waiting: list[Pair] = []
        num_waiting = 0
        for batch in self._batches(size):
            for part in ArrayRows(*batch).blocks(size):
                waiting.append(part)
                num_waiting += len(part[0])
                if num_waiting >= size:
                    X, Y = _joined(waiting)
                    yield X[:size], Y[:size]
                    waiting, num_waiting = [(X[size:], Y[size:])], num_waiting - size
        if num_waiting:
            yield _joined(waiting)

    def _batches(self, size: int) -> Iterator[Pair]:
        """As they come, of so many rows if they do not; the first time they are checked and counted."""
        dataset = self.dataset if self.is_batched else self.dataset.batch(size)
        count, kind = 0, self._kind_of_Y
        for X, Y in dataset.as_numpy_iterator():
            if self._kind_of_Y is None:
                X, Y = (x.numpy() for x in prepare_data((X, Y), self.likelihood))
                kind = Y.dtype
            count += len(X)
            yield as_computed(X, np.asarray(Y, kind))
        if self._kind_of_Y is None:
            self.num_rows, self._kind_of_Y = count, kind
        if count != self.num_rows:
            raise InvalidDataError(
                f"data has changed its number of rows: {self.num_rows} when it was first read, now "
                f"{count}. A Dataset for full data must give the same rows every time."
            )


def _columns_of(*specs: Any) -> tuple[bool, tuple[int, int]]:
    """Whether a Dataset of X and Y is batched, and how many columns each has."""
    ranks = tuple(x.shape.rank for x in specs)
    known = ranks in ((1, 1), (2, 2)) and all(x.shape[-1] is not None for x in specs)
    if not known:
        raise InvalidDataError(
            "data must be a Dataset of rows X [D] and Y [P], or of batches X [N, D] and Y [N, P]; found "
            f"{' and '.join(str(x.shape) for x in specs)}. One column of Y: dataset.map(lambda x, y: "
            "(x, y[..., None])); shapes that are not known: tf.ensure_shape in such a map."
        )
    return ranks == (2, 2), (int(specs[0].shape[-1]), int(specs[1].shape[-1]))


def _joined(parts: list[Pair]) -> Pair:
    if len(parts) == 1:
        return parts[0]
    X, Y = (np.concatenate(x) for x in zip(*parts, strict=True))
    return X, Y


def as_computed(X: Any, Y: Any) -> Pair:
    """As arrays, X in the precision that is computed in."""
    return np.asarray(X, np.float64), np.asarray(Y)


def rows_of(data: Any, likelihood: Likelihood) -> DataRows:
    """Whatever stands for full data, checked."""
    if isinstance(data, DataRows):
        return data
    if isinstance(data, tf.data.Dataset):
        return DatasetRows(data, likelihood)
    X, Y = prepare_data(data, likelihood)
    return ArrayRows(*(tf.convert_to_tensor(x).numpy() for x in (X, Y)))


def are_constant(data: Any) -> bool:
    """Whether the data are known while a graph is traced, and stay what they are."""
    if not isinstance(data, (tuple, list)):
        return True
    return all(not is_variable(x) and (not tf.is_tensor(x) or hasattr(x, "numpy")) for x in data)


class Reference:
    """What q(u) was inferred from, held outside of what TensorFlow tracks and of what is saved: the data,
    the hyperparameters, and the factors of ``K_uu`` with the ``Λ₂`` that was found."""

    def __init__(self) -> None:
        self.rows: DataRows | None = None
        self.hyperparameters: Sequence[AnyNDArray] = ()
        self.factors: Sequence[AnyNDArray] = ()
        self.lambda_2: AnyNDArray = np.empty(0)

    def __deepcopy__(self, memo: dict[int, Any]) -> Reference:
        other = Reference()
        other.__dict__.update(vars(self))
        return other

    def __reduce__(self) -> tuple[type[Reference], tuple[()]]:
        return Reference, ()
