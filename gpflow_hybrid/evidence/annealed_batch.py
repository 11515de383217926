"""One batch of settings, from its priors to its weights, samples and predictions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from gpflow.base import RegressionData
from gpflow.likelihoods import Likelihood
from scipy.special import logsumexp

from ..errors import NonFiniteError, in_short
from .bases import Base, FactoredPrior, conditionals, prior_base, site_base
from .chains import AnnealedTarget, Chains, Path, advance
from .moment_matching import match_moments
from .plans import Plan
from .prediction import predictive_log_densities
from .results import FloatArray, normalised
from .schedules import NO_WARP, evened
from .settings import PriorAndTest, Settings

NUM_PARTS = 25
"""Into which a batch's annealing is divided, for the sake of the progress bar."""


class SettingOutput(NamedTuple):
    """What the chains of one setting left behind."""

    log_weights: FloatArray  # [C]
    samples: FloatArray  # [S, N, L]
    sample_weights: FloatArray  # [S]
    test_log_densities: FloatArray | None  # [N*]
    reverse_log_weights: FloatArray | None  # [C]
    num_temperatures: int
    warp: FloatArray  # that these weights suggest, [K + 1]


class Batch:
    """Settings that run together, with one likelihood and one set of random numbers.

    :param count_sweeps: called with the number of sweeps done, counted for every setting.
    :param warps: of every setting's temperatures, ``[G, K + 1]``; by default none.
    """

    def __init__(
        self,
        settings: Settings,
        indices: Sequence[int],
        plan: Plan,
        test: RegressionData | None,
        count_sweeps: Callable[[int], object],
        warps: FloatArray | None = None,
    ) -> None:
        self.warps = np.tile(NO_WARP, (len(indices), 1)) if warps is None else warps
        self.plan = plan
        self.test = test
        self.count_sweeps = count_sweeps
        self.num_settings = len(indices)
        self.likelihood: Likelihood = settings.likelihood
        X, Y = (tf.convert_to_tensor(d) for d in settings.model.data)
        self.conditional: PriorAndTest = settings.prior(indices, None if test is None else test[0])
        prior = self.conditional.prior
        if plan.start == "prior":
            base = prior_base(prior)
        else:
            base = posterior_base(settings, indices, X, Y, prior)
        blocks = conditionals(prior, base.lambda_2, plan.block_size or int(X.shape[0]))
        self.data = X, Y
        self.target = AnnealedTarget(settings.likelihood, X, Y, base, blocks)

    def run(self) -> Iterator[SettingOutput]:
        """Anneal, sample, predict and anneal back; one output for each setting."""
        plan = self.plan
        chains = self.target.begin(plan.num_chains, plan.keys[0])
        self._refuse_nan(chains.values)
        chains = self._follow(self._path(0.0, 1.0, plan.num_temperatures), chains, plan.keys[1])
        log_weights, lengths = chains.log_weights, chains.lengths
        chains, samples, densities = self._sample(chains)
        weights = normalised(np.repeat(log_weights, plan.num_samples, axis=1))
        reverse = self._reverse(chains) if plan.bidirectional else None
        for g in range(self.num_settings):
            predicted = None
            if self.test is not None:
                predicted = logsumexp(densities[g], axis=0, b=weights[g][:, None])
            back = None if reverse is None else reverse[g]
            yield SettingOutput(
                log_weights[g],
                samples[g],
                weights[g],
                predicted,
                back,
                plan.num_temperatures,
                evened(self.warps[g], lengths[g]),
            )

    def _path(self, begin: float, end: float, num_steps: int) -> Path:
        return Path(begin, end, num_steps, self.plan.power, self.warps)

    def _sample(self, chains: Chains) -> tuple[Chains, FloatArray, FloatArray]:
        """Samples ``[G, S, N, L]`` and their test log densities ``[G, S, N*]``, chain by chain."""
        G, L, C, N = chains.x.shape
        num, thinning, keys = self.plan.num_samples, self.plan.thinning, self.plan.keys
        level = self._path(1.0, 1.0, num * thinning)
        num_test = 0 if self.test is None else int(self.test[0].shape[0])
        samples = np.empty((G, C, num, N, L))
        densities = np.empty((G, C, num, num_test))
        for i in range(num):
            chains = self._advance(level, chains, i * thinning, (i + 1) * thinning, keys[2])
            f = chains.x + self.target.mean
            samples[:, :, i] = f.transpose(0, 2, 3, 1)
            if self.test is not None:
                densities[:, :, i] = predictive_log_densities(
                    self.likelihood,
                    *self.test,
                    self.conditional,
                    tf.constant(f, self.data[0].dtype),
                )
        flat = (G, C * num)
        return chains, samples.reshape(*flat, N, L), densities.reshape(*flat, num_test)

    def _reverse(self, chains: Chains) -> FloatArray:
        """Weights of the way back, which begins after a burn-in at the posterior."""
        plan = self.plan
        chains = self._follow(self._path(1.0, 1.0, plan.num_burn_in), chains, plan.keys[3])
        log_normaliser = self.target.base.log_normaliser[:, None]
        chains = chains._replace(log_weights=np.repeat(log_normaliser, plan.num_chains, axis=1))
        down = self._path(1.0, 0.0, plan.num_temperatures)
        return self._follow(down, chains, plan.keys[4]).log_weights

    def _follow(self, path: Path, chains: Chains, key: int) -> Chains:
        ends = np.linspace(0, path.num_steps, min(NUM_PARTS, path.num_steps) + 1).astype(int)
        for first, last in itertools.pairwise(ends):
            chains = self._advance(path, chains, int(first), int(last), key)
        return chains

    def _advance(self, path: Path, chains: Chains, first: int, last: int, key: int) -> Chains:
        # A proposal at which log p is NaN, as exp(f) makes it at f = 1000, is rejected as −∞ is.
        chains = advance(self.target, chains, path, first, last, key)
        self.count_sweeps((last - first) * self.num_settings)
        return chains

    def _refuse_nan(self, values: FloatArray) -> None:
        nan = np.flatnonzero(np.isnan(values).any((0, 1)))
        if nan.size:
            n = nan[-1]
            x, y = (d[n].numpy() for d in self.data)
            raise NonFiniteError(
                f"log p(y|f) is NaN at datum {n} (x = {in_short(x)}, y = {y}) for a value of f that the "
                "chains started from. The likelihood must return a number or −∞ for every f: rescale "
                "the data, or make the kernel's variance smaller."
            )


def posterior_base(
    settings: Settings, indices: Sequence[int], X: tf.Tensor, Y: tf.Tensor, prior: FactoredPrior
) -> Base:
    """q with moment-matched sites; where there are none, those of the model's own E-step.

    A setting that has neither starts from the prior: every start gives the right answer.
    """
    lambda_1, lambda_2, usable = match_moments(settings.likelihood, X, Y, prior)
    if not np.all(usable):
        inferred = [
            (lambda_1[g], lambda_2[g]) if usable[g] else settings.infer(i)
            for g, i in enumerate(indices)
        ]
        lambda_1, lambda_2 = (tf.stack(part) for part in zip(*inferred, strict=True))
    base = site_base(prior, lambda_1, lambda_2)
    valid = tf.math.is_finite(base.log_normaliser)
    if not np.all(valid):
        sites = (tf.where(valid[:, None, None], x, 0.0) for x in (lambda_1, lambda_2))
        base = site_base(prior, *sites)
    return base
