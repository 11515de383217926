"""Where inference starts if it must not depend on what came before: sites that a likelihood suggests.

A function of the likelihood and the data alone. Nearer to the optimum than zero sites, and in a better
basin where the ELBO has several optima.
"""

from __future__ import annotations

import tensorflow as tf
from gpflow.likelihoods import Bernoulli, Likelihood, MultiClass, Softmax, StudentT

from ..sites import SiteValues, zeros_like
from .density import Array
from .node_rules import point_derivatives


def suggests_sites(likelihood: Likelihood) -> bool:
    """Whether they may be other than zero."""
    return isinstance(likelihood, MultiClass) or type(likelihood) in (StudentT, Bernoulli)


def smooth_relative(likelihood: Likelihood) -> Likelihood | None:
    """A log-concave likelihood of the same latents and labels, for one that is a step function of f: of
    ``MultiClass``, whose latent of the label is the largest, ``Softmax``."""
    return Softmax(likelihood.num_classes) if isinstance(likelihood, MultiClass) else None


def first_sites(likelihood: Likelihood, Y: tf.Tensor, like: tf.Tensor) -> SiteValues:
    """``λ₁`` and ``λ₂``, ``[N, L]``: zero for most likelihoods.

    Of ``MultiClass``, regression on signs: ``λ₂ = 1``, ``λ₁ = 1`` for the label's latent, −1 for others.
    Of ``Bernoulli``, the Taylor series of ``log p`` at f = 0: expectations under a wide prior say little.
    Of ``StudentT`` with one output, its curvature where y is: ``λ₂ = (ν + 1)/(ν s²)``, ``λ₁ = λ₂ y``.

    :param like: has the shape and the type of λ.
    """
    if isinstance(likelihood, MultiClass):
        labels = tf.cast(tf.reshape(Y, [-1]), tf.int32)
        one = tf.ones_like(like)
        return SiteValues(2.0 * tf.one_hot(labels, like.shape[-1], dtype=like.dtype) - one, one)
    if type(likelihood) is Bernoulli and Y.shape[-1] == like.shape[-1]:
        labels = tf.constant([[0.0], [1.0]], like.dtype)
        at = point_derivatives(likelihood, labels, labels, tf.zeros_like(labels)[None], True)
        code = tf.cast(Y, tf.int32)
        lambda_1, lambda_2 = at.first[0, :, 0], -at.second[0][0, :, 0]
        return SiteValues(tf.gather(lambda_1, code), tf.gather(lambda_2, code))
    if type(likelihood) is StudentT and Y.shape[-1] == like.shape[-1]:
        scale = tf.cast(likelihood.scale, like.dtype)
        lambda_2 = (likelihood.df + 1.0) / (likelihood.df * scale * scale) * tf.ones_like(like)
        return SiteValues(lambda_2 * tf.cast(Y, like.dtype), lambda_2)
    return SiteValues(zeros_like(like), zeros_like(like))


def first_sites_on_arrays(likelihood: Likelihood, Y: Array, like: Array) -> SiteValues:
    """The same of arrays."""
    found = first_sites(likelihood, tf.constant(Y), tf.constant(like))
    return SiteValues(*(x.numpy() for x in found))
