"""``φₙ(f) = log p(yₙ|fₙ) − log tₙ(fₙ)`` of many chains at once, on arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from gpflow.likelihoods import Likelihood

from ..likelihoods.densities import density_of, values_of
from ..likelihoods.nodes import log_prob_at
from .bases import Base
from .results import FloatArray

LogProb = Callable[[FloatArray], FloatArray]
"""``log p`` of some data at ``f [A, n, L]``: ``[A, n, L]`` for a scalar likelihood, else ``[A, n]``."""


class Potential:
    """φ of consecutive data, ``start, …, start + n − 1``."""

    def __init__(self, log_prob: LogProb, base: Base, start: int, end: int) -> None:
        self.log_prob = log_prob
        # [G, L, N] → [G, n, L]
        self.lambda_1, self.lambda_2 = (
            np.ascontiguousarray(np.swapaxes(np.asarray(x)[..., start:end], 1, 2), np.float64)
            for x in (base.lambda_1, base.lambda_2)
        )

    def __call__(self, f: FloatArray, setting: npt.NDArray[np.intp]) -> FloatArray:
        """``[A, n]`` at ``f [A, n, L]``.

        :param setting: of each row, ``[A]``.
        """
        site = self.lambda_2[setting]  # a copy
        site *= -0.5 * f
        site += self.lambda_1[setting]
        site *= f
        log_p = self.log_prob(f)
        if log_p.ndim == 3:  # every latent has a factor of its own
            site = np.subtract(log_p, site, out=site)
            return site[..., 0] if site.shape[2] == 1 else site.sum(-1)
        return log_p - site.sum(-1)


def log_probs(
    likelihood: Likelihood, X: tf.Tensor, Y: tf.Tensor, parts: Sequence[tuple[int, int]]
) -> list[LogProb]:
    """``log p`` of the data from a first to a last, for each of the parts.

    A likelihood with a density on arrays is asked for it, others through one compiled function.
    """
    binding = density_of(likelihood)
    if binding is not None:
        labels, values = np.asarray(Y, np.float64), values_of(likelihood)
        return [binding(labels[start:end], *values).log_prob for start, end in parts]

    def log_prob(f: tf.Tensor, X: tf.Tensor, Y: tf.Tensor) -> tf.Tensor:
        return log_prob_at(likelihood, f, X, Y)

    specs = [tf.TensorSpec([None, None, None], X.dtype)]
    specs += [tf.TensorSpec([None, *d.shape[1:]], d.dtype) for d in (X, Y)]
    compiled = tf.function(log_prob, input_signature=specs, autograph=False)

    def of_part(start: int, end: int) -> LogProb:
        data = X[start:end], Y[start:end]
        return lambda f: np.asarray(compiled(tf.constant(f, X.dtype), *data), np.float64)

    return [of_part(*part) for part in parts]
