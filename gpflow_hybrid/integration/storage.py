"""An integration in a file: arrays and words, and nothing that runs."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from gpflow.models import GPModel
from gpflow.quadrature import NDiagGHQuadrature
from gpflow.utilities import parameter_dict

from ..errors import CheckpointError
from .integrate import marginals_of
from .marginals import Draws
from .mixtures import Mixture
from .movable import Node
from .problems import prepare
from .results import ChainReport, HyperparameterPosterior

FORMAT = 2

WORDS = (
    "method",
    "converged",
    "message",
    "log_evidence",
    "log_evidence_error",
    "priors",
    "num_evaluations",
    "seconds",
    "fit_seconds",
)


def save(result: HyperparameterPosterior, path: Path) -> None:
    """Settings, weights, sites and words, with a mark of model and data, as NumPy's ``npz``."""
    words: dict[str, Any] = {name: getattr(result, name) for name in WORDS}
    words |= {"format": FORMAT, "mark": result.mixture.mark, "chains": None}
    words["points"] = _points(result.mixture.likelihood)
    if result.chains is not None:
        words["chains"] = {
            name: np.asarray(value).tolist()
            for name, value in dataclasses.asdict(result.chains).items()
        }
    nodes = result.mixture.nodes
    arrays = {
        "words": np.array(json.dumps(words)),
        "weights": result.weights,
        "x": np.stack([node.x for node in nodes]),
        "log_densities": result.log_densities,
        "draws": result.draws.x,
        "draw_weights": result.draws.weights,
        **result.mixture.held(),
    }
    sites = zip(*(node.sites for node in nodes), strict=True)
    arrays |= {f"lambda_{i}": np.stack(each) for i, each in enumerate(sites, start=1)}
    with open(path, "wb") as file:
        np.savez_compressed(file, **arrays)


def load(path: Path, model: GPModel, data: Any) -> HyperparameterPosterior:
    """What was saved, with a copy of a model of the same parts and data."""
    try:
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        words = json.loads(str(arrays.pop("words")))
        if words.pop("format") != FORMAT:
            raise ValueError
    except FileNotFoundError:
        raise CheckpointError(f"There is no file {path}.") from None
    except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{path} is not what HyperparameterPosterior.save writes, or is damaged: integrate again."
        ) from error
    problem = prepare(model, data, {})
    if words.pop("mark") != problem.mark:
        raise CheckpointError(
            f"{path} is of a model with other data or other hyperparameters: build the model as it was "
            "when it was integrated."
        )
    points = words.pop("points")
    if points != _points(problem.model.likelihood):  # a fit gave it more of them
        problem.model.likelihood.quadrature = NDiagGHQuadrature(1, points)
    movable = problem.movable()
    parameters = parameter_dict(problem.model)
    for name, value in arrays.items():
        if name in parameters:
            parameters[name].assign(value)
    sites = [arrays[name] for name in ("lambda_1", "lambda_2") if name in arrays]
    nodes = [
        Node(x, float(density), np.array([]), tuple(s[k] for s in sites))
        for k, (x, density) in enumerate(zip(arrays["x"], arrays["log_densities"], strict=True))
    ]
    draws = Draws(arrays["draws"], arrays["draw_weights"])
    chains = words.pop("chains")
    return HyperparameterPosterior(
        **words,
        weights=arrays["weights"],
        settings=tuple(movable.values(node.x) for node in nodes),
        log_densities=arrays["log_densities"],
        marginals=marginals_of(movable, draws),
        chains=None if chains is None else _report(chains),
        draws=draws,
        mixture=Mixture(movable, nodes, arrays["weights"], problem.mark),
    )


def _report(saved: dict[str, Any]) -> ChainReport:
    numbers = {name: np.asarray(saved[name]) for name in ("r_hat", "effective_sample_size")}
    return ChainReport(**{**saved, **numbers})


def _points(likelihood: Any) -> int | None:
    """Of the likelihood's Gauss–Hermite rule, where it has one."""
    found = getattr(getattr(likelihood, "quadrature", None), "n_gh", None)
    return None if found is None else int(found)
