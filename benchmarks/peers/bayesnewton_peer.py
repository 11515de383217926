"""BayesNewton: variational inference and expectation propagation by Newton steps, with Adam."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np

# BayesNewton 1.3.4 names this class in annotations; JAX 0.4.24 does not have it.
jnp.DeviceArray = jax.Array

import bayesnewton  # noqa: E402
import objax  # noqa: E402

from . import stopping  # noqa: E402
from .outcome import Fit, hyperparameters, score  # noqa: E402

MODELS = {
    "vi": bayesnewton.models.VariationalGP,
    "ep": bayesnewton.models.ExpectationPropagationGP,
}


def fit(
    X_train: np.ndarray,
    Y_train: np.ndarray,
    X_test: np.ndarray,
    Y_test: np.ndarray,
    *,
    inference: str,
) -> Fit:
    """A Newton step on the sites and an Adam step on the kernel, in turn."""
    start = time.perf_counter()
    kernel = bayesnewton.kernels.Matern52(variance=1.0, lengthscale=1.0)
    likelihood = bayesnewton.likelihoods.Bernoulli(link="probit")
    model = MODELS[inference](kernel=kernel, likelihood=likelihood, X=X_train, Y=Y_train)
    adam = objax.optimizer.Adam(model.vars())
    energy = objax.GradValues(model.energy, model.vars())

    @objax.Function.with_vars(model.vars() + adam.vars())
    def both_steps(lr: jax.Array) -> jax.Array:
        model.inference(lr=lr)
        gradient, value = energy()
        adam(stopping.ADAM_LR, gradient)
        return value[0]

    compiled = objax.Jit(both_steps)

    def step(iteration: int) -> float:
        return float(compiled(jnp.asarray(stopping.natgrad_lr(iteration))))

    losses, converged = stopping.minimise(step, len(X_train))
    model.update_posterior()
    seconds = time.perf_counter() - start
    return Fit(
        seconds=seconds,
        **stopping.summary(losses, converged),
        **score(np.asarray(model.predict_y(X_test)[0]), Y_test),
        **hyperparameters(float(kernel.lengthscale), float(kernel.variance)),
    )
