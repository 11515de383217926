"""Who answers an iteration's questions: the likelihood on arrays, compiled functions, or a graph.

An iteration is a generator on the host. A compiled function must not be called from inside
``tf.numpy_function``, where it waits for a thread that the call itself may hold; so inside a graph the two
take turns in a ``tf.while_loop``: TensorFlow answers, the host goes on.
"""

from __future__ import annotations

import copy
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf
from gpflow.likelihoods import Likelihood

from ..compilation import compiled
from ..likelihoods.densities import values_of
from ..likelihoods.on_arrays import Observations, on_arrays, works_on_arrays
from ..linalg.host import call_on_host
from ..linalg.threads import host_arithmetic
from ..priors import Array
from ..stand_ins import parameters_of, read_once
from .questions import Iteration, Question, Request, understood

Result = TypeVar("Result")

MAX_OPEN = 4
"""Iterations of one graph that may wait for an answer at the same time, one for every thread that runs
it. Of more, the longest waiting one goes: where an answer has failed, nobody comes back for it."""


def run(
    iteration: Iteration[Result], likelihood: Likelihood, data: tuple[tf.Tensor, tf.Tensor]
) -> Result:
    """An iteration to its end, outside of any graph."""
    with host_arithmetic(int(data[0].shape[0])):
        return _run(iteration, answer_eagerly(likelihood, *data))


def _run(iteration: Iteration[Result], answer: Callable[[Request], Any]) -> Result:
    try:
        request = next(iteration)
        while True:
            request = iteration.send(answer(request))
    except StopIteration as end:
        return end.value


Answers = dict[Question, Callable[..., Any]]
"""Functions of :class:`~gpflow_hybrid.likelihoods.on_arrays.Observations` and the arrays of a request."""


def answers_on_arrays(questions: Iterable[Question], likelihood: Likelihood) -> Answers | None:
    """How a likelihood answers these questions on arrays, without a graph, if it can answer all of them."""
    form = on_arrays(likelihood)
    if form is None:
        return None
    found = {}
    for question in questions:
        answer = understood(question, likelihood).host_answer(form)
        if answer is None:
            return None
        found[question] = answer
    return found


def run_on_arrays(iteration: Iteration[Result], answers: Answers, data: Observations) -> Result:
    """An iteration to its end, on arrays alone."""
    with host_arithmetic(len(data.X)):
        return _run(iteration, lambda r: answers[r.question](data, *r.arrays))


def is_answered_on_arrays(question: Question, likelihood: Likelihood) -> bool:
    """Whether a question costs no graph, and is one: of exact expectations nobody asks for their error."""
    is_exact = works_on_arrays(likelihood)
    return not is_exact and answers_on_arrays([question], likelihood) is not None


def answer_eagerly(likelihood: Likelihood, X: tf.Tensor, Y: tf.Tensor) -> Callable[[Request], Any]:
    """On arrays where the likelihood can, else by compiled functions of ``(X, Y, *arrays)``, one for each
    question, that live as long as the likelihood."""
    functions: dict[Question, Callable[..., Any]] = {}
    observations = functools.cache(
        lambda: Observations(X.numpy(), Y.numpy(), values_of(likelihood))
    )

    def function_for(question: Question, arrays: Sequence[Array]) -> Callable[..., Any]:
        host = answers_on_arrays([question], likelihood)
        if host is not None:
            return functools.partial(host[question], observations())
        asked = understood(question, likelihood)
        tensors = [tf.convert_to_tensor(x) for x in arrays]
        key = (asked.name, arrays[0].shape[1])
        graph = compiled(likelihood, key, asked.answer_reading_once, X, Y, *tensors)

        def run(*arrays: Array) -> Any:
            found = graph(X, Y, *(tf.convert_to_tensor(x) for x in arrays))
            return asked.kind(*(x.numpy() for x in found))

        return run

    def answer(request: Request) -> Any:
        question, arrays = request
        if question not in functions:
            functions[question] = function_for(question, arrays)
        return functions[question](*arrays)

    return answer


class Finished(NamedTuple):
    """What an iteration ended with, until the graph asks for it."""

    result: tuple[Array, ...]

    def close(self) -> None:
        """Nothing to do."""


class Sessions:
    """Iterations that wait for a graph's answers, by number."""

    def __init__(self) -> None:
        self._open: dict[int, Any] = {}  # the longest waiting first
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def put(self, iteration: Any) -> int:
        """A number for an iteration that waits from now on."""
        with self._lock:
            number = next(self._numbers)
            self._open[number] = iteration
            abandoned = [self._open.pop(i) for i in list(self._open)[:-MAX_OPEN]]
        for other in abandoned:
            other.close()
        return number

    def take(self, number: int) -> Any:
        """The iteration of a number, which waits no longer."""
        with self._lock:
            if number in self._open:
                return self._open.pop(number)
        raise RuntimeError(
            f"An E-step inside a graph was given up: more than {MAX_OPEN} threads ran the same graph. "
            "Compile a training loss for each of them."
        )


class Respondent(NamedTuple):
    """Who is asked inside a graph, about which data, and the questions that may come."""

    questions: Sequence[Question]
    likelihood: Likelihood
    data: tuple[tf.Tensor, tf.Tensor]


def run_in_graph(
    start: Callable[..., Iteration[tuple[Array, ...]]],
    arguments: list[tf.Tensor],
    shapes: list[Any],
    respondent: Respondent,
) -> list[tf.Tensor]:
    """An iteration to its end, inside a graph.

    :param start: the iteration, from the arrays of ``arguments`` to arrays of the given ``shapes``.
    """
    # A graph that holds the original would keep it alive.
    host = answers_on_arrays(respondent.questions, copy.copy(respondent.likelihood))
    if host is None:
        return _take_turns(start, arguments, shapes, respondent)
    values = [tf.convert_to_tensor(p) for p in parameters_of(respondent.likelihood)]

    def to_the_end(X: Array, Y: Array, *others: Array) -> tuple[Array, ...]:
        data = Observations(X, Y, others[: len(values)])
        return _run(start(*others[len(values) :]), lambda r: host[r.question](data, *r.arrays))

    inputs = [*respondent.data, *values, *arguments]
    return call_on_host(to_the_end, inputs, shapes, arguments[0].dtype)


def _take_turns(
    start: Callable[..., Iteration[tuple[Array, ...]]],
    arguments: list[tf.Tensor],
    shapes: list[Any],
    respondent: Respondent,
) -> list[tf.Tensor]:
    questions, likelihood, data = respondent
    index_of = {}
    asked: list[Question] = []
    for question in questions:
        as_understood = understood(question, likelihood)
        if as_understood not in asked:
            asked.append(as_understood)
        index_of[question] = asked.index(as_understood)
    sites = arguments[-1]  # [N, L], as what is asked about
    sessions = Sessions()
    dtype, end = sites.dtype, len(asked)

    def advance(iteration: Any, answer: Any) -> tuple[Any, ...]:
        """Number, question and arrays ``[k, N, L]`` of the next request, or the end."""
        try:
            request = iteration.send(answer)
        except StopIteration as stop:
            return sessions.put(Finished(stop.value)), end, np.zeros((1, 0, 0))
        return sessions.put(iteration), index_of[request.question], np.stack(request.arrays)

    def begin(*arrays: Array) -> tuple[Any, ...]:
        return advance(start(*arrays), None)

    def resume(number: Any, index: Any, arrays: Array, flat: Array) -> tuple[Any, ...]:
        answer = asked[int(index)].unpack(flat, *arrays.shape[1:])
        return advance(sessions.take(int(number)), answer)

    def finish(number: Any) -> tuple[Array, ...]:
        return sessions.take(int(number)).result

    kinds = [tf.int64, tf.int32, dtype]
    state_shapes = [tf.TensorShape([]), tf.TensorShape([]), tf.TensorShape([None, None, None])]

    def on_host(function: Callable[..., Any], inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        return call_on_host(function, inputs, state_shapes, kinds, stateful=True)

    constant = read_once(likelihood)

    def answer(question: Question, arrays: tf.Tensor) -> tf.Tensor:
        parts = [tf.ensure_shape(arrays[i], sites.shape) for i in range(question.num_arrays)]
        asked_of = likelihood if question.is_parameter_gradient else constant
        found = question.answer(asked_of, *data, *parts)
        return tf.concat([tf.reshape(x, [-1]) for x in found], 0)

    def body(number: tf.Tensor, index: tf.Tensor, arrays: tf.Tensor) -> list[tf.Tensor]:
        branches = [lambda q=q: answer(q, arrays) for q in asked]
        flat = tf.switch_case(index, branches)
        return on_host(resume, [number, index, arrays, flat])

    number, *_ = tf.while_loop(
        lambda number, index, arrays: index < end,
        body,
        on_host(begin, arguments),
        shape_invariants=state_shapes,
        parallel_iterations=1,
    )
    return call_on_host(finish, [number], shapes, dtype, stateful=True)
