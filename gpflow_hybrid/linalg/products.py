"""Products of matrices with a column for every datum, ``[M, N]``, and of the small ones beside them.

All by SciPy's BLAS, without Python's lock. Matrices are C-ordered: Fortran sees them transposed, so that
nothing is copied.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.linalg import lapack

from . import blas

Array = npt.NDArray[Any]


def cholesky(K: Array) -> Array:
    """The lower factor of ``K = L Lᵀ``; NaN where K is not positive definite or not finite."""
    upper, info = lapack.dpotrf(K.T, lower=0, clean=1)
    found = info == 0 and np.isfinite(upper).all()
    return upper.T if found else np.full(K.shape, np.nan)


def product(A: Array, B: Array) -> Array:
    """``AB``, of matrices in either order."""
    (left, trans_a), (right, trans_b) = _for_fortran(B), _for_fortran(A)
    return blas.gemm(left, right, trans_a=trans_a, trans_b=trans_b).T  # (BᵀAᵀ)ᵀ


def congruence(A: Array, B: Array) -> Array:
    """``A B Aᵀ``."""
    return product(product(A, B), A.T)


def _for_fortran(A: Array) -> tuple[Array, bool]:
    """A matrix that Fortran takes, and whether it has to be transposed to be ``Aᵀ``; copied if neither
    its rows nor its columns stand one after the other."""
    if A.flags.f_contiguous and not A.flags.c_contiguous:
        return A, True
    return _rows_of(A).T, False


def _rows_of(A: Array) -> Array:
    return np.ascontiguousarray(A, np.float64)


def solve_lower(L: Array, B: Array, *, transpose: bool = False) -> Array:
    """``L⁻¹B``, or ``L⁻ᵀB``, of a lower triangular L."""
    return blas.solve_upper(_rows_of(B).T, _rows_of(L).T, trans=transpose).T


def combine(A: Array, x: Array) -> Array:
    """``A x``, a sum over the data."""
    return blas.gemv(_rows_of(A).T, x, trans=True)


def project(A: Array, x: Array) -> Array:
    """``Aᵀx``, a number for every datum."""
    return blas.gemv(_rows_of(A).T, x)


def squared_norms(A: Array) -> Array:
    """``diag AᵀA``."""
    return np.einsum("mn,mn->n", A, A)


def quadratic_forms(A: Array, B: Array) -> Array:
    """``diag AᵀBA`` of a symmetric B: twice that of its lower triangle, half the price of ``BA``."""
    lower = np.tril(B)
    lower[np.diag_indices_from(lower)] *= 0.5
    return 2.0 * np.einsum("mn,mn->n", A, blas.times_upper(_rows_of(A).T, lower.T).T)


def weighted_gram(A: Array, weights: Array) -> Array:
    """``A diag(x) Aᵀ`` for weights of either sign, by symmetric products."""
    root, negative = np.sqrt(np.abs(weights)), weights < 0.0
    B = _rows_of(A * root)
    upper = np.zeros((len(A), len(A)), order="F")
    if not negative.any():
        blas.add_gram(upper, B.T, 1.0)
    else:
        for sign, part in ((1.0, ~negative), (-1.0, negative)):
            if part.any():
                blas.add_gram(upper, np.compress(part, B, axis=1).T, sign)
    return upper + np.triu(upper, 1).T
