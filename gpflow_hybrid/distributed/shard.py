"""What lives on a worker: rows of the data, and what was found of them at the present hyperparameters.

A :class:`Shard` is a result in Dask's hands, found again by every task that is given it on the same
worker. On another worker it arrives with its rows alone and finds the rest again: the same numbers.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from .. import tuning
from ..errors import InvalidDataError
from ..inference.inducing import InducingPosterior, SummedSites
from ..inference.row_sums import RowSums
from ..likelihoods.projected import Maker
from ..likelihoods.projections import projected
from ..linalg.threads import limit_threads, one_blas_thread
from ..priors.inducing import InducingPrior
from ..priors.protocol import Array
from ..rows import ArrayRows, as_computed
from ..validation import prepare_data
from .configuration import configured
from .structure import Structure, Values, restored, variables_of
from .worker_memory import give_back, keep_less, most_kept, prepare_memory

KEPT_STRUCTURES = 4
"""Models that a process remembers: those whose sums are taken in turns."""


class Setting(NamedTuple):
    """A model at one setting of its hyperparameters, on its way to workers."""

    token: str
    structure: Structure
    values: Values
    alpha: float
    in_parts: bool
    variables: tuple[Any, ...]
    """What derivatives are taken in: positions among the variables, or the shape of one that is not one of
    them."""


class SumRequest(NamedTuple):
    """A sum over rows: the method of :class:`~gpflow_hybrid.inference.row_sums.RowSums`, and what for."""

    setting: Setting
    method: str
    q_token: str
    sites: SummedSites | None
    """Of q(u); None where the sum is not at one."""
    arguments: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        """Of its arrays."""
        given = (x for argument in self.arguments if isinstance(argument, tuple) for x in argument)
        arrays = (*self.setting.values.arrays, *(self.sites or ()), *given)
        return sum(x.nbytes for x in arrays) + len(self.setting.structure.pickled)


class _Model:
    """The parts of a model in this process, at the setting that was asked for last."""

    def __init__(self, structure: Structure) -> None:
        self.parts, self.config = restored(structure)
        self._variables = variables_of(self.parts)
        self._lock = threading.Lock()
        self._token = ""
        self._q: tuple[str, InducingPosterior] | None = None

    def at(self, setting: Setting) -> tuple[InducingPrior, Maker]:
        """``K_uu`` and its factor once for all shards of this process."""
        with self._lock:
            if self._token != setting.token:
                setting.values.assign_to(self._variables)
                with configured(self.config):
                    self._prior = self._new_prior(setting)
                likelihood, num_latent = self.parts.likelihood, self.parts.num_latent
                self._make = projected(likelihood, setting.alpha, num_latent)
                self._token = setting.token
            return self._prior, self._make

    def _new_prior(self, setting: Setting) -> InducingPrior:
        kernel, Z, mean, _, num_latent = self.parts
        variables = [
            self._variables[x] if isinstance(x, int) else tf.Variable(tf.zeros(x, tf.float64))
            for x in setting.variables
        ]
        return InducingPrior(kernel, Z, mean, num_latent, variables)

    def posterior(self, token: str, sites: SummedSites) -> InducingPosterior:
        """One object for one q: what was found of a block there is known by it."""
        with self._lock:
            if self._q is None or self._q[0] != token:
                self._q = (token, InducingPosterior(sites))
            return self._q[1]


_models: dict[str, _Model] = {}
_models_lock = threading.Lock()
_shards: weakref.WeakSet[Shard] = weakref.WeakSet()


def _model(structure: Structure) -> _Model:
    with _models_lock:
        found = _models.pop(structure.token, None) or _Model(structure)
        _models[structure.token] = found  # the last in line
        for token in list(_models)[:-KEPT_STRUCTURES]:
            del _models[token]
        return found


class Shard:
    """Some rows of the data."""

    def __init__(self, X: Array, Y: Array) -> None:
        self.X, self.Y = X, Y
        self._lock = threading.Lock()
        self._rows: tuple[str, ArrayRows] | None = None
        self._sums: tuple[str, RowSums] | None = None
        with _models_lock:
            _shards.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Shard, (self.X, self.Y)

    def __sizeof__(self) -> int:
        return int(self.X.nbytes + self.Y.nbytes)

    def answer(self, question: SumRequest, first: int) -> Any:
        """A sum over these rows.

        :param first: the number of the first of them among all data.
        """
        with self._lock, np.errstate(all="ignore"), one_blas_thread():
            model = _model(question.setting.structure)
            sums = self._sums_at(model, question.setting, first)
            if question.sites is None:
                return getattr(sums, question.method)(model.parts.likelihood)
            q = model.posterior(question.q_token, question.sites)
            return getattr(sums, question.method)(q, *question.arguments)

    def _sums_at(self, model: _Model, setting: Setting, first: int) -> RowSums:
        prior, make = model.at(setting)  # also where another setting was asked for in between
        if self._sums is None or self._sums[0] != setting.token:
            self._forget()  # its projections leave before others come
            rows = self._checked(model, setting, first)
            self._sums = (
                setting.token,
                RowSums(prior, make, rows, setting.alpha, setting.in_parts, _room(), 1),
            )
        return self._sums[1]

    def _forget(self) -> None:
        """All that was found of the rows."""
        self._sums = None
        give_back()

    def forget_if_idle(self) -> None:
        """The same, unless somebody computes with it."""
        if self._lock.acquire(blocking=False):
            try:
                self._forget()
            finally:
                self._lock.release()

    @property
    def kept_bytes(self) -> int:
        """Of projections."""
        found = self._sums  # which another thread may take away
        return 0 if found is None else found[1].blocks.kept_bytes

    def _checked(self, model: _Model, setting: Setting, first: int) -> ArrayRows:
        """The rows as their likelihood takes them, looked at once for every model."""
        if self._rows is None or self._rows[0] != setting.structure.token:
            try:
                data = prepare_data((self.X, self.Y), model.parts.likelihood)
            except InvalidDataError as error:
                last = first + len(self.X) - 1
                raise InvalidDataError(
                    f"The data cannot be used; rows {first} to {last}, counted from the first of them: "
                    f"{error}"
                ) from None
            arrays = as_computed(*(tf.convert_to_tensor(x).numpy() for x in data))
            self._rows = (setting.structure.token, ArrayRows(*arrays))
        return self._rows[1]


def _room() -> int:
    """Bytes of projections that a shard may keep: what those of this process before it have left, but at
    least its part."""
    with _models_lock:
        present = list(_shards)
    most = min(tuning.KEPT_PROJECTIONS, most_kept())
    left = most - sum(x.kept_bytes for x in present)
    return max(left, most // max(1, len(present)))


def answer(shard: Shard, question: SumRequest, first: int) -> Any:
    """:meth:`Shard.answer` as a task."""
    prepare_process()
    return shard.answer(question, first)


def shape_of(shard: Shard) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of X and Y."""
    return shard.X.shape, shard.Y.shape


def rows_of_shard(shard: Shard, chosen: slice | Array) -> tuple[Array, Array]:
    """Some of them, a slice or by their numbers, as arrays that own their memory."""
    return shard.X[chosen].copy(), shard.Y[chosen].copy()


def status_of_worker(dask_worker: Any) -> str:
    """In Dask's word."""
    return str(dask_worker.status.name)


def forget_projections() -> None:
    """Of all shards here, and fewer are kept from now on: for a worker whose memory is nearly full."""
    with _models_lock:
        present = list(_shards)
    keep_less()
    for shard in present:
        shard.forget_if_idle()


_is_prepared = False
_preparing = threading.Lock()


def prepare_process() -> None:
    """A worker has the threads and the memory that Dask has given it; one inside of another program leaves
    that as it is."""
    global _is_prepared
    with _preparing:
        if not _is_prepared:
            _prepare_process()
            _is_prepared = True


def _prepare_process() -> None:
    from distributed import get_worker

    try:
        worker = get_worker()
    except ValueError:  # Dask computes here, without a cluster
        return
    if worker.address.startswith("inproc:"):
        return
    limit_threads(1)
    prepare_memory(worker.memory_manager.memory_limit)
    try:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    except RuntimeError:  # TensorFlow is under way
        pass
