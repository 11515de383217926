"""SVGP's expectations, as the likelihood of projections."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from gpflow.likelihoods import Likelihood

from ..stand_ins import floating_variables
from .curvature import curvature
from .density import Array, Density
from .expectations import ExpectationGradients, expectation_gradients, variational_expectations
from .marginalised import Pulled, gradients_of
from .node_rules import NodeRule, curvature_by, diagonal, expectation_gradients_by
from .probit import ProbitBernoulli
from .projected import Moments, ProjectedLikelihood, SiteWeights
from .ratio_gradients import RatioGradients


class Averaged(ProjectedLikelihood):
    """SVGP's: the likelihood's own expectation at ``v + k̃``."""

    def __init__(
        self,
        likelihood: Likelihood,
        bind: Callable[[Array], Density] | None,
        rule: NodeRule | None,
        X: Array,
        Y: Array,
        variance: Array,
    ) -> None:
        self.likelihood, self.X, self.Y, self.variance = likelihood, X, Y, variance
        self.density = None if bind is None else bind(Y)
        self.rule = rule

    def expectations(self, m: Array, v: Array, largest: float = math.inf) -> ExpectationGradients:
        v = np.minimum(v + self.variance, largest)
        if isinstance(self.likelihood, ProbitBernoulli):
            found = self.likelihood.expectation_derivatives(self.X, m, v, self.Y)
            return ExpectationGradients(*found)
        if self.density is not None:
            closed = self.density.expected(m, v)
            if closed is not None:
                return ExpectationGradients(np.sum(closed.value, -1), closed.m, closed.v)
            if self.rule is not None:
                found = expectation_gradients_by(self.rule, self.density.at, m, v)
                return ExpectationGradients(*found)
        at = expectation_gradients(self.likelihood, self.X, tf.constant(m), tf.constant(v), self.Y)
        return ExpectationGradients(*(x.numpy() for x in at))

    def curvature(self, at: Moments) -> tuple[Array, ...]:
        m, v = at.m, at.v + self.variance
        if isinstance(self.likelihood, ProbitBernoulli):
            mv, vv = self.likelihood.expectation_curvature(self.X, m, v, self.Y)
            return tuple(diagonal(x) for x in (2.0 * at.E.variance, mv, mv, vv))
        if self.density is not None:
            closed = self.density.expected(m, v)
            if closed is not None:
                mm, mv, vv = (diagonal(x) for x in closed[3:])
                return mm, mv, mv, vv
            if self.rule is not None:
                return curvature_by(self.rule, self.density.at, m, v)
        tensors = (tf.constant(x) for x in (m, v, -2.0 * at.E.variance))
        return tuple(x.numpy() for x in curvature(self.likelihood, self.X, self.Y, *tensors))

    def ratios(self, at: Moments) -> RatioGradients:
        """Not asked for: the bound needs expectations alone."""
        raise AssertionError("SVGP's bound has no ratios.")

    def pull_back(self, at: Moments, weights: SiteWeights | None) -> Pulled:
        m, v = at.m, at.v + self.variance
        if self.density is not None and self.rule is not None:
            # Sums over nodes are exact where expectations have closed forms: polynomials of f.
            nodes = m + np.sqrt(v) * self.rule.z[:, None, :]
            found = self.density.in_parameters(nodes)
            sums = [np.sum(np.tensordot(self.rule.weights, d.log_prob, 1)) for d in found]
            return Pulled(at.E.variance, sums)
        variables = floating_variables(self.likelihood)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(variables)
            arguments = (self.X, tf.constant(m), tf.constant(v), self.Y)
            total = tf.reduce_sum(variational_expectations(self.likelihood, *arguments))
        return Pulled(at.E.variance, gradients_of(tape, total, variables))
