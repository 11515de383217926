"""What the estimators share: parameters, scaling, the choice of dense or sparse, training."""

from __future__ import annotations

import warnings
from typing import Any

import gpflow
import numpy as np
import numpy.typing as npt
from gpflow.kernels import Kernel
from gpflow.likelihoods import Likelihood
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from ..errors import ConvergenceWarning, InvalidDataError, LargeModelWarning
from ..inducing_points import inducing_points
from ..integration import HyperparameterPosterior, integrate_hyperparameters
from ..models import CVIModel, SparseCVIModel
from ..training import FitResult, fit
from ..validation import is_integer

Array = npt.NDArray[Any]

DENSE_ROWS = 2500
"""Rows up to which ``inducing_points="auto"`` means a dense model: a minute of one core."""

AUTOMATIC_POINTS = 200
"""Inducing points beyond."""


class HybridGP(BaseEstimator):
    """A Gaussian process as an estimator; not to be made by itself."""

    def __init__(
        self,
        kernel: Any = "matern52",
        *,
        objective: Any = "ep_like",
        inducing_points: Any = "auto",
        standardise: bool = True,
        n_restarts_optimizer: int = 0,
        integrate_hyperparameters: bool = False,
        random_state: Any = None,
    ) -> None:
        self.kernel = kernel
        self.objective = objective
        self.inducing_points = inducing_points
        self.standardise = standardise
        self.n_restarts_optimizer = n_restarts_optimizer
        self.integrate_hyperparameters = integrate_hyperparameters
        self.random_state = random_state

    def _start_fit(self, X: Array) -> int:
        """Look at the parameters and at X, whose scale is kept; a seed."""
        if not is_integer(self.n_restarts_optimizer) or self.n_restarts_optimizer < 0:
            raise InvalidDataError(
                "n_restarts_optimizer must be a non-negative integer; found "
                f"{self.n_restarts_optimizer!r}."
            )
        self.X_offset_ = X.mean(axis=0) if self.standardise else np.zeros(X.shape[1])
        scale = X.std(axis=0) if self.standardise else np.ones(X.shape[1])
        # A column is constant if it varies by no more than rounding.
        constant = scale <= 10.0 * np.finfo(np.float64).eps * np.abs(self.X_offset_)
        self.X_scale_ = np.where(constant, 1.0, scale)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self.inducing_points_ = self._inducing_inputs(self._scaled(X), seed)
        return seed

    def _scaled(self, X: Array) -> Array:
        return (X - self.X_offset_) / self.X_scale_

    def _inducing_inputs(self, X: Array, seed: int) -> Array | None:
        """Z in scaled inputs, or None for a dense model."""
        number = self.inducing_points
        rows = len(X)
        if number is None or (number == "auto" and rows <= DENSE_ROWS):
            return None
        if number == "auto":
            warnings.warn(
                f"X has {rows:,} rows, more than {DENSE_ROWS:,}: the model is sparse, with "
                f"{AUTOMATIC_POINTS} inducing points. Pass inducing_points=None for the dense model, or "
                "another number of points.",
                LargeModelWarning,
                stacklevel=5,
            )
            number = AUTOMATIC_POINTS
        elif not is_integer(number) or number < 1:
            raise InvalidDataError(
                f'inducing_points must be "auto", a positive integer or None; found {number!r}.'
            )
        distinct = len(np.unique(X, axis=0))
        return inducing_points(X, int(min(number, distinct)), seed=seed)

    @property
    def approximation_(self) -> str:
        """``"dense"``, or ``"sparse"`` with its number of inducing points."""
        check_is_fitted(self)
        Z = self.inducing_points_
        return "dense" if Z is None else f"sparse, {len(Z)} inducing points"

    def _train(
        self,
        X: Array,
        Y: Array,
        kernel: Kernel,
        likelihood: Likelihood,
        seed: int,
        mean: float | None = None,
    ) -> tuple[Any, FitResult | HyperparameterPosterior]:
        """A model of scaled inputs and observations ``[N, 1]``, trained, or the mixture of such models over
        the posterior of their hyperparameters.

        :param mean: where f starts to be around, if that is not zero.
        """
        function = None if mean is None else gpflow.functions.Constant(np.array([mean]))
        model: Any
        data, Z = None, self.inducing_points_
        if Z is None:
            model = CVIModel((X, Y), kernel, likelihood, function, objective=self.objective)
        else:
            model = SparseCVIModel(
                kernel, likelihood, Z.copy(), mean_function=function, objective=self.objective
            )
            gpflow.set_trainable(model.inducing_variable, False)
            data = (X, Y)
        self._start(model, X, Y)
        common: dict[str, Any] = {"data": data, "seed": seed, "progress": False}
        common["num_starts"] = 1 + int(self.n_restarts_optimizer)
        result: FitResult | HyperparameterPosterior
        if self.integrate_hyperparameters:
            model = result = integrate_hyperparameters(model, **common)
        else:
            result = fit(model, log_scale=True, **common)
        if not result.converged:
            warnings.warn(
                f"{result.message} ({type(self).__name__} starts at the scale of the data; num_starts is "
                "1 + n_restarts_optimizer.)",
                ConvergenceWarning,
                stacklevel=4,
            )
        return model, result

    def _start(self, model: Any, X: Array, Y: Array) -> None:
        """Where training starts, if the kernel does not say all of it."""

    @staticmethod
    def _log_evidence(result: FitResult | HyperparameterPosterior) -> float:
        """Of the model at its optimum, or of the model class."""
        return result.log_evidence if isinstance(result, HyperparameterPosterior) else -result.loss

    def _new_inputs(self, X: Any) -> Array:
        """Rows to predict at, scaled."""
        check_is_fitted(self)
        return self._scaled(validate_data(self, X, reset=False, dtype=np.float64))
