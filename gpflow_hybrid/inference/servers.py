"""Who answers an iteration's questions: the likelihood on arrays, compiled functions, or a graph.

An iteration is a generator on the host. A compiled function must not be called from inside
``tf.numpy_function``, where it waits for a thread that the call itself may hold; so inside a graph the two
take turns in a ``tf.while_loop``: TensorFlow answers, the host goes on.
"""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf
from gpflow.likelihoods import Likelihood

from ..compilation import compiled
from ..linalg.host import call_on_host
from ..priors import Array
from .questions import Iteration, Question, Request, answers_on_arrays, understood

Result = TypeVar("Result")

MAX_OPEN = 64
"""Iterations of graphs that may wait for an answer at the same time; the longest waiting one goes."""

ABANDONED_AFTER = 600.0
"""Seconds after which nobody will answer any more: the graph has failed in between."""


def run(
    iteration: Iteration[Result], likelihood: Likelihood, data: tuple[tf.Tensor, tf.Tensor]
) -> Result:
    """An iteration to its end, outside of any graph."""
    with np.errstate(all="ignore"):  # what is not finite comes out so, as in TensorFlow
        return _run(iteration, answer_eagerly(likelihood, *data))


def _run(iteration: Iteration[Result], answer: Callable[[Request], Any]) -> Result:
    try:
        request = next(iteration)
        while True:
            request = iteration.send(answer(request))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def answer_on_arrays(likelihood: Likelihood, X: Array, Y: Array) -> Callable[[Request], Any]:
    """The answers of a likelihood that works on arrays."""

    def answer(request: Request) -> Any:
        question = understood(request.question, likelihood)
        assert question.on_arrays is not None
        return question.on_arrays(likelihood, X, Y, *request.arrays)

    return answer


def answer_eagerly(likelihood: Likelihood, X: tf.Tensor, Y: tf.Tensor) -> Callable[[Request], Any]:
    """On arrays where the likelihood can, else by compiled functions of ``(X, Y, *arrays)``, one for each
    question, that live as long as the likelihood."""
    on_arrays = answer_on_arrays(likelihood, X.numpy(), Y.numpy())
    functions: dict[Question, Callable[..., Any]] = {}

    def answer(request: Request) -> Any:
        if answers_on_arrays([request.question], likelihood):
            return on_arrays(request)
        question = understood(request.question, likelihood)
        arguments = (X, Y, *(tf.convert_to_tensor(x) for x in request.arrays))
        if question not in functions:
            key = (question.name, request.arrays[0].shape[1])
            functions[question] = compiled(likelihood, key, question.answer, *arguments)
        return question.kind(*(x.numpy() for x in functions[question](*arguments)))

    return answer


class Finished(NamedTuple):
    """What an iteration ended with, until the graph asks for it."""

    result: tuple[Array, ...]

    def close(self) -> None:
        """Nothing to do."""


class Sessions:
    """Iterations that wait for a graph's answers, by number."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[float, Any]] = {}  # since when it waits
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def put(self, iteration: Any) -> int:
        """A number for an iteration that waits from now on; abandoned ones are closed."""
        now = time.monotonic()
        with self._lock:
            waiting = list(self._open)  # the longest first
            too_many = waiting[: max(0, len(waiting) + 1 - MAX_OPEN)]
            too_long = [i for i in waiting if now - self._open[i][0] > ABANDONED_AFTER]
            abandoned = [self._open.pop(i)[1] for i in {*too_many, *too_long}]
            number = next(self._numbers)
            self._open[number] = now, iteration
        for other in abandoned:
            other.close()
        return number

    def take(self, number: int) -> Any:
        """The iteration of a number, which waits no longer."""
        with self._lock:
            if number in self._open:
                return self._open.pop(number)[1]
        raise RuntimeError(
            "An E-step inside a graph was given up: its likelihood took longer than "
            f"{ABANDONED_AFTER:.0f} s to answer, or more than {MAX_OPEN} ran at the same time."
        )


SESSIONS = Sessions()


def run_in_graph(
    start: Callable[..., Iteration[tuple[Array, ...]]],
    arguments: list[tf.Tensor],
    shapes: list[Any],
    questions: Sequence[Question],
    likelihood: Likelihood,
    data: tuple[tf.Tensor, tf.Tensor],
) -> list[tf.Tensor]:
    """An iteration to its end, inside a graph.

    :param start: the iteration from the arrays of ``arguments``; it ends with arrays of the given ``shapes``.
    """
    if answers_on_arrays(questions, likelihood):
        alone = copy.copy(likelihood)  # a graph that holds the original would keep it alive

        def to_the_end(X: Array, Y: Array, *arrays: Array) -> tuple[Array, ...]:
            return _run(start(*arrays), answer_on_arrays(alone, X, Y))

        return call_on_host(to_the_end, [*data, *arguments], shapes, arguments[0].dtype)
    return _take_turns(start, arguments, shapes, questions, likelihood, data)


def _take_turns(
    start: Callable[..., Iteration[tuple[Array, ...]]],
    arguments: list[tf.Tensor],
    shapes: list[Any],
    questions: Sequence[Question],
    likelihood: Likelihood,
    data: tuple[tf.Tensor, tf.Tensor],
) -> list[tf.Tensor]:
    index_of = {}
    asked: list[Question] = []
    for question in questions:
        as_understood = understood(question, likelihood)
        if as_understood not in asked:
            asked.append(as_understood)
        index_of[question] = asked.index(as_understood)
    sites = arguments[-1]  # [N, L], as what is asked about
    dtype, end = sites.dtype, len(asked)

    def advance(iteration: Any, answer: Any) -> tuple[Any, ...]:
        """Number, question and arrays ``[k, N, L]`` of the next request, or the end."""
        try:
            request = iteration.send(answer)
        except StopIteration as stop:
            return SESSIONS.put(Finished(stop.value)), end, np.zeros((1, 0, 0))
        return SESSIONS.put(iteration), index_of[request.question], np.stack(request.arrays)

    def begin(*arrays: Array) -> tuple[Any, ...]:
        return advance(start(*arrays), None)

    def resume(number: Any, index: Any, arrays: Array, flat: Array) -> tuple[Any, ...]:
        answer = asked[int(index)].unpack(flat, *arrays.shape[1:])
        return advance(SESSIONS.take(int(number)), answer)

    def finish(number: Any) -> tuple[Array, ...]:
        return SESSIONS.take(int(number)).result

    kinds = [tf.int64, tf.int32, dtype]
    state_shapes = [tf.TensorShape([]), tf.TensorShape([]), tf.TensorShape([None, None, None])]

    def on_host(function: Callable[..., Any], inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        return call_on_host(function, inputs, state_shapes, kinds, stateful=True)

    def answer(question: Question, arrays: tf.Tensor) -> tf.Tensor:
        parts = [tf.ensure_shape(arrays[i], sites.shape) for i in range(question.num_arrays)]
        found = question.answer(likelihood, *data, *parts)
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
