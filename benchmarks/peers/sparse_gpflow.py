"""GPflow's SVGP and our SparseCVIModel: the same kernel, likelihood, inducing inputs and scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpflow
import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
import tf_keras

from . import minibatches, stopping
from .outcome import hyperparameters
from .sparse_outcome import Clock, SparseFit, classified, finished, regressed


def kernel_for(X: np.ndarray) -> gpflow.kernels.Kernel:
    """Where all contenders start: an isotropic Matérn-5/2 with ``ℓ = √D``, ``σ = 1``, trained in logs.

    On some of the data σ² rises to millions, to which softplus, linear there, is a long way.
    """
    kernel = gpflow.kernels.Matern52()
    in_logs = tfp.bijectors.Exp()
    kernel.lengthscales = gpflow.Parameter(np.sqrt(X.shape[1]), transform=in_logs)
    kernel.variance = gpflow.Parameter(1.0, transform=in_logs)
    return kernel


def scorer(
    model: Any, X_test: np.ndarray, Y_test: np.ndarray, regression: bool
) -> Callable[[], Any]:
    """A function without arguments that scores the model as it is."""

    def scores() -> dict[str, Any]:
        if not regression:
            return classified(model.predict_y(X_test)[0].numpy(), Y_test)
        densities = model.predict_log_density((X_test, Y_test)).numpy()
        return regressed(densities, model.predict_f(X_test)[0].numpy(), Y_test)

    return scores


def lbfgs(model: Any, data: Any, clock: Clock, scores: Callable[[], Any]) -> dict[str, Any]:
    """Train on all rows until SciPy's test is met or the time is used up."""

    def look(*_: Any) -> None:
        clock.look(lambda: (scores()["log_density"], float(model.elbo(data))))
        if clock.is_over:
            raise StopIteration

    found = gpflow.optimizers.Scipy().minimize(
        model.training_loss_closure(data), model.trainable_variables, step_callback=look
    )
    return {
        "evaluations": int(found.nfev),
        "objective": -float(found.fun),
        **finished(clock, bool(found.success), str(found.message)),
    }


def natgrad(
    model: Any, data: Any, clock: Clock, scores: Callable[[], Any], largest: float
) -> dict[str, Any]:
    """A natural-gradient step on q(u) and an Adam step on the rest for every batch."""
    gpflow.set_trainable(model.q_mu, False)
    gpflow.set_trainable(model.q_sqrt, False)
    lr = tf.Variable(minibatches.natgrad_lr(0, largest), dtype=tf.float64)
    on_q = gpflow.optimizers.NaturalGradient(lr)
    adam = tf_keras.optimizers.Adam(stopping.ADAM_LR)
    X, Y = map(tf.constant, data)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def both_steps(rows: tf.Tensor) -> tf.Tensor:
        loss = model.training_loss_closure((tf.gather(X, rows), tf.gather(Y, rows)), compile=False)
        on_q.minimize(loss, [(model.q_mu, model.q_sqrt)])
        with tf.GradientTape() as tape:
            value = loss()
        variables = model.trainable_variables
        adam.apply_gradients(zip(tape.gradient(value, variables), variables, strict=True))
        return value

    def step(count: int, rows: np.ndarray) -> float:
        lr.assign(minibatches.natgrad_lr(count, largest))
        return float(both_steps(rows))

    def measure() -> tuple[float, float]:
        return scores()["log_density"], float(model.elbo(data))

    found = minibatches.minimise(step, len(data[0]), clock, measure)
    return {"step_size": largest, **found}


def report(
    model: Any, data: Any, clock: Clock, scores: Callable[[], Any], trained: dict[str, Any]
) -> SparseFit:
    """The trained model's results."""
    ended = clock.report()
    return SparseFit(
        **ended,
        **trained,
        **scores(),
        elbo=float(model.elbo(data)),
        **hyperparameters(model.kernel.lengthscales.numpy(), model.kernel.variance.numpy()),
    )


def fit(
    X_train: np.ndarray,
    Y_train: np.ndarray,
    X_test: np.ndarray,
    Y_test: np.ndarray,
    Z: np.ndarray,
    *,
    train_Z: bool,
    regression: bool,
    limit: float,
    optimiser: str,
) -> SparseFit:
    """SVGP with L-BFGS on all rows, or with natural gradients and Adam on batches."""
    data = X_train, Y_train

    def attempt(lr: float | None = None) -> SparseFit:
        clock = Clock(limit)
        likelihood = gpflow.likelihoods.StudentT() if regression else gpflow.likelihoods.Bernoulli()
        model = gpflow.models.SVGP(kernel_for(X_train), likelihood, Z.copy(), num_data=len(X_train))
        gpflow.set_trainable(model.inducing_variable, bool(train_Z))
        scores = scorer(model, X_test, Y_test, regression)
        if lr is None:
            trained = lbfgs(model, data, clock, scores)
        else:
            trained = natgrad(model, data, clock, scores, lr)
        return report(model, data, clock, scores, trained)

    if optimiser == "lbfgs":
        return attempt()
    return minibatches.first_that_runs(attempt, (tf.errors.InvalidArgumentError,))
