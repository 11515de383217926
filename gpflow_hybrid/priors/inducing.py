"""Projections of the data onto inducing variables, in blocks of rows.

With ``K_uu = L Lᵀ`` and the whitened inducing variables ``u = L w``, ``w ~ N(0, I)``,

    A = L⁻¹ K_uf  [M, N],     a = Aᵀw,     f | a ~ N(a + μ₀, k̃),     k̃ = diag K_ff − diag AᵀA.

Kernels are evaluated outside of any graph (:mod:`~gpflow_hybrid.priors.inducing_kernels`); the rest is BLAS
on arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from gpflow.base import Module
from gpflow.functions import Zero
from gpflow.inducing_variables import (
    InducingVariables,
    SeparateIndependentInducingVariables,
    SharedIndependentInducingVariables,
)
from gpflow.kernels import Kernel
from gpflow.mean_functions import MeanFunction

from ..covariances import latent_kernels, prior_mean
from ..errors import NonFiniteError
from ..linalg.products import cholesky, product, solve_lower, squared_norms
from ..stand_ins import is_taken_apart, parameters_of, with_values
from .inducing_kernels import InducingKernel, StationaryKernel, TapedKernel, taped_gradients
from .protocol import Array

SMALLEST_RESIDUAL = 1e-10
"""Part of a prior variance below which ``k̃`` is rounding error."""


class Projection(NamedTuple):
    """Of a block of rows on the inducing variables of one latent, or of all that share them."""

    A: Array  # [M, N]
    residual: Array  # k̃ [N]


class ProjectionBar(NamedTuple):
    """Its cotangents."""

    A: Array
    residual: Array


def independent_parts(
    kernel: Kernel, inducing_variable: InducingVariables
) -> list[tuple[Kernel, InducingVariables]]:
    """Kernel and inducing variables of every latent; one pair if the latents share both."""
    kernels = list(latent_kernels(kernel))
    if isinstance(inducing_variable, SeparateIndependentInducingVariables):
        variables = list(inducing_variable.inducing_variable_list)
    elif isinstance(inducing_variable, SharedIndependentInducingVariables):
        variables = [inducing_variable.inducing_variable]
    else:
        variables = [inducing_variable]
    count = max(len(kernels), len(variables))
    kernels, variables = (x * count if len(x) == 1 else x for x in (kernels, variables))
    return list(zip(kernels, variables, strict=True))


class _Parts(Module):
    """All that an inducing prior is made of."""

    def __init__(
        self, kernel: Kernel, inducing_variable: InducingVariables, mean_function: MeanFunction
    ) -> None:
        super().__init__()
        self.kernel, self.inducing_variable = kernel, inducing_variable
        self.mean_function = mean_function


class InducingPrior:
    """Kernels, inducing variables and mean function at their present values.

    :param variables: what :meth:`in_variables` differentiates in.
    """

    def __init__(
        self,
        kernel: Kernel,
        inducing_variable: InducingVariables,
        mean_function: MeanFunction,
        num_latent: int,
        variables: Sequence[tf.Variable] = (),
    ) -> None:
        self._original = _Parts(kernel, inducing_variable, mean_function)
        self.variables = list(variables)
        parts = self._original
        # Parameters are read once: each reading is a dozen operations.
        self.sources: list[Any] = self.variables
        self._reads_once = is_taken_apart(parts)
        if self._reads_once:
            self.sources = [tf.convert_to_tensor(p) for p in parameters_of(parts)]
            parts = with_values(parts, self.sources)
        self.mean_function, self.num_latent = parts.mean_function, num_latent
        self.kernels = self._kernels(parts)
        self.chol = [cholesky(k.at_inducing()) for k in self.kernels]

    def _kernels(self, parts: _Parts) -> list[InducingKernel]:
        """One for each part, of the original or with values in place of parameters."""
        original = self._original
        pairs = independent_parts(original.kernel, original.inducing_variable)
        taped = independent_parts(parts.kernel, parts.inducing_variable)
        parameters = parameters_of(original)
        found: list[InducingKernel] = []
        for (kernel, variables), pair in zip(pairs, taped, strict=True):
            if self._reads_once and StationaryKernel.serves(kernel, variables):
                values = [x.numpy() for x in self.sources]
                found.append(StationaryKernel(kernel, variables, parameters, values))
            else:
                found.append(TapedKernel(*pair, self.sources))
        return found

    @property
    def is_valid(self) -> bool:
        """Whether every ``K_uu`` has a Cholesky factor."""
        return all(np.isfinite(L).all() for L in self.chol)

    def require_valid(self) -> None:
        """Refuse a ``K_uu`` that is not positive definite."""
        if not self.is_valid:
            raise NonFiniteError(
                "The kernel matrix of the inducing variables is not positive definite, or not finite. "
                "Check the hyperparameters (gpflow.utilities.print_summary(model)); where inducing "
                "points have come close to each other, use fewer of them."
            )

    def project(self, X: Array) -> tuple[list[Projection], Array]:
        """The projections of some rows, one for each part, and ``μ₀ [N, L]``."""
        found = []
        for L, kernel in zip(self.chol, self.kernels, strict=True):
            cross, prior = kernel.at_data(X)
            A = solve_lower(L, cross)
            residual = prior - squared_norms(A)
            found.append(Projection(A, np.maximum(residual, SMALLEST_RESIDUAL * prior)))
        return found, self._mean(X)

    def _mean(self, X: Array) -> Array:
        """``μ₀ [N, L]``."""
        if type(self.mean_function) is Zero:
            return np.zeros((len(X), self.num_latent))
        return prior_mean(self.mean_function, tf.constant(X), self.num_latent).numpy()

    def pull_back_rows(
        self, X: Array, A: Sequence[Array], bars: Sequence[ProjectionBar], mean_bar: Array
    ) -> tuple[list[Array], list[Array]]:
        """Derivatives by way of ``K_uf``, ``K_ff`` and ``μ₀``, and ``Ā Aᵀ`` of every part: both for
        :meth:`in_variables`, summed over all rows."""
        total = [np.zeros(x.shape) for x in self.sources]
        products = []
        for L, kernel, each, bar in zip(self.chol, self.kernels, A, bars, strict=True):
            A_bar = bar.A - 2.0 * each * bar.residual
            cross_bar = solve_lower(L, A_bar, transpose=True)
            total = _added(total, kernel.pull_back_data(X, cross_bar, bar.residual))
            products.append(product(A_bar, each.T))
        if type(self.mean_function) is Zero:
            return total, products
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self.sources)
            mean = prior_mean(self.mean_function, tf.constant(X), self.num_latent)
        return _added(total, taped_gradients(tape, [mean], [mean_bar], self.sources)), products

    def in_variables(self, rows: Sequence[Array], products: Sequence[Array]) -> list[Array]:
        """Derivatives in the variables, from the sums over all rows that :meth:`pull_back_rows` returns.

        By way of L, ``dA = −L⁻¹ dL A``. With ``P = ĀAᵀ`` and Φ the lower triangle with half of the
        diagonal, ``K̄_uu = −½ L⁻ᵀ (Φ(P) + Φ(P)ᵀ) L⁻¹``.
        """
        total = list(rows)
        for L, kernel, P in zip(self.chol, self.kernels, products, strict=True):
            lower = np.tril(P, -1)
            both = solve_lower(L, lower + lower.T + np.diag(np.diag(P)), transpose=True)
            K_bar = -0.5 * solve_lower(L, np.ascontiguousarray(both.T), transpose=True)
            total = _added(total, kernel.pull_back_inducing(K_bar))
        if not self._reads_once:
            return total
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self.variables)
            values = [tf.convert_to_tensor(p) for p in parameters_of(self._original)]
        return taped_gradients(tape, values, total, self.variables)


def _added(x: Sequence[Array], y: Sequence[Array]) -> list[Array]:
    return [a + b for a, b in zip(x, y, strict=True)]
