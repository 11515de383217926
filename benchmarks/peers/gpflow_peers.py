"""GPflow's own models: VGP with L-BFGS or natural gradients and Adam, SVGP with M = n/4."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import gpflow
import numpy as np
import tensorflow as tf
import tf_keras

from . import stopping
from .outcome import Fit, hyperparameters, score

Model = gpflow.models.VGP | gpflow.models.SVGP


def _vgp(X: np.ndarray, Y: np.ndarray) -> tuple[Model, Callable[[], tf.Tensor]]:
    model = gpflow.models.VGP((X, Y), gpflow.kernels.Matern52(), gpflow.likelihoods.Bernoulli())
    return model, model.training_loss


def _svgp(X: np.ndarray, Y: np.ndarray) -> tuple[Model, Callable[[], tf.Tensor]]:
    """Inducing inputs start at n/4 of the training inputs and are trained, as GPflow does."""
    chosen = np.random.default_rng(0).choice(len(X), len(X) // 4, replace=False)
    model = gpflow.models.SVGP(
        gpflow.kernels.Matern52(), gpflow.likelihoods.Bernoulli(), X[chosen], num_data=len(X)
    )
    return model, model.training_loss_closure((X, Y))


def _lbfgs(model: Model, loss: Callable[[], tf.Tensor], num_data: int) -> dict[str, Any]:
    found = gpflow.optimizers.Scipy().minimize(loss, model.trainable_variables)
    return {
        "evaluations": int(found.nfev),
        "objective": -float(found.fun),
        "converged": bool(found.success),
        "note": "" if found.success else str(found.message),
    }


def _natgrad(model: Model, loss: Callable[[], tf.Tensor], num_data: int) -> dict[str, Any]:
    """A natural-gradient step on q and an Adam step on the hyperparameters, in turn."""
    gpflow.set_trainable(model.q_mu, False)
    gpflow.set_trainable(model.q_sqrt, False)
    lr = tf.Variable(stopping.natgrad_lr(0), dtype=tf.float64)
    natgrad, adam = (
        gpflow.optimizers.NaturalGradient(lr),
        tf_keras.optimizers.Adam(stopping.ADAM_LR),
    )

    @tf.function
    def compiled() -> tf.Tensor:
        natgrad.minimize(loss, [(model.q_mu, model.q_sqrt)])
        with tf.GradientTape() as tape:
            value = loss()
        variables = model.trainable_variables
        adam.apply_gradients(zip(tape.gradient(value, variables), variables, strict=True))
        return value

    def step(iteration: int) -> float:
        lr.assign(stopping.natgrad_lr(iteration))
        return float(compiled())

    losses, converged = stopping.minimise(step, num_data)
    return stopping.summary(losses, converged)


MODELS = {"vgp": _vgp, "svgp": _svgp}
OPTIMISERS = {"lbfgs": _lbfgs, "natgrad": _natgrad}


def fit(
    X_train: np.ndarray,
    Y_train: np.ndarray,
    X_test: np.ndarray,
    Y_test: np.ndarray,
    *,
    model: str,
    optimiser: str,
) -> Fit:
    """Train one of ``MODELS`` with one of ``OPTIMISERS``; the likelihood is the squeezed probit."""
    start = time.perf_counter()
    built, loss = MODELS[model](X_train, Y_train)
    trained = OPTIMISERS[optimiser](built, loss, len(X_train))
    seconds = time.perf_counter() - start
    return Fit(
        seconds=seconds,
        **trained,
        **score(built.predict_y(X_test)[0].numpy(), Y_test),
        **hyperparameters(built.kernel.lengthscales.numpy(), built.kernel.variance.numpy()),
    )
