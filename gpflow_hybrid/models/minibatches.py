"""Training of a sparse model on batches of its data: natural-gradient steps, and unbiased estimates."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from gpflow.base import Module, RegressionData
from gpflow.config import default_float

from ..errors import InvalidPosteriorError, NonFiniteError
from ..inference.inducing import InducingPosterior, Pair, SummedSites
from ..inference.options import MINIBATCH
from ..inference.row_sums import GradientSums, RowSums
from ..likelihoods.projections import likelihood_gradients
from ..objectives import power_of
from ..priors.inducing import InducingPrior
from ..rows import DataRows
from ..stand_ins import floating_variables
from ..validation import check_step
from .sparse_base import SparseSiteModel


class BatchState(Module):
    """How many steps were taken on batches, and the weights w of the total gradient so far."""

    # Kept out of summaries and parameter dictionaries; checkpoints still carry them.
    _TF_MODULE_IGNORED_PROPERTIES = frozenset(
        ("num_steps", "weights", *Module._TF_MODULE_IGNORED_PROPERTIES)
    )

    def __init__(self, size: int) -> None:
        super().__init__()
        self.num_steps = tf.Variable(0, trainable=False, dtype=tf.int64, name="num_steps")
        zeros = tf.zeros([size], default_float())
        self.weights = tf.Variable(zeros, trainable=False, name="adjoint_weights")


class MinibatchModel(SparseSiteModel):
    """A sparse model that can be trained on batches.

    The estimate of the objective on B of N rows, ``(N/B) Σ φ − KL``, and its gradient are taken at a q(u)
    that has not seen the batch; then q(u) takes a step on it. Unless the objective is the ELBO, which is
    stationary in q(u), the total gradient needs ``w = (∂G/∂x)ᵀw + ∂L/∂x``, which follows by steps of
    the same size.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        size = sum(int(np.prod(x.shape)) for x in self.sites.values)
        self._batches = BatchState(size)

    def _state(self) -> tuple[tf.Variable, ...]:
        found = getattr(self, "_batches", None)
        return () if found is None else (found.num_steps, found.weights)

    def natgrad_step(self, batch: RegressionData, lr: Any = None) -> None:
        """One natural-gradient step of q(u): ``λ ← (1 − ρ) λ + ρ (N/B) Σ_batch``.

        With all data, a Gaussian likelihood and lr 1 it is the exact posterior. A step that would leave no
        valid q(u) is halved until it does.

        :param batch: ``(X, Y)``.
        :param lr: ρ in (0, 1]; None is the automatic one, which falls with the number of steps.
        """
        if not tf.executing_eagerly():
            raise RuntimeError(
                "natgrad_step() computes on the host and cannot run inside tf.function. Call it outside; "
                "inside, model.training_loss(batch) takes a step."
            )
        rows = self._rows_to_learn(batch)
        q, scale = self._q(), self._scale(rows)
        with np.errstate(all="ignore"):
            found = self._sums(rows, power_of(self.objective)).expectations(q)
        step = self._automatic_lr(1.0 / scale) if lr is None else float(check_step(lr))
        self._move(q, _scaled(found.target, scale), step)

    def _automatic_lr(self, part: float) -> float:
        """``ρ_t = 0.7 √(B/N) (1 + t/50)^−0.75``, and one for all data: ``Σρ = ∞`` and ``Σρ² < ∞``.

        :param part: ``B/N``.
        """
        if part >= 1.0:
            return 1.0
        first = MINIBATCH.first_step * np.sqrt(part)
        t = int(self._batches.num_steps) / MINIBATCH.steps_before_decay
        return float(first * (1.0 + t) ** -MINIBATCH.decay)

    def _move(self, q: InducingPosterior, target: SummedSites, lr: float) -> None:
        if not all(np.isfinite(x).all() for x in target):
            raise NonFiniteError(
                "The expected log likelihood of this batch is not finite under q(u), which is unchanged. "
                "Rescale the data, or start from a smaller kernel variance."
            )
        shortest = MINIBATCH.smallest_step * lr
        while lr > shortest:
            new = q.sites.step(target, lr)
            if InducingPosterior(new).is_valid:
                self.sites.assign(self._as_site_values(new))
                self._batches.num_steps.assign_add(1)
                return
            lr *= 0.5
        raise InvalidPosteriorError(
            "No natural-gradient step on this batch, however short, leaves a valid q(u), which is "
            "unchanged. Use larger batches, or model.infer(data)."
        )

    def _estimate(self, rows: DataRows, variables: list[tf.Variable]) -> tuple[float, list[Any]]:
        """The objective and its gradient at the present q(u), which then takes a step on the batch."""
        alpha, scale = power_of(self.objective), self._scale(rows)
        prior = self._prior(variables)
        sums = self._sums(rows, alpha, prior)
        lr = self._automatic_lr(1.0 / scale)
        with np.errstate(all="ignore"):
            q = self._q()
            if not q.sites.lambda_2.any():  # nothing is known of the data yet
                self._move(q, _scaled(sums.expectations(q).target, scale), lr)
                q = self._q()
            found = sums.expectations(q)
            value, w = found.expected, None
            if alpha > 0.0:
                objective = sums.linearise(q)
                if np.isfinite(objective.value):
                    value, w = objective.value, self._follow(sums, q, objective.slope, scale, lr)
            pulled = sums.pull_back(q, w)
        gradients = [scale * g for g in self._gradients(prior, pulled, variables)]
        self._move(q, _scaled(found.target, scale), lr)
        return scale * value - q.kl, gradients

    def _follow(
        self, sums: RowSums, q: InducingPosterior, slope: Pair, scale: float, lr: float
    ) -> Pair:
        """``w ← (1 − ρ) w + ρ (N/B) (∂L/∂x + (∂G/∂x)ᵀ w)`` of the batch."""
        weights = self._batches.weights
        w = weights.numpy()
        product = sums.transpose_product(q, Pair.of_flat(w, len(q.h)))
        new = w + lr * (scale * (slope.flat() + product.flat()) - w)
        if np.isfinite(new).all():
            weights.assign(new)
        return Pair.of_flat(weights.numpy(), len(q.h))

    def _gradients(
        self, prior: InducingPrior, sums: GradientSums, variables: list[tf.Variable]
    ) -> list[Any]:
        """From sums over the data to derivatives in the variables."""
        found = prior.in_variables(sums.rows, sums.factor_products)
        total = {id(v): g for v, g in zip(variables, found, strict=True)}
        own = likelihood_gradients(self.likelihood, sums.parameters)
        for v, g in zip(floating_variables(self.likelihood), own, strict=True):
            total[id(v)] = total[id(v)] + g
        return [total[id(v)] for v in variables]


def _scaled(sites: SummedSites, scale: float) -> SummedSites:
    return SummedSites(*(scale * x for x in sites))
