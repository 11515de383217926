"""Where inference starts under a likelihood that is a step function of f: at the optimum of a smooth one.

With ``p(y|f)`` one number where the label's latent is the largest and another elsewhere, the ELBO has many
optima: of sites that look at the labels alone, which one is met jumps with the hyperparameters, by tens of
nats. ``softmax(βf)`` is log-concave, so that its λ* is a smooth function of them; with β many times what f
is wide under the prior it is nearly the step, and its λ* near a good optimum.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from gpflow.likelihoods import Likelihood

from ..likelihoods.curvature import Curvature, curvature
from ..likelihoods.expectations import ExpectationGradients, expectation_gradients
from ..likelihoods.first_sites import smooth_relative
from ..likelihoods.on_arrays import OnArrays
from ..priors import Prior
from ..sites import SiteValues
from .common import Collapse, Method, Solution
from .options import SMOOTH_START
from .questions import EXPECTATIONS, Iteration, Question
from .variational import solve

Result = TypeVar("Result")


def _relative_on_arrays(name: str) -> Callable[[OnArrays], Callable[..., Any] | None]:
    """A method of the smooth relative's, which has no parameters, on arrays."""

    def host_answer(on: OnArrays) -> Callable[..., Any] | None:
        if on.smooth_relative is None:
            return None
        asked = getattr(on.smooth_relative, name)
        return lambda data, *arrays: asked(data._replace(values=()), *arrays)

    return host_answer


def _relative_of(likelihood: Likelihood) -> Likelihood:
    found = smooth_relative(likelihood)
    assert found is not None  # only then is it asked
    return found


def _expectations(likelihood: Likelihood, X: Any, Y: Any, m: Any, v: Any) -> ExpectationGradients:
    return expectation_gradients(_relative_of(likelihood), X, m, v, Y)


def _curvature(likelihood: Likelihood, X: Any, Y: Any, m: Any, v: Any, g2: Any) -> Curvature:
    return curvature(_relative_of(likelihood), X, Y, m, v, g2)


SMOOTH_EXPECTATIONS = Question(
    "smooth_expectations",
    _expectations,
    ExpectationGradients,
    2,
    (1, 2, 2),
    _relative_on_arrays("expectations"),
)
"""``E_q[log p̃]`` of the smooth relative p̃, and its derivatives, from m and v."""

SMOOTH_CURVATURE = Question(
    "smooth_curvature", _curvature, Curvature, 3, (3, 3, 3, 3), _relative_on_arrays("curvature")
)
"""Its second derivatives, from m, v and ``g₂ = −2 ∂E/∂v``."""


def starts_smoothly(likelihood: Likelihood) -> bool:
    """Whether a likelihood has a smooth relative."""
    return smooth_relative(likelihood) is not None


@functools.cache
def smoothly_started(method: Method) -> Method:
    """The same method from sites of the smooth relative; from those it is given where it has none."""

    def collapsed(
        prior: Prior, start: SiteValues, tolerance: float, max_steps: int
    ) -> Iteration[Collapse]:
        start = yield from _smooth_sites(prior, start)
        return (yield from method.collapse(prior, start, tolerance, max_steps))

    def solved(
        prior: Prior, start: SiteValues, tolerance: float, max_steps: int
    ) -> Iteration[Solution]:
        start = yield from _smooth_sites(prior, start)
        return (yield from method.solve(prior, start, tolerance, max_steps))

    questions = (*method.questions, SMOOTH_EXPECTATIONS, SMOOTH_CURVATURE)
    return dataclasses.replace(method, collapse=collapsed, solve=solved, questions=questions)


def _smooth_sites(prior: Prior, start: SiteValues) -> Iteration[SiteValues]:
    """λ* of ``softmax(βf)``, roughly, with β in units of what f is wide under the prior."""
    beta = SMOOTH_START.steepness / np.sqrt(np.mean(prior.variance))
    zeros = SiteValues(*(np.zeros_like(x) for x in start))
    iteration = solve(prior, zeros, SMOOTH_START.tolerance, SMOOTH_START.max_steps)
    found = yield from _of_steep_relative(iteration, beta)
    return found.sites if found.has_started else start


def _of_steep_relative(iteration: Iteration[Result], beta: float) -> Iteration[Result]:
    """An iteration whose questions about ``E_q[log p(y|f)]`` are asked about ``p̃(y|βf)``: with
    ``Ẽ(m, v) = E(βm, β²v)`` every derivative in m brings a β, and every one in v a β²."""
    scales = np.array([beta, beta * beta])
    answer: Any = None
    while True:
        try:
            request = iteration.send(answer)
        except StopIteration as end:  # also at once, where the prior is not valid
            return end.value
        m, v, *others = request.arrays
        if request.question is EXPECTATIONS:
            E = yield SMOOTH_EXPECTATIONS(beta * m, beta * beta * v)
            answer = ExpectationGradients(E.value, scales[0] * E.mean, scales[1] * E.variance)
        else:
            (g2,) = others
            H = yield SMOOTH_CURVATURE(beta * m, beta * beta * v, g2 / scales[1])
            answer = Curvature(
                *(x * s for x, s in zip(H, np.outer(scales, scales).flat, strict=True))
            )
