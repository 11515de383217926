"""Training of a sparse model on batches of its data: natural-gradient steps, and unbiased estimates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from gpflow.base import RegressionData

from ..errors import InvalidPosteriorError, NonFiniteError
from ..inference.inducing import InducingPosterior, Pair, SummedSites
from ..inference.options import MINIBATCH
from ..inference.remarks import Remark, Remarks
from ..inference.row_sums import RowSums
from ..linalg.products import solve_lower
from ..objectives import power_of
from ..priors.inducing import InducingPrior
from ..priors.protocol import Array
from ..rows import DataRows
from ..validation import check_step
from .sparse_objectives import SparseObjectives

NO_CAVITY = (
    "A cavity does not exist in a batch: its estimate falls back to the ELBO, a lower bound."
)


class MinibatchModel(SparseObjectives):
    """A sparse model that can be trained on batches.

    The estimate of the objective on B of N rows, ``(N/B) Σ φ − KL``, and its gradient are taken at a q(u)
    that has not seen the batch; then q(u) takes a step on it. Unless the objective is the ELBO, which is
    stationary in q(u), the total gradient needs ``w = (∂G/∂x)ᵀw + ∂L/∂x``, which follows by steps of
    the same size. Both are forgotten when q(u) is inferred from all data, or reset. The estimate is
    unbiased where every datum has a cavity; that of a batch with one that has none is the ELBO's.

    Sites are of ``L⁻¹u``. Where θ has moved since the last step they are first made to say of u what they
    did: data say much the same of u at other hyperparameters, and a q(u) that lags behind θ holds it back.
    """

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
        scale = self._scale(rows)
        step = self._automatic_lr(1.0 / scale) if lr is None else float(check_step(lr))
        with self._host_arithmetic():
            prior = self._prior()
            q, sums = self._q_at(prior), self._sums(rows, power_of(self.objective), prior)
            self._move(q, _scaled(sums.expectations(q).target, scale), step, prior)

    def _automatic_lr(self, part: float) -> float:
        """``ρ_t = 0.7 √(B/N) (1 + t/50)^−0.75``, and one for all data: ``Σρ = ∞`` and ``Σρ² < ∞``.

        :param part: ``B/N``.
        """
        if part >= 1.0:
            return 1.0
        first = MINIBATCH.first_step * np.sqrt(part)
        t = int(self.sites.num_steps) / MINIBATCH.steps_before_decay
        return float(first * (1.0 + t) ** -MINIBATCH.decay)

    def _q_at(self, prior: InducingPrior) -> InducingPosterior:
        """q(u) with sites that say of u what they did at the last step, if that is valid."""
        q = self._q()
        moved = InducingPosterior(self._warm_start(prior))
        return moved if moved.is_valid else q

    def _move(
        self,
        q: InducingPosterior,
        target: SummedSites,
        lr: float,
        prior: InducingPrior,
    ) -> None:
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
                self.sites.num_steps.assign_add(1)
                self._inferred_from.factors = prior.chol
                self._inferred_from.lambda_2 = new.lambda_2
                return
            lr *= 0.5
        raise InvalidPosteriorError(
            "No natural-gradient step on this batch, however short, leaves a valid q(u), which is "
            "unchanged. Use larger batches, or model.infer(data)."
        )

    def _estimate(
        self, rows: DataRows, variables: list[tf.Variable], remarks: Remarks
    ) -> tuple[float, list[Any]]:
        """The objective and its gradient at the present q(u), which then takes a step on the batch."""
        alpha, scale = power_of(self.objective), self._scale(rows)
        prior = self._prior(variables)
        sums = self._sums(rows, alpha, prior)
        lr = self._automatic_lr(1.0 / scale)
        q = self._q_at(prior)
        if not q.sites.lambda_2.any():  # nothing is known of the data yet
            self._move(q, _scaled(sums.expectations(q).target, scale), lr, prior)
            q = self._q()
        found = sums.expectations(q)
        value, w = found.expected, None
        if alpha > 0.0:
            objective = sums.linearise(q)
            if np.isfinite(objective.value):
                value, w = objective.value, self._follow(sums, q, objective.slope, scale, lr)
            elif int(self.sites.num_steps) > MINIBATCH.steps_before_decay:
                remarks.make(0.0, [Remark(NO_CAVITY)])  # and not for a q(u) that is on its way
        pulled = sums.pull_back(q, w)
        gradients = [scale * g for g in self._gradients(prior, pulled, variables)]
        self._move(q, _scaled(found.target, scale), lr, prior)
        return scale * value - q.kl, gradients

    def _follow(
        self, sums: RowSums, q: InducingPosterior, slope: Pair, scale: float, lr: float
    ) -> Pair:
        """``w ← (1 − ρ) w + ρ (N/B) (∂L/∂x + (∂G/∂x)ᵀ w)`` of the batch.

        They are kept as weights of the sites themselves, which are the same at every q; in units of q they
        would not be, as it moves. Where the sites were rewritten for another factor, so are they.
        """
        weights = self.sites.weights
        kept = Pair.of_flat(weights.numpy(), len(q.h))
        if not np.array_equal(q.sites.lambda_2, self._present_sites().lambda_2):
            kept = weights_at_other_factors(kept, self._inferred_from.factors, sums.prior.chol)
        w = q.weights_in_units(kept)
        product = sums.transpose_product(q, w)
        new = Pair(
            *(x + lr * (scale * (y + z) - x) for x, y, z in zip(w, slope, product, strict=True))
        )
        if not np.isfinite(new.flat()).all():
            return w
        weights.assign(q.weights_of_sites(new).flat())
        return new


def _scaled(sites: SummedSites, scale: float) -> SummedSites:
    return SummedSites(*(scale * x for x in sites))


def weights_at_other_factors(w: Pair, old: Sequence[Array], new: Sequence[Array]) -> Pair:
    """Weights of sites that were rewritten by ``T = L₀⁻¹L``, so that the weighted sums are the same:
    ``a ← T⁻¹a`` and ``B ← T⁻¹BT⁻ᵀ``."""
    S = np.stack([solve_lower(L, L0) for L0, L in zip(old, new, strict=True)])
    S = np.broadcast_to(S, w.B.shape)
    return Pair(np.einsum("lij,lj->li", S, w.a), S @ w.B @ np.swapaxes(S, 1, 2))
