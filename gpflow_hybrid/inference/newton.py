"""The linear system behind a Newton step on λ, and behind the gradient of the collapsed objective.

Newton's method on the fixed point ``λ = g(λ)`` of the natural-gradient map needs ``J = I − ∂g/∂λ``. It
is written in ``a = δλ₁ − m δλ₂`` and ``b = δλ₂``, in which the posterior moves by
``δm = Σa`` and ``δv = −(Σ∘Σ)b``:

    (1 + μ) a − (E_mm + g₂) Σa + E_mv (Σ∘Σ) b = ∂E/∂m − (λ₁ − λ₂m)
    (1 + μ) b + 2 E_vm Σa − 2 E_vv (Σ∘Σ) b   = g₂ − λ₂
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from gpflow.base import RegressionData
from gpflow.likelihoods import Likelihood

from ..likelihoods.expectations import ExpectationGradients, expectation_gradients
from ..linalg import backend, matvec
from ..linalg.backends import call_on_host
from .newton_host import HostSystem

STEP_TOLERANCE = 1e-4
"""Relative error of a step where the latents are coupled: exact enough for fast convergence."""


Pair = tuple[tf.Tensor, tf.Tensor]
"""``(a, b)``, or derivatives in means and variances, ``[L, N]`` each."""


class Curvature(NamedTuple):
    """Second derivatives of ``E(m, v)`` per datum, ``[N, L, L]`` each, first index as named first."""

    mm: tf.Tensor
    mv: tf.Tensor
    vm: tf.Tensor
    vv: tf.Tensor


def curvature(
    likelihood: Likelihood,
    data: RegressionData,
    m: tf.Tensor,
    v: tf.Tensor,
    known: ExpectationGradients | None = None,
    rough: bool = False,
) -> Curvature:
    """The Hessian of every datum's ``E_q[log p]`` in its marginal means and variances.

    A likelihood with exact expectations may have it as ``expectation_curvature``, and a cheaper one, good
    enough for a step, with ``rough=True``.

    :param known: the expectations and their first derivatives at ``(m, v)``, if they are.
    :param rough: see :func:`has_rough_curvature`.
    """
    X, Y = data
    if hasattr(likelihood, "expectation_curvature"):
        E = expectation_gradients(likelihood, X, m, v, Y) if known is None else known
        cheaper = {"rough": True} if rough else {}
        mean_variance, variance_variance = likelihood.expectation_curvature(X, m, v, Y, **cheaper)
        cross = tf.linalg.diag(mean_variance)
        return Curvature(
            tf.linalg.diag(2.0 * E.variance), cross, cross, tf.linalg.diag(variance_variance)
        )
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch((m, v))
        E = expectation_gradients(likelihood, X, m, v, Y)
        columns = [tf.reduce_sum(g[:, k]) for g in (E.mean, E.variance) for k in range(m.shape[1])]
    rows = [
        tape.gradient(c, (m, v), unconnected_gradients=tf.UnconnectedGradients.ZERO)
        for c in columns
    ]
    L = m.shape[1]
    mm, mv = (tf.stack([r[i] for r in rows[:L]], axis=1) for i in (0, 1))
    vm, vv = (tf.stack([r[i] for r in rows[L:]], axis=1) for i in (0, 1))
    return Curvature(mm, mv, vm, vv)


def has_rough_curvature(likelihood: Likelihood) -> bool:
    """Whether a likelihood has a cheaper curvature for steps."""
    exact = getattr(likelihood, "expectation_curvature", None)
    return exact is not None and "rough" in inspect.signature(exact).parameters


class HostNewtonSystem:
    """:class:`NewtonSystem` by SciPy, from inside a graph."""

    def __init__(
        self, Sigma: tf.Tensor, hessian: Curvature, g2: tf.Tensor, is_coupled: bool
    ) -> None:
        self.Sigma = Sigma
        self.hessian = hessian
        self.arguments = [Sigma, *hessian, tf.transpose(g2)]
        self.is_coupled = is_coupled

    def solve(self, ra: tf.Tensor, rb: tf.Tensor, damping: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """``(J + μI)⁻¹ (ra, rb)``, ``[L, N]`` each, inexactly."""

        def on_host(*arrays: Any) -> tuple[Any]:
            Sigma, *hessian, g2, damping, r = arrays
            system = HostSystem(Sigma, tuple(hessian), g2, damping, self.is_coupled)
            return (system.solve(r, STEP_TOLERANCE),)

        r = tf.stack([ra, rb])
        (x,) = call_on_host(on_host, [*self.arguments, damping, r], [r.shape])
        return tuple(tf.unstack(x))

    def transpose_solve(self, r: Pair, d: Pair, tolerance: float) -> tuple[Pair, tf.Tensor]:
        """``J⁻ᵀ (r_a + Σ d_m, r_b − (Σ∘Σ) d_v)`` and its relative error."""

        def on_host(*arrays: Any) -> tuple[Any, Any]:
            Sigma, *hessian, g2, r, d_m, d_v = arrays
            system = HostSystem(Sigma, tuple(hessian), g2, 0.0, self.is_coupled)
            return system.transpose_solve(r, d_m, d_v, tolerance)

        stacked = tf.stack(r)
        w, error = call_on_host(on_host, [*self.arguments, stacked, *d], [stacked.shape, []])
        return (w[0], w[1]), error


class NewtonSystem:
    """``J + μI`` at one λ and, for the gradient of the collapsed objective, the transpose of J.

    Vectors are pairs ``(a, b)`` of ``[L, N]``. Where the likelihood does not couple the latents the
    system decouples into one of size N per latent, solved directly; where it does, those precondition
    GMRES.
    """

    def __init__(
        self, Sigma: tf.Tensor, hessian: Curvature, g2: tf.Tensor, is_coupled: bool
    ) -> None:
        self.Sigma = Sigma
        self.Sigma2 = tf.square(Sigma)
        self.hessian = hessian
        self.g2 = tf.transpose(g2)  # [L, N]
        self.is_coupled = is_coupled
        self.mv, self.vm, self.vv = (
            tf.transpose(tf.linalg.diag_part(h)) for h in (hessian.mv, hessian.vm, hessian.vv)
        )
        # Σ E_mv (Σ∘Σ)
        self.product = tf.matmul(Sigma, self.mv[..., None] * self.Sigma2)

    def _matrix(self, c: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """``c I − 2 E_vv (Σ∘Σ) − (2/c) E_vm Σ E_mv (Σ∘Σ)``, ``[L, N, N]``, and 0 if it is finite, else NaN.

        TensorFlow raises on a matrix that it cannot factorise; a non-finite one becomes the identity
        and the second value makes the solution NaN, which the iteration rejects.
        """
        M = -2.0 * self.vv[..., None] * self.Sigma2 - (2.0 / c) * self.vm[..., None] * self.product
        diagonal = tf.linalg.diag_part(M) + c
        # An exactly singular matrix is moved off by a rounding error.
        largest = tf.reduce_max(tf.abs(M), axis=[-2, -1], keepdims=True)[..., 0]
        eps = np.finfo(M.dtype.as_numpy_dtype).eps
        M = tf.linalg.set_diag(M, diagonal + eps * largest)
        finite = tf.reduce_all(tf.math.is_finite(M))
        identity = tf.eye(tf.shape(M)[-1], batch_shape=tf.shape(M)[:-2], dtype=M.dtype)
        flag = tf.where(finite, tf.zeros((), M.dtype), tf.constant(np.nan, M.dtype))
        return tf.where(finite, M, identity), flag

    def solve(self, ra: tf.Tensor, rb: tf.Tensor, damping: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """``(J + μI)⁻¹ (ra, rb)``, ``[L, N]`` each; inexactly where the latents are coupled."""
        c = 1.0 + damping
        M, flag = self._matrix(c)
        lu, pivots = tf.linalg.lu(M)

        def decoupled(r: tf.Tensor) -> tf.Tensor:
            ra, rb = tf.unstack(r)
            rhs = rb - 2.0 * self.vm * matvec(self.Sigma, ra) / c
            b = tf.squeeze(tf.linalg.lu_solve(lu, pivots, rhs[..., None]), -1)
            return tf.stack([(ra - self.mv * matvec(self.Sigma2, b)) / c, b])

        def apply(x: tf.Tensor) -> tf.Tensor:
            a, b = tf.unstack(x)
            H = self.hessian
            dm, dv = matvec(self.Sigma, a), -matvec(self.Sigma2, b)
            into_a = c * a - self.g2 * dm - _per_datum(H.mm, dm) - _per_datum(H.mv, dv)
            into_b = c * b + 2.0 * (_per_datum(H.vm, dm) + _per_datum(H.vv, dv))
            return tf.stack([into_a, into_b])

        r = tf.stack([ra, rb]) + flag
        if self.is_coupled:
            return tuple(tf.unstack(gmres(apply, decoupled, r, STEP_TOLERANCE)))
        return tuple(tf.unstack(decoupled(r)))

    def transpose_solve(self, r: Pair, d: Pair, tolerance: float) -> tuple[Pair, tf.Tensor]:
        """``J⁻ᵀ (r_a + Σ d_m, r_b − (Σ∘Σ) d_v)`` by preconditioned GMRES, few iterations where the latents
        decouple, and its relative error."""
        M, flag = self._matrix(tf.ones((), self.Sigma.dtype))
        lu, pivots = tf.linalg.lu(tf.linalg.matrix_transpose(M))

        def precondition(x: tf.Tensor) -> tf.Tensor:
            xa, xb = tf.unstack(x)
            rhs = xb - matvec(self.Sigma2, self.mv * xa)
            wb = tf.squeeze(tf.linalg.lu_solve(lu, pivots, rhs[..., None]), -1)
            return tf.stack([xa - 2.0 * matvec(self.Sigma, self.vm * wb), wb])

        def apply(w: tf.Tensor) -> tf.Tensor:
            wa, wb = tf.unstack(w)
            H = self.hessian
            into_m = -_per_datum(H.mm, wa, True) - self.g2 * wa + 2.0 * _per_datum(H.vm, wb, True)
            into_v = _per_datum(H.mv, wa, True) - 2.0 * _per_datum(H.vv, wb, True)
            return tf.stack([wa + matvec(self.Sigma, into_m), wb + matvec(self.Sigma2, into_v)])

        (ra, rb), (d_m, d_v) = r, d
        rhs = flag + tf.stack([ra + matvec(self.Sigma, d_m), rb - matvec(self.Sigma2, d_v)])
        w = gmres(apply, precondition, rhs, tolerance, 200)
        return (w[0], w[1]), tf.math.divide_no_nan(tf.norm(apply(w) - rhs), tf.norm(rhs))


def newton_system(
    Sigma: tf.Tensor, hessian: Curvature, g2: tf.Tensor, is_coupled: bool
) -> HostNewtonSystem | NewtonSystem:
    """The system at one λ, with the linear algebra of the moment."""
    if backend().name == "lapack":
        return HostNewtonSystem(Sigma, hessian, g2, is_coupled)
    return NewtonSystem(Sigma, hessian, g2, is_coupled)


def _per_datum(H: tf.Tensor, x: tf.Tensor, transpose: bool = False) -> tf.Tensor:
    """``Hₙ xₙ`` for every datum: ``[N, L, L]`` and ``[L, N]`` to ``[L, N]``."""
    return tf.transpose(matvec(H, tf.transpose(x), transpose_a=transpose))


def gmres(
    apply: Callable[[tf.Tensor], tf.Tensor],
    precondition: Callable[[tf.Tensor], tf.Tensor],
    rhs: tf.Tensor,
    tolerance: float,
    max_iterations: int = 60,
) -> tf.Tensor:
    """Solve ``A x = rhs`` with right-preconditioned GMRES; tensors of any one shape."""
    shape, dtype = tf.shape(rhs), rhs.dtype
    flat = tf.reshape(rhs, [-1])
    size = tf.size(flat)
    norm = tf.norm(flat)
    steps = tf.minimum(max_iterations, size)
    first = tf.math.divide_no_nan(flat, norm)
    basis = tf.concat([first[None], tf.zeros([steps, size], dtype)], 0)  # [steps + 1, D]
    hessenberg = tf.zeros([steps + 1, steps], dtype)
    target = norm * tf.one_hot(0, steps + 1, dtype=dtype)

    def least_squares(H: tf.Tensor) -> tf.Tensor:
        # Columns not reached yet are zero; the tiny ridge keeps them out of the solution.
        gram = tf.matmul(H, H, transpose_a=True)
        ridge = 1e-30 + tf.cast(tf.linalg.diag_part(gram) == 0.0, dtype)
        return tf.linalg.lstsq(
            tf.concat([H, tf.linalg.diag(tf.sqrt(ridge))], 0),
            tf.concat([target, tf.zeros([steps], dtype)], 0)[:, None],
            fast=False,
        )[:, 0]

    def body(j: Any, basis: Any, H: Any, _: Any) -> Any:
        w = tf.reshape(apply(precondition(tf.reshape(basis[j], shape))), [-1])
        h = tf.zeros([steps + 1], dtype)
        for _pass in range(2):  # Gram–Schmidt, twice for orthogonality
            projection = tf.linalg.matvec(basis, w)
            w = w - tf.linalg.matvec(basis, projection, transpose_a=True)
            h = h + projection
        length = tf.norm(w)
        h = h + length * tf.one_hot(j + 1, steps + 1, dtype=dtype)
        H = H + h[:, None] * tf.one_hot(j, steps, dtype=dtype)[None]
        basis = tf.tensor_scatter_nd_update(
            basis, [[j + 1]], tf.math.divide_no_nan(w, length)[None]
        )
        y = least_squares(H)
        error = tf.norm(target - tf.linalg.matvec(H, y))
        return j + 1, basis, H, error

    _, basis, hessenberg, _ = tf.while_loop(
        lambda j, b, H, error: (j < steps) & (error > tolerance * norm),
        body,
        (tf.constant(0), basis, hessenberg, norm),
        shape_invariants=(
            tf.TensorShape([]),
            tf.TensorShape([None, None]),
            tf.TensorShape([None, None]),
            tf.TensorShape([]),
        ),
    )
    y = least_squares(hessenberg)
    x = tf.linalg.matvec(basis[:-1], y, transpose_a=True)
    return tf.ensure_shape(precondition(tf.reshape(x, shape)), rhs.shape)
