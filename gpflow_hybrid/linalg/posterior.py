"""``(K, λ) → m, v, log Z``, differentiable by a closed-form adjoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from .backends import Backend, Known, backend
from .factors import LatentPosterior, matvec


class Marginals(NamedTuple):
    """q at the data: mean and variance ``[N, L]`` and ``log Z`` summed over latents ``[]``."""

    mean: tf.Tensor
    variance: tf.Tensor
    log_normaliser: tf.Tensor


def evaluate(K: tf.Tensor, r: tf.Tensor, lambda_2: tf.Tensor) -> Known:
    """The posterior of sites ``(r, λ₂)`` ``[L, N]``, without derivatives; NaN where no valid q exists."""
    return backend().posterior(*(tf.stop_gradient(x) for x in (K, r, lambda_2)))


def site_posterior(
    K: tf.Tensor, r: tf.Tensor, lambda_2: tf.Tensor, known: Known | None = None
) -> LatentPosterior:
    """``(K, r, λ₂) → (d, v, log Z)``, differentiable in all three by a closed-form adjoint.

    The gradient never differentiates through a factorisation: with ``A = (I + ΛK)⁻¹ = I − ΛΣ``,
    ``K̄ = A diag(v̄) Aᵀ + sym[(A d̄)(A r)ᵀ] + z̄ (½ (A r)(A r)ᵀ − ½ Λ(I + KΛ)⁻¹)``.
    First derivatives only; asking for the second raises ``NotImplementedError``.

    :param known: the posterior at these very arguments, if it has been evaluated.
    """
    known = evaluate(K, r, lambda_2) if known is None else known
    return LatentPosterior(*_with_adjoint(backend(), K, r, lambda_2, known))


def _with_adjoint(
    using: Backend, K: tf.Tensor, r: tf.Tensor, lambda_2: tf.Tensor, known: Known
) -> tuple[tf.Tensor, ...]:
    """``d``, ``v`` and ``log Z`` as they are, with their derivatives in ``K``, ``r`` and ``λ₂``."""
    known = tf.nest.map_structure(tf.stop_gradient, known)
    shift, variance, log_normaliser = known.posterior

    @tf.custom_gradient
    def attach(
        K: tf.Tensor, r: tf.Tensor, lambda_2: tf.Tensor
    ) -> tuple[tuple[tf.Tensor, ...], Callable[..., Any]]:
        def grad(d_bar: tf.Tensor, v_bar: tf.Tensor, z_bar: tf.Tensor) -> tuple[Any, ...]:
            Sigma = known.covariance(K, lambda_2)
            z = z_bar[..., None]
            # dΣ = Aᵀ dK A − Σ dΛ Σ; d = Σr.
            Sigma_d_bar = matvec(Sigma, d_bar)
            r_bar = Sigma_d_bar + z * shift
            lambda_2_bar = (
                -Sigma_d_bar * shift
                - matvec(tf.square(Sigma), v_bar)
                - 0.5 * z * (tf.square(shift) + variance)
            )
            K_bar = using.kernel_adjoint(Sigma, r, lambda_2, shift, d_bar, v_bar, z_bar)
            if K.shape[0] == 1 != r.shape[0]:
                K_bar = tf.reduce_sum(K_bar, axis=0, keepdims=True)
            bars = (d_bar, v_bar, z_bar)
            return _without_derivative(K_bar, r_bar, lambda_2_bar, K, r, lambda_2, *bars)

        return (tf.identity(shift), tf.identity(variance), tf.identity(log_normaliser)), grad

    return attach(K, r, lambda_2)


@tf.custom_gradient
def _without_derivative(
    K_bar: tf.Tensor, r_bar: tf.Tensor, lambda_2_bar: tf.Tensor, *origins: tf.Tensor
) -> tuple[tuple[tf.Tensor, ...], Callable[..., Any]]:
    """The first three as they are; to differentiate them, also in what they were made of, says that the
    hand-written adjoint has no derivative. (LAPACK's calls alone would pass for constants.)"""

    def grad(*_: tf.Tensor) -> Any:
        raise NotImplementedError(
            "Second derivatives through the posterior of the sites are not available: its adjoint "
            "is written by hand. Use first derivatives, or finite differences of them."
        )

    return tuple(tf.identity(x) for x in (K_bar, r_bar, lambda_2_bar)), grad


def offset_sites(
    prior_mean: tf.Tensor, lambda_1: tf.Tensor, lambda_2: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sites seen from ``g = f − μ₀``, as ``[L, N]``: ``r = λ₁ − λ₂ μ₀`` and ``λ₂``."""
    return tf.transpose(lambda_1 - lambda_2 * prior_mean), tf.transpose(lambda_2)


def add_prior_mean(
    posterior: LatentPosterior, prior_mean: tf.Tensor, lambda_1: tf.Tensor, lambda_2: tf.Tensor
) -> Marginals:
    """Back from ``g`` to ``f``: ``m = μ₀ + d`` and ``log Z += μ₀ᵀλ₁ − ½ μ₀ᵀΛμ₀``."""
    constant = tf.reduce_sum(prior_mean * (lambda_1 - 0.5 * lambda_2 * prior_mean))
    return Marginals(
        prior_mean + tf.transpose(posterior.shift),
        tf.transpose(posterior.variance),
        tf.reduce_sum(posterior.log_normaliser) + constant,
    )


def marginals(
    K: tf.Tensor,
    prior_mean: tf.Tensor,
    lambda_1: tf.Tensor,
    lambda_2: tf.Tensor,
    known: Known | None = None,
) -> Marginals:
    """Mean, variance and log normaliser of ``q(f) ∝ N(f; μ₀, K) Π exp(λ₁f − ½λ₂f²)``.

    :param K: ``[L, N, N]`` or ``[1, N, N]``.
    :param prior_mean: ``μ₀``, ``[N, L]``.
    :param lambda_1: ``[N, L]``.
    :param lambda_2: ``[N, L]``, signed.
    :param known: see :func:`site_posterior`.
    """
    r, lam = offset_sites(prior_mean, lambda_1, lambda_2)
    return add_prior_mean(site_posterior(K, r, lam, known), prior_mean, lambda_1, lambda_2)
