"""A method's collapse, outside of graphs or as a part of one: the same numbers, as tensors."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from gpflow.likelihoods import Likelihood

from ..errors import ConvergenceWarning
from ..linalg import Marginals
from ..priors import Array, Prior, PriorMoments
from ..sites import SiteValues
from .common import Collapse, Method, SitePair, Solution
from .options import TRAINING
from .questions import Iteration
from .servers import Respondent, run, run_in_graph

NOT_CONVERGED = (
    "Inference inside the training loss did not converge: its residual is {:.1e}. Value and gradient are "
    "not exact at these hyperparameters."
)


class Limits(NamedTuple):
    """When an iteration ends: the residual, and how many steps it may try."""

    tolerance: float
    max_steps: int


class CollapsedTensors(NamedTuple):
    """A :class:`~gpflow_hybrid.inference.common.Collapse` as tensors."""

    solution: Solution
    value: tf.Tensor
    q: Marginals
    weights: SitePair
    prior_adjoint: Callable[[], Sequence[tf.Tensor]]
    """The total derivatives in the tensors that the prior was made of; to be asked for once."""


class Remarks:
    """What a training loss has to say, each kind once: an optimiser evaluates it many times.

    A compiled loss has remarks of its own; those of eager calls are a model's, until :meth:`forget`.
    """

    def __init__(self) -> None:
        self._made: set[str] = set()

    def forget(self) -> None:
        """Say everything again."""
        self._made.clear()

    def make(self, residual: float, remarks: Sequence[str]) -> None:
        """Warn of what has not been warned of before.

        :param residual: of inference; infinite where it had nothing to start from.
        """
        remarks = list(remarks)
        if TRAINING.warn_residual < residual < np.inf:
            remarks.append(NOT_CONVERGED.format(float(residual)))
        for remark in remarks:
            kind, *_ = re.split("[:;]", remark)  # what follows has numbers
            if kind not in self._made:
                self._made.add(kind)
                # Python itself would say the same words once in a process; this is another run.
                warnings.warn_explicit(remark, ConvergenceWarning, __file__, 1, __name__, {})


def collapse(
    method: Method,
    moments: PriorMoments,
    likelihood: Likelihood,
    data: tuple[tf.Tensor, tf.Tensor],
    start: SiteValues,
    limits: Limits,
    remarks: Remarks,
) -> CollapsedTensors:
    """``method.collapse`` from the given sites, eagerly or as a part of the graph that is being traced."""
    if tf.executing_eagerly():
        prior = moments.on_host(*(x.numpy() for x in moments))
        iteration = method.collapse(prior, SiteValues(*(x.numpy() for x in start)), *limits)
        found = run(iteration, likelihood, data)
        remarks.make(found.solution.residual, found.remarks)
        return _as_tensors(found, moments, prior)
    iterate = functools.partial(_to_arrays, method, moments.on_host, limits, remarks)
    pair = tf.TensorShape([2]).concatenate(start.lambda_1.shape)
    shapes = [pair, [5], [], pair, pair, *(x.shape for x in moments)]
    respondent = Respondent(method.questions, likelihood, data)
    tensors = run_in_graph(iterate, [*moments, *start], shapes, respondent)
    lambdas, numbers, value, q, weights, *bars = tensors
    counts = tf.unstack(tf.cast(numbers[:3], tf.int32))
    solution = Solution(SiteValues(*tf.unstack(lambdas)), *counts, *tf.unstack(numbers[3:]))
    return CollapsedTensors(
        solution,
        value,
        Marginals(q[0], q[1], tf.zeros_like(value)),
        SitePair(*tf.unstack(weights)),
        lambda: bars,
    )


def _to_arrays(
    method: Method,
    make_prior: Callable[..., Prior],
    limits: Limits,
    remarks: Remarks,
    *arrays: Array,
) -> Iteration[tuple[Any, ...]]:
    """A collapse as the arrays that a graph takes, from those of the prior, λ₁ and λ₂."""
    *moments, lambda_1, lambda_2 = arrays
    prior = make_prior(*moments)
    try:
        found = yield from method.collapse(prior, SiteValues(lambda_1, lambda_2), *limits)
        remarks.make(found.solution.residual, found.remarks)
        bars = _prior_adjoint(found, moments)
    finally:
        prior.close()
    sites, *numbers = found.solution
    q = np.stack([found.q.mean, found.q.variance])
    return np.stack(sites), np.array(numbers), found.value, q, np.stack(found.weights), *bars


def _prior_adjoint(found: Collapse, moments: Sequence[Array]) -> Sequence[Array]:
    """The total derivatives in these arrays; zero where there was no start."""
    if found.covariance is None:
        return [np.zeros_like(x) for x in moments]
    return found.prior_adjoint()


def _as_tensors(found: Collapse, moments: PriorMoments, prior: Prior) -> CollapsedTensors:
    def tensor(x: Any) -> tf.Tensor:
        return tf.convert_to_tensor(np.asarray(x, moments.mean.dtype.as_numpy_dtype))

    def prior_adjoint() -> list[tf.Tensor]:
        bars = [tensor(x) for x in _prior_adjoint(found, [x.numpy() for x in moments])]
        prior.close()
        return bars

    sites, *numbers = found.solution
    return CollapsedTensors(
        Solution(SiteValues(*map(tensor, sites)), *numbers),
        tensor(found.value),
        Marginals(*map(tensor, found.q)),
        SitePair(*map(tensor, found.weights)),
        prior_adjoint,
    )
