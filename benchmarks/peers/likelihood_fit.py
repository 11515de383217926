"""One fit, in a process of its own, for :mod:`benchmarks.likelihoods`; prints what was seen as JSON.

It uses public names only, so that an earlier ``gpflow_hybrid`` can be measured too.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import gpflow
import numpy as np
import tensorflow as tf

import gpflow_hybrid as gh

L = gpflow.likelihoods


def problem(name: str, size: int) -> tuple[tuple[Any, Any], Any, int]:
    """Data with a smooth signal of two inputs, the likelihood, and its number of latents."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-2.0, 2.0, size=(size, 2))
    f = np.sin(2.0 * X[:, :1]) + 0.5 * np.cos(3.0 * X[:, 1:])
    noisy = f + 0.4 * rng.normal(size=f.shape)
    label = (noisy > 0.0).astype(float)
    level = np.digitize(noisy, [-0.5, 0.5])
    Y, likelihood, num_latent = {
        "probit": (label, gh.likelihoods.ProbitBernoulli(), 1),
        "bernoulli": (label, L.Bernoulli(), 1),
        "poisson": (rng.poisson(np.exp(1.0 + f)).astype(float), L.Poisson(), 1),
        "student_t": (f + 0.2 * rng.standard_t(3, size=f.shape), L.StudentT(), 1),
        "gamma": (rng.gamma(2.0, np.exp(f)), L.Gamma(shape=2.0), 1),
        "ordinal": (level.astype(float), gh.likelihoods.Ordinal(np.array([-0.5, 0.5])), 1),
        "heteroskedastic": (
            f + np.exp(-1.5 + 0.5 * X[:, 1:]) * rng.normal(size=f.shape),
            L.HeteroskedasticTFPConditional(),
            2,
        ),
        "softmax": (level, L.Softmax(3), 3),
        "robust_max": (level, L.MultiClass(3), 3),
    }[name]
    return (X, Y), likelihood, num_latent


def count_posteriors() -> list[int]:
    """How often the posterior is evaluated from now on, one entry; none where no prior is to be asked."""
    try:
        from gpflow_hybrid.priors import DensePrior
    except ImportError:
        return []
    count, posterior = [0], DensePrior.posterior

    def counted(*arguments: Any) -> Any:
        count[0] += 1
        return posterior(*arguments)

    DensePrior.posterior = counted
    return count


def first_loss(model: Any, now: Callable[[], float]) -> float:
    """Seconds of the first training loss with its gradient, tracing included."""

    @tf.function
    def loss_and_gradient() -> Any:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(model.trainable_variables)
            loss = model.training_loss()
        return loss, tape.gradient(loss, model.trainable_variables)

    began = now()
    loss, _ = loss_and_gradient()
    float(loss)
    return now() - began


def per_evaluation(model: Any, now: Callable[[], float]) -> dict[str, float]:
    """Milliseconds per evaluation of the posterior in an E-step from zero sites at the optimum.

    Of one latent without the likelihood, and of the likelihood; nothing where the package has no questions
    to time.
    """
    try:
        from gpflow_hybrid.inference import servers
    except ImportError:
        return {}
    answer_eagerly, spent = servers.answer_eagerly, []

    def timed(*arguments: Any) -> Any:
        answer = answer_eagerly(*arguments)

        def ask(request: Any) -> Any:
            began = now()
            found = answer(request)
            spent.append(now() - began)
            return found

        return ask

    servers.answer_eagerly = timed
    for _ in range(2):  # the first time some functions are compiled
        spent.clear()
        model.sites.reset(len(model.data[0]))
        began = now()
        result = model.infer()
        seconds = now() - began
    scale = 1e3 / result.num_evaluations
    return {
        "posterior": scale * (seconds - sum(spent)) / model.num_latent_gps,
        "likelihood": scale * sum(spent),
    }


def main(name: str, size: str, method: str, clock: str) -> None:
    """Fit, and print seconds, those of the first loss, evaluations, the loss at the end, and how it fell.

    :param clock: the function of :mod:`time` that tells the seconds.
    """
    now = getattr(time, clock)
    data, likelihood, num_latent = problem(name, int(size))

    def build() -> Any:
        kind = {"cvi": gh.CVIModel, "vgp": gpflow.models.VGP}[method]
        return kind(data, gpflow.kernels.Matern52(), likelihood, num_latent_gps=num_latent)

    path: list[tuple[float, float]] = []

    def training_loss() -> tf.Tensor:
        loss = model.training_loss()
        tf.numpy_function(lambda x: path.append((now() - began, float(x))), [loss], [])
        return loss

    count = count_posteriors()
    began = now()
    model = build()
    result = gpflow.optimizers.Scipy().minimize(
        training_loss, model.trainable_variables, options={"maxiter": 1000}
    )
    seconds = now() - began
    parts = {}
    if method == "cvi" and count:
        whole = 1e3 * seconds / (count[0] * model.num_latent_gps)
        parts = {"whole": whole} | per_evaluation(model, now)
    gpflow.utilities.reset_cache_bijectors(model)
    # With another likelihood of the same kind nothing that was traced is used again.
    data, likelihood, num_latent = problem(name, int(size))
    found = {
        "seconds": seconds,
        "first": first_loss(build(), now),
        "evaluations": int(result.nfev),
        "loss": float(result.fun),
        "path": path,
        **parts,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
