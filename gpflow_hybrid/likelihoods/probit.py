"""The probit likelihood with exact expectations."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from check_shapes import check_shapes, inherit_check_shapes
from gpflow.base import MeanAndVariance, TensorType
from gpflow.likelihoods import ScalarLikelihood

from ..namespaces import functions_of, is_array
from .log_cdf import log_cdf, low_derivatives
from .probit_integrals import (
    expected_log_cdf,
    high_moments,
    low_moments,
)
from .probit_powers import log_expected_cdf_power


class ProbitBernoulli(ScalarLikelihood):
    """Bernoulli likelihood with the probit link, exact where GPflow's ``Bernoulli`` squeezes. ::

        p(y = 1 | f) = Φ(f),     p(y = 0 | f) = Φ(−f),     y ∈ {0, 1}

    ``log p`` is concave in f, so that sites have ``λ₂ ≥ 0``; GPflow's probabilities stop at 1e-3
    and 1 − 1e-3, which makes theirs convex in places. Labels are not checked here: any y acts as
    the sign ``2y − 1``.
    """

    works_on_arrays = True
    """``expectation_derivatives``, ``expectation_curvature`` and ``log_expected_derivatives`` take NumPy's
    arrays as well as tensors."""

    @inherit_check_shapes
    def _scalar_log_prob(self, X: TensorType, F: TensorType, Y: TensorType) -> tf.Tensor:
        return log_cdf(_signed(tf.convert_to_tensor(F), Y))

    @inherit_check_shapes
    def _conditional_mean(self, X: TensorType, F: TensorType) -> tf.Tensor:
        return tf.exp(log_cdf(tf.convert_to_tensor(F)))

    @inherit_check_shapes
    def _conditional_variance(self, X: TensorType, F: TensorType) -> tf.Tensor:
        # Φ(f) Φ(−f): p − p² would lose the upper tail.
        F = tf.convert_to_tensor(F)
        return tf.exp(log_cdf(F) + log_cdf(-F))

    @inherit_check_shapes
    def _predict_mean_and_var(
        self, X: TensorType, Fmu: TensorType, Fvar: TensorType
    ) -> MeanAndVariance:
        # E[Φ(f)] = Φ(m/√(1 + v))
        a = Fmu / tf.sqrt(1 + Fvar)
        return self._conditional_mean(X, a), self._conditional_variance(X, a)

    @inherit_check_shapes
    def _predict_log_density(
        self, X: TensorType, Fmu: TensorType, Fvar: TensorType, Y: TensorType
    ) -> tf.Tensor:
        z = _signed(tf.convert_to_tensor(Fmu), Y) / tf.sqrt(1 + Fvar)
        return tf.reduce_sum(log_cdf(z), axis=-1)

    @inherit_check_shapes
    def _variational_expectations(
        self, X: TensorType, Fmu: TensorType, Fvar: TensorType, Y: TensorType
    ) -> tf.Tensor:
        m, v, shape = _flatten(_signed(tf.convert_to_tensor(Fmu), Y), Fvar)
        return tf.reduce_sum(tf.reshape(expected_log_cdf(m, v), shape), axis=-1)

    def expectation_derivatives(
        self, X: TensorType, Fmu: TensorType, Fvar: TensorType, Y: TensorType
    ) -> tuple[Any, Any, Any]:
        """``E_q[log p]`` ``[N]`` and its derivatives in mean and variance ``[N, P]``, in one go."""
        m, v, shape = _flatten(_signed(Fmu, Y), Fvar)
        E0, E1, E2 = (_as_before(x, shape, Fmu) for x in low_moments(m, v))
        return functions_of(E0).sum(E0, axis=-1), _signed(E1, Y), 0.5 * E2

    def expectation_curvature(
        self,
        X: TensorType,
        Fmu: TensorType,
        Fvar: TensorType,
        Y: TensorType,
        *,
        rough: bool = False,
    ) -> tuple[Any, Any]:
        """``∂²E/∂m∂v`` and ``∂²E/∂v²``, ``[N, P]`` each; exact expectations have ``∂²E/∂m² = 2 ∂E/∂v``.

        :param rough: three digits will do, as for a Newton step.
        """
        m, v, shape = _flatten(_signed(Fmu, Y), Fvar)
        E3, E4 = (_as_before(x, shape, Fmu) for x in high_moments(m, v, rough))
        return 0.5 * _signed(E3, Y), 0.25 * E4

    def log_expected_derivatives(
        self, X: TensorType, Fmu: TensorType, Fvar: TensorType, Y: TensorType
    ) -> tuple[Any, Any, Any]:
        """``log E[p(y|f)] = log Φ((2y − 1) Fmu/√(1 + Fvar))`` for ``f ~ N(Fmu, Fvar)``, and its derivatives
        in both, ``[N, P]`` each."""
        q2 = 1 + Fvar
        q = functions_of(Fvar).sqrt(q2)
        z = _signed(Fmu, Y) / q
        value, slope = low_derivatives(z)[:2] if is_array(z) else (log_cdf(z), log_cdf(z, 1))
        return value, _signed(slope, Y) / q, -0.5 * slope * z / q2

    @check_shapes(
        "X: [broadcast batch..., input_dim]",
        "Fmu: [broadcast batch..., latent_dim]",
        "Fvar: [broadcast batch..., latent_dim]",
        "Y: [broadcast batch..., observation_dim]",
        "return: [batch..., latent_dim]",
    )
    def log_expected_power(
        self, X: TensorType, Fmu: TensorType, Fvar: TensorType, Y: TensorType, alpha: TensorType
    ) -> tf.Tensor:
        """``(1/α) log E[p(y|f)^α]`` under ``f ~ N(Fmu, Fvar)``, one value per latent. ::

            α → 0: E[log p(y|f)],     α = 1: log Φ((2y − 1) Fmu/√(1 + Fvar))

        It is non-decreasing in α. α is a scalar in (0, 1] and is not differentiated.
        """
        m = _signed(tf.convert_to_tensor(Fmu), Y)
        if tf.get_static_value(alpha) == 1:
            return log_cdf(m / tf.sqrt(1 + Fvar))
        m, v, shape = _flatten(m, Fvar)
        if not tf.is_tensor(alpha):
            alpha = tf.constant(alpha, m.dtype)  # tf.cast would pass through float32
        return tf.reshape(log_expected_cdf_power(m, v, tf.cast(alpha, m.dtype)), shape)


def _signed(F: Any, Y: Any) -> Any:
    """``(2y − 1) f``: p(y|f) = Φ of it."""
    if is_array(F):
        return (2 * np.asarray(Y, F.dtype) - 1) * F
    return (2 * tf.cast(Y, F.dtype) - 1) * F


def _as_before(x: Any, shape: Any, like: Any) -> Any:
    """Undo `_flatten`; the number of columns is known."""
    if is_array(x):
        return x.reshape(shape)
    x = tf.reshape(x, shape)
    x.set_shape([None] * (len(like.shape) - 1) + [like.shape[-1]])
    return x


def _flatten(m: Any, v: Any) -> tuple[Any, Any, Any]:
    """m and v broadcast against each other and flattened to ``[B]``, and the shape they had."""
    if is_array(m):
        m, v = np.broadcast_arrays(m, v)
        return m.ravel(), v.ravel(), m.shape
    v = tf.cast(v, m.dtype)
    shape = tf.broadcast_dynamic_shape(tf.shape(m), tf.shape(v))
    m, v = (tf.reshape(tf.broadcast_to(a, shape), [-1]) for a in (m, v))
    return m, v, shape
