"""Annealed importance sampling: the marginal likelihood without a bound or an approximation."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from gpflow.base import RegressionData
from gpflow.models import GPModel

from .. import tuning
from ..display import progress_bar
from .annealed_batch import Batch, SettingOutput
from .plans import Plan, Start, check_test_data, make_plan
from .results import AnnealingResult, Average, average_weights, effective_sample_size, remark
from .schedules import affordable, needed
from .settings import Setting, Settings


def annealed_importance_sampling(
    model: GPModel,
    *,
    start: Start = "posterior",
    hyperparameters: Sequence[Setting] | None = None,
    num_chains: int = 64,
    num_temperatures: int | None = None,
    effort: float = 1.0,
    power: float | None = None,
    block_size: int | None = None,
    average: Average = "arithmetic",
    bidirectional: bool = False,
    num_samples: int = 1,
    thinning: int = 5,
    test_data: RegressionData | None = None,
    seed: int = 0,
    progress: bool | None = None,
    client: Any = None,
) -> AnnealingResult:
    """Estimate ``log p(y | θ)`` by annealed importance sampling, with its standard error.

    Chains begin at exact draws from a Gaussian and move to the posterior through ::

        π_t(f) ∝ base(f) exp(τ_t φ(f)),   τ_t = (t/T)^power,   t = 0, …, T

    by elliptical slice sampling. Their log weights ``Σ_t (τ_t − τ_{t−1}) φ(f_{t−1})``, with ``f_{t−1}``
    from the distribution *before* the transition, have ``E[exp(log weight)] = p(y)`` at every T.

    - ``start="posterior"``: the base is ``q(f) ∝ N(f; μ₀, K) Π tₙ(fₙ)``, with sites that match the
      posterior's moments, ``φ = Σ log p(yₙ|fₙ) − log tₙ(fₙ)``, and log Z is added. Hundreds of
      temperatures do. Any q gives the right answer; a good one gives it soon.
    - ``start="prior"``: the base is the prior and ``φ = log p(y|f)``, as in the paper's appendix
      (τ = (t/T)⁴, T = 8000; its own estimate has ``num_chains=3, average="geometric"``).

    The settings of a grid share their random numbers: each has the value that it would have alone,
    and neighbours have similar errors. The model is left untouched.

    :param model: a site model, or any GPflow model with data and a full GP prior.
    :param start: where annealing starts.
    :param hyperparameters: settings to run as one batch, dictionaries from GPflow's paths to values
        (:func:`~gpflow_hybrid.evidence.grid` makes them); what they do not name is as in the model.
        None for the model's present hyperparameters.
    :param num_chains: C, independent chains for each setting.
    :param num_temperatures: T; 200 from the posterior, 8000 from the prior.
    :param effort: sweeps up to so many times those of all settings with T temperatures may be made. What
        is more than one is spent on settings whose effective sample size is too low: they anneal again,
        from other random numbers, with at least twice as many temperatures, which are laid so that each
        step takes the same part of the effective sample size, as far as the weights of before tell. Which
        weights are kept then depends on them: the mean is unbiased without that choice only.
    :param power: exponent of the schedule; 3 from the posterior, 4 from the prior.
    :param block_size: a sweep moves all the data at once, then blocks of so many data given the
        rest; 0 for the first move alone. 8 from the posterior; 0 from the prior, as in the paper.
    :param average: ``"arithmetic"``, or the paper's ``"geometric"`` mean of the weights.
    :param bidirectional: also anneal back, from the posterior to the start: an estimate from above,
        as far as the chains have reached the posterior.
    :param num_samples: posterior samples to keep from each chain.
    :param thinning: sweeps before each of them.
    :param test_data: ``(X*, Y*)``, for the log predictive densities ``log p(y* | y)``.
    :param seed: same seed, same result.
    :param progress: a progress bar; by default on a terminal and in a notebook.
    :param client: a ``distributed.Client``, whose workers take some of the settings each; needs the extra
        ``dask``.
    """
    began = time.perf_counter()
    plan = make_plan(
        start,
        power,
        average,
        bidirectional,
        effort,
        num_chains=num_chains,
        num_temperatures=num_temperatures,
        block_size=block_size,
        num_samples=num_samples,
        thinning=thinning,
        seed=seed,
    )
    settings = Settings(model, [{}] if hyperparameters is None else hyperparameters)
    copy = settings.model
    test = None if test_data is None else check_test_data(test_data, plan, copy)
    num_data = int(copy.data[0].shape[0])
    num_floats = 4 * copy.num_latent_gps * num_data**2
    size = max(
        1, min(tuning.ANNEALED_CHAINS // plan.num_chains, tuning.ANNEALED_FLOATS // num_floats)
    )
    if client is not None:  # at least one batch for every thread
        from ..distributed.workers import check_client

        check_client(client)
        num_threads = sum(client.nthreads().values())
        size = min(size, -(-len(settings.values) // max(1, num_threads)))
    outputs: dict[int, SettingOutput] = {}
    num_settings = len(settings.values)
    budget = plan.effort * plan.num_sweeps * num_settings
    with progress_bar(progress, total=int(budget), desc="annealing", leave=False) as bar:
        wanted = dict.fromkeys(range(num_settings), plan.num_temperatures)
        while wanted:
            for number in sorted(set(wanted.values())):
                now = dataclasses.replace(plan, num_temperatures=number)
                chosen = [i for i, n in wanted.items() if n == number]
                common = _Annealing(model, settings.given, now, test)
                jobs = [
                    (indices, np.stack([outputs[i].warp for i in indices]) if plan.round else None)
                    for indices in _batches(settings, chosen, size)
                ]
                if client is None:
                    found = [_run_batch(common, job, settings, bar.update) for job in jobs]
                else:
                    from ..distributed.jobs import run_jobs

                    found = run_jobs(client, "annealing", _run_batch, common, jobs, progress=False)
                    bar.update(now.num_sweeps * len(chosen))
                for (indices, _), part in zip(jobs, found, strict=True):
                    outputs.update(zip(indices, part, strict=True))
                budget -= now.num_sweeps * len(chosen)
            plan = dataclasses.replace(plan, round=plan.round + 1)
            wanted = affordable(plan, budget, needed(outputs))
    ordered = [outputs[i] for i in range(num_settings)]
    return _result(ordered, plan, hyperparameters, time.perf_counter() - began)


class _Annealing(NamedTuple):
    """What all batches share."""

    model: GPModel
    settings: Sequence[Setting]
    plan: Plan
    test: RegressionData | None


def _run_batch(
    common: _Annealing,
    job: tuple[list[int], Any],
    settings: Settings | None = None,
    advance: Callable[[int], Any] = lambda _: None,
) -> list[SettingOutput]:
    """Some settings, with their schedules if these are not the plan's.

    :param settings: those of all batches, where they are at hand.
    """
    indices, warps = job
    settings = Settings(common.model, common.settings) if settings is None else settings
    return list(Batch(settings, indices, common.plan, common.test, advance, warps).run())


def _batches(settings: Settings, chosen: Sequence[int], size: int) -> Iterator[list[int]]:
    """Settings that can run together, at most so many."""
    for group in settings.groups():
        members = [i for i in group if i in chosen]
        if members:
            yield from (x.tolist() for x in np.array_split(members, -(-len(members) // size)))


def _result(
    outputs: Sequence[SettingOutput],
    plan: Plan,
    hyperparameters: Sequence[Setting] | None,
    seconds: float,
) -> AnnealingResult:
    def collect(values: Sequence[Any]) -> Any:
        if values[0] is None:
            return None
        return np.asarray(values[0]) if hyperparameters is None else np.stack(values)

    log_weights, samples, sample_weights, densities, reverse, temperatures, _ = (
        collect(part) for part in zip(*outputs, strict=True)
    )
    estimate, error = average_weights(log_weights, plan.average)
    reverse_estimate = reverse_error = None
    if reverse is not None:
        # 1/w on the way back is unbiased for Z₀/Z, and log Z₀ is in w already.
        negative, reverse_error = average_weights(-reverse, plan.average)
        reverse_estimate = -negative
    return AnnealingResult(
        log_marginal_likelihood=estimate,
        standard_error=error,
        effective_sample_size=effective_sample_size(log_weights),
        log_weights=log_weights,
        samples=samples,
        sample_weights=sample_weights,
        settings=None if hyperparameters is None else tuple(hyperparameters),
        start=plan.start,
        average=plan.average,
        num_temperatures=plan.num_temperatures,
        seconds=seconds,
        message=remark(log_weights, int(np.max(temperatures))),
        test_log_densities=densities,
        reverse_log_weights=reverse,
        reverse_log_marginal_likelihood=reverse_estimate,
        reverse_standard_error=reverse_error,
        temperatures=temperatures,
    )
