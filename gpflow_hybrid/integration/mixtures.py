"""Predictions of a mixture over hyperparameters, in GPflow's shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from gpflow.base import MeanAndVariance
from gpflow.likelihoods import Likelihood
from gpflow.models import GPModel
from gpflow.posteriors import PrecomputeCacheType
from gpflow.utilities import parameter_dict

from .. import tuning
from ..copying import copied
from ..display import values_in_short
from ..errors import NonFiniteError
from ..posteriors import cache_type
from ..validation import check_count
from .movable import MovableModel, Node

Array = npt.NDArray[np.float64]


def moments(
    weights: Array,
    parts: Sequence[MeanAndVariance],
    full_cov: bool,
    full_output_cov: bool,
) -> MeanAndVariance:
    """``m = Σ w m_k`` and ``Σ w (V_k + (m_k − m)(m_k − m)ᵀ)``, the outer product as GPflow's flags say."""
    mean = _sum(weights, [m for m, _ in parts])
    spreads = [v + _spread(m - mean, full_cov, full_output_cov) for m, v in parts]
    return mean, _sum(weights, spreads)


def _sum(weights: Array, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.add_n([tf.cast(w, t.dtype) * t for w, t in zip(weights, tensors, strict=True)])


def _spread(d: tf.Tensor, full_cov: bool, full_output_cov: bool) -> tf.Tensor:
    """Products of deviations ``[..., N, P]``, shaped as GPflow shapes a variance."""
    if full_cov and full_output_cov:
        return tf.einsum("...np,...mq->...npmq", d, d)
    if full_cov:
        return tf.einsum("...np,...mp->...pnm", d, d)
    if full_output_cov:
        return tf.einsum("...np,...nq->...npq", d, d)
    return tf.square(d)


class MixturePosterior:
    """q(f(·)) as a mixture, the matrices of every setting computed once.

    ``predict_f`` is from the caches, ``fused_predict_f`` computes anew; both have the shapes of GPflow's
    posteriors. Each cache has a matrix of the size of the data, or of the inducing variables.
    """

    def __init__(self, weights: Array, posteriors: Sequence[Any]) -> None:
        self.weights = weights
        """Of the settings, ``[K]``."""
        self.posteriors = tuple(posteriors)
        """GPflow's posterior at each."""

    def predict_f(
        self, Xnew: Any, full_cov: bool = False, full_output_cov: bool = False
    ) -> MeanAndVariance:
        """Mean and variance of f under the mixture."""
        parts = [p.predict_f(Xnew, full_cov, full_output_cov) for p in self.posteriors]
        return moments(self.weights, parts, full_cov, full_output_cov)

    def fused_predict_f(
        self, Xnew: Any, full_cov: bool = False, full_output_cov: bool = False
    ) -> MeanAndVariance:
        """The same without the caches."""
        parts = [p.fused_predict_f(Xnew, full_cov, full_output_cov) for p in self.posteriors]
        return moments(self.weights, parts, full_cov, full_output_cov)


class Mixture:
    """A model at several settings of its hyperparameters."""

    def __init__(
        self, model: MovableModel, nodes: Sequence[Node], weights: Array, mark: str
    ) -> None:
        self._movable = model
        self.nodes = tuple(nodes)
        self.weights = weights
        self.mark = mark
        """Of the data and the parameters, by which a model is recognised."""
        self._cached: dict[PrecomputeCacheType, MixturePosterior] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_cached": {}}  # made again when they are asked for

    @property
    def likelihood(self) -> Likelihood:
        """The model's, with the parameters of the last setting that was looked at."""
        return self._movable.model.likelihood

    def models(self) -> Iterator[GPModel]:
        """The model at one setting after the other; always the same object."""
        for node in self.nodes:
            self._movable.restore(node.x, node.sites)
            yield self._movable.model

    def values(self, x: Array) -> dict[str, Array]:
        """The parameters that are integrated over, at coordinates ``[..., d]``."""
        return self._movable.values(x)

    def held(self) -> dict[str, Array]:
        """Every other parameter but the sites, by its path: inducing points, for instance."""
        model = self._movable.model
        free = {id(c.parameter) for c in self._movable.coordinates}
        return {
            path: np.asarray(parameter)
            for path, parameter in parameter_dict(model).items()
            if id(parameter) not in free and not path.startswith((".sites", ".data"))
        }

    def predict_f(self, Xnew: Any, full_cov: bool, full_output_cov: bool) -> MeanAndVariance:
        """Mean and variance of f."""
        parts = self._each("predict_f", Xnew, full_cov, full_output_cov)
        return moments(self.weights, parts, full_cov, full_output_cov)

    def predict_y(self, Xnew: Any, full_cov: bool, full_output_cov: bool) -> MeanAndVariance:
        """Mean and variance of y."""
        parts = self._each("predict_y", Xnew, full_cov, full_output_cov)
        return moments(self.weights, parts, full_cov, full_output_cov)

    def predict_log_density(self, data: Any, full_cov: bool, full_output_cov: bool) -> tf.Tensor:
        """``log Σ w ∫ p(y|f, θ) q_θ(f) df``."""
        each = self._each("predict_log_density", data, full_cov, full_output_cov)
        logs = [tf.cast(np.log(w), t.dtype) + t for w, t in zip(self.weights, each, strict=True)]
        return tf.reduce_logsumexp(tf.stack(logs), axis=0)

    def _each(self, method: str, at: Any, *flags: bool) -> list[Any]:
        """A prediction at every setting.

        At the first by the model itself, which refuses what it cannot use; where there are many, at the
        others by one compiled function.
        """
        models = self.models()
        found = [getattr(next(models), method)(at, *flags)]
        function = getattr(self._movable.model, method)
        if len(self.nodes) >= tuning.COMPILED_SETTINGS:

            def moved(x: tf.Tensor, *sites: tf.Tensor) -> Any:
                self._movable.move(x, sites)
                return function(at, *flags)

            compiled = tf.function(moved, autograph=False)
            found += [compiled(*map(tf.constant, (n.x, *n.sites))) for n in self.nodes[1:]]
            self._movable.restore(self.nodes[-1].x, self.nodes[-1].sites)
        else:
            found += [function(at, *flags) for _ in models]
        for node, prediction in zip(self.nodes, found, strict=True):
            self._refuse_non_finite(method, node, prediction)
        return found

    def _refuse_non_finite(self, method: str, node: Node, prediction: Any) -> None:
        """One such setting would make the whole mixture NaN; a density of zero is a number."""
        parts = prediction if isinstance(prediction, tuple) else (prediction,)
        if all(np.all(np.isfinite(x) | np.isneginf(x)) for x in parts):
            return
        setting = ", ".join(f"{p} = {values_in_short(v)}" for p, v in self.values(node.x).items())
        raise NonFiniteError(
            f"{method} is not finite at one of the settings of the mixture, {setting}. Look for missing or "
            "huge numbers in what was passed; else integrate with narrower priors, which leave it out."
        )

    def predict_f_samples(
        self, Xnew: Any, num_samples: int | None, full_cov: bool, full_output_cov: bool
    ) -> tf.Tensor:
        """Samples of f, each at hyperparameters of its own."""
        if num_samples is not None:
            check_count(num_samples, "num_samples")
        size = 1 if num_samples is None else int(num_samples)
        logits = tf.math.log(tf.constant(self.weights))[None]
        chosen = tf.random.categorical(logits, size)[0].numpy()
        found = [
            m.predict_f_samples(Xnew, int(np.sum(chosen == k)), full_cov, full_output_cov)
            for k, m in enumerate(self.models())
            if np.any(chosen == k)
        ]
        axis = len(found[0].shape) - 3
        # Back in the order in which they were drawn.
        places = np.argsort(np.argsort(chosen, kind="stable"), kind="stable")
        samples = tf.gather(tf.concat(found, axis), places, axis=axis)
        return tf.squeeze(samples, axis) if num_samples is None else samples

    def posterior(self, precompute_cache: PrecomputeCacheType | str | None) -> MixturePosterior:
        """With caches of all settings, made once; each has a kernel of its own, which stays where it is."""
        kind = cache_type(precompute_cache)
        if kind not in self._cached:
            posteriors = [copied(model).posterior(kind) for model in self.models()]
            self._cached[kind] = MixturePosterior(self.weights, posteriors)
        return self._cached[kind]
