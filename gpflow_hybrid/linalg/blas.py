"""SciPy's BLAS without Python's lock, so that several threads compute at a time.

``scipy.linalg.blas`` holds the lock throughout most routines. The same routines are there as pointers, for
Cython, and ctypes calls them without it. Matrices are as Fortran has them, column by column; what is not
said is one, or as large as the matrices are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.linalg import cython_blas

Array = npt.NDArray[Any]

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_name_of = ctypes.pythonapi.PyCapsule_GetName
_name_of.restype, _name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]


def _routine(name: str, num_arguments: int) -> Callable[..., None]:
    """All of its arguments are pointers."""
    capsule = cython_blas.__pyx_capi__[name]
    address = _pointer_of(capsule, _name_of(capsule))
    routine = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * num_arguments)(address)

    def call(*arguments: Any) -> None:
        routine(*(x if isinstance(x, int) else ctypes.addressof(x) for x in arguments))

    return call


_dgemm, _dgemv = _routine("dgemm", 13), _routine("dgemv", 11)
_dsyrk, _dtrmm, _dtrsm = _routine("dsyrk", 10), _routine("dtrmm", 11), _routine("dtrsm", 11)


def _letter(x: str) -> ctypes.c_char:
    return ctypes.c_char(x.encode())


def _transposed(x: bool) -> ctypes.c_char:
    return _letter("T" if x else "N")


_int, _real = ctypes.c_int, ctypes.c_double


def _stored(A: Array) -> tuple[int, ctypes.c_int]:
    """Where a matrix begins, and the length of its columns."""
    assert A.dtype == np.float64
    assert A.flags.f_contiguous
    return A.ctypes.data, _int(max(1, A.shape[0]))


def gemm(A: Array, B: Array, *, trans_a: bool = False, trans_b: bool = False) -> Array:
    """``op(A) op(B)``."""
    m, k = reversed(A.shape) if trans_a else A.shape
    n, inner = B.shape if trans_b else reversed(B.shape)
    assert inner == k
    C = np.empty((m, n), order="F")
    sizes = _int(m), _int(n), _int(k)
    _dgemm(
        _transposed(trans_a),
        _transposed(trans_b),
        *sizes,
        _real(1.0),
        *_stored(A),
        *_stored(B),
        _real(0.0),
        *_stored(C),
    )
    return C


def gemv(A: Array, x: Array, *, trans: bool = False) -> Array:
    """``op(A) x``."""
    x = np.ascontiguousarray(x)
    assert x.dtype == np.float64
    assert x.shape == (A.shape[0 if trans else 1],)
    y, one = np.zeros(A.shape[1 if trans else 0]), _int(1)
    _dgemv(
        _transposed(trans),
        *map(_int, A.shape),
        _real(1.0),
        *_stored(A),
        x.ctypes.data,
        one,
        _real(0.0),
        y.ctypes.data,
        one,
    )
    return y


def add_gram(upper: Array, A: Array, weight: float) -> None:
    """``weight AᵀA``, added to an upper triangle in its place."""
    assert upper.shape == (A.shape[1], A.shape[1])
    _dsyrk(
        _letter("U"),
        _letter("T"),
        _int(A.shape[1]),
        _int(A.shape[0]),
        _real(weight),
        *_stored(A),
        _real(1.0),
        *_stored(upper),
    )


def times_upper(B: Array, U: Array) -> Array:
    """``B U`` of an upper triangular U."""
    return _of_triangle(_dtrmm, B, U, False)


def solve_upper(B: Array, U: Array, *, trans: bool = False) -> Array:
    """``B op(U)⁻¹``."""
    return _of_triangle(_dtrsm, B, U, trans)


def _of_triangle(routine: Callable[..., None], B: Array, U: Array, trans: bool) -> Array:
    assert U.shape == (B.shape[1], B.shape[1])
    found = B.copy(order="F")
    routine(
        _letter("R"),
        _letter("U"),
        _transposed(trans),
        _letter("N"),
        *map(_int, B.shape),
        _real(1.0),
        *_stored(U),
        *_stored(found),
    )
    return found
