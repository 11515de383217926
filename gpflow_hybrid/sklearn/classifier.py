"""Classification, of two classes or of each against the rest."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import log_ndtr, ndtr, ndtri_exp
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from ..errors import InvalidDataError
from ..integration import HyperparameterPosterior
from ..likelihoods import ProbitBernoulli
from .base import HybridGP
from .parts import make_kernel, moments_of

Array = npt.NDArray[Any]


FIRST_VARIANCE = 25.0
"""Of a kernel by name: classes that can be told apart have a latent of a few units, and from one the way is
longer."""


class HybridGPClassifier(ClassifierMixin, HybridGP):
    """Gaussian-process classification with EP-like learning, in the place of
    :class:`sklearn.gaussian_process.GaussianProcessClassifier`.

    Two classes have the probit likelihood ``p(y = 1 | f) = Φ(f)`` and one model, of which

        p(y = 1 | x) = Φ(a(x)),     a = m/√(1 + v),

    with mean m and variance v of f(x). More classes have a model each, of it against the rest, and the
    probabilities ``Φ(a_c) / Σ_c Φ(a_c)``.

    :param kernel: a GPflow kernel, whose parameters are where training starts, or ``"matern12"``,
        ``"matern32"``, ``"matern52"``, ``"rbf"``, ``"rational_quadratic"``, which start at the scale of the
        data; with ``"_ard"`` behind it, a lengthscale for every column.
    :param objective: what is learnt from: ``"ep_like"``, ``"elbo"``, or a power in [0, 1].
    :param inducing_points: how many a sparse model has; None for a dense one; ``"auto"`` is dense up to
        2500 rows, and says so beyond.
    :param standardise: whether columns of X are brought to mean zero and variance one.
    :param n_restarts_optimizer: further starts of the optimiser.
    :param integrate_hyperparameters: whether to predict by the mixture over the hyperparameters' posterior
        (:func:`~gpflow_hybrid.integrate_hyperparameters`, with its default priors), instead of their
        optimum: the probability is then ``Σ_k w_k Φ(a_k(x))``, ``model_`` and ``fit_result_`` are a
        :class:`~gpflow_hybrid.HyperparameterPosterior`, and ``log_marginal_likelihood_value_`` is the
        log evidence ``log ∫ p(y|θ) p(θ) dθ``. It costs some three to fifteen fits.
    :param random_state: of these, and of where inducing points are.

    There are no weights of rows or of classes: the models do not take any, and ``fit`` has no
    ``sample_weight``, which is how scikit-learn's ensembles know.
    """

    def fit(self, X: Any, y: Any) -> HybridGPClassifier:
        """Train on rows X and labels y, numbers or strings."""
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        count = len(self.classes_)
        if count < 2:
            raise InvalidDataError(
                f"y must have at least two classes; found one class, {self.classes_[0]!r}."
            )
        seed = self._start_fit(X)
        positive = [1] if count == 2 else range(count)
        models, results = [], []
        X = self._scaled(X)
        kernel, likelihood = make_kernel(self.kernel, X, FIRST_VARIANCE), ProbitBernoulli()
        for label in positive:
            Y = (codes == label).astype(np.float64)[:, None]
            model, result = self._train(X, Y, copy.deepcopy(kernel), likelihood, seed)
            models.append(model)
            results.append(result)
        #: the GPflow model, of scaled inputs; a tuple of one for every class if there are more than two
        self.model_ = models[0] if count == 2 else tuple(models)
        #: how training ended; a tuple likewise
        self.fit_result_ = results[0] if count == 2 else tuple(results)
        #: the learning objective, an estimate of log p(y), or the log evidence where hyperparameters are
        #: integrated out; the mean over classes if there are more than two
        evidence = [self._log_evidence(r) for r in results]
        self.log_marginal_likelihood_value_ = float(np.mean(evidence))
        return self

    def decision_function(self, X: Any) -> Array:
        """``a = m/√(1 + v)``, ``[N]``, positive for the second class; ``[N, C]`` of more than two.

        With integrated hyperparameters ``Φ⁻¹`` of the probability, which is the same for one setting.
        """
        X = self._new_inputs(X)
        models = self.model_ if isinstance(self.model_, tuple) else (self.model_,)
        columns = []
        for model in models:
            if isinstance(model, HyperparameterPosterior):
                columns.append(self._mixed(model, X))
                continue
            mean, variance = moments_of(model, X)
            columns.append((mean / np.sqrt(1.0 + variance))[:, 0])
        return columns[0] if len(columns) == 1 else np.stack(columns, axis=1)

    @staticmethod
    def _mixed(mixture: HyperparameterPosterior, X: Array) -> Array:
        """``Φ⁻¹(Σ w Φ(a))``, from the logarithms of both sides, of which one may have run out of digits."""
        ones = np.ones((len(X), 1))
        negative, positive = (
            np.asarray(mixture.predict_log_density((X, y))) for y in (0.0 * ones, ones)
        )
        return np.where(positive < negative, ndtri_exp(positive), -ndtri_exp(negative))

    def predict_proba(self, X: Any) -> Array:
        """Probabilities of the classes, ``[N, C]``, in the order of ``classes_``."""
        a = self.decision_function(X)
        if a.ndim == 1:
            return np.stack([ndtr(-a), ndtr(a)], axis=1)
        # In units of the largest: far from all classes every Φ may be zero.
        log_p = log_ndtr(a)
        p = np.exp(log_p - log_p.max(axis=1, keepdims=True))
        return p / p.sum(axis=1, keepdims=True)

    def predict(self, X: Any) -> Array:
        """The most probable class."""
        a = self.decision_function(X)
        codes = (a > 0.0).astype(int) if a.ndim == 1 else np.argmax(a, axis=1)
        return self.classes_[codes]
