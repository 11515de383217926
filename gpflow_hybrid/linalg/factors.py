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

from typing import NamedTuple

import tensorflow as tf


class SiteFactors(NamedTuple):
    """The factors from which every posterior quantity follows: ``Σ = K − VᵀV + WᵀW``."""

    scale: tf.Tensor  # S = √max(λ₂, 0)                     [L, N]
    chol: tf.Tensor  # lower triangular, B = I + S K S       [L, N, N]
    V: tf.Tensor  # chol⁻¹ S K                               [L, N, N]
    negative: tf.Tensor  # one row √max(−λ₂, 0) eᵢ per negative site, whitened by C   [L, k, N]
    negative_V: tf.Tensor  # the same times Vᵀ               [L, k, N]
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
    """Factor ``I + KΛ`` for signed ``Λ = diag(λ₂)``; NaN throughout where no valid q exists.

    Inside a graph every shape is static, as XLA wants it: there the negative sites' matrices have as many
    rows as there are data, most of them zero, and are computed only if there are negative sites.
    """
    scale = tf.sqrt(tf.maximum(lambda_2, 0.0))  # [L, N]
    SK = scale[..., None] * K  # [L, N, N]
    B = tf.linalg.set_diag(
        SK * scale[..., None, :], 1.0 + tf.square(scale) * tf.linalg.diag_part(K)
    )
    chol = tf.linalg.cholesky(B)
    V = tf.linalg.triangular_solve(chol, SK)
    if tf.executing_eagerly():
        # The k most negative sites of each latent, k being the largest count over latents; a latent
        # with fewer pads with zero roots, which leave C the identity there. Without negative sites
        # k = 0 and every array below is empty.
        k = tf.reduce_max(tf.math.count_nonzero(lambda_2 < 0.0, axis=-1, dtype=tf.int32))
        values, index = tf.math.top_k(-lambda_2, k)  # [L, k]
        root = tf.sqrt(tf.maximum(values, 0.0))
        selector = root[..., None] * tf.one_hot(index, tf.shape(lambda_2)[-1], dtype=K.dtype)
        correction = _negative_sites(K, V, selector)
    else:
        selector = tf.linalg.diag(tf.sqrt(tf.maximum(-lambda_2, 0.0)))
        zeros = tf.zeros_like(V)
        correction = tf.cond(
            tf.reduce_any(lambda_2 < 0.0),
            lambda: _negative_sites(K, V, selector),
            lambda: (zeros, zeros, zeros, zeros[..., 0, 0]),
        )
    negative, negative_V, W, log_det_C = correction
    log_det = 2.0 * tf.reduce_sum(tf.math.log(tf.linalg.diag_part(chol)), -1) + log_det_C
    return SiteFactors(scale, chol, V, negative, negative_V, W, log_det)


def _negative_sites(K: tf.Tensor, V: tf.Tensor, selector: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """``chol(C)⁻¹`` times N, NVᵀ and NΣ₊, and ``log|C|``, ``C = I − N Σ₊ N``.

    :param selector: the rows of N that are not zero, ``[L, k, N]``.
    """
    # N Σ₊ = N K − (N Vᵀ) V
    NV = tf.matmul(selector, V, transpose_b=True)
    cross = tf.matmul(selector, K) - tf.matmul(NV, V)  # [L, k, N]
    C = tf.eye(tf.shape(selector)[-2], dtype=K.dtype) - tf.matmul(cross, selector, transpose_b=True)
    chol_C = tf.linalg.cholesky(C)
    log_det_C = 2.0 * tf.reduce_sum(tf.math.log(tf.linalg.diag_part(chol_C)), -1)
    return *(tf.linalg.triangular_solve(chol_C, x) for x in (selector, NV, cross)), log_det_C


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


def weights_from_factors(
    K: tf.Tensor, factors: SiteFactors, r: tf.Tensor, lambda_2: tf.Tensor
) -> tf.Tensor:
    """``β = (I + ΛK)⁻¹ r``, ``[L, N]``, with which ``k(x, X) β`` is the shift at any x.

    Not as ``r − ΛΣr``, which is a difference of large numbers where sites are precise. With negative sites

        β = β₊ + (I + Λ₊K)⁻¹ Nᵀ chol(C)⁻ᵀ W r = β₊ + (negativeᵀ − S chol⁻ᵀ negative_Vᵀ) W r
    """
    Wr = matvec(factors.W, r)
    across = matvec(factors.negative_V, Wr, True)[..., None]
    across = tf.squeeze(tf.linalg.triangular_solve(factors.chol, across, adjoint=True), -1)
    correction = matvec(factors.negative, Wr, True) - factors.scale * across
    return _weights(K, factors, r, lambda_2) + correction


def posterior_from_factors(
    K: tf.Tensor, factors: SiteFactors, r: tf.Tensor, lambda_2: tf.Tensor
) -> LatentPosterior:
    """``d``, ``v`` and ``log Z`` without forming ``Σ``."""
    V, W = factors.V, factors.W
    # d = Σr = Kβ₊ + WᵀWr
    weights, whitened_r = _weights(K, factors, r, lambda_2), matvec(W, r)
    positive = matvec(K, weights)
    shift = positive + matvec(W, whitened_r, True)
    variance = (
        tf.linalg.diag_part(K) - tf.reduce_sum(V * V, axis=-2) + tf.reduce_sum(W * W, axis=-2)
    )
    # ½ rᵀΣ₊r as a maximum over d, which does not feel d's rounding error in units of r, but of β₊
    sites = r - 0.5 * tf.square(factors.scale) * positive - 0.5 * weights
    quadratic = tf.reduce_sum(positive * sites, -1)
    log_normaliser = quadratic + 0.5 * (tf.reduce_sum(tf.square(whitened_r), -1) - factors.log_det)
    return LatentPosterior(shift, variance, log_normaliser)


def covariance_from_factors(K: tf.Tensor, factors: SiteFactors) -> tf.Tensor:
    """``Σ = K − VᵀV + WᵀW``, ``[L, N, N]``."""
    V, W = factors.V, factors.W
    return K - tf.matmul(V, V, transpose_a=True) + tf.matmul(W, W, transpose_a=True)


def kernel_adjoint(
    Sigma: tf.Tensor,
    lambda_2: tf.Tensor,
    beta: tf.Tensor,
    d_bar: tf.Tensor,
    v_bar: tf.Tensor,
    z_bar: tf.Tensor,
) -> tf.Tensor:
    """``K̄ = A diag(v̄) Aᵀ + sym[(A d̄) βᵀ] + z̄ (½ ββᵀ − ½ AΛ)``, ``A = I − ΛΣ``, ``[L, N, N]``."""
    z = z_bar[..., None]
    A_d_bar = d_bar - lambda_2 * matvec(Sigma, d_bar)
    A = -lambda_2[..., None] * Sigma
    A = tf.linalg.set_diag(A, 1.0 + tf.linalg.diag_part(A))
    outer = (A_d_bar + 0.5 * z * beta)[..., None] * beta[..., None, :]
    return (
        tf.matmul(A * v_bar[..., None, :], A, transpose_b=True)
        + 0.5 * (outer + tf.linalg.matrix_transpose(outer))
        - 0.5 * z[..., None] * (A * lambda_2[..., None, :])
    )
