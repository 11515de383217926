"""GPyTorch: a whitened variational GP with all training inputs as inducing inputs."""

from __future__ import annotations

import time
from typing import Any

import gpytorch
import numpy as np
import torch
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    NaturalVariationalDistribution,
    VariationalStrategy,
)

from . import stopping
from .outcome import Fit, hyperparameters, score


class Classifier(gpytorch.models.ApproximateGP):
    """A zero-mean Matérn-5/2 GP with q(f) over the training inputs."""

    def __init__(self, X: torch.Tensor, distribution: Any) -> None:
        strategy = VariationalStrategy(
            self, X, distribution(len(X)), learn_inducing_locations=False
        )
        super().__init__(strategy)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5))
        self.covar_module.outputscale = 1.0
        self.covar_module.base_kernel.lengthscale = 1.0

    def forward(self, X: torch.Tensor) -> gpytorch.distributions.MultivariateNormal:
        """The prior at X."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(X), self.covar_module(X))


def fit(
    X_train: np.ndarray,
    Y_train: np.ndarray,
    X_test: np.ndarray,
    Y_test: np.ndarray,
    *,
    natgrad: bool,
) -> Fit:
    """Train with Adam on everything, or with natural gradients on q and Adam on the kernel."""
    start = time.perf_counter()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    X, y, num_data = torch.as_tensor(X_train), torch.as_tensor(np.ravel(Y_train)), len(X_train)
    model = Classifier(
        X, NaturalVariationalDistribution if natgrad else CholeskyVariationalDistribution
    )
    likelihood = gpytorch.likelihoods.BernoulliLikelihood()
    bound = gpytorch.mlls.VariationalELBO(likelihood, model, num_data)
    adam = torch.optim.Adam(
        model.hyperparameters() if natgrad else model.parameters(), lr=stopping.ADAM_LR
    )
    optimisers: list[torch.optim.Optimizer] = [adam]
    if natgrad:
        optimisers.insert(0, gpytorch.optim.NGD(model.variational_parameters(), num_data))
    model.train()

    def step(iteration: int) -> float:
        if natgrad:
            optimisers[0].param_groups[0]["lr"] = stopping.natgrad_lr(iteration)
        for optimiser in optimisers:
            optimiser.zero_grad()
        loss = -bound(model(X), y)
        loss.backward()
        for optimiser in optimisers:
            optimiser.step()
        return num_data * loss.item()

    losses, converged = stopping.minimise(step, num_data)
    seconds = time.perf_counter() - start
    model.eval()
    with torch.no_grad():
        probability = likelihood(model(torch.as_tensor(X_test))).mean.numpy()
    kernel = model.covar_module
    return Fit(
        seconds=seconds,
        **stopping.summary(losses, converged),
        **score(probability, Y_test),
        **hyperparameters(kernel.base_kernel.lengthscale.item(), kernel.outputscale.item()),
    )
