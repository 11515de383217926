"""What an integration over hyperparameters leaves behind: their posterior, and predictions under it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from gpflow.base import MeanAndVariance
from gpflow.models import GPModel
from gpflow.posteriors import PrecomputeCacheType

from ..display import ShownAsText, in_rows
from .marginals import Draws, Marginal
from .mixtures import Mixture, MixturePosterior

Array = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class ChainReport:
    """How well chains have mixed."""

    r_hat: Array
    """Of every scalar hyperparameter: close to one where the chains agree."""
    effective_sample_size: Array
    """Of every scalar hyperparameter, over all chains."""
    num_divergences: int
    """Transitions at which the integrator lost the density's level."""
    acceptance: float
    """Mean probability of acceptance."""


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class HyperparameterPosterior(ShownAsText):
    """The posterior over hyperparameters that :func:`~gpflow_hybrid.integrate_hyperparameters` found.

    Predictions are those of the mixture ``Σ_k w_k p(· | y, θ_k)``. Prints as a table.
    """

    method: str
    """``"grid"`` or ``"hmc"``."""
    converged: bool
    """Whether predictions have stopped moving; of chains, whether they have mixed."""
    message: str
    """How it went, in words."""
    weights: Array
    """Of the settings, ``[K]``; they sum to one."""
    settings: tuple[dict[str, Array], ...]
    """The hyperparameters at each, by GPflow's path."""
    log_densities: Array
    """``log p(y|θ) + log p(x)`` at each, x the logarithm of a positive parameter."""
    log_evidence: float
    """``log ∫ p(y|θ) p(θ) dθ``: compares kernels and likelihoods on the same data."""
    log_evidence_error: float
    """Its standard error; of quasi-random settings half of what two halves of them differ by, zero of a
    lattice or a design."""
    marginals: tuple[Marginal, ...]
    """One for every scalar hyperparameter."""
    priors: dict[str, str]
    """What was assumed of each parameter, in words."""
    chains: ChainReport | None
    """Of a sampler."""
    num_evaluations: int
    """Of the training loss, those of the fit included."""
    seconds: float
    """Wall time, the fit and tracing included."""
    fit_seconds: float
    """Of it, until the mode was found."""
    draws: Draws
    """Weighted draws from the posterior, in the coordinates, for other summaries than :attr:`marginals`."""
    mixture: Mixture
    """The model at every setting."""

    def __getitem__(self, name: str) -> Marginal:
        """The marginal of this name, GPflow's path or as it is printed, without the first dot."""
        for found in self.marginals:
            if name in (found.name, found.name.lstrip(".")):
                return found
        known = ", ".join(m.name for m in self.marginals)
        raise KeyError(f"{name!r} is not a marginal; there are {known}.")

    def predict_f(
        self, Xnew: Any, full_cov: bool = False, full_output_cov: bool = False
    ) -> MeanAndVariance:
        """Mean and variance of f, GPflow's shapes."""
        return self.mixture.predict_f(Xnew, full_cov, full_output_cov)

    def predict_y(
        self, Xnew: Any, full_cov: bool = False, full_output_cov: bool = False
    ) -> MeanAndVariance:
        """Mean and variance of y, GPflow's shapes."""
        return self.mixture.predict_y(Xnew, full_cov, full_output_cov)

    def predict_log_density(
        self, data: Any, full_cov: bool = False, full_output_cov: bool = False
    ) -> tf.Tensor:
        """``log Σ_k w_k p(y | x, θ_k)`` of every new datum, ``[..., N]``."""
        return self.mixture.predict_log_density(data, full_cov, full_output_cov)

    def predict_f_samples(
        self,
        Xnew: Any,
        num_samples: int | None = None,
        full_cov: bool = True,
        full_output_cov: bool = False,
    ) -> tf.Tensor:
        """Samples of f, each with hyperparameters of its own; GPflow's shapes."""
        return self.mixture.predict_f_samples(Xnew, num_samples, full_cov, full_output_cov)

    def posterior(
        self, precompute_cache: PrecomputeCacheType | str | None = PrecomputeCacheType.TENSOR
    ) -> MixturePosterior:
        """The mixture with precomputed matrices, for fast repeated prediction.

        :param precompute_cache: as in GPflow: ``"tensor"``, ``"variable"``, ``"nocache"`` or None.
        """
        return self.mixture.posterior(precompute_cache)

    def save(self, path: str | Path) -> None:
        """Write everything but the model to a file, which :meth:`load` reads."""
        from .storage import save

        save(self, Path(path))

    @staticmethod
    def load(path: str | Path, model: GPModel, data: Any = None) -> HyperparameterPosterior:
        """Read what :meth:`save` wrote.

        :param model: built as the one that was integrated, with the same data; its hyperparameters do not
            matter, and it is left untouched.
        :param data: of a model that has none of its own.
        """
        from .storage import load

        return load(Path(path), model, data)

    def plot(self) -> Any:
        """Every marginal, and below them the joint density of each pair with the settings; a figure."""
        from .plots import plot

        return plot(self)

    def __str__(self) -> str:
        error = f" ± {self.log_evidence_error:.2g}" if self.log_evidence_error > 0.0 else ""
        rows = [("log evidence", f"{self.log_evidence:.4f}{error}")]
        size = 1.0 / np.sum(self.weights**2)
        rows.append(("settings", f"{len(self.weights)}, as good as {size:.1f} of equal weight"))
        if self.chains is not None:
            c = self.chains
            rows += [
                ("R̂", f"at most {np.max(c.r_hat):.3f}"),
                ("effective sample size", f"at least {np.min(c.effective_sample_size):.0f}"),
                ("divergences", f"{c.num_divergences}, acceptance {c.acceptance:.2f}"),
            ]
        count = f"{self.num_evaluations} ({self.seconds:.1f} s, {self.fit_seconds:.1f} to the mode)"
        rows.append(("evaluations", count))
        rows += [(f"prior of {path.lstrip('.')}", words) for path, words in self.priors.items()]
        return f"{self.message}\n{_table(self.marginals)}\n{in_rows(rows)}"


def _table(marginals: tuple[Marginal, ...]) -> str:
    """Mean, deviation and quantiles of each."""
    names = ["", *(m.name.lstrip(".") for m in marginals)]
    width = max(map(len, names))
    header = ["mean", "deviation", *(f"{100 * q:g} %" for q in marginals[0].quantiles)]
    lines = ["  ".join([f"{'':<{width}}", *(f"{h:>9}" for h in header)])]
    for m in marginals:
        numbers: Mapping[int, float] = dict(enumerate((m.mean, m.deviation, *m.quantiles.values())))
        cells = [f"{x:>9.4g}" for x in numbers.values()]
        lines.append("  ".join([f"{m.name.lstrip('.'):<{width}}", *cells]))
    return "\n".join(lines)
