"""What annealing returns, and the statistics of its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy.special import logsumexp

from ..display import ShownAsText

FloatArray = npt.NDArray[np.float64]
Average = Literal["arithmetic", "geometric"]

TRUSTED_FRACTION = 0.3
"""Effective sample size per chain below which the standard error is not to be trusted."""

TRUSTED = "The weights are even enough for their standard error to be trusted."


def average_weights(log_weights: FloatArray, average: Average = "arithmetic") -> tuple[Any, Any]:
    """The estimate of log Z and its standard error, from weights ``[..., C]``.

    Arithmetic: ``log (1/C) Σ w``, whose ``exp`` is unbiased, with the delta method's error
    ``sd(w) / (√C mean(w))``. Geometric: ``(1/C) Σ log w``, biased low, as in the paper.
    """
    if average == "geometric":
        return log_weights.mean(-1), standard_error(log_weights)
    estimate = logsumexp(log_weights, axis=-1) - np.log(log_weights.shape[-1])
    relative = np.exp(log_weights - np.where(np.isfinite(estimate), estimate, 0.0)[..., None])
    return estimate, standard_error(relative)


def effective_sample_size(log_weights: FloatArray) -> Any:
    """``(Σ w)² / Σ w²``, between 1 and C."""
    return np.exp(2.0 * logsumexp(log_weights, axis=-1) - logsumexp(2.0 * log_weights, axis=-1))


def is_poor(log_weights: FloatArray) -> Any:
    """Whether weights ``[..., C]`` are too uneven for their standard error to be trusted."""
    size = effective_sample_size(log_weights)
    return ~(size >= max(TRUSTED_FRACTION * log_weights.shape[-1], 2.0))


def normalised(log_weights: FloatArray) -> FloatArray:
    """``w / Σ w`` on the last axis, which may be empty."""
    if log_weights.shape[-1] == 0:
        return log_weights
    return np.exp(log_weights - logsumexp(log_weights, axis=-1, keepdims=True))


def standard_error(values: FloatArray) -> Any:
    """Of the mean over the last axis; NaN for a single value."""
    num = values.shape[-1]
    if num == 1:
        return np.full(values.shape[:-1], np.nan)[()]
    return np.std(values, axis=-1, ddof=1) / np.sqrt(num)


@dataclasses.dataclass(frozen=True, repr=False)
class AnnealingResult(ShownAsText):
    """What annealed importance sampling found; one number each, or one for each setting ``[G]``."""

    log_marginal_likelihood: Any
    """Estimate of ``log p(y | θ)``."""
    standard_error: Any
    """Its standard error over chains; NaN for a single chain."""
    effective_sample_size: Any
    """``(Σ w)² / Σ w²``: of how many equally weighted chains the estimate is worth."""
    log_weights: FloatArray
    """One for each chain, ``[..., C]``."""
    samples: FloatArray
    """Posterior samples of f at the data, ``[..., S, N, L]``; to be used with their weights."""
    sample_weights: FloatArray
    """Normalised weights of the samples, ``[..., S]``."""
    settings: tuple[Mapping[str, Any], ...] | None
    """The settings of the hyperparameters, or None for the model's own."""
    start: str
    """``"posterior"`` or ``"prior"``."""
    average: Average
    """``"arithmetic"`` or ``"geometric"``."""
    num_temperatures: int
    """Steps from the start to the posterior, where no more were needed."""
    seconds: float
    """Wall time, tracing included."""
    message: str
    """What to make of the estimate and, where it is poor, what to do."""
    test_log_densities: FloatArray | None = None
    """``log p(y* | y)`` of every test datum, ``[..., N*]``."""
    reverse_log_weights: FloatArray | None = None
    """Of the chains that annealed back to the start, ``[..., C]``."""
    reverse_log_marginal_likelihood: Any = None
    """Estimate from the way back, ``−log (1/C) Σ 1/w``."""
    reverse_standard_error: Any = None
    """Standard error of the estimate from the way back."""
    temperatures: Any = None
    """Steps of the estimate of every setting: more than :attr:`num_temperatures` where its first weights
    were uneven and ``effort`` allowed for it."""

    @property
    def test_log_density(self) -> Any:
        """Mean of :attr:`test_log_densities` over test data; None without test data."""
        if self.test_log_densities is None:
            return None
        return self.test_log_densities.mean(-1)

    @property
    def lower_bound(self) -> Any:
        """A value whose expectation is at most ``log p(y)``: the arithmetic average, forwards."""
        return average_weights(self.log_weights)[0]

    @property
    def upper_bound(self) -> Any:
        """A value whose expectation is at least ``log p(y)``, if the way back began at the posterior.

        None unless the sandwich was asked for.
        """
        return self.reverse_log_marginal_likelihood

    def __str__(self) -> str:
        estimate, error = self.log_marginal_likelihood, self.standard_error
        size, of_chains = self.effective_sample_size, f"of {self.log_weights.shape[-1]} chains"
        if self.settings is None:
            rows = [("log p(y)", f"{estimate:.4f} ± {error:.4f}")]
            if self.reverse_log_weights is not None:
                back, back_error = self.reverse_log_marginal_likelihood, self.reverse_standard_error
                rows.append(("annealed back", f"{back:.4f} ± {back_error:.4f}"))
            if self.test_log_densities is not None:
                test_error = standard_error(self.test_log_densities)
                text = f"{self.test_log_density:.4f} ± {test_error:.4f}"
                rows.append(("mean test log density", text))
            rows.append(("effective sample size", f"{size:.1f} {of_chains}"))
        else:
            best = int(np.argmax(estimate))
            where = ", ".join(
                f"{path} = {np.array2string(np.asarray(v), precision=4, threshold=6)}"
                for path, v in self.settings[best].items()
            )
            errors = f"median {np.median(error):.3f}, largest {np.max(error):.3f}"
            sizes = f"median {np.median(size):.1f}, smallest {np.min(size):.1f} {of_chains}"
            rows = [
                (f"{len(self.settings)} settings", ""),
                ("largest log p(y)", f"{estimate[best]:.4f} ± {error[best]:.4f} at {where}"),
                ("standard error", errors),
                ("effective sample size", sizes),
            ]
            if self.test_log_densities is not None:
                rows.append(
                    ("mean test log density", f"largest {np.max(self.test_log_density):.4f}")
                )
        most = self.num_temperatures if self.temperatures is None else np.max(self.temperatures)
        number = f"{self.num_temperatures} temperatures"
        if most > self.num_temperatures:
            number = f"{self.num_temperatures} to {most} temperatures"
        how = f"from the {self.start}, {number}, {self.seconds:.1f} s"
        rows.append(("annealed", how))
        return "\n".join([*(f"{name:<24}{text}".rstrip() for name, text in rows), self.message])


def remark(log_weights: FloatArray, num_temperatures: int) -> str:
    """Whether the weights can be trusted and, if not, how many temperatures should do."""
    num = log_weights.shape[-1]
    if num == 1:
        return "One chain has no standard error: raise num_chains."
    if np.any(np.all(np.isneginf(log_weights), -1)):
        return (
            "Every chain of a setting has weight zero: p(y|f) vanished on the way. Start from the "
            "posterior, or raise num_temperatures."
        )
    size, poor = effective_sample_size(log_weights), is_poor(log_weights)
    if not np.any(poor):
        return TRUSTED
    # The variance of log weights falls as one over the number of temperatures.
    with np.errstate(invalid="ignore"):
        spread = np.nan_to_num(np.nanmax(np.var(log_weights, axis=-1)), posinf=1e4)
    needed = num_temperatures * int(np.ceil(max(spread, 2.0)))
    many = f" at {np.sum(poor)} of {poor.size} settings" if log_weights.ndim > 1 else ""
    return (
        f"The effective sample size is as low as {size.min():.1f} of {num} chains{many}: the "
        "standard error is too small there and the estimate probably too low. Raise "
        f"num_temperatures to about {needed}."
    )
