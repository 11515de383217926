"""Every estimate of log p(y | θ) for one model, side by side."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, overload

import tensorflow as tf
from gpflow.models import GPModel

from ..errors import GPflowHybridError, InvalidDataError
from ..inference.reports import InferenceResult
from ..models import CVIModel, EPModel, LaplaceModel
from ..objectives import check_power
from .annealing import annealed_importance_sampling
from .plans import Plan, make_plan
from .results import TRUSTED
from .settings import Setting, Settings
from .table import EvidenceComparison, EvidenceEstimate

DESCRIPTIONS = {
    "elbo": "a lower bound; loose where the posterior is skewed",
    "ep_like": "EP's formula at the sites of variational inference; close, not a bound",
    "ep": "expectation propagation; usually very close where it converges, not a bound",
    "laplace": "the curvature at the mode; poor for skewed posteriors",
    "ais": "unbiased for p(y); right within its error",
}


@overload
def compare_evidence(
    model: GPModel,
    *,
    powers: Sequence[float] = ...,
    annealing: Mapping[str, Any] | None = ...,
    sample: bool = ...,
    seed: int = ...,
    hyperparameters: None = ...,
    client: Any = ...,
) -> EvidenceComparison: ...


@overload
def compare_evidence(
    model: GPModel,
    *,
    powers: Sequence[float] = ...,
    annealing: Mapping[str, Any] | None = ...,
    sample: bool = ...,
    seed: int = ...,
    hyperparameters: Sequence[Setting],
    client: Any = ...,
) -> list[EvidenceComparison]: ...


def compare_evidence(
    model: GPModel,
    *,
    powers: Sequence[float] = (0.5,),
    annealing: Mapping[str, Any] | None = None,
    sample: bool = True,
    seed: int = 0,
    hyperparameters: Sequence[Setting] | None = None,
    client: Any = None,
) -> EvidenceComparison | list[EvidenceComparison]:
    """Estimate ``log p(y | θ)`` at the model's present hyperparameters in every way there is.

    ======================  ======================================================================
    ``elbo``                ``log Z + Σ E_q[log p − log t]``, q of variational inference. Always a
                            lower bound; trust differences of it only where the gap is constant.
    ``power_ep_α``          ``log Z + (1/α) Σ log E_q[(p/t)^α]`` at the same sites, between
                            ``elbo`` (α → 0) and ``ep_like`` (α = 1).
    ``ep_like``             The same at α = 1: the value that ``CVIModel`` learns from. Close to
                            ``ep`` at the price of the ELBO, and it exists wherever cavities do.
    ``ep``                  Expectation propagation at its own fixed point. For log-concave
                            likelihoods usually within a small part of a nat; for others it may not
                            converge, which the note says.
    ``laplace``             ``log p(y, f̂) + ½ log|2πΣ|`` at the mode. Trust it where the posterior is
                            nearly Gaussian: much data per latent, or weak likelihood terms.
    ``ais``                 Annealed importance sampling. The only one that converges to the truth;
                            trust it to two standard errors if its effective sample size is not
                            small.
    ======================  ======================================================================

    The model is left as it is. A method that has no value here (EP and Laplace for likelihoods that
    couple latents, a cavity that does not exist) keeps its row, with NaN and the reason.

    :param model: a site model, or a GPflow model with a full GP prior and data (``GPR``, ``VGP``, ...).
    :param powers: of power EP at the sites of variational inference.
    :param annealing: keyword arguments for :func:`~gpflow_hybrid.annealed_importance_sampling`.
    :param sample: whether to sample at all; everything else takes a fraction of the time.
    :param seed: of the sampler.
    :param hyperparameters: settings to compare at, one after the other; dictionaries from GPflow's paths to
        values (:func:`~gpflow_hybrid.evidence.grid` makes them). The result is then a list. None for the
        model's present hyperparameters.
    :param client: a ``distributed.Client``, whose workers take one setting each; needs the extra ``dask``.
    """
    if not isinstance(powers, Sequence) or len(set(powers)) != len(powers):
        raise InvalidDataError(f"powers must be a sequence of distinct numbers; found {powers!r}.")
    for alpha in powers:
        check_power(alpha, "powers")
    options = _annealing_options(annealing, seed)
    settings = Settings(model, [{}] if hyperparameters is None else hyperparameters)
    common = _Comparison(model, settings.given, tuple(powers), options if sample else None)
    indices = range(len(settings.values))
    if client is None:
        found = [_compare(common, i) for i in indices]
    else:
        from ..distributed.jobs import run_jobs

        found = run_jobs(client, "compare-evidence", _compare, common, list(indices))
    return found[0] if hyperparameters is None else found


class _Comparison(NamedTuple):
    """What all settings share."""

    model: GPModel
    settings: Sequence[Setting]
    powers: Sequence[float]
    options: dict[str, Any] | None
    """Of the sampler; None where nothing is sampled."""


def _compare(common: _Comparison, index: int) -> EvidenceComparison:
    """All estimates at one setting."""
    settings = Settings(common.model, common.settings)
    settings.apply(index)
    copy, options = settings.model, common.options
    data = tuple(tf.convert_to_tensor(d) for d in copy.data)
    parts = (copy.kernel, copy.likelihood, copy.mean_function, copy.num_latent_gps)
    estimates = []

    def add(name: str, note: str, compute: Callable[[], tuple[float, float | None, str]]) -> None:
        start = time.perf_counter()
        try:
            value, error, remark = compute()
            if not math.isfinite(value):
                value, error = math.nan, None
                remark = f"no value: it is not finite. {remark}".rstrip()
        except GPflowHybridError as failure:
            value, error, remark = math.nan, None, f"no value: {failure}"
        seconds = time.perf_counter() - start
        estimates.append(EvidenceEstimate(name, value, error, seconds, remark or note))

    variational = CVIModel(data, *parts)
    trouble = ""

    def bound() -> tuple[float, None, str]:
        nonlocal trouble
        trouble = _trouble(variational.infer())
        return float(variational.elbo()), None, trouble

    def power_ep(alpha: float) -> tuple[float, None, str]:
        return float(variational.power_ep_log_marginal(alpha)), None, trouble

    def own(kind: type[EPModel] | type[LaplaceModel]) -> tuple[float, None, str]:
        yardstick = kind(data, *parts)
        remark = _trouble(yardstick.infer())
        return float(yardstick.log_marginal_likelihood()), None, remark

    def sampled() -> tuple[float, float, str]:
        result = annealed_importance_sampling(copy, **(options or {}))
        trusted = result.message == TRUSTED
        remark = DESCRIPTIONS["ais"] if trusted else result.message.rstrip(".")
        size = f"{result.effective_sample_size:.0f} of {result.log_weights.shape[-1]}"
        remark = f"{remark}; effective sample size {size}"
        return float(result.log_marginal_likelihood), float(result.standard_error), remark

    add("elbo", DESCRIPTIONS["elbo"], bound)
    for alpha in common.powers:
        note = f"between elbo (power 0) and ep_like (power 1), power {alpha:g}"
        add(f"power_ep_{alpha:g}", note, functools.partial(power_ep, alpha))
    add("ep_like", DESCRIPTIONS["ep_like"], functools.partial(power_ep, 1.0))
    add("ep", DESCRIPTIONS["ep"], functools.partial(own, EPModel))
    add("laplace", DESCRIPTIONS["laplace"], functools.partial(own, LaplaceModel))
    if options is not None:
        add("ais", DESCRIPTIONS["ais"], sampled)
    return EvidenceComparison(tuple(estimates), int(data[0].shape[0]))


def _trouble(result: InferenceResult) -> str:
    """What a row should say of the inference behind it, if anything."""
    return "" if result.converged and "quadrature" not in result.message else result.message


def _annealing_options(annealing: Mapping[str, Any] | None, seed: int) -> dict[str, Any]:
    """The sampler's keyword arguments, refused before anything is computed."""
    if annealing is not None and not isinstance(annealing, Mapping):
        raise InvalidDataError(
            f"annealing must be a dictionary of keyword arguments; found {annealing!r}."
        )
    options = {"seed": seed, **(annealing or {})}
    arguments = inspect.signature(annealed_importance_sampling).parameters
    defaults = {name: argument.default for name, argument in arguments.items()}
    del defaults["model"], defaults["hyperparameters"], defaults["client"]
    for name in options:
        if name not in defaults:
            raise InvalidDataError(
                f"annealing names {name!r}, which is no argument here; known are "
                f"{', '.join(defaults)}."
            )
    make_plan(
        **{
            field.name: (defaults | options)[field.name]
            for field in dataclasses.fields(Plan)
            if field.name in defaults
        }
    )
    return options
