"""Regression with any likelihood."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.base import RegressorMixin
from sklearn.utils.validation import validate_data

from ..training.starts import start_from_data
from .base import HybridGP
from .parts import has_log_link, is_shifted_with_f, make_kernel, make_likelihood
from .quantiles import predictive_quantiles

Array = npt.NDArray[Any]


class HybridGPRegressor(RegressorMixin, HybridGP):
    """Gaussian-process regression with any likelihood.

    :param kernel: as of :class:`HybridGPClassifier`.
    :param likelihood: ``"gaussian"`` (exact), ``"student_t"`` for outliers, ``"poisson"`` for counts,
        ``"gamma"`` for positive numbers, ``"heteroskedastic"`` for a noise that varies with x, or a
        GPflow likelihood of one output.

    With ``standardise=True`` columns of X are brought to mean zero and variance one, and so is y where it
    is f with a noise; predictions and ``log_marginal_likelihood_value_`` are of y as it was.
    Where y is around ``exp(f)``, f has a constant mean that is trained. Other parameters are those of
    :class:`HybridGPClassifier`; with ``integrate_hyperparameters=True`` the mean, standard deviation and
    quantiles are those of the mixture. Rows have no weights: the models do not take any.
    """

    def __init__(
        self,
        kernel: Any = "matern52",
        *,
        likelihood: Any = "gaussian",
        objective: Any = "ep_like",
        inducing_points: Any = "auto",
        standardise: bool = True,
        n_restarts_optimizer: int = 0,
        integrate_hyperparameters: bool = False,
        random_state: Any = None,
    ) -> None:
        super().__init__(
            kernel,
            objective=objective,
            inducing_points=inducing_points,
            standardise=standardise,
            n_restarts_optimizer=n_restarts_optimizer,
            integrate_hyperparameters=integrate_hyperparameters,
            random_state=random_state,
        )
        self.likelihood = likelihood

    def fit(self, X: Any, y: Any) -> HybridGPRegressor:
        """Train on rows X and observations y."""
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, ensure_min_samples=2)
        y = np.asarray(y, np.float64)
        likelihood = make_likelihood(self.likelihood)
        seed = self._start_fit(X)
        scales = self.standardise and is_shifted_with_f(likelihood)
        self.y_offset_ = float(np.mean(y)) if scales else 0.0
        self.y_scale_ = (float(np.std(y)) or 1.0) if scales else 1.0
        around = np.log(np.mean(y)) if has_log_link(likelihood) and np.mean(y) > 0.0 else None
        Y = ((y - self.y_offset_) / self.y_scale_)[:, None]
        #: the GPflow model, of scaled inputs and observations
        X = self._scaled(X)
        kernel = make_kernel(self.kernel, X)
        self.model_, self.fit_result_ = self._train(X, Y, kernel, likelihood, seed, around)
        #: the learning objective, an estimate of log p(y); exact for a Gaussian likelihood
        #: of the model class where hyperparameters are integrated out
        evidence = self._log_evidence(self.fit_result_)
        self.log_marginal_likelihood_value_ = evidence - len(y) * np.log(self.y_scale_)
        return self

    def _start(self, model: Any, X: Array, Y: Array) -> None:
        if isinstance(self.kernel, str):
            start_from_data(model, X, Y)

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The mean of y at new rows, and its standard deviation, noise included, if that is asked for."""
        X = self._new_inputs(X)
        mean, variance = (np.asarray(x)[:, 0] for x in self.model_.predict_y(X))
        mean = self.y_offset_ + self.y_scale_ * mean
        return (mean, self.y_scale_ * np.sqrt(variance)) if return_std else mean

    def predict_quantiles(self, X: Any, quantiles: Any = (0.05, 0.5, 0.95)) -> Array:
        """Quantiles of y at new rows, ``[N, Q]``: where the distribution ``∫ p(y ≤ t | f) q(f) df`` passes
        them."""
        X = self._new_inputs(X)
        found = predictive_quantiles(self.model_, X, quantiles)
        return self.y_offset_ + self.y_scale_ * found
