"""GPflow's ordinal likelihood with finite derivatives in its outer bins."""

from __future__ import annotations

import tensorflow as tf
from check_shapes import inherit_check_shapes
from gpflow import likelihoods
from gpflow.base import TensorType
from gpflow.likelihoods.utils import inv_probit

FAR = 1e3
"""Stands in for infinity among the scaled bin edges: Φ(±1000) is 0 or 1 exactly."""


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

    def _edges(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Upper and lower edges of every bin, over σ."""
        inner = self.bin_edges / self.sigma
        far = tf.constant([FAR], inner.dtype)
        return tf.concat([inner, far], 0), tf.concat([-far, inner], 0)

    @inherit_check_shapes
    def _scalar_log_prob(self, X: TensorType, F: TensorType, Y: TensorType) -> tf.Tensor:
        upper, lower = (tf.gather(e, tf.cast(Y, tf.int32)) - F / self.sigma for e in self._edges())
        # GPflow's floor of 1e-6, kept so that both give the same values.
        return tf.math.log(inv_probit(upper) - inv_probit(lower) + 1e-6)

    @inherit_check_shapes
    def _make_phi(self, F: TensorType) -> tf.Tensor:
        upper, lower = (e - tf.reshape(F, (-1, 1)) / self.sigma for e in self._edges())
        return inv_probit(upper) - inv_probit(lower)


def with_finite_derivatives(likelihood: likelihoods.Likelihood) -> likelihoods.Likelihood:
    """The likelihood itself, or the same one with :class:`Ordinal` in place of GPflow's."""
    if type(likelihood) is likelihoods.Ordinal:
        return Ordinal.of(likelihood)
    if type(likelihood) is likelihoods.SwitchedLikelihood:
        parts = [with_finite_derivatives(part) for part in likelihood.likelihoods]
        if any(new is not old for new, old in zip(parts, likelihood.likelihoods, strict=True)):
            return likelihoods.SwitchedLikelihood(parts, quadrature=likelihood.quadrature)
    return likelihood
