"""From a kernel matrix and Gaussian sites to the posterior's marginals, and back to gradients.

Everything here is per latent GP, with the latent as the leading axis: ``K [L, N, N]`` (or
``[1, N, N]`` where the latents share a kernel), vectors ``[L, N]``. The sites act on ``g = f − μ₀``:

    t(g) = exp(rᵀg − ½ gᵀΛg),   Σ = (K⁻¹ + Λ)⁻¹,   d = Σr,   v = diag Σ
    log Z = log ∫ N(g; 0, K) t(g) dg = −½ log|I + KΛ| + ½ rᵀd

``Λ`` is diagonal and signed. Its positive part enters through ``B = I + S K S``, ``S = √Λ₊``, whose
spectrum is at least one, so that no jitter is needed; its negative part is a correction of the rank
of the number of negative sites, whose Schur complement ``C = I − N Σ₊ N``, ``N = √Λ₋``, is positive
definite if and only if a valid q exists. Where it is not, every result is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf


class SiteFactors(NamedTuple):
    """The factors from which every posterior quantity follows: ``Σ = K − VᵀV + WᵀW``."""

    scale: tf.Tensor  # S = √max(λ₂, 0)                     [L, N]
    chol: tf.Tensor  # lower triangular, B = I + S K S       [L, N, N]
    V: tf.Tensor  # chol⁻¹ S K                               [L, N, N]
    negative: tf.Tensor  # one row √max(−λ₂, 0) eᵢ per negative site, whitened by C   [L, k, N]
    W: tf.Tensor  # chol(C)⁻¹ N Σ₊                           [L, k, N]
    log_det: tf.Tensor  # log|I + KΛ|                        [L]


class LatentPosterior(NamedTuple):
    """Shift of the mean, marginal variances and log normaliser of q, per latent."""

    shift: tf.Tensor  # d = Σr        [L, N]
    variance: tf.Tensor  # diag Σ     [L, N]
    log_normaliser: tf.Tensor  # log Z [L]


def matvec(A: tf.Tensor, x: tf.Tensor, transpose_a: bool = False) -> tf.Tensor:
    """``A x`` with a batch of matrices that broadcasts against the batch of vectors."""
    return tf.squeeze(tf.matmul(A, x[..., None], transpose_a=transpose_a), -1)


def factorise(K: tf.Tensor, lambda_2: tf.Tensor) -> SiteFactors:
    """Factor ``I + KΛ`` for signed ``Λ = diag(λ₂)``; NaN throughout where no valid q exists."""
    N = tf.shape(lambda_2)[-1]
    scale = tf.sqrt(tf.maximum(lambda_2, 0.0))  # [L, N]
    SK = scale[..., None] * K  # [L, N, N]
    B = tf.linalg.set_diag(
        SK * scale[..., None, :], 1.0 + tf.square(scale) * tf.linalg.diag_part(K)
    )
    chol = tf.linalg.cholesky(B)
    V = tf.linalg.triangular_solve(chol, SK)

    # The k most negative sites of each latent, k being the largest count over latents; a latent
    # with fewer pads with zero roots, which leave C the identity there. Without negative sites
    # k = 0 and every array below is empty.
    k = tf.reduce_max(tf.math.count_nonzero(lambda_2 < 0.0, axis=-1, dtype=tf.int32))
    values, index = tf.math.top_k(-lambda_2, k)  # [L, k]
    root = tf.sqrt(tf.maximum(values, 0.0))
    selector = root[..., None] * tf.one_hot(index, N, dtype=K.dtype)  # N as rows   [L, k, N]
    # N Σ₊ = N K − (N Vᵀ) V
    NV = tf.matmul(selector, V, transpose_b=True)
    cross = tf.matmul(selector, K) - tf.matmul(NV, V)  # [L, k, N]
    C = tf.eye(k, dtype=K.dtype) - tf.matmul(cross, selector, transpose_b=True)
    chol_C = tf.linalg.cholesky(C)
    negative = tf.linalg.triangular_solve(chol_C, selector)
    W = tf.linalg.triangular_solve(chol_C, cross)

    log_det = 2.0 * (
        tf.reduce_sum(tf.math.log(tf.linalg.diag_part(chol)), -1)
        + tf.reduce_sum(tf.math.log(tf.linalg.diag_part(chol_C)), -1)
    )
    return SiteFactors(scale, chol, V, negative, W, log_det)


def covariance_apply(K: tf.Tensor, factors: SiteFactors, x: tf.Tensor) -> tf.Tensor:
    """``Σx`` without forming ``Σ``, ``[L, N]``."""
    V, W = factors.V, factors.W
    return matvec(K, x) - matvec(V, matvec(V, x), True) + matvec(W, matvec(W, x), True)


def _weights(K: tf.Tensor, factors: SiteFactors, r: tf.Tensor, lambda_2: tf.Tensor) -> tf.Tensor:
    """``β₊ = (I + Λ₊K)⁻¹ r``, ``[L, N]``, from which ``Σ₊r = Kβ₊``.

    With ``(I + Λ₊K)⁻¹ = S B⁻¹ S⁻¹ = I − S B⁻¹ S K``: the first form for sites that say more than the
    prior, where the second is a difference of large numbers, the second for all others.
    """
    strong = lambda_2 * tf.linalg.diag_part(K) > 1.0
    zero = tf.zeros_like(r)
    weak_r = tf.where(strong, zero, r)
    scaled = tf.where(strong, r / tf.where(strong, factors.scale, tf.ones_like(r)), zero)
    rhs = scaled - factors.scale * matvec(K, weak_r)
    solved = tf.squeeze(tf.linalg.cholesky_solve(factors.chol, rhs[..., None]), -1)
    return weak_r + factors.scale * solved


def posterior_from_factors(
    K: tf.Tensor, factors: SiteFactors, r: tf.Tensor, lambda_2: tf.Tensor
) -> LatentPosterior:
    """``d``, ``v`` and ``log Z`` without forming ``Σ``."""
    V, W = factors.V, factors.W
    # d = Σr = Kβ₊ + WᵀWr
    shift = matvec(K, _weights(K, factors, r, lambda_2)) + matvec(W, matvec(W, r), True)
    variance = (
        tf.linalg.diag_part(K) - tf.reduce_sum(V * V, axis=-2) + tf.reduce_sum(W * W, axis=-2)
    )
    log_normaliser = 0.5 * (tf.reduce_sum(r * shift, -1) - factors.log_det)
    return LatentPosterior(shift, variance, log_normaliser)


def covariance_from_factors(K: tf.Tensor, factors: SiteFactors) -> tf.Tensor:
    """``Σ = K − VᵀV + WᵀW``, ``[L, N, N]``."""
    V, W = factors.V, factors.W
    return K - tf.matmul(V, V, transpose_a=True) + tf.matmul(W, W, transpose_a=True)


@tf.custom_gradient
def _no_second_derivative(*tensors: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
    """The identity; differentiating it says that the hand-written adjoint has no derivative."""

    def grad(*_: tf.Tensor) -> Any:
        raise NotImplementedError(
            "Second derivatives through the posterior of the sites are not available: its adjoint "
            "is written by hand. Use first derivatives, or finite differences of them."
        )

    return [tf.identity(t) for t in tensors], grad


@tf.custom_gradient
def _site_posterior(
    K: tf.Tensor, r: tf.Tensor, lambda_2: tf.Tensor
) -> tuple[tuple[tf.Tensor, tf.Tensor, tf.Tensor], Callable[..., Any]]:
    factors = factorise(K, lambda_2)
    shift, variance, log_normaliser = posterior_from_factors(K, factors, r, lambda_2)

    def grad(d_bar: tf.Tensor, v_bar: tf.Tensor, z_bar: tf.Tensor) -> tuple[tf.Tensor, ...]:
        K_, r_, lambda_2_, d_bar, v_bar, z_bar = _no_second_derivative(
            K, r, lambda_2, d_bar, v_bar, z_bar
        )
        Sigma = covariance_from_factors(K_, factors)
        z = z_bar[..., None]
        # dΣ = Aᵀ dK A − Σ dΛ Σ with A = (I + ΛK)⁻¹ = I − ΛΣ; d = Σr.
        Sigma_d_bar = matvec(Sigma, d_bar)
        r_bar = Sigma_d_bar + z * shift
        lambda_2_bar = (
            -Sigma_d_bar * shift
            - matvec(tf.square(Sigma), v_bar)
            - 0.5 * z * (tf.square(shift) + variance)
        )
        # K̄ = A diag(v̄) Aᵀ + sym[(A d̄)(A r)ᵀ] + z̄ (½ (A r)(A r)ᵀ − ½ (Λ − ΛΣΛ))
        lam = lambda_2_
        A_d_bar = d_bar - lam * Sigma_d_bar
        A_r = r_ - lam * shift
        A = -lam[..., None] * Sigma
        A = tf.linalg.set_diag(A, 1.0 + tf.linalg.diag_part(A))
        outer = (A_d_bar + 0.5 * z * A_r)[..., None] * A_r[..., None, :]
        K_bar = (
            tf.matmul(A * v_bar[..., None, :], A, transpose_b=True)
            + 0.5 * (outer + tf.linalg.matrix_transpose(outer))
            # Λ − ΛΣΛ = A Λ
            - 0.5 * z[..., None] * (A * lam[..., None, :])
        )
        if K.shape[0] == 1:
            K_bar = tf.reduce_sum(K_bar, axis=0, keepdims=True)
        return K_bar, r_bar, lambda_2_bar

    return (shift, variance, log_normaliser), grad


def site_posterior(K: tf.Tensor, r: tf.Tensor, lambda_2: tf.Tensor) -> LatentPosterior:
    """``(K, r, λ₂) → (d, v, log Z)``, differentiable in all three by a closed-form adjoint.

    The gradient never differentiates through a factorisation: with ``A = (I + ΛK)⁻¹ = I − ΛΣ``,
    ``K̄ = A diag(v̄) Aᵀ + sym[(A d̄)(A r)ᵀ] + z̄ (½ (A r)(A r)ᵀ − ½ Λ(I + KΛ)⁻¹)``.
    First derivatives only; asking for the second raises ``NotImplementedError``.
    """
    return LatentPosterior(*_site_posterior(K, r, lambda_2))


class Marginals(NamedTuple):
    """q at the data: mean and variance ``[N, L]`` and ``log Z`` summed over latents ``[]``."""

    mean: tf.Tensor
    variance: tf.Tensor
    log_normaliser: tf.Tensor


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
    K: tf.Tensor, prior_mean: tf.Tensor, lambda_1: tf.Tensor, lambda_2: tf.Tensor
) -> Marginals:
    """Mean, variance and log normaliser of ``q(f) ∝ N(f; μ₀, K) Π exp(λ₁f − ½λ₂f²)``.

    :param K: ``[L, N, N]`` or ``[1, N, N]``.
    :param prior_mean: ``μ₀``, ``[N, L]``.
    :param lambda_1: ``[N, L]``.
    :param lambda_2: ``[N, L]``, signed.
    """
    r, lam = offset_sites(prior_mean, lambda_1, lambda_2)
    return add_prior_mean(site_posterior(K, r, lam), prior_mean, lambda_1, lambda_2)
