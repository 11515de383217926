"""Projections of the data onto inducing variables, in blocks of rows.

With ``K_uu = L Lᵀ`` and the whitened inducing variables ``u = L w``, ``w ~ N(0, I)``,

    A = L⁻¹ K_uf  [M, N],     a = Aᵀw,     f | a ~ N(a + μ₀, k̃),     k̃ = diag K_ff − diag AᵀA.

TensorFlow evaluates kernels, outside of any graph; the rest is BLAS on arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from gpflow import covariances
from gpflow.base import Module
from gpflow.config import default_jitter
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
        self.parts = independent_parts(parts.kernel, parts.inducing_variable)
        self.chol = [cholesky(K.numpy()) for K in self._Kuu()]

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

    def _Kuu(self) -> list[tf.Tensor]:
        return [covariances.Kuu(iv, k, jitter=default_jitter()) for k, iv in self.parts]

    def _at_data(self, X: tf.Tensor) -> tuple[list[tf.Tensor], list[tf.Tensor], tf.Tensor]:
        """``K_uf`` and ``diag K_ff`` of every part, and ``μ₀``."""
        cross = [covariances.Kuf(iv, k, X) for k, iv in self.parts]
        diagonal = [k(X, full_cov=False) for k, _ in self.parts]
        return cross, diagonal, prior_mean(self.mean_function, X, self.num_latent)

    def project(self, X: Array) -> tuple[list[Projection], Array]:
        """The projections of some rows, one for each part, and ``μ₀ [N, L]``."""
        cross, diagonal, mean = self._at_data(tf.constant(X))
        found = []
        for L, K, variance in zip(self.chol, cross, diagonal, strict=True):
            A = solve_lower(L, K.numpy())
            prior = variance.numpy()
            residual = prior - squared_norms(A)
            found.append(Projection(A, np.maximum(residual, SMALLEST_RESIDUAL * prior)))
        return found, mean.numpy()

    def pull_back_rows(
        self, X: Array, A: Sequence[Array], bars: Sequence[ProjectionBar], mean_bar: Array
    ) -> tuple[list[Array], list[Array]]:
        """Derivatives by way of ``K_uf``, ``K_ff`` and ``μ₀``, and ``Ā Aᵀ`` of every part: both for
        :meth:`in_variables`, summed over all rows."""
        cross_bars, products = [], []
        for L, each, bar in zip(self.chol, A, bars, strict=True):
            total = bar.A - 2.0 * each * bar.residual
            cross_bars.append(solve_lower(L, total, transpose=True))
            products.append(product(total, each.T))
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self.sources)
            cross, diagonal, mean = self._at_data(tf.constant(X))
        outputs = [*cross, *diagonal, mean]
        output_bars = [*cross_bars, *(bar.residual for bar in bars), mean_bar]
        return self._gradients(tape, outputs, output_bars), products

    def in_variables(self, rows: Sequence[Array], products: Sequence[Array]) -> list[Array]:
        """Derivatives in the variables, from the sums over all rows that :meth:`pull_back_rows` returns.

        By way of L, ``dA = −L⁻¹ dL A``, so ``L̄ = −L⁻ᵀ Ā Aᵀ``.
        """
        bars = [
            -np.tril(solve_lower(L, P, transpose=True))
            for L, P in zip(self.chol, products, strict=True)
        ]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self.sources)
            chol = [tf.linalg.cholesky(K) for K in self._Kuu()]
        through_factors = self._gradients(tape, chol, bars)
        total = [x + y for x, y in zip(rows, through_factors, strict=True)]
        if not self._reads_once:
            return total
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self.variables)
            values = [tf.convert_to_tensor(p) for p in parameters_of(self._original)]
        return self._gradients(tape, values, total, self.variables)

    def _gradients(
        self,
        tape: tf.GradientTape,
        outputs: list[tf.Tensor],
        bars: Sequence[Any],
        sources: Sequence[Any] | None = None,
    ) -> list[Array]:
        found = tape.gradient(
            outputs,
            self.sources if sources is None else sources,
            output_gradients=[tf.constant(b, x.dtype) for b, x in zip(bars, outputs, strict=True)],
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        return [tf.convert_to_tensor(g).numpy() for g in found]
