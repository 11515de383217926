"""GPJax: variational GPs with all training inputs as inducing inputs.

Whitened q with Adam on everything, or the dual parameterisation with natural gradients on q and Adam
on the kernel. The steps are those of ``gpjax.fit`` and ``gpjax.fit_natgrads``, which themselves
run a fixed number of iterations and compile anew at every call.
"""

from __future__ import annotations

import time
from typing import Any

import equinox as eqx
import gpjax as gpx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import paramax
from gpjax.natural_gradients import natural_gradient_step, partition_variational
from gpjax.parameters import val

from . import stopping
from .outcome import Fit, hyperparameters, score

jax.config.update("jax_enable_x64", True)


def _family(X: jax.Array, kind: Any) -> Any:
    """q(f) at the inputs X, which stay fixed, under a zero-mean Matérn-5/2 GP."""
    one = jnp.ones(())  # an array: Python's 1.0 has a weak type, and the step would compile twice
    prior = gpx.gps.Prior(
        mean_function=gpx.mean_functions.Zero(),
        kernel=gpx.kernels.Matern52(lengthscale=one, variance=one),
    )
    family = kind(model=prior * gpx.likelihoods.Bernoulli(), inducing_inputs=X)
    return eqx.tree_at(lambda q: q.inducing_inputs, family, replace_fn=paramax.non_trainable)


def _adam(family: Any, data: gpx.Dataset) -> tuple[Any, list[float], bool]:
    adam = optax.adam(stopping.ADAM_LR)
    state = adam.init(eqx.filter(family, eqx.is_array))

    @eqx.filter_jit
    def compiled(family: Any, state: Any) -> tuple[Any, Any, jax.Array]:
        loss, gradient = eqx.filter_value_and_grad(lambda q: -gpx.objectives.elbo(q, data))(family)
        update, state = adam.update(gradient, state, eqx.filter(family, eqx.is_array))
        return eqx.apply_updates(family, update), state, loss

    def step(iteration: int) -> float:
        nonlocal family, state
        family, state, loss = compiled(family, state)
        return float(loss)

    losses, converged = stopping.minimise(step, data.n)
    return family, losses, converged


def _natgrad(family: Any, data: gpx.Dataset) -> tuple[Any, list[float], bool]:
    adam = optax.adam(stopping.ADAM_LR)
    variational, hyper = partition_variational(family)
    state = adam.init(eqx.filter(hyper, eqx.is_array))

    def negative_elbo(family: Any, data: gpx.Dataset) -> jax.Array:
        return -gpx.objectives.dual_elbo(family, data)

    @eqx.filter_jit
    def compiled(variational: Any, hyper: Any, state: Any, lr: jax.Array) -> tuple[Any, ...]:
        variational, loss = natural_gradient_step(variational, hyper, data, negative_elbo, lr)
        gradient = eqx.filter_grad(lambda h: negative_elbo(eqx.combine(variational, h), data))(
            hyper
        )
        update, state = adam.update(gradient, state, eqx.filter(hyper, eqx.is_array))
        return variational, eqx.apply_updates(hyper, update), state, loss

    def step(iteration: int) -> float:
        nonlocal variational, hyper, state
        lr = jnp.asarray(stopping.natgrad_lr(iteration))
        variational, hyper, state, loss = compiled(variational, hyper, state, lr)
        return float(loss)

    losses, converged = stopping.minimise(step, data.n)
    return eqx.combine(variational, hyper), losses, converged


def fit(
    X_train: np.ndarray,
    Y_train: np.ndarray,
    X_test: np.ndarray,
    Y_test: np.ndarray,
    *,
    natgrad: bool,
) -> Fit:
    """Train until the common rule stops it."""
    start = time.perf_counter()
    data = gpx.Dataset(X=jnp.asarray(X_train), y=jnp.asarray(Y_train))
    families = gpx.variational_families
    kind = families.DualVariationalGaussian if natgrad else families.WhitenedVariationalGaussian
    family = _family(data.X, kind)
    family, losses, converged = (_natgrad if natgrad else _adam)(family, data)
    seconds = time.perf_counter() - start
    latent = family(jnp.asarray(X_test))
    kernel = family.model.prior.kernel
    return Fit(
        seconds=seconds,
        **stopping.summary(losses, converged),
        **score(np.asarray(family.model.likelihood(latent).mean), Y_test),
        **hyperparameters(float(val(kernel.lengthscale)), float(val(kernel.variance))),
    )
