"""How far from LAPACK's floor: times as multiples of one ``dpotrf`` and one ``dtrtri`` of the same size.

    python -m benchmarks.floor 614 1232 2500
    python -m benchmarks.floor 1000 2000 4000 --random

USPS digits for n up to 1232 with 256 inputs, normal random inputs beyond; Matérn-5/2, probit, EP-like.
Every figure is the median over repetitions that are taken in turn with the floor's, in one process. The
growth is the exponent of n between the smallest and the largest size, of the training loss per evaluation
of the posterior.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import gpflow
import numpy as np
import tensorflow as tf

import gpflow_hybrid as gh
from benchmarks.peers.floor import floor_of
from gpflow_hybrid.inference.options import COLLAPSE
from gpflow_hybrid.sites import SiteValues

NUM_INPUTS = 256


class Ratios(NamedTuple):
    """Times in floors."""

    posterior: float
    """One evaluation of (m, v, log Z) from K and λ."""
    m_step: float
    """One gradient of the EP-like value at fixed λ, the kernel and its gradient included."""
    training_loss: float
    """One collapsed training loss with its gradient, 1 % away from the hyperparameters before."""
    evaluations: float
    """Evaluations of the posterior in the latter."""
    floor_seconds: float


def problem(n: int, random: bool = False) -> tuple[Any, Any, float, float]:
    """Inputs, labels, and hyperparameters near the optimum of the EP-like value."""
    if n <= 1232 and not random:
        X, Y = gh.datasets.load("usps")
        train, test = next(iter(gh.datasets.folds(len(X))))
        X_train, _ = gh.datasets.standardise(X[train], X[test])
        return X_train[:n], Y[train][:n], np.exp(4.0), np.exp(3.2)
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, NUM_INPUTS))
    Y = (X[:, :1] + X[:, 1:2] + rng.normal(size=(n, 1)) > 0.0).astype(float)
    return X, Y, np.exp(3.5), np.exp(1.5)


def timed(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def in_turn(
    calls: list[Callable[[], float]], repetitions: int, statistic: Callable[..., Any] = np.median
) -> list[float]:
    """Times that are taken alternately, so that all see the same machine."""
    return list(statistic([[call() for call in calls] for _ in range(repetitions)], axis=0))


def growth(sizes: list[int], found: list[Ratios]) -> float:
    """``p`` in ``time ~ nᵖ`` between the smallest and the largest size."""
    seconds = [r.training_loss * r.floor_seconds / r.evaluations for r in found]
    return float(np.log(seconds[-1] / seconds[0]) / np.log(sizes[-1] / sizes[0]))


def measure(
    n: int,
    random: bool = False,
    repetitions: int = 15,
    statistic: Callable[..., Any] = np.median,
) -> Ratios:
    """All ratios for one size.

    :param statistic: of the repetitions; the minimum is what other processes disturb least.
    """
    X, Y, lengthscale, sigma = problem(n, random)
    kernel = gpflow.kernels.Matern52(variance=sigma**2, lengthscales=lengthscale)
    model = gh.CVIModel((X, Y), kernel, gh.likelihoods.ProbitBernoulli())
    model.infer()
    prior = model.host_prior()
    sites = SiteValues(*(x.numpy() for x in model.sites.values))
    trainer = gh.VEMTrainer(model, "ep_like")
    x = gpflow.optimizers.Scipy.pack_tensors(model.trainable_variables)

    @tf.function
    def loss_and_gradient() -> Any:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(model.trainable_variables)
            loss = model.training_loss()
        return loss, tape.gradient(loss, model.trainable_variables)

    sign = 1.0

    def training_loss() -> float:
        nonlocal sign
        sign = -sign
        for parameter, value in ((kernel.lengthscales, lengthscale), (kernel.variance, sigma**2)):
            parameter.assign(value * (1.005 if sign > 0 else 0.995))
        return timed(lambda: [float(t) for t in tf.nest.flatten(loss_and_gradient())])

    def m_step() -> float:
        return timed(lambda: [t.numpy() for t in trainer._compiled_gradient(x)])

    calls = [floor_of(n), lambda: timed(lambda: prior.posterior(sites)), m_step, training_loss]
    in_turn(calls, 2)  # traced, and warm
    floor, *others = in_turn(calls, repetitions, statistic)
    model.sites.release()
    moved = 1.005 if sign < 0 else 0.995  # from where the last loss was
    kernel.lengthscales.assign(lengthscale * moved)
    kernel.variance.assign(sigma**2 * moved)
    # The training loss takes its last step from here without another evaluation.
    evaluations = model.infer(tolerance=COLLAPSE.polished_from).num_evaluations
    return Ratios(*(t / floor for t in others), evaluations, floor)


def main() -> None:
    """Measure and print one line per size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sizes", nargs="*", type=int, default=[614, 1232, 2500])
    parser.add_argument("--random", action="store_true", help="random inputs for every size")
    arguments = parser.parse_args()
    sizes = sorted(arguments.sizes)
    found = []
    for size in sizes:
        ratios = measure(size, arguments.random)
        found.append(ratios)
        print(
            f"n = {size}: floor {1e3 * ratios.floor_seconds:.1f} ms; posterior "
            f"{ratios.posterior:.2f}, M-step gradient {ratios.m_step:.1f}, training loss and gradient "
            f"{ratios.training_loss:.1f} floors ({ratios.evaluations} evaluations of the posterior)",
            flush=True,
        )
    if len(sizes) > 1:
        print(f"growth: n^{growth(sizes, found):.2f}")


if __name__ == "__main__":
    main()
