"""``(K, λ) → m, v, log Z`` as tensors, differentiable by a closed-form adjoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from . import factors, lapack
from .backends import uses_lapack
from .factors import LatentPosterior, matvec
from .host import call_on_host, without_derivative


class Marginals(NamedTuple):
    """q at the data: mean and variance ``[N, L]`` and ``log Z`` summed over latents, tensors or arrays."""

    mean: Any
    variance: Any
    log_normaliser: Any


class Linalg(NamedTuple):
    """A way to compute, for tensors with the latent as leading axis."""

    posterior: Callable[..., tuple[LatentPosterior, Callable[[], tf.Tensor]]]
    """d, v and log Z from ``K, r, λ₂``, and how to get Σ."""
    kernel_adjoint: Callable[..., tf.Tensor]
    """``K̄`` ``[L, N, N]`` from ``Σ, λ₂, β, d̄, v̄, z̄``."""


def _by_tensorflow(
    K: tf.Tensor, r: tf.Tensor, lambda_2: tf.Tensor
) -> tuple[LatentPosterior, Callable[[], tf.Tensor]]:
    found = factors.factorise(K, lambda_2)
    posterior = factors.posterior_from_factors(K, found, r, lambda_2)
    return posterior, lambda: factors.covariance_from_factors(K, found)


def _by_lapack(
    K: tf.Tensor, r: tf.Tensor, lambda_2: tf.Tensor
) -> tuple[LatentPosterior, Callable[[], tf.Tensor]]:
    matrices = r.shape[:1].concatenate(K.shape[1:])

    def posterior(K: Any, r: Any, lambda_2: Any) -> tuple[Any, ...]:
        found = [lapack.posterior(_latent(K, i), r[i], lambda_2[i])[:4] for i in range(len(r))]
        return tuple(_stack(parts) for parts in zip(*found, strict=True))

    def covariance(K: Any, *others: Any) -> tuple[Any]:
        parts = enumerate(zip(*others, strict=True))
        return (_stack([lapack.covariance(_latent(K, i), *part) for i, part in parts]),)

    shift, variance, log_normaliser, chol_inverse = call_on_host(
        posterior, [K, r, lambda_2], [r.shape, r.shape, r.shape[:1], matrices]
    )
    parts = [K, lambda_2, chol_inverse, variance]
    return (
        LatentPosterior(shift, variance, log_normaliser),
        lambda: call_on_host(covariance, parts, [matrices])[0],
    )


def _lapack_adjoint(Sigma: tf.Tensor, *vectors: tf.Tensor) -> tf.Tensor:
    def on_host(*arguments: Any) -> tuple[Any]:
        return (_stack([lapack.kernel_adjoint(*parts) for parts in zip(*arguments, strict=True)]),)

    (K_bar,) = call_on_host(on_host, [Sigma, *vectors], [Sigma.shape])
    return K_bar


LAPACK = Linalg(_by_lapack, _lapack_adjoint)
TENSORFLOW = Linalg(_by_tensorflow, factors.kernel_adjoint)


def site_posterior(
    K: tf.Tensor, r: tf.Tensor, lambda_2: tf.Tensor, *, exportable: bool = True
) -> LatentPosterior:
    """``(K, r, λ₂) → (d, v, log Z)``, differentiable in all three by a closed-form adjoint.

    The gradient never differentiates through a factorisation: with ``A = (I + ΛK)⁻¹ = I − ΛΣ`` and
    ``β = A r``, ``K̄ = A diag(v̄) Aᵀ + sym[(A d̄) βᵀ] + z̄ (½ ββᵀ − ½ AΛ)``.
    First derivatives only; asking for the second raises ``NotImplementedError``.
    """
    using = LAPACK if uses_lapack(exportable=exportable) else TENSORFLOW
    found, covariance = using.posterior(*(tf.stop_gradient(x) for x in (K, r, lambda_2)))
    shift, variance, _ = found

    @tf.custom_gradient
    def attach(
        K: tf.Tensor, r: tf.Tensor, lambda_2: tf.Tensor
    ) -> tuple[tuple[tf.Tensor, ...], Callable[..., Any]]:
        def grad(d_bar: tf.Tensor, v_bar: tf.Tensor, z_bar: tf.Tensor) -> tuple[Any, ...]:
            Sigma = covariance()
            z = z_bar[..., None]
            # dΣ = Aᵀ dK A − Σ dΛ Σ; d = Σr.
            Sigma_d_bar = matvec(Sigma, d_bar)
            r_bar = Sigma_d_bar + z * shift
            lambda_2_bar = (
                -Sigma_d_bar * shift
                - matvec(tf.square(Sigma), v_bar)
                - 0.5 * z * (tf.square(shift) + variance)
            )
            beta = r - lambda_2 * shift
            K_bar = using.kernel_adjoint(Sigma, lambda_2, beta, d_bar, v_bar, z_bar)
            if K.shape[0] == 1 != r.shape[0]:
                K_bar = tf.reduce_sum(K_bar, axis=0, keepdims=True)
            origins = (K, r, lambda_2, d_bar, v_bar, z_bar)
            return without_derivative((K_bar, r_bar, lambda_2_bar), origins)

        return tuple(tf.identity(x) for x in found), grad

    return LatentPosterior(*attach(K, r, lambda_2))


def offset_sites(
    prior_mean: tf.Tensor, lambda_1: tf.Tensor, lambda_2: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sites seen from ``g = f − μ₀``, as ``[L, N]``: ``r = λ₁ − λ₂ μ₀`` and ``λ₂``."""
    return tf.transpose(lambda_1 - lambda_2 * prior_mean), tf.transpose(lambda_2)


def marginals(
    K: tf.Tensor,
    prior_mean: tf.Tensor,
    lambda_1: tf.Tensor,
    lambda_2: tf.Tensor,
    *,
    exportable: bool = True,
) -> Marginals:
    """Mean, variance and log normaliser of ``q(f) ∝ N(f; μ₀, K) Π exp(λ₁f − ½λ₂f²)``.

    :param K: ``[L, N, N]`` or ``[1, N, N]``.
    :param prior_mean: ``μ₀``, ``[N, L]``.
    :param lambda_1: ``[N, L]``.
    :param lambda_2: ``[N, L]``, signed.
    :param exportable: whether a graph that is traced now may leave this process, or be compiled by XLA.
    """
    r, lam = offset_sites(prior_mean, lambda_1, lambda_2)
    found = site_posterior(K, r, lam, exportable=exportable)
    # Back from g to f: log Z += μ₀ᵀλ₁ − ½ μ₀ᵀΛμ₀
    constant = tf.reduce_sum(prior_mean * (lambda_1 - 0.5 * lambda_2 * prior_mean))
    return Marginals(
        prior_mean + tf.transpose(found.shift),
        tf.transpose(found.variance),
        tf.reduce_sum(found.log_normaliser) + constant,
    )


def _latent(K: Any, i: int) -> Any:
    """The kernel matrix of a latent, shared or its own."""
    return K[0 if len(K) == 1 else i]


def _stack(parts: Any) -> Any:
    """Along a new leading axis; a single part as it is."""
    return parts[0][None] if len(parts) == 1 else np.stack(parts)
