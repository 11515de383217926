"""What an iteration asks of a likelihood.

Iterations are generators on NumPy's arrays: they yield a :class:`Request`, a question with its arrays, and
are sent the answer. They never call a likelihood, which may live in a TensorFlow graph; whoever runs them
(:mod:`~gpflow_hybrid.inference.servers`) does.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf
from gpflow.likelihoods import Likelihood

from ..likelihoods.curvature import Curvature, curvature
from ..likelihoods.expectations import ExpectationGradients, expectation_gradients
from ..likelihoods.on_arrays import OnArrays
from ..likelihoods.ratio_gradients import RatioGradients, ratio_gradients
from ..priors import Array
from ..stand_ins import read_once

Result = TypeVar("Result")
Iteration = Generator["Request", Any, Result]
"""An iteration that ends with a result."""


@dataclasses.dataclass(frozen=True, eq=False)
class Question:
    """A function of the likelihood, the data and arrays ``[N, L]``.

    :param name: what a compiled graph of it is kept under.
    :param answer: ``(likelihood, X, Y, *arrays)`` to a ``kind`` of tensors.
    :param num_arrays: that it takes.
    :param ranks: of the answer's tensors: 0 is ``[]``, 1 ``[N]``, 2 ``[N, L]``, 3 ``[N, L, L]``; empty
        where it is one row of numbers.
    :param host_answer: how a likelihood on arrays answers it, ``(observations, *arrays)``, or None if it
        cannot.
    :param is_parameter_gradient: whether the answer is a derivative in the likelihood's parameters; they
        are constants otherwise.
    """

    name: Hashable
    answer: Callable[..., Any]
    kind: Callable[..., Any]
    num_arrays: int
    ranks: tuple[int, ...]
    host_answer: Callable[[OnArrays], Callable[..., Any] | None] = lambda _: None
    is_parameter_gradient: bool = False

    def __call__(self, *arrays: Array) -> Request:
        """Ask it."""
        return Request(self, arrays)

    def answer_reading_once(self, likelihood: Likelihood, *arguments: tf.Tensor) -> Any:
        """``answer`` of a likelihood that reads its parameters once."""
        return self.answer(
            likelihood if self.is_parameter_gradient else read_once(likelihood), *arguments
        )

    def shapes(self, num_data: int, num_latent: int) -> list[tuple[int, ...]]:
        """Of the answer's arrays."""
        return [(num_data, num_latent, num_latent)[:rank] for rank in self.ranks]

    def unpack(self, flat: Array, num_data: int, num_latent: int) -> Any:
        """The answer from all its numbers in a row."""
        if not self.ranks:
            return self.kind(flat)
        shapes = self.shapes(num_data, num_latent)
        ends = np.cumsum([np.prod(shape, dtype=int) for shape in shapes])
        parts = np.split(flat, ends[:-1])
        return self.kind(*(x.reshape(s) for x, s in zip(parts, shapes, strict=True)))


class Request(NamedTuple):
    """A question at some arrays, ``[N, L]`` each."""

    question: Question
    arrays: Sequence[Array]


def has_rough_curvature(likelihood: Likelihood) -> bool:
    """Whether a likelihood has a cheaper curvature for steps."""
    exact = getattr(likelihood, "expectation_curvature", None)
    return exact is not None and "rough" in inspect.signature(exact).parameters


def understood(question: Question, likelihood: Likelihood) -> Question:
    """The question as this likelihood understands it: not all have a rough curvature."""
    is_rough = question is ROUGH_CURVATURE and not has_rough_curvature(likelihood)
    return CURVATURE if is_rough else question


def _expectations(likelihood: Likelihood, X: Any, Y: Any, m: Any, v: Any) -> ExpectationGradients:
    return expectation_gradients(likelihood, X, m, v, Y)


def _curvature(
    likelihood: Likelihood, X: Any, Y: Any, m: Any, v: Any, g2: Any, rough: bool = False
) -> Curvature:
    return curvature(likelihood, X, Y, m, v, g2, rough=rough)


EXPECTATIONS = Question(
    "expectations", _expectations, ExpectationGradients, 2, (1, 2, 2), lambda on: on.expectations
)
"""``E_q[log p]`` and its derivatives, from m and v."""

CURVATURE = Question("curvature", _curvature, Curvature, 3, (3, 3, 3, 3), lambda on: on.curvature)
"""The second derivatives of ``E_q[log p]``, from m, v and ``g₂ = −2 ∂E/∂v``."""

ROUGH_CURVATURE = Question(
    "rough_curvature",
    functools.partial(_curvature, rough=True),
    Curvature,
    3,
    (3, 3, 3, 3),
    lambda on: functools.partial(on.curvature, rough=True),
)
"""The same to three digits, which is enough for a step."""


@functools.cache
def ratios(alpha: float, blend: bool = True) -> Question:
    """``Σ (1/α) log E_q[(p/t)^α]`` and its derivatives, from m, v, λ₁ and λ₂.

    :param blend: whether the likelihood's own expectations have a part for α < 1.
    """
    blend = blend and alpha < 1.0

    def answer(likelihood: Likelihood, X: Any, Y: Any, *arrays: tf.Tensor) -> RatioGradients:
        m, v, lambda_1, lambda_2 = arrays
        return ratio_gradients(likelihood, X, Y, m, v, lambda_1, lambda_2, alpha, blend)

    def host_answer(on: OnArrays) -> Callable[..., RatioGradients] | None:
        return on.ratios(alpha) if blend or alpha == 1.0 else None

    name = ("ratios", alpha, blend)
    return Question(name, answer, RatioGradients, 4, (0, 2, 2, 2, 2), host_answer)
