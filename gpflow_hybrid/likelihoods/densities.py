"""Which likelihoods have a :class:`~gpflow_hybrid.likelihoods.density.Density`: those of GPflow that are as
GPflow made them, with parameters that are plain numbers. Others are asked through TensorFlow."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
from gpflow import likelihoods as gpflow_likelihoods
from gpflow.base import Parameter
from gpflow.likelihoods import Likelihood
from gpflow.likelihoods.utils import inv_probit

from ..array_parameters import value_of
from ..stand_ins import parameters_of
from .coupled_families import HeteroskedasticDensity, SoftmaxDensity
from .density import Array, Density
from .families import (
    BetaDensity,
    GammaDensity,
    GaussianDensity,
    LogitDensity,
    OrdinalDensity,
    ProbitDensity,
    SqueezedProbitDensity,
    StudentTDensity,
    exponential,
    poisson,
)
from .node_rules import gauss_hermite_rule
from .ordinal import Ordinal
from .probit import ProbitBernoulli
from .robust_max import RobustMaxDensity

__all__ = ["Binding", "density_of", "values_of"]

Binding = Callable[..., Density]
"""A density from observations Y ``[N, P]`` and the values of the likelihood's parameters."""


def density_of(likelihood: Likelihood) -> Binding | None:
    """How a likelihood becomes a :class:`Density`; None where it is not known here."""
    kind, L = type(likelihood), gpflow_likelihoods
    values = parameters_of(likelihood)
    if any(not isinstance(p, Parameter) or p.shape != () for p in values):
        return None
    link = getattr(likelihood, "invlink", None)
    if len(values) == 1:
        if kind is L.Gaussian and likelihood.variance is values[0]:  # and not a scale
            return GaussianDensity
        if kind is L.StudentT and likelihood.scale is values[0]:  # and not a function of X
            return functools.partial(_student_t, df=float(likelihood.df))
        if kind is L.Beta and link is inv_probit and likelihood.scale is values[0]:
            return BetaDensity
        if kind is L.Gamma and link is tf.exp and likelihood.shape is values[0]:
            return GammaDensity
        if kind is Ordinal:
            return functools.partial(_ordinal, edges=np.asarray(likelihood.bin_edges, float))
        if kind is L.MultiClass and type(link) is L.RobustMax and link.epsilon is values[0]:
            return functools.partial(
                RobustMaxDensity,
                num_classes=int(likelihood.num_classes),
                rule=gauss_hermite_rule(int(likelihood.num_gauss_hermite_points)),
            )
    if values:
        return None
    if kind is ProbitBernoulli:
        return ProbitDensity
    if kind is L.Bernoulli and link in (inv_probit, tf.sigmoid):
        return SqueezedProbitDensity if link is inv_probit else LogitDensity
    if kind is L.Poisson and link is tf.exp:
        return functools.partial(poisson, binsize=float(likelihood.binsize))
    if kind is L.Exponential and link is tf.exp:
        return exponential
    if kind is L.Softmax:
        return functools.partial(SoftmaxDensity, num_classes=int(likelihood.num_classes))
    if kind is L.HeteroskedasticTFPConditional and _is_normal(likelihood):
        return HeteroskedasticDensity
    return None


def _student_t(y: Array, scale: Array, *, df: float) -> Density:
    return StudentTDensity(y, scale, df)


def _ordinal(y: Array, sigma: Array, *, edges: Array) -> Density:
    return OrdinalDensity(y, edges, sigma)


def _is_normal(likelihood: Likelihood) -> bool:
    """Whether its conditional is a normal with mean ``f₁`` and scale ``exp(f₂)``, whatever function makes
    it: tried at points where other simple ones differ."""
    if type(likelihood.scale_transform) is not tfp.bijectors.Exp:
        return False
    F = np.array([[0.0, 0.0], [-1.3, 0.7], [2.9, -1.1]])
    with tf.init_scope():
        conditional = likelihood.conditional_distribution(tf.constant(F))
        if type(conditional) is not tfp.distributions.Normal:
            return False
        moments = np.stack([np.ravel(x) for x in (conditional.loc, conditional.scale)], 1)
    return bool(np.allclose(moments, np.stack([F[:, 0], np.exp(F[:, 1])], 1), rtol=1e-12))


def values_of(likelihood: Likelihood) -> Sequence[Array]:
    """The present values of its parameters, for a binding."""
    return [value_of(p).astype(p.dtype.as_numpy_dtype) for p in parameters_of(likelihood)]
