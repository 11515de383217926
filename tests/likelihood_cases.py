"""Every kind of likelihood with observations that suit it, for tests that run over all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import gpflow
import numpy as np
import tensorflow as tf
from gpflow.quadrature import NDiagGHQuadrature

import gpflow_hybrid as gh
from gpflow_hybrid.likelihoods import ProbitBernoulli

Y = np.ndarray


class LogCosh(gpflow.likelihoods.ScalarLikelihood):
    """A user's own likelihood, a smooth Laplace noise: ``p(y|f) = sech((y − f)/s) / (πs)``."""

    def __init__(self, scale: float = 0.5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scale = gpflow.Parameter(scale, transform=gpflow.utilities.positive())

    def _scalar_log_prob(self, X: tf.Tensor, F: tf.Tensor, Y: tf.Tensor) -> tf.Tensor:
        u = (Y - F) / self.scale
        # log cosh u = softplus(2u) − u − log 2, smooth at u = 0
        return np.log(2.0 / np.pi) - tf.math.log(self.scale) - tf.math.softplus(2.0 * u) + u

    def _conditional_mean(self, X: tf.Tensor, F: tf.Tensor) -> tf.Tensor:
        return F

    def _conditional_variance(self, X: tf.Tensor, F: tf.Tensor) -> tf.Tensor:
        return tf.zeros_like(F) + tf.square(0.5 * np.pi * self.scale)


@dataclasses.dataclass(frozen=True)
class Case:
    """A likelihood by name, and ``observe(f, rng)``: observations for a signal ``f [N, 1]``."""

    name: str
    make: Callable[..., gpflow.likelihoods.Likelihood]
    observe: Callable[[np.ndarray, np.random.Generator], Y]
    num_latent: int = 1
    fine: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {"quadrature": NDiagGHQuadrature(1, 100)}
    )
    """Arguments that make ``E[log p]`` accurate where GPflow's 20 Gauss–Hermite points are not."""

    def __str__(self) -> str:
        return self.name


def _noisy(f: np.ndarray, rng: np.random.Generator) -> Y:
    return f + 0.3 * rng.normal(size=f.shape)


def _binary(f: np.ndarray, rng: np.random.Generator) -> Y:
    return (_noisy(f, rng) > 0.0).astype(float)


def _positive(f: np.ndarray, rng: np.random.Generator) -> Y:
    return np.exp(_noisy(f, rng))


def _class(f: np.ndarray, rng: np.random.Generator) -> Y:
    return np.digitize(_noisy(f, rng), [-0.4, 0.4])


def _switched(f: np.ndarray, rng: np.random.Generator) -> Y:
    return np.hstack([_noisy(f, rng), (np.arange(len(f)) % 2.0)[:, None]])


_L = gpflow.likelihoods


def _make_switched(**kwargs: Any) -> gpflow.likelihoods.Likelihood:
    # Each part integrates with its own quadrature.
    return _L.SwitchedLikelihood([_L.Gaussian(0.1), _L.StudentT(scale=0.5, df=4.0, **kwargs)])


CASES = {
    case.name: case
    for case in [
        Case("gaussian", lambda **_: _L.Gaussian(0.1), _noisy),
        Case("bernoulli_probit", _L.Bernoulli, _binary),
        Case("bernoulli_logit", lambda **k: _L.Bernoulli(invlink=tf.sigmoid, **k), _binary),
        Case("probit_bernoulli", lambda **_: ProbitBernoulli(), _binary),
        Case("student_t", lambda **k: _L.StudentT(scale=0.5, df=4.0, **k), _noisy),
        Case("poisson", _L.Poisson, lambda f, rng: rng.poisson(np.exp(f)).astype(float)),
        Case("exponential", _L.Exponential, _positive),
        Case("gamma", lambda **k: _L.Gamma(shape=2.0, **k), _positive),
        Case(
            "beta",
            lambda **k: _L.Beta(scale=5.0, **k),
            lambda f, rng: 1.0 / (1.0 + np.exp(-_noisy(f, rng))),
        ),
        Case("ordinal", lambda **k: gh.likelihoods.Ordinal(np.array([-0.4, 0.4]), **k), _class),
        Case("multiclass", lambda **_: _L.MultiClass(3), _class, num_latent=3),
        Case("softmax", lambda **_: _L.Softmax(3), _class, num_latent=3),
        Case(
            "heteroskedastic",
            _L.HeteroskedasticTFPConditional,
            _noisy,
            num_latent=2,
            fine={"quadrature": NDiagGHQuadrature(2, 60)},
        ),
        Case("switched", _make_switched, _switched),
        Case("own_log_cosh", LogCosh, _noisy),
    ]
}
"""By name; ``make(**case.fine)`` has accurate expectations."""
