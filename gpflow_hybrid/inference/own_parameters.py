"""Derivatives of a method's objective in the parameters of the likelihood itself."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import tensorflow as tf
from gpflow.likelihoods import Likelihood

from ..likelihoods.ratio_gradients import ParameterGradients
from ..linalg import Marginals
from ..sites import SiteValues
from ..stand_ins import floating_variables, is_taken_apart, leaves_of, with_values
from .common import FixedPoint, SitePair
from .questions import Question


def parameter_question(
    key: Hashable,
    value: Callable[[Likelihood, Any, Any, FixedPoint], tf.Tensor],
    host_answer: Callable[[Any], Callable[..., Any] | None] = lambda _: None,
) -> Question:
    """The question for the derivatives of ``L + wᵀρ``, from m, v, λ₁, λ₂ and w, all constant.

    :param value: what ``L + wᵀρ`` has of the likelihood's parameters, as a tensor.
    """

    def answer(likelihood: Likelihood, X: Any, Y: Any, *arrays: tf.Tensor) -> ParameterGradients:
        m, v, lambda_1, lambda_2, wa, wb = arrays
        q = Marginals(m, v, tf.zeros([], m.dtype))
        fixed = FixedPoint(q, SiteValues(lambda_1, lambda_2), SitePair(wa, wb))
        is_apart = is_taken_apart(likelihood)
        leaves = leaves_of(likelihood) if is_apart else floating_variables(likelihood)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(leaves)
            own = with_values(likelihood, leaves) if is_apart else likelihood
            total = value(own, X, Y, fixed)
        zero = tf.UnconnectedGradients.ZERO
        found = tape.gradient(total, leaves, unconnected_gradients=zero)
        rows = [tf.reshape(tf.convert_to_tensor(g), [-1]) for g in found]
        return ParameterGradients(tf.concat([tf.cast(g, m.dtype) for g in rows], 0))

    name = ("parameters", key)
    return Question(
        name, answer, ParameterGradients, 6, (), host_answer, is_parameter_gradient=True
    )
