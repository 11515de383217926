"""Who takes part, and where each one runs."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Contender:
    """One row of the table."""

    label: str
    module: str
    """In :mod:`benchmarks.peers`; its ``fit`` is called."""
    arguments: dict[str, Any]
    """For ``fit``, after the data."""
    packages: tuple[str, ...]
    """Distributions whose versions are recorded, the contender's own first."""
    environment: str | None = None
    """One of :data:`.environments.REQUIREMENTS`; None is the interpreter of the command itself."""
    remark: str = ""
    """What a reader of the table must know."""


OURS = ("gpflow-hybrid", "gpflow", "tensorflow", "scipy")
GPFLOW = ("gpflow", "tensorflow", "scipy")
_GPY = ("GPy", "numpy", "scipy")
TORCH = ("gpytorch", "torch")
_GPJAX = ("gpjax", "jax")
_NEWTON = ("bayesnewton", "jax")
SQUEEZED = "probit squeezed into [0.001, 0.999]"

CONTENDERS = {
    "cvi_ep_like": Contender("CVIModel, collapsed EP-like", "ours", {"objective": "ep_like"}, OURS),
    "cvi_elbo": Contender("CVIModel, collapsed ELBO", "ours", {"objective": "elbo"}, OURS),
    "vem_ep_like": Contender(
        "CVIModel, VEM EP-like", "ours", {"objective": "ep_like", "alternating": True}, OURS
    ),
    "vem_elbo": Contender(
        "CVIModel, VEM ELBO", "ours", {"objective": "elbo", "alternating": True}, OURS
    ),
    "vgp_lbfgs": Contender(
        "GPflow VGP, L-BFGS",
        "gpflow_peers",
        {"model": "vgp", "optimiser": "lbfgs"},
        GPFLOW,
        remark=SQUEEZED,
    ),
    "vgp_natgrad": Contender(
        "GPflow VGP, natural gradients + Adam",
        "gpflow_peers",
        {"model": "vgp", "optimiser": "natgrad"},
        GPFLOW,
        remark=SQUEEZED,
    ),
    "svgp_lbfgs": Contender(
        "GPflow SVGP, M = n/4, L-BFGS",
        "gpflow_peers",
        {"model": "svgp", "optimiser": "lbfgs"},
        GPFLOW,
        remark=SQUEEZED,
    ),
    "svgp_natgrad": Contender(
        "GPflow SVGP, M = n/4, natural gradients + Adam",
        "gpflow_peers",
        {"model": "svgp", "optimiser": "natgrad"},
        GPFLOW,
        remark=SQUEEZED,
    ),
    "gpy_ep": Contender("GPy EP, nested", "gpy_peer", {"inference": "ep"}, _GPY, "gpy"),
    "gpy_laplace": Contender("GPy Laplace", "gpy_peer", {"inference": "laplace"}, _GPY, "gpy"),
    "sklearn": Contender(
        "scikit-learn GaussianProcessClassifier",
        "sklearn_peer",
        {},
        ("scikit-learn", "scipy"),
        remark="Laplace, logistic likelihood",
    ),
    "gpytorch_adam": Contender(
        "GPyTorch variational, Adam", "gpytorch_peer", {"natgrad": False}, TORCH, "gpytorch"
    ),
    "gpytorch_natgrad": Contender(
        "GPyTorch variational, natural gradients + Adam",
        "gpytorch_peer",
        {"natgrad": True},
        TORCH,
        "gpytorch",
    ),
    "gpjax_adam": Contender(
        "GPJax variational, Adam", "gpjax_peer", {"natgrad": False}, _GPJAX, "gpjax", SQUEEZED
    ),
    "gpjax_natgrad": Contender(
        "GPJax dual variational, natural gradients + Adam",
        "gpjax_peer",
        {"natgrad": True},
        _GPJAX,
        "gpjax",
        SQUEEZED,
    ),
    "bayesnewton_vi": Contender(
        "BayesNewton VI, Newton + Adam",
        "bayesnewton_peer",
        {"inference": "vi"},
        _NEWTON,
        "bayesnewton",
        SQUEEZED,
    ),
    "bayesnewton_ep": Contender(
        "BayesNewton EP, Newton + Adam",
        "bayesnewton_peer",
        {"inference": "ep"},
        _NEWTON,
        "bayesnewton",
        SQUEEZED,
    ),
}
