"""GPyTorch's SVGP on batches, with Adam on everything or natural gradients on q(u)."""

from __future__ import annotations

from typing import Any

import gpytorch
import numpy as np
import torch
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    NaturalVariationalDistribution,
    VariationalStrategy,
)

from . import minibatches, stopping
from .outcome import hyperparameters
from .sparse_outcome import Clock, SparseFit, classified, regressed

ROWS = 2048
"""Rows of a block where all of them are summed over."""


class Sparse(gpytorch.models.ApproximateGP):
    """A zero-mean Matérn-5/2 GP with whitened inducing variables at Z."""

    def __init__(self, Z: torch.Tensor, distribution: Any, train_Z: bool) -> None:
        strategy = VariationalStrategy(
            self, Z, distribution(len(Z)), learn_inducing_locations=train_Z
        )
        super().__init__(strategy)
        self.mean_module = gpytorch.means.ZeroMean()
        in_logs = gpytorch.constraints.Positive(transform=torch.exp, inv_transform=torch.log)
        matern = gpytorch.kernels.MaternKernel(nu=2.5, lengthscale_constraint=in_logs)
        self.covar_module = gpytorch.kernels.ScaleKernel(matern, outputscale_constraint=in_logs)
        self.covar_module.outputscale = 1.0
        self.covar_module.base_kernel.lengthscale = float(np.sqrt(Z.shape[1]))

    def forward(self, X: torch.Tensor) -> gpytorch.distributions.MultivariateNormal:
        """The prior at X."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(X), self.covar_module(X))


def likelihood_for(regression: bool) -> Any:
    """Probit, or Student-t with three degrees of freedom and a scale to learn, as in GPflow."""
    if not regression:
        return gpytorch.likelihoods.BernoulliLikelihood()
    likelihood = gpytorch.likelihoods.StudentTLikelihood()
    likelihood.deg_free, likelihood.noise = 3.0, 1.0
    likelihood.raw_deg_free.requires_grad_(False)
    return likelihood


def fit(
    X_train: np.ndarray,
    Y_train: np.ndarray,
    X_test: np.ndarray,
    Y_test: np.ndarray,
    Z: np.ndarray,
    *,
    train_Z: bool,
    regression: bool,
    limit: float,
    natgrad: bool,
) -> SparseFit:
    """Train on batches; in double precision, as all others."""
    arrays = X_train, Y_train, X_test, Y_test, Z

    def attempt(lr: float | None = None) -> SparseFit:
        return _fit(arrays, bool(train_Z), bool(regression), float(limit), lr)

    # NotPSDError, NanError and torch's LinAlgError are RuntimeErrors.
    return minibatches.first_that_runs(attempt, (RuntimeError,)) if natgrad else attempt()


def _fit(
    arrays: tuple[np.ndarray, ...],
    train_Z: bool,
    regression: bool,
    limit: float,
    largest: float | None,
) -> SparseFit:
    """By natural gradients where there is a largest step size."""
    X_train, Y_train, X_test, Y_test, Z = arrays
    natgrad = largest is not None
    clock = Clock(limit)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    X, y = torch.as_tensor(X_train), torch.as_tensor(np.ravel(Y_train))
    distribution = NaturalVariationalDistribution if natgrad else CholeskyVariationalDistribution
    model = Sparse(torch.as_tensor(Z), distribution, train_Z)
    likelihood, num_data = likelihood_for(regression), len(X)
    bound = gpytorch.mlls.VariationalELBO(likelihood, model, num_data)
    on_q = list(model.variational_parameters())
    others = [p for p in [*model.hyperparameters(), *likelihood.parameters()] if p.requires_grad]
    optimisers = [torch.optim.Adam(others if natgrad else [*on_q, *others], lr=stopping.ADAM_LR)]
    if natgrad:
        optimisers.insert(
            0, gpytorch.optim.NGD(on_q, num_data, lr=minibatches.natgrad_lr(0, largest))
        )

    def step(count: int, rows: np.ndarray) -> float:
        if natgrad:
            optimisers[0].param_groups[0]["lr"] = minibatches.natgrad_lr(count, largest)
        for optimiser in optimisers:
            optimiser.zero_grad()
        loss = -bound(model(X[rows]), y[rows])
        loss.backward()
        for optimiser in optimisers:
            optimiser.step()
        return num_data * float(loss.item())

    def scores() -> dict[str, Any]:
        model.eval()
        with torch.no_grad():
            q = model(torch.as_tensor(X_test))
            if regression:
                densities = likelihood.log_marginal(torch.as_tensor(np.ravel(Y_test)), q)
                found = regressed(densities.numpy(), q.mean.numpy(), Y_test)
            else:
                found = classified(likelihood(q).mean.numpy(), Y_test)
        model.train()
        return found

    def elbo() -> float:
        with torch.no_grad():
            expected = sum(
                likelihood.expected_log_prob(y[i : i + ROWS], model(X[i : i + ROWS])).sum().item()
                for i in range(0, num_data, ROWS)
            )
            return expected - float(model.variational_strategy.kl_divergence().item())

    model.train()
    trained = minibatches.minimise(step, num_data, clock, lambda: (scores()["log_density"], elbo()))
    ended, kernel = clock.report(), model.covar_module
    return SparseFit(
        **ended,
        **trained,
        **scores(),
        elbo=elbo(),
        **hyperparameters(kernel.base_kernel.lengthscale.item(), kernel.outputscale.item()),
        step_size=largest,
    )
