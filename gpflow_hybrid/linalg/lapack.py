"""The posterior of Gaussian sites by LAPACK and BLAS, on NumPy arrays: one latent GP at a time.

The same quantities as :mod:`~gpflow_hybrid.linalg.factors`, in its notation, by a shorter way. With
``B = I + S K S = L Lᵀ`` and the triangular inverse ``L⁻¹``,

    Σ₊ = S⁻¹ (I − B⁻¹) S⁻¹,     v₊ = (1 − diag B⁻¹)/λ₂,     diag B⁻¹ = column sums of squares of L⁻¹

so that one ``potrf`` and one ``trtri`` give every marginal. The difference cancels where ``λ₂v`` is tiny:
those columns, and those of negative sites, are ``Σ₊ = K − K S B⁻¹ S K``.

Symmetric matrices are C-ordered, triangular ones lower; Fortran sees both transposed, so that nothing is
copied: a lower ``L`` here is an upper ``Lᵀ`` there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.linalg import get_blas_funcs, get_lapack_funcs

from ..tuning import COLUMN_CHUNK, RANK_CHUNK
from .symmetric import clear_above, mirror, row_blocks
from .workspace import empty_matrix

Array = npt.NDArray[Any]

WEAK = 1e-6
"""``λ₂v`` below which ``1 − diag B⁻¹`` has lost too many digits for a variance."""

WEAK_COVARIANCE = 1e-8
"""The same for covariances between such sites. Whatever is made of those is weighted by the sites."""


class HostPosterior(NamedTuple):
    """``d = Σr``, ``v = diag Σ``, ``log Z``, and ``L⁻¹``, from which Σ follows."""

    shift: Array  # [N]
    variance: Array  # [N]
    log_normaliser: Array  # []
    chol_inverse: Array  # L⁻¹, zero above its diagonal  [N, N]
    negative: Array  # W, the negative sites' part of Σ = Σ₊ + WᵀW  [k, N]
    weights: Array  # β₊ = (I + Λ₊K)⁻¹ r  [N]


def posterior(K: Array, r: Array, lambda_2: Array, room: Array | None = None) -> HostPosterior:
    """``d``, ``v``, ``log Z`` and ``L⁻¹`` for one latent; NaN where no valid q exists.

    :param room: for ``L⁻¹``.
    """
    diagonal = K.diagonal()
    scale = np.sqrt(np.maximum(lambda_2, 0.0))
    L = _site_matrix(K, scale, empty_matrix(len(K), K.dtype) if room is None else room)
    _, info = _lapack("potrf", L)(L.T, lower=0, overwrite_a=1, clean=1)
    if info != 0:
        return _no_posterior(K, L)
    log_det = 2.0 * np.log(L.diagonal()).sum()
    weights = _weights(K, scale, L, r, lambda_2)
    shift = symmetric_product(K, weights)
    # ½ rᵀΣ₊r as a maximum over d, which does not feel d's rounding error in units of r, but of β₊
    quadratic = shift @ (r - 0.5 * scale * scale * shift) - 0.5 * (weights @ shift)
    _lapack("trtri", L)(L.T, lower=0, overwrite_c=1)

    # v₊ = (1 − diag B⁻¹)/λ₂, or diag(K) − column sums of squares of L⁻¹ S K
    explained = 1.0 - _column_squares(L)
    variance = np.divide(explained, lambda_2, out=diagonal.copy(), where=lambda_2 > 0.0)
    for weak in _chunks(explained < WEAK):
        whitened = _whitened(K, scale, L, weak)
        variance[weak] = diagonal[weak] - np.einsum("ij,ij->i", whitened, whitened)

    # Σ = Σ₊ + WᵀW
    found = _negative_sites(K, scale, L, lambda_2)
    if found is None:
        return _no_posterior(K, L)
    W, log_det_C = found
    whitened_r = W @ r
    shift += whitened_r @ W
    variance += np.einsum("ij,ij->j", W, W)
    log_normaliser = quadratic + 0.5 * (whitened_r @ whitened_r - log_det - log_det_C)
    return HostPosterior(shift, variance, np.asarray(log_normaliser, K.dtype), L, W, weights)


def covariance(
    K: Array,
    lambda_2: Array,
    chol_inverse: Array,
    variance: Array,
    negative: Array | None = None,
    room: Array | None = None,
    *,
    mirrored: bool = True,
) -> Array:
    """``Σ`` from what :func:`posterior` found.

    :param negative: W; computed again if it is not given.
    :param room: for Σ.
    :param mirrored: or only what is on and below the diagonal, and anything above.
    """
    n = len(K)
    scale = np.sqrt(np.maximum(lambda_2, 0.0))
    is_weak = lambda_2 * variance < WEAK_COVARIANCE
    inverse_scale = np.divide(1.0, scale, out=np.zeros_like(scale), where=scale > 0.0)
    Sigma = empty_matrix(n, K.dtype) if room is None else room
    if not is_weak.all():  # −S⁻¹ B⁻¹ S⁻¹ with B⁻¹ = L⁻ᵀ L⁻¹, below the diagonal
        for rows in row_blocks(n):
            Sigma[rows, : rows.stop] = chol_inverse[rows, : rows.stop]
        _lapack("lauum", Sigma)(Sigma.T, lower=0, overwrite_c=1)
        for rows in row_blocks(n):
            part = Sigma[rows, : rows.stop]
            part *= -inverse_scale[rows, None]
            part *= inverse_scale[: rows.stop]
        if mirrored:
            mirror(Sigma)
    for weak in _chunks(is_weak):
        columns = _covariance_rows(K, scale, chol_inverse, weak)
        Sigma[weak] = columns
        Sigma[:, weak] = columns.T
    if negative is None:
        found = _negative_sites(K, scale, chol_inverse, lambda_2)
        negative = np.zeros((0, n), K.dtype) if found is None else found[0]
    if len(negative):
        W = np.ascontiguousarray(negative)
        blas_function("syrk", W)(1.0, W.T, beta=1.0, c=Sigma.T, lower=0, overwrite_c=1)
        if mirrored:
            mirror(Sigma)
    Sigma.flat[:: n + 1] = variance
    return Sigma


def kernel_adjoint(
    Sigma: Array, lambda_2: Array, beta: Array, d_bar: Array, v_bar: Array, z_bar: float = 1.0
) -> Array:
    """``K̄ = A diag(v̄) Aᵀ + sym[(A d̄) βᵀ] + z̄ (½ ββᵀ − ½ AΛ)`` with ``A = I − ΛΣ`` and ``β = A r``."""
    n = len(beta)
    K_bar = _signed_product(Sigma, lambda_2, v_bar)
    left: Array = d_bar - lambda_2 * symmetric_product(Sigma, d_bar) + 0.5 * z_bar * beta
    blas_function("syr2", K_bar)(0.5, left, beta, a=K_bar.T, lower=0, overwrite_a=1)
    # AΛ = Λ − ΛΣΛ
    half = 0.5 * z_bar * lambda_2
    for rows in row_blocks(n):
        part = Sigma[rows, : rows.stop] * half[: rows.stop]
        part *= lambda_2[rows, None]
        K_bar[rows, : rows.stop] += part
    K_bar.flat[:: n + 1] -= half
    mirror(K_bar)
    return K_bar


def explained_variance(cross: Array, lambda_2: Array, chol_inverse: Array) -> Array:
    """``k(x, X) S B⁻¹ S k(X, x)``: what positive sites take from the prior variance of other inputs x.

    :param cross: ``k(X, x)``, ``[N, M]``.
    """
    rows = np.ascontiguousarray(cross.T) * np.sqrt(np.maximum(lambda_2, 0.0))
    whitened = _triangular_product(chol_inverse, rows, transpose=False)
    return np.einsum("ij,ij->i", whitened, whitened)


def symmetric_product(A: Array, x: Array) -> Array:
    """``A x``. By SciPy's BLAS, as everything here: NumPy's has threads of its own, and those of the two
    would wait for each other's cores."""
    return blas_function("symv", A)(1.0, A.T, x, lower=0)


def _site_matrix(K: Array, scale: Array, B: Array) -> Array:
    """``B = I + S K S``, on and below the diagonal."""
    n = len(K)
    for rows in row_blocks(n):
        part = B[rows, : rows.stop]
        np.multiply(K[rows, : rows.stop], scale[: rows.stop], out=part)
        part *= scale[rows, None]
    B.flat[:: n + 1] += 1.0
    return B


def _weights(K: Array, scale: Array, L: Array, r: Array, lambda_2: Array) -> Array:
    """``β₊ = (I + Λ₊K)⁻¹ r``: ``S B⁻¹ S⁻¹ r`` for sites that say more than the prior, for others
    ``(I − S B⁻¹ S K) r``; each is a difference of large numbers where the other is not."""
    strong = lambda_2 * K.diagonal() > 1.0
    weak_r = np.where(strong, 0.0, r)
    rhs = np.divide(r, scale, out=np.zeros_like(r), where=strong)
    if weak_r.any():
        rhs -= scale * symmetric_product(K, weak_r)
    solved, _ = _lapack("potrs", L)(L.T, rhs, lower=0)
    return weak_r + scale * solved


def _column_squares(L: Array) -> Array:
    """Column sums of squares of a lower triangular matrix."""
    total = np.zeros(len(L), L.dtype)
    for rows in row_blocks(len(L)):
        part = L[rows, : rows.stop]
        total[: rows.stop] += np.einsum("ij,ij->j", part, part)
    return total


def _chunks(is_member: Array, size: int = COLUMN_CHUNK) -> Iterator[Array]:
    """Indices of the members, so many at a time that their columns are a small part of a matrix."""
    (index,) = np.nonzero(is_member)
    return (index[i : i + size] for i in range(0, len(index), size))


def _whitened(K: Array, scale: Array, chol_inverse: Array, index: Array) -> Array:
    """Columns of ``L⁻¹ S K``, as rows."""
    rows = K[index] * scale
    return _triangular_product(chol_inverse, rows, transpose=False) if scale.any() else rows


def _covariance_rows(K: Array, scale: Array, chol_inverse: Array, index: Array) -> Array:
    """Rows of ``Σ₊ = K − K S L⁻ᵀ (L⁻¹ S K)``."""
    rows = K[index]
    if not scale.any():
        return rows
    whitened = _whitened(K, scale, chol_inverse, index)
    solved = _triangular_product(chol_inverse, whitened, transpose=True)
    solved *= -scale
    # C-ordered rows are Fortran's columns: Kᵀxᵀ for each of them, added to those of K.
    return blas_function("symm", K)(
        1.0, K.T, solved.T, beta=1.0, c=rows.T, lower=0, overwrite_c=1
    ).T


def _negative_sites(
    K: Array, scale: Array, chol_inverse: Array, lambda_2: Array
) -> tuple[Array, float] | None:
    """``W = chol(C)⁻¹ N Σ₊`` and ``log|C|``, ``C = I − N Σ₊ N``; None where C is not positive definite."""
    (index,) = np.nonzero(lambda_2 < 0.0)
    if not len(index):
        return np.zeros((0, len(K)), K.dtype), 0.0
    root = np.sqrt(-lambda_2[index])
    rows = _covariance_rows(K, scale, chol_inverse, index)
    rows *= root[:, None]
    C = np.ascontiguousarray(np.eye(len(index), dtype=K.dtype) - rows[:, index] * root)
    _, info = _lapack("potrf", C)(C.T, lower=0, overwrite_a=1, clean=1)
    if info != 0:
        return None
    W, _ = _lapack("trtrs", C)(C.T, np.asfortranarray(rows), lower=0, trans=1)
    return np.ascontiguousarray(W), 2.0 * float(np.log(C.diagonal()).sum())


def _triangular_product(L: Array, rows: Array, *, transpose: bool) -> Array:
    """``(L x)ᵀ`` or ``(Lᵀ x)ᵀ`` for every row ``xᵀ``; the rows are overwritten."""
    product = blas_function("trmm", L)(
        1.0, L.T, rows.T, lower=0, trans_a=0 if transpose else 1, overwrite_b=1
    )
    return product.T


def _signed_product(Sigma: Array, lambda_2: Array, v_bar: Array) -> Array:
    """``A diag(v̄) Aᵀ`` on and below the diagonal, by symmetric products for each sign of v̄."""
    n = len(v_bar)
    K_bar = empty_matrix(n, Sigma.dtype)
    clear_above(K_bar)
    memory = np.empty((min(RANK_CHUNK, n), n), Sigma.dtype)
    beta = 0.0
    for sign in (1.0, -1.0):
        for index in _chunks(sign * v_bar > 0.0, RANK_CHUNK):
            rows = np.take(Sigma, index, axis=0, out=memory[: len(index)], mode="clip")
            rows *= -lambda_2  # rows of Aᵀ = I − ΣΛ
            rows[np.arange(len(index)), index] += 1.0
            rows *= np.sqrt(np.abs(v_bar[index]))[:, None]
            blas_function("syrk", K_bar)(sign, rows.T, beta=beta, c=K_bar.T, lower=0, overwrite_c=1)
            beta = 1.0
    if beta == 0.0:
        K_bar[...] = 0.0
    return K_bar


def _no_posterior(K: Array, L: Array) -> HostPosterior:
    nothing = np.full(len(K), np.nan, K.dtype)
    L[...] = np.nan
    log_normaliser, W = np.asarray(np.nan, K.dtype), np.zeros((0, len(K)))
    return HostPosterior(nothing, nothing.copy(), log_normaliser, L, W, nothing.copy())


def _lapack(name: str, like: Array) -> Any:
    return get_lapack_funcs(name, (like,))


def blas_function(name: str, like: Array) -> Any:
    return get_blas_funcs(name, (like,))
