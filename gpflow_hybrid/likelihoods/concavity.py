"""Which likelihoods are known to be log-concave in f: their fixed point of inference is unique."""

from __future__ import annotations

import tensorflow as tf
from gpflow import likelihoods as gpflow_likelihoods
from gpflow.likelihoods import Likelihood

from .probit import ProbitBernoulli

_LINKS = {
    gpflow_likelihoods.Bernoulli: tf.sigmoid,  # GPflow's probit is squeezed, and is not
    gpflow_likelihoods.Poisson: tf.exp,
    gpflow_likelihoods.Exponential: tf.exp,
    gpflow_likelihoods.Gamma: tf.exp,
}


def is_log_concave(likelihood: Likelihood) -> bool:
    """Whether ``log p(y|f)`` is known to be concave in f for every y.

    Then ``λ*(θ)`` does not depend on where inference starts, and may start from λ of other hyperparameters.
    """
    kind = type(likelihood)
    if kind in (ProbitBernoulli, gpflow_likelihoods.Gaussian, gpflow_likelihoods.Softmax):
        return True
    return kind in _LINKS and likelihood.invlink is _LINKS[kind]
