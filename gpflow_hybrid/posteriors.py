"""Predictions from sites, cached or not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from check_shapes import inherit_check_shapes
from gpflow.base import MeanAndVariance, TensorType
from gpflow.kernels import Kernel
from gpflow.mean_functions import MeanFunction
from gpflow.posteriors import (
    AbstractPosterior,
    BasePosterior,
    PrecomputeCacheType,
    PrecomputedValue,
)
from gpflow.utilities import assert_params_false

from .batches import in_batches
from .covariances import covariance, prior_mean, variance
from .errors import InvalidPosteriorError, NonFiniteError, in_short
from .inputs import columns_of, new_inputs
from .linalg import factorise, matvec, offset_sites, weights_from_factors
from .sites import Sites, SiteValues

__all__ = ["CheckedPosterior", "SitePosterior"]


def cache_type(value: PrecomputeCacheType | str | None) -> PrecomputeCacheType:
    """GPflow's enum from itself, from its string values, or from None (no cache)."""
    if value is None:
        return PrecomputeCacheType.NOCACHE
    if isinstance(value, str):
        value = value.lower()
    try:
        return PrecomputeCacheType(value)
    except ValueError:
        raise ValueError(
            f"precompute_cache must be 'tensor', 'variable', 'nocache' or None; found {value!r}."
        ) from None


NO_VALID_Q = "No valid q(f) for these sites, or a non-finite kernel matrix or mean function."
"""What a compiled function can say; outside of one, :func:`explain_invalid` says more."""


def explain_invalid(X: TensorType, K: tf.Tensor, mean: tf.Tensor, lambda_2: tf.Tensor) -> Exception:
    """Why there is no q for these sites: a prior that is not finite, or negative sites."""
    finite_rows = {
        "kernel matrix": np.isfinite(K).all(axis=(0, 2)),
        "mean function": np.isfinite(mean).all(axis=1),
    }
    for name, finite in finite_rows.items():
        if not finite.all():
            n = int(np.argmin(finite))
            return NonFiniteError(
                f"The {name} is not finite at datum {n} (x = {in_short(np.asarray(X)[n])}). Check the "
                "hyperparameters: gpflow.utilities.print_summary(model)."
            )
    array = np.asarray(lambda_2)
    worst = np.unravel_index(np.argmin(array), array.shape)
    return InvalidPosteriorError(
        "There is no valid q(f) for these sites: K⁻¹ + diag(λ₂) is not positive definite. The "
        f"most negative λ₂ is {array[worst]:.3g} at datum {worst[0]} (latent {worst[1]}). "
        "Run model.infer(), or restart from zero sites with smaller natural-gradient steps."
    )


def no_cavity(
    n: int, latent: int, precision: float, count: int, alpha: float, reset: str
) -> InvalidPosteriorError:
    """That the cavity of a datum, the first of so many, does not exist.

    :param reset: how the sites return to zero.
    """
    return InvalidPosteriorError(
        f"The cavity of datum {n} (latent {latent}) does not exist: 1/v − αλ₂ = {precision:.3g} with "
        f"α = {alpha:g} ({count} such data). The integral diverges there: use the ELBO or a smaller α, "
        f"or infer from zero sites ({reset})."
    )


class CheckedPosterior(AbstractPosterior):
    """A posterior that takes whatever a model's constructor takes for X."""

    def predict_f(self, Xnew: Any, *args: Any, **kwargs: Any) -> MeanAndVariance:
        """See GPflow's method."""
        return super().predict_f(new_inputs(Xnew, columns_of(self.X_data)), *args, **kwargs)

    def fused_predict_f(self, Xnew: Any, *args: Any, **kwargs: Any) -> MeanAndVariance:
        """See GPflow's method."""
        return super().fused_predict_f(new_inputs(Xnew, columns_of(self.X_data)), *args, **kwargs)


class SitePosterior(CheckedPosterior):
    """q(f(·)) of a model with sites.

    With ``β = (I + ΛK)⁻¹ r``, ``T = chol(B)⁻¹ S k(X, x)`` and the negative sites' correction R, ::

        mean = m(x) + k(x, X) β,     cov = k(x, x') − TᵀT' + RᵀR'

    The cache is of the sites and hyperparameters at the time of :meth:`update_cache`; predictions
    without it (:meth:`fused_predict_f`, and the model's own ``predict_f``) are always current.
    """

    def __init__(
        self,
        kernel: Kernel,
        X_data: tf.Tensor,
        sites: Sites,
        mean_function: MeanFunction,
        num_latent_gps: int,
        *,
        precompute_cache: PrecomputeCacheType | str | None,
        site_values: Callable[[], SiteValues] | None = None,
    ) -> None:
        super().__init__(kernel, X_data, mean_function=mean_function)
        self.sites = sites
        self._site_values = site_values
        self.num_latent_gps = num_latent_gps
        self.num_data: int | None = X_data.shape[0]
        self.update_cache(cache_type(precompute_cache))

    def update_cache(self, precompute_cache: PrecomputeCacheType | str | None = None) -> None:
        """Set the cache to the present sites and hyperparameters; see GPflow's method."""
        if isinstance(precompute_cache, str):
            precompute_cache = cache_type(precompute_cache)
        super().update_cache(precompute_cache)

    def _precompute(self) -> tuple[PrecomputedValue, ...]:
        read = self._site_values
        lambda_1, lambda_2 = self.sites.values if read is None else read()
        self.sites.require_rows(self.X_data)
        assert self.mean_function is not None
        K = covariance(self.kernel, self.X_data)
        mean = prior_mean(self.mean_function, self.X_data, self.num_latent_gps)
        r, lam = offset_sites(mean, lambda_1, lambda_2)
        factors = factorise(K, lam)
        beta = weights_from_factors(K, factors, r, lam)
        if not tf.executing_eagerly():
            tf.debugging.assert_all_finite(beta, NO_VALID_Q)
        elif not np.isfinite(beta).all():
            raise explain_invalid(self.X_data, K, mean, lambda_2)
        # R = negative · Σ₊-column = negative · (k(X, x) − Kᵀ S B⁻¹ S k(X, x)) = P k − G T
        dynamic = self.num_data is None
        return (
            PrecomputedValue(beta, (False, dynamic)),
            PrecomputedValue(factors.scale, (False, dynamic)),
            PrecomputedValue(factors.chol, (False, dynamic, dynamic)),
            PrecomputedValue(factors.negative, (False, True, dynamic)),
            PrecomputedValue(factors.negative_V, (False, True, dynamic)),
        )

    @inherit_check_shapes
    def _conditional_with_precompute(
        self,
        cache: tuple[tf.Tensor, ...],
        Xnew: TensorType,
        full_cov: bool = False,
        full_output_cov: bool = False,
    ) -> MeanAndVariance:
        assert_params_false(self._conditional_with_precompute, full_output_cov=full_output_cov)
        Xnew = tf.convert_to_tensor(Xnew)
        tensors = [tf.convert_to_tensor(c) for c in cache]
        if full_cov:
            return self._at(tensors, Xnew, full_cov=True)

        def at_rows(X: tf.Tensor) -> MeanAndVariance:
            return self._at(tensors, X, full_cov=False)

        width = self.num_latent_gps * int(tensors[0].shape[-1] or 0)  # of k(X, x) for one x
        mean, variance = in_batches(at_rows, (Xnew,), width)
        return mean, variance

    def _at(self, cache: list[tf.Tensor], Xnew: tf.Tensor, full_cov: bool) -> MeanAndVariance:
        beta, scale, chol, P, G = cache
        L = self.num_latent_gps
        batch, num_new = tf.shape(Xnew)[:-2], tf.shape(Xnew)[-2]

        # All batches of new points at once: k(X, Xnew) as [L, N, B·M].
        flat = tf.reshape(Xnew, tf.stack([-1, tf.shape(Xnew)[-1]]))
        Kxn = covariance(self.kernel, self.X_data, flat)
        Kxn = tf.broadcast_to(Kxn, tf.concat([[L], tf.shape(Kxn)[1:]], 0))
        mean = tf.transpose(matvec(Kxn, beta, transpose_a=True))  # [B·M, L]
        mean = tf.reshape(mean, tf.concat([batch, [num_new, L]], 0))
        T = tf.linalg.triangular_solve(chol, scale[..., None] * Kxn)  # [L, N, B·M]
        R = self._negative_part(P, Kxn, G, T)  # [L, k, B·M]

        if not full_cov:
            explained = tf.reduce_sum(tf.square(T), -2) - tf.reduce_sum(tf.square(R), -2)
            explained = tf.reshape(tf.transpose(explained), tf.shape(mean))
            return mean, variance(self.kernel, Xnew) - explained

        def gram(A: tf.Tensor) -> tf.Tensor:  # [L, n, B·M] -> [batch..., L, M, M]
            A = tf.reshape(A, tf.stack([L, tf.shape(A)[1], -1, num_new]))
            A = tf.transpose(A, [2, 0, 1, 3])
            A = tf.matmul(A, A, transpose_a=True)
            return tf.reshape(A, tf.concat([batch, tf.shape(A)[1:]], 0))

        return mean, covariance(self.kernel, Xnew) - gram(T) + gram(R)

    def _negative_part(self, P: tf.Tensor, Kxn: tf.Tensor, G: tf.Tensor, T: tf.Tensor) -> tf.Tensor:
        """``R``. Inside a graph the negative sites' matrices are whole, and usually zero."""

        def correction() -> tf.Tensor:
            return tf.matmul(P, Kxn) - tf.matmul(G, T)

        if tf.executing_eagerly():
            return correction()
        rows = tf.concat([tf.shape(P)[:2], tf.shape(T)[-1:]], 0)
        return tf.cond(tf.reduce_any(P != 0.0), correction, lambda: tf.zeros(rows, T.dtype))

    @inherit_check_shapes
    def _conditional_fused(
        self, Xnew: TensorType, full_cov: bool = False, full_output_cov: bool = False
    ) -> MeanAndVariance:
        cache = tuple(c.value for c in self._precompute())
        return self._conditional_with_precompute(cache, Xnew, full_cov, full_output_cov)


def following(make: Callable[[], BasePosterior], cache: PrecomputeCacheType) -> BasePosterior:
    """GPflow's posterior of a q(u) that moves: ``update_cache`` and ``fused_predict_f`` see the present.

    :param make: GPflow's posterior of the present q(u), without a cache.
    """
    return _following(type(make()))(make, cache)


@functools.cache
def _following(kind: type[BasePosterior]) -> Callable[..., BasePosterior]:
    class Following(CheckedPosterior, kind):  # type: ignore[valid-type, misc]
        def __init__(self, make: Callable[[], BasePosterior], cache: PrecomputeCacheType) -> None:
            self._make = make
            now = make()
            kind.__init__(
                self,
                now.kernel,
                now.X_data,
                now.q_mu,
                now.q_sqrt,
                now.whiten,
                now.mean_function,
                precompute_cache=cache,
            )

        @property
        def q_mu(self) -> tf.Tensor:
            return self._make().q_mu

        @property
        def q_sqrt(self) -> tf.Tensor:
            return self._make().q_sqrt

        def update_cache(self, precompute_cache: PrecomputeCacheType | str | None = None) -> None:
            if precompute_cache is not None:
                precompute_cache = cache_type(precompute_cache)
            super().update_cache(precompute_cache)

        def _precompute(self) -> tuple[PrecomputedValue, ...]:
            now = self._make()
            self._set_qdist(now.q_mu, now.q_sqrt)
            return super()._precompute()  # type: ignore[safe-super]

        def fused_predict_f(self, Xnew: Any, *args: Any, **kwargs: Any) -> Any:
            inputs = new_inputs(Xnew, columns_of(self.X_data))
            return self._make().fused_predict_f(inputs, *args, **kwargs)

    Following.__name__ = Following.__qualname__ = kind.__name__
    return Following
