"""The prior with its kernel matrix, by LAPACK."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from scipy.linalg import get_blas_funcs, get_lapack_funcs

from .. import tuning
from ..linalg import Marginals, lapack
from ..linalg.lapack import symmetric_product
from ..linalg.symmetric import mirror, row_blocks
from ..linalg.workspace import Workspace, leave_workspace, take_workspace
from ..sites import SiteValues
from .protocol import Array, Posterior, Solver


class PriorMoments(NamedTuple):
    """``K [L or 1, N, N]`` and ``μ₀ [N, L]`` as tensors: what a :class:`DensePrior` is made of."""

    K: tf.Tensor
    mean: tf.Tensor

    @staticmethod
    def on_host(K: Array, mean: Array) -> DensePrior:
        """The prior with these values."""
        return DensePrior(K, mean)


class DensePrior:
    """``N(μ₀, K)``, the kernel matrix shared by the latents or one each."""

    def __init__(self, K: Array, mean: Array) -> None:
        self.K, self.mean = K, mean
        self.workspace = take_workspace(K.shape[-1], K.dtype)
        self.largest_variance = float(max(matrix.diagonal().max() for matrix in K))
        self.spares_memory = len(mean) > tuning.LARGE_MATRIX

    def kernel_matrix(self, latent: int) -> Array:
        """``K`` of a latent."""
        return self.K[0 if len(self.K) == 1 else latent]

    @property
    def variance(self) -> Array:
        """``diag K``, ``[N, L]``."""
        diagonals = np.stack([matrix.diagonal() for matrix in self.K], 1)
        return np.broadcast_to(diagonals, self.mean.shape)

    def largest_correlation(self) -> float:
        """``max |Kᵢⱼ| / √(Kᵢᵢ Kⱼⱼ)`` over pairs of data; 1 where there is no pair."""
        found = 0.0
        for matrix in self.K:
            scale = np.sqrt(np.abs(matrix.diagonal()))
            for rows in row_blocks(len(matrix)):
                block = np.abs(matrix[rows]) / (scale[rows, None] * scale)
                block[np.arange(len(block)), np.arange(len(matrix))[rows]] = 0.0
                found = max(found, float(np.max(block)))
        return found if len(self.mean) > 1 else 1.0

    def posterior(self, sites: SiteValues, keeping: tuple[Posterior, ...] = ()) -> DensePosterior:
        """q at these sites, one latent after the other."""
        taken = {q.slot for q in keeping if isinstance(q, DensePosterior)}
        return DensePosterior(self, sites, next(i for i in range(len(taken) + 1) if i not in taken))

    def close(self) -> None:
        """Leave the matrices' memory to the next E-step."""
        leave_workspace(self.workspace)
        self.workspace = Workspace(0, self.K.dtype)  # whoever comes late finds none of it


class DensePosterior:
    """q of a :class:`DensePrior` at some sites.

    :param slot: where in the workspace its factors are.
    """

    def __init__(self, prior: DensePrior, sites: SiteValues, slot: int) -> None:
        self.prior, self.slot = prior, slot
        lambda_1, lambda_2 = sites
        r = np.ascontiguousarray((lambda_1 - lambda_2 * prior.mean).T)
        self.lambda_2 = np.ascontiguousarray(lambda_2.T)
        self.parts = [
            lapack.posterior(
                prior.kernel_matrix(i), r[i], self.lambda_2[i], self._room("factor", slot, i)
            )
            for i in range(len(r))
        ]
        constant = np.sum(prior.mean * (lambda_1 - 0.5 * lambda_2 * prior.mean))
        self.marginals = Marginals(
            prior.mean + np.stack([p.shift for p in self.parts], 1),
            np.stack([p.variance for p in self.parts], 1),
            sum(p.log_normaliser for p in self.parts) + constant,
        )

    def at_new_rows(self, cross: Sequence[Array], variance: Array) -> tuple[Array, Array]:
        """``k(x, X) (I + ΛK)⁻¹ r`` and ``k(x, x) − k(x, X) S B⁻¹ S k(X, x)`` for M other inputs, ``[M, L]``
        each; of positive sites.

        :param cross: ``k(X, x)`` ``[N, M]`` for every latent.
        :param variance: ``k(x, x)`` ``[M, L]``.
        """
        shift, explained = np.empty_like(variance), np.empty_like(variance)
        for i, (part, k) in enumerate(zip(self.parts, cross, strict=True)):
            shift[:, i] = part.weights @ k
            explained[:, i] = lapack.explained_variance(k, self.lambda_2[i], part.chol_inverse)
        return shift, variance - explained

    def _room(self, *name: str | int) -> Array:
        return self.prior.workspace.matrix(*name)

    def covariance(self, *, for_adjoint: bool) -> DenseCovariance:
        """Σ; for steps, as long as ``Σ∘Σ`` is kept, only what is on and below the diagonal."""
        Sigma = [
            lapack.covariance(
                self.prior.kernel_matrix(i),
                self.lambda_2[i],
                part.chol_inverse,
                part.variance,
                part.negative,
                self._room("covariance", i),
                mirrored=for_adjoint or self.prior.spares_memory,
            )
            for i, part in enumerate(self.parts)
        ]
        return DenseCovariance(
            Sigma, self.lambda_2, self.prior.workspace, len(self.prior.K), self.prior.spares_memory
        )


class DenseCovariance:
    """``Σ`` as matrices, one per latent."""

    def __init__(
        self,
        Sigma: list[Array],
        lambda_2: Array,
        workspace: Workspace,
        num_kernels: int,
        spares_memory: bool,
    ) -> None:
        self.Sigma, self.lambda_2 = Sigma, lambda_2
        self._workspace, self._num_kernels = workspace, num_kernels
        self._spares_memory = spares_memory

    @functools.cached_property
    def variance(self) -> Array:
        """``diag Σ``, ``[L, N]``."""
        return np.stack([A.diagonal() for A in self.Sigma])

    @functools.cached_property
    def _squares(self) -> list[Array]:
        """``Σ∘Σ`` on and below the diagonals."""
        found = []
        for i, A in enumerate(self.Sigma):
            square = self._workspace.matrix("squares", i)
            for rows in row_blocks(len(A)):
                part = A[rows, : rows.stop]
                np.multiply(part, part, out=square[rows, : rows.stop])
            found.append(square)
        return found

    def product(self, x: Array) -> Array:
        """``Σx``, ``[L, N]``."""
        return np.stack([symmetric_product(A, y) for A, y in zip(self.Sigma, x, strict=True)])

    def squared_product(self, x: Array) -> Array:
        """``(Σ∘Σ)x``, ``[L, N]``; where memory is dear without another matrix."""
        if not self._spares_memory:
            return np.stack(
                [symmetric_product(A, y) for A, y in zip(self._squares, x, strict=True)]
            )
        found = np.empty_like(x)
        for A, y, out in zip(self.Sigma, x, found, strict=True):
            for rows in row_blocks(len(y)):
                out[rows] = np.einsum("ij,ij,j->i", A[rows], A[rows], y)
        return found

    def reduced_solver(self, mv: Array, vm: Array, vv: Array, c: float) -> Solver:
        """By LU factors of M, one matrix per latent."""
        like = self.Sigma[0]
        getrf, getrs = get_lapack_funcs(("getrf", "getrs"), (like,))
        factors = [
            getrf(self._reduced_matrix(i, *parts, c), overwrite_a=1)[:2]
            for i, parts in enumerate(zip(mv, vm, vv, strict=True))
        ]

        def solve(x: Array, transpose: bool) -> Array:
            pairs = zip(factors, x, strict=True)
            return np.stack([getrs(*lu, y, trans=int(transpose))[0] for lu, y in pairs])

        return solve

    def _reduced_matrix(self, latent: int, mv: Array, vm: Array, vv: Array, c: float) -> Array:
        """``M`` of one latent."""
        Sigma = self.Sigma[latent]
        Sigma2 = Sigma * Sigma if self._spares_memory else self._squares[latent]
        mirror(Sigma2)
        symm = get_blas_funcs("symm", (Sigma,))
        M: Array = symm(1.0, Sigma.T, (Sigma2 * mv).T, lower=0)  # (Σ∘Σ E_mv)ᵀ = E_mv (Σ∘Σ)
        M *= -(2.0 / c) * vm[:, None]
        # Fortran's order, as M has: columns of a symmetric matrix are its rows.
        for columns in row_blocks(len(M)):
            M[:, columns] -= 2.0 * vv[:, None] * Sigma2[columns].T
        # An exactly singular matrix is moved off by a rounding error.
        largest = max(M.max(), -M.min())
        M[np.diag_indices(len(M))] += c + np.finfo(M.dtype).eps * largest
        return M

    def between(self, data: Array, a: Array, b: Array) -> Array:
        """``Σ_l aᵢaⱼ Σ_ij + 2 bᵢbⱼ Σ_ij²`` for directions ``[L, R]`` of these data, ``[R, R]``."""
        found = np.zeros((len(data), len(data)), a.dtype)
        for A, x, y in zip(self.Sigma, a, b, strict=True):
            mirror(A)
            for rows in row_blocks(len(data)):
                so_far = slice(rows.stop)  # on and below the diagonal
                part = A[data[rows]][:, data[so_far]]
                squares = part * (2.0 * y[rows, None] * y[so_far])
                found[rows, so_far] += part * (x[rows, None] * x[so_far] + squares)
        mirror(found)
        return found

    def adjoint(
        self,
        beta: Array,
        mean_bar: Array,
        variance_bar: Array,
        prior_variance_bar: Array | None = None,
    ) -> tuple[Array, Array]:
        """``K̄`` ``[L or 1, N, N]`` and ``μ̄₀ = A m̄ + β`` ``[N, L]``, with ``A = I − ΛΣ``."""
        vectors = zip(self.Sigma, self.lambda_2, beta, mean_bar, variance_bar, strict=True)
        K_bars = [lapack.kernel_adjoint(*each) for each in vectors]
        if prior_variance_bar is not None:
            for matrix, diagonal in zip(K_bars, prior_variance_bar, strict=True):
                matrix[np.diag_indices(len(matrix))] += diagonal
        if self._num_kernels == 1:
            K_bar = functools.reduce(np.add, K_bars)[None]
        else:
            K_bar = np.stack(K_bars)
        prior_mean_bar = mean_bar - self.lambda_2 * self.product(mean_bar) + beta
        return K_bar, prior_mean_bar.T
