"""The Gaussian at which annealing starts: the prior, or the prior times Gaussian sites.

    base(f) = N(f; m, Σ) exp(log Z),   Σ = F Fᵀ = (K⁻¹ + Λ)⁻¹,   K = L Lᵀ

Everything has the setting of the hyperparameters as the leading axis (G of them) and the latent GP
as the second: vectors are ``[G, L, N]``, matrices ``[G, L, N, N]``.
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from ..linalg import matvec


class FactoredPrior(NamedTuple):
    """``N(μ₀, L Lᵀ)`` at the data, for every setting."""

    mean: tf.Tensor  # [G, L, N]
    chol: tf.Tensor  # L, [G, L or 1, N, N]


class Base(NamedTuple):
    """``exp(log_normaliser) N(mean, factor factorᵀ)``, and the sites that it contains."""

    mean: tf.Tensor  # [G, L, N]
    factor_t: tf.Tensor  # Fᵀ, [G, L or 1, N, N]
    log_normaliser: tf.Tensor  # log Z, [G]
    lambda_1: tf.Tensor  # [G, L, N]
    lambda_2: tf.Tensor  # [G, L, N]


class Blocks(NamedTuple):
    """Conditionals of the base: ``x_b | x_rest ~ N(weightsᵀ x, factor factorᵀ)``, ``x = f − m``.

    All B blocks have b data, the last may overlap with the one before.
    """

    start: tf.Tensor  # the first datum, [B]
    weights: tf.Tensor  # zero at the block's own data, [B, G, L or 1, N, b]
    factor_t: tf.Tensor  # [B, G, L or 1, b, b]


def prior_base(prior: FactoredPrior) -> Base:
    """The prior itself: no sites, ``log Z = 0``."""
    zeros = tf.zeros_like(prior.mean)
    return Base(
        prior.mean,
        tf.linalg.matrix_transpose(prior.chol),
        tf.zeros_like(prior.mean[:, 0, 0]),
        zeros,
        zeros,
    )


def site_base(prior: FactoredPrior, lambda_1: tf.Tensor, lambda_2: tf.Tensor) -> Base:
    """``N(μ₀, K) Π exp(λ₁f − ½λ₂f²)`` for signed ``λ₂``; NaN where it cannot be normalised.

    ``R Rᵀ = I + LᵀΛL``, ``F = L R⁻ᵀ``, ``m = μ₀ + F Fᵀ r`` with ``r = λ₁ − Λμ₀``.
    """
    chol_t = tf.linalg.matrix_transpose(prior.chol)
    M = tf.matmul(chol_t, lambda_2[..., None] * prior.chol)
    R = tf.linalg.cholesky(tf.linalg.set_diag(M, 1.0 + tf.linalg.diag_part(M)))
    factor_t = tf.linalg.triangular_solve(R, tf.broadcast_to(chol_t, tf.shape(R)))
    r = lambda_1 - lambda_2 * prior.mean
    root = matvec(factor_t, r)  # Fᵀr
    log_det = 2.0 * tf.reduce_sum(tf.math.log(tf.linalg.diag_part(R)), [-2, -1])
    # log Z = −½ log|I + KΛ| + ½ rᵀΣr + μ₀ᵀλ₁ − ½ μ₀ᵀΛμ₀
    constant = prior.mean * (lambda_1 - 0.5 * lambda_2 * prior.mean)
    log_normaliser = 0.5 * (tf.reduce_sum(root * root, [-2, -1]) - log_det)
    return Base(
        prior.mean + matvec(factor_t, root, transpose_a=True),
        factor_t,
        log_normaliser + tf.reduce_sum(constant, [-2, -1]),
        lambda_1,
        lambda_2,
    )


def rows(x: tf.Tensor) -> tf.Tensor:
    """One row for all the latents of a datum, ``[G, L, …] → [G…, L]``."""
    latents_last = tf.transpose(x, [0, *range(2, x.shape.rank), 1])
    x_rows = tf.reshape(latents_last, tf.stack([-1, tf.shape(x)[1]]))
    x_rows.set_shape([None, x.shape[1]])
    return x_rows


def marginal_variance(base: Base) -> tf.Tensor:
    """``diag Σ``, ``[G, L or 1, N]``."""
    return tf.reduce_sum(tf.square(base.factor_t), -2)


def conditionals(prior: FactoredPrior, lambda_2: tf.Tensor, block_size: int) -> Blocks:
    """Blocks of consecutive data, ``block_size`` in each; none if one would hold all the data.

    With ``Q = K⁻¹ + Λ`` and ``S = Q_bb⁻¹``: ``E[x_b | x_rest] = x_b − S Q_b x``, variance ``S``.
    """
    N = int(prior.mean.shape[-1])
    size = min(block_size, N)
    num = -(-N // size) if size < N else 0
    start = tf.minimum(tf.range(num) * size, N - size)
    inverse = tf.linalg.triangular_solve(
        prior.chol, tf.eye(N, batch_shape=tf.shape(prior.chol)[:-2], dtype=prior.chol.dtype)
    )
    K_inverse = tf.matmul(inverse, inverse, transpose_a=True)
    precision = tf.linalg.set_diag(
        K_inverse + tf.zeros_like(lambda_2)[..., None],
        tf.linalg.diag_part(K_inverse) + lambda_2,
    )

    def conditional(first: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        rows = precision[..., first : first + size, :]
        chol = tf.linalg.cholesky(rows[..., first : first + size])
        # S = C⁻ᵀC⁻¹: the factor is C⁻ᵀ, its transpose C⁻¹.
        eye = tf.eye(size, batch_shape=tf.shape(chol)[:-2], dtype=chol.dtype)
        weights = -tf.linalg.matrix_transpose(tf.linalg.cholesky_solve(chol, rows))
        own = (tf.range(N) >= first) & (tf.range(N) < first + size)
        weights = tf.where(own[:, None], tf.zeros((), chol.dtype), weights)
        return weights, tf.linalg.triangular_solve(chol, eye)

    if num == 0:
        empty = precision[None, ..., :size][:0]
        return Blocks(start, empty, empty[..., :size, :])
    dtype = prior.chol.dtype
    return Blocks(start, *tf.map_fn(conditional, start, fn_output_signature=(dtype, dtype)))
