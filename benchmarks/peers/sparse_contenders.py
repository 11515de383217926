"""Who takes part in ``python -m benchmarks.sparse``."""

from __future__ import annotations

from .contenders import CONTENDERS, GPFLOW, OURS, SQUEEZED, TORCH, Contender

_SKLEARN = ("scikit-learn", "scipy")

SPARSE = {
    "sparse_cvi_ep_like": Contender(
        "SparseCVIModel, EP-like", "sparse_ours", {"objective": "ep_like"}, OURS
    ),
    "sparse_cvi_elbo": Contender(
        "SparseCVIModel, ELBO", "sparse_ours", {"objective": "elbo"}, OURS
    ),
    "sparse_svgp_lbfgs": Contender(
        "GPflow SVGP, L-BFGS", "sparse_gpflow", {"optimiser": "lbfgs"}, GPFLOW, remark=SQUEEZED
    ),
    "sparse_svgp_natgrad": Contender(
        "GPflow SVGP, natural gradients + Adam, batches",
        "sparse_gpflow",
        {"optimiser": "natgrad"},
        GPFLOW,
        remark=SQUEEZED,
    ),
    "sparse_gpytorch_natgrad": Contender(
        "GPyTorch SVGP, natural gradients + Adam, batches",
        "sparse_gpytorch",
        {"natgrad": True},
        TORCH,
        "gpytorch",
    ),
    "sparse_gpytorch_adam": Contender(
        "GPyTorch SVGP, Adam, batches", "sparse_gpytorch", {"natgrad": False}, TORCH, "gpytorch"
    ),
    "sparse_logistic": Contender(
        "scikit-learn LogisticRegression", "sparse_sklearn", {"model": "linear"}, _SKLEARN
    ),
    "sparse_boosting": Contender(
        "scikit-learn HistGradientBoosting", "sparse_sklearn", {"model": "boosting"}, _SKLEARN
    ),
}
WITHOUT_INDUCING = ("sparse_logistic", "sparse_boosting")
"""Those that do not depend on M."""
ONLY_LABELS = ("sparse_logistic",)
"""Those that do no regression."""

ALL = {**CONTENDERS, **SPARSE}
