"""GPflow's ordinal likelihood with finite derivatives in its outer bins."""

from __future__ import annotations

import tensorflow as tf
from check_shapes import inherit_check_shapes
from gpflow import likelihoods
from gpflow.base import TensorType
from gpflow.likelihoods.utils import inv_probit

FAR = 1e3
"""Scaled edges end here: Φ(±1000) is 0 or 1 exactly."""

FARTHER = 1e30
"""Stands in for infinity among the edges, with finite derivatives."""

FLOOR = 1e-6
"""What GPflow adds to a probability."""


class Ordinal(likelihoods.Ordinal):
    """``p(y = k | f) = Φ((aₖ − f)/σ) − Φ((aₖ₋₁ − f)/σ)``, the values of GPflow's ``Ordinal``.

    GPflow's outer edges ``±∞`` make its second derivatives NaN there, and with current TensorFlow,
    whose ``erf(±∞)`` is NaN in double precision, its values too.
    """

    @classmethod
    def of(cls, likelihood: likelihoods.Ordinal) -> Ordinal:
        """The same likelihood, sharing its parameter σ and its quadrature."""
        shared = cls(likelihood.bin_edges, quadrature=likelihood.quadrature)
        shared.sigma = likelihood.sigma
        return shared

    def _between(self, F: tf.Tensor, sigma: tf.Tensor, Y: TensorType | None = None) -> tf.Tensor:
        """The probability of the bins Y, or of all, for noise of size σ; squeezed as by GPflow."""
        inner = tf.convert_to_tensor(self.bin_edges)
        far = tf.constant([FARTHER], inner.dtype)
        edges = [tf.concat([inner, far], 0), tf.concat([-far, inner], 0)]
        if Y is not None:
            edges = [tf.gather(e, tf.cast(Y, tf.int32)) for e in edges]
        upper, lower = (tf.clip_by_value((e - F) / sigma, -FAR, FAR) for e in edges)
        return inv_probit(upper) - inv_probit(lower)

    @inherit_check_shapes
    def _scalar_log_prob(self, X: TensorType, F: TensorType, Y: TensorType) -> tf.Tensor:
        return tf.math.log(self._between(F, self.sigma, Y) + FLOOR)

    def log_expected_density(self, Fmu: tf.Tensor, Fvar: tf.Tensor, Y: TensorType) -> tf.Tensor:
        """``log E_N(f; Fmu, Fvar)[p(y|f)]``, ``[N, L]``: noise of variance ``σ² + v``."""
        return tf.math.log(self._between(Fmu, tf.sqrt(self.sigma**2 + Fvar), Y) + FLOOR)

    @inherit_check_shapes
    def _make_phi(self, F: TensorType) -> tf.Tensor:
        return self._between(tf.reshape(F, (-1, 1)), self.sigma)


def with_finite_derivatives(likelihood: likelihoods.Likelihood) -> likelihoods.Likelihood:
    """The likelihood itself, or the same one with :class:`Ordinal` in place of GPflow's."""
    if type(likelihood) is likelihoods.Ordinal:
        return Ordinal.of(likelihood)
    if type(likelihood) is likelihoods.SwitchedLikelihood:
        parts = [with_finite_derivatives(part) for part in likelihood.likelihoods]
        if any(new is not old for new, old in zip(parts, likelihood.likelihoods, strict=True)):
            return likelihoods.SwitchedLikelihood(parts, quadrature=likelihood.quadrature)
    return likelihood
