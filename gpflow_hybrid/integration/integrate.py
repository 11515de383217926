"""Hyperparameters integrated out: one call, a posterior over them and predictions under it."""

from __future__ import annotations

import time
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from gpflow.models import GPModel

from ..errors import InvalidDataError
from ..training import fitting
from ..training.fit_results import FitResult
from ..validation import check_count, check_positive, is_integer
from .axes import axes_at
from .designs import fewest_points, integrate_by_design
from .divergence import refuse_divergent
from .lattices import Lattice, Quadrature
from .marginals import Draws, Marginal, marginal, smooth_draws
from .mixtures import Mixture
from .movable import MovableModel, Node
from .priors import Priors
from .problems import prepare
from .results import ChainReport, HyperparameterPosterior
from .target import Target

Array = npt.NDArray[np.float64]
Method = Literal["auto", "grid", "hmc"]

MAX_LATTICE = 3
"""Free scalars over which a lattice is laid;"""

MAX_GRID = 6
"""up to which a design is, and beyond which chains are run."""

NEGLIGIBLE = 0.1
"""Share of settings that are left out of predictions, in units of the tolerance."""


def integrate_hyperparameters(
    model: GPModel,
    *,
    data: Any = None,
    method: Method = "auto",
    priors: Priors | None = None,
    tolerance: float = 5e-3,
    max_evaluations: int = 1000,
    num_starts: int = 1,
    num_chains: int = 4,
    num_samples: int = 250,
    num_burnin: int = 150,
    seed: int = 0,
    progress: bool | None = None,
) -> HyperparameterPosterior:
    """Integrate a model's trainable hyperparameters out, instead of optimising them.

        p(θ | y) ∝ p(y | θ) p(θ),      p(y* | y) = ∫ p(y* | y, θ) p(θ | y) dθ ≈ Σ_k w_k p(y* | y, θ_k)

    with the model's own learning objective for ``log p(y | θ)``: exact for ``GPR``, the EP-like value, the
    ELBO, EP's or Laplace's for the others. The integral is over logarithms of positive parameters, with
    their Jacobian, and so does not depend on GPflow's bijectors.

    The mode is found by :func:`~gpflow_hybrid.fit`, axes around it from the curvature there and the width
    to each side. Up to three free scalars are summed over a lattice that grows and is refined until the
    predictive densities of the data stop moving; four to six over a central composite design, and over
    quasi-random points where that is not enough; more are sampled by the No-U-Turn sampler of TensorFlow
    Probability.

    :param model: any model of this package, or ``GPR``, ``SGPR`` or ``GPRFITC``; it is left untouched.
        Inducing points are not integrated over: they are trained to the mode, if they are trainable.
    :param data: ``(X, Y)`` or a ``tf.data.Dataset``, for a model that has none of its own.
    :param method: ``"grid"`` (up to six scalars) or ``"hmc"``; ``"auto"`` chooses by their number.
    :param priors: by GPflow's path, distributions of the parameters or ``"flat"``; else the model's own,
        else weak defaults: log-normal, for lengthscales around the median distance between inputs with a
        deviation of 1.5 of the logarithm, for the kernel's standard deviation around that of Y where the
        likelihood is a noise around f (1.5), around ten where y is a class (3), else around one (1.5). The
        result says which.
    :param tolerance: of a grid, on every log predictive density of the data.
    :param max_evaluations: of a grid, at most so many settings are looked at, beside those of the fit and
        of the axes.
    :param num_starts: of the fit that finds the mode.
    :param num_chains: of the sampler, each with a copy of the model and sites of its own.
    :param num_samples: of every chain, after
    :param num_burnin: transitions that adapt the step size.
    :param seed: of everything that is random.
    :param progress: a progress bar of the fit; by default on a terminal and in a notebook.
    """
    _check(method, tolerance, max_evaluations, num_chains, num_samples, num_burnin, seed=seed)
    began = time.perf_counter()
    problem = prepare(model, data, priors or {})
    fit = fitting.fit(problem.model, data=data, num_starts=num_starts, seed=seed, progress=progress)
    if fit.status == "interrupted":
        raise KeyboardInterrupt
    target, chosen = problem.target(), problem.priors
    fit_seconds = time.perf_counter() - began
    d = target.dimension
    by_grid = method == "grid" or (method == "auto" and d <= MAX_GRID)
    if by_grid and d > MAX_GRID:
        raise InvalidDataError(
            f'method="grid" is for up to {MAX_GRID} free scalars; found {d}. Pass method="hmc", or hold '
            "some parameters with gpflow.set_trainable."
        )
    if by_grid:
        check_enough_evaluations(max_evaluations, d)
    else:
        check_enough_samples(num_chains, num_samples, d)
    mode = target.position()
    axes = axes_at(mode, target.density, target.log_density)
    refuse_divergent(target, chosen, axes)
    if not by_grid:
        from .sampling import sample

        copies = [problem.copy().target() for _ in range(num_chains)]
        sampled = sample(target, copies, axes, num_samples, num_burnin, seed)
        found, draws, chains = sampled
    else:
        chains = None
        if d <= MAX_LATTICE:
            found = Lattice(target.node, axes, max_evaluations).integrate(tolerance)
        else:
            found = integrate_by_design(target.node, axes, tolerance, max_evaluations, seed)
        masses = np.array([n.log_density for n in found.nodes]) + axes.log_volume(found.z)
        has_mass = masses > -np.inf
        draws = smooth_draws(found.z[has_mass], masses[has_mass], axes, found.step)
    weights, nodes = _that_count(found, NEGLIGIBLE * tolerance)
    values = target.values(np.stack([node.x for node in nodes]))
    return HyperparameterPosterior(
        method="grid" if by_grid else "hmc",
        converged=found.has_converged,
        message=_message(found, fit, target, tolerance, chains),
        weights=weights,
        settings=tuple({p: v[i] for p, v in values.items()} for i in range(len(nodes))),
        log_densities=np.array([node.log_density for node in nodes]),
        log_evidence=found.log_evidence,
        log_evidence_error=found.log_evidence_error,
        marginals=marginals_of(target, draws),
        priors={path: str(prior) for path, prior in chosen.items()},
        chains=chains,
        num_evaluations=target.num_evaluations + fit.num_evaluations,
        seconds=time.perf_counter() - began,
        fit_seconds=fit_seconds,
        draws=draws,
        mixture=Mixture(problem.movable(), nodes, weights, problem.mark),
    )


def _check(method: Any, tolerance: Any, *counts: Any, seed: Any) -> None:
    if method not in ("auto", "grid", "hmc"):
        raise InvalidDataError(f'method must be "auto", "grid" or "hmc"; found {method!r}.')
    check_positive(tolerance, "tolerance")
    names = ("max_evaluations", "num_chains", "num_samples", "num_burnin")
    for value, name in zip(counts, names, strict=True):
        check_count(value, name)
    if not is_integer(seed) or seed < 0:
        raise InvalidDataError(f"seed must be a non-negative integer; found {seed!r}.")


def check_enough_evaluations(max_evaluations: int, d: int) -> None:
    """A lattice has the neighbours of the mode, a design its points and the first quasi-random ones."""
    fewest = 3**d if d <= MAX_LATTICE else fewest_points(d)
    if max_evaluations < fewest:
        raise InvalidDataError(
            f"max_evaluations must be at least {fewest} for {d} free scalars; found {max_evaluations}."
        )


def check_enough_samples(num_chains: int, num_samples: int, d: int) -> None:
    """R̂ halves every chain; half of all samples have a covariance."""
    fewest = max(4, -(-4 * (d + 1) // num_chains))
    if num_samples < fewest:
        raise InvalidDataError(
            f"num_samples must be at least {fewest} for {d} free scalars and {num_chains} chains; found "
            f"{num_samples}."
        )


def _that_count(found: Quadrature, negligible: float) -> tuple[Array, list[Node]]:
    """Without settings that together have less than this share."""
    weights = np.exp(found.log_weights)
    order = np.argsort(-weights, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    kept = order[before < 1.0 - negligible]
    return weights[kept] / weights[kept].sum(), [found.nodes[i] for i in kept]


def marginals_of(model: MovableModel, draws: Draws) -> tuple[Marginal, ...]:
    """Of every scalar, named by the path of its parameter."""
    found = []
    for path, values in model.values(draws.x).items():
        columns = values.reshape(len(values), -1).T
        names = [path] if len(columns) == 1 else [f"{path}[{i}]" for i in range(len(columns))]
        found += [marginal(n, c, draws.weights) for n, c in zip(names, columns, strict=True)]
    return tuple(found)


def _message(
    found: Quadrature,
    fit: FitResult,
    target: Target,
    tolerance: float,
    chains: ChainReport | None,
) -> str:
    how = found.description
    if chains is not None and found.has_converged:
        words = f"Converged: {how} have mixed."
    elif chains is not None:
        words = (
            f"Not converged: {how} have not mixed (R̂ {np.max(chains.r_hat):.3f}, effective sample size "
            f"{np.min(chains.effective_sample_size):.0f}, {chains.num_divergences} divergences). Raise "
            "num_samples and num_burnin, or give narrower priors."
        )
    elif found.has_converged:
        words = f"Converged: {how}; predictions moved by {found.change:.1e} at the last refinement."
    else:
        words = (
            f"Not converged: with {how} predictions still moved by {found.change:.1e}, more than the "
            f"tolerance of {tolerance:.1e}. Raise max_evaluations or tolerance, or pass "
            'method="hmc".'
        )
    if target.num_failures:
        words += f" {target.num_failures} settings have no value and were left out."
    if not fit.converged:
        words += f" The mode: {fit.message}"
    return words
