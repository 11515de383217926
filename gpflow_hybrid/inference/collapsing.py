"""A method's collapse, outside of graphs or as a part of one: the same numbers, as tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from gpflow.likelihoods import Likelihood

from ..priors import Array, Prior, PriorMoments
from ..sites import SiteValues
from ..stand_ins import leaves_of
from .common import Collapse, Method, Solution
from .options import TRAINING
from .questions import Iteration, Question
from .remarks import Remark, Remarks
from .servers import Respondent, is_answered_on_arrays, run, run_in_graph

COARSE = (
    "The likelihood's quadrature is too coarse for the posteriors of this training loss: its error is "
    "{:.1e}, in units of the posterior. model.infer() says what to do; gpflow_hybrid.fit refines it where "
    "it can."
)

INDEPENDENT = (
    "Under this kernel no datum tells of another; the largest correlation between two is {:.0e}. An "
    "optimiser finds no slope here, and its success is no fit: begin with lengthscales of the size of "
    'the distances between inputs, as gpflow_hybrid.fit(model, start="data") does.'
)


class Limits(NamedTuple):
    """When an iteration ends: the residual, and how many steps it may try."""

    tolerance: float
    max_steps: int


class CollapsedTensors(NamedTuple):
    """A :class:`~gpflow_hybrid.inference.common.Collapse` as tensors."""

    solution: Solution
    value: tf.Tensor
    parameter_bars: tf.Tensor
    """Derivatives in the numbers that the likelihood's parameters are, ``[P]``."""
    prior_adjoint: Callable[[], Sequence[tf.Tensor]]
    """The total derivatives in the tensors that the prior was made of; to be asked for once."""


class Collapsing(NamedTuple):
    """A method's collapse as an iteration, and what it asks beside the method's questions."""

    iterate: Callable[[Prior, SiteValues], Iteration[tuple[Collapse, Array]]]
    num_own: int
    """Numbers that the likelihood's parameters are."""
    question: Question | None
    """How far the method's quadrature is from exact, if that may be asked."""


def iteration_of(
    method: Method, likelihood: Likelihood, limits: Limits, remarks: Remarks
) -> Collapsing:
    """``method.collapse`` with the derivatives in the likelihood's own parameters."""
    num_own = sum(x.shape.num_elements() for x in leaves_of(likelihood))
    asks = method.quadrature_error is not None and is_answered_on_arrays(
        method.quadrature_error, likelihood
    )
    question = method.quadrature_error if asks else None
    iterate = functools.partial(_with_parameters, method, question, num_own, limits, remarks)
    return Collapsing(iterate, num_own, question)


def questions_of(method: Method, found: Collapsing) -> tuple[Question, ...]:
    """All that may be asked."""
    questions = (
        (*method.questions, method.parameter_question) if found.num_own else method.questions
    )
    return questions if found.question is None else (*questions, found.question)


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
    collapsing = iteration_of(method, likelihood, limits, remarks)
    iterate = collapsing.iterate
    if tf.executing_eagerly():
        prior = moments.on_host(*(x.numpy() for x in moments))
        found, own = run(iterate(prior, SiteValues(*(x.numpy() for x in start))), likelihood, data)
        return _as_tensors(found, own, moments, prior)
    to_arrays = functools.partial(_to_arrays, iterate, moments.on_host)
    pair = tf.TensorShape([2]).concatenate(start.lambda_1.shape)
    shapes = [pair, [5], [], [collapsing.num_own], *(x.shape for x in moments)]
    respondent = Respondent(questions_of(method, collapsing), likelihood, data)
    tensors = run_in_graph(to_arrays, [*moments, *start], shapes, respondent)
    lambdas, numbers, value, own, *bars = tensors
    counts = tf.unstack(tf.cast(numbers[:3], tf.int32))
    solution = Solution(SiteValues(*tf.unstack(lambdas)), *counts, *tf.unstack(numbers[3:]))
    return CollapsedTensors(solution, value, own, lambda: bars)


def _with_parameters(
    method: Method,
    question: Question | None,
    num_own: int,
    limits: Limits,
    remarks: Remarks,
    prior: Prior,
    start: SiteValues,
) -> Iteration[tuple[Collapse, Array]]:
    """A collapse, and the derivatives in so many numbers of the likelihood's own.

    :param question: how far the method's quadrature is from exact, if that may be asked.
    """
    found = yield from method.collapse(prior, start, *limits)
    made, count = list(found.remarks), remarks.count()
    if count == 1 and (correlation := prior.largest_correlation()) < TRAINING.no_correlation:
        made.append(Remark(INDEPENDENT, (correlation,)))
    # A dear question: at evaluations 1, 2, 4, 8, …
    if question is not None and found.solution.has_started and count & (count - 1) == 0 < count:
        error = (yield question(found.q.mean, found.q.variance, *found.solution.sites)).size
        if error > method.tolerated_error:
            made.append(Remark(COARSE, (float(error),)))
    remarks.make(found.solution.residual, made)
    if num_own == 0 or not found.solution.has_started:
        return found, np.zeros(num_own)
    sites = found.solution.sites if found.removed is None else found.removed
    own = yield method.parameter_question(*found.q[:2], *sites, *found.weights)
    return found, own.in_a_row


def _to_arrays(
    iterate: Callable[[Prior, SiteValues], Iteration[tuple[Collapse, Array]]],
    make_prior: Callable[..., Prior],
    *arrays: Array,
) -> Iteration[tuple[Any, ...]]:
    """A collapse as the arrays that a graph takes, from those of the prior, λ₁ and λ₂."""
    *moments, lambda_1, lambda_2 = arrays
    prior = make_prior(*moments)
    try:
        found, own = yield from iterate(prior, SiteValues(lambda_1, lambda_2))
        bars = _prior_adjoint(found, moments)
    finally:
        prior.close()
    sites, *numbers = found.solution
    return np.stack(sites), np.array(numbers), found.value, own, *bars


def _prior_adjoint(found: Collapse, moments: Sequence[Array]) -> Sequence[Array]:
    """The total derivatives in these arrays; zero where there was no start."""
    if found.covariance is None:
        return [np.zeros_like(x) for x in moments]
    return found.prior_adjoint()


def _as_tensors(
    found: Collapse, own: Array, moments: PriorMoments, prior: Prior
) -> CollapsedTensors:
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
        tensor(own),
        prior_adjoint,
    )
