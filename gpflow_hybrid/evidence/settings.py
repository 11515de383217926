"""Settings of the hyperparameters: read them, apply them to a copy, share what they share."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import gpflow
import numpy as np
import tensorflow as tf
from gpflow.base import AnyNDArray, Parameter
from gpflow.kernels import Kernel
from gpflow.likelihoods import Likelihood
from gpflow.models import GPModel

from ..copying import copied
from ..covariances import latent_kernels, prior_mean
from ..errors import GPflowHybridError, InvalidDataError, NonFiniteError
from ..models import CVIModel, SiteModel
from .bases import FactoredPrior

Setting = Mapping[str, Any]
"""Values by GPflow's path: ``{".kernel.variance": 2.0}``."""

JITTERS = (5e3, 5e5, 5e7)
"""In units of rounding of the mean of the kernel's diagonal; the first with a Cholesky factor is used."""

_PARTS = (".kernel", ".likelihood", ".mean_function")


def grid(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of the values on each axis, the last axis running fastest.

    The paper's grid, whose results reshape to ``[21, 21]``::

        values = np.exp(np.linspace(-1, 5, 21))
        gh.evidence.grid({".kernel.lengthscales": values, ".kernel.variance": values**2})
    """
    if not isinstance(axes, Mapping) or not all(np.ndim(v) > 0 for v in axes.values()):
        raise InvalidDataError(
            f"axes must be a dictionary from GPflow's paths to sequences of values; found {axes!r}."
        )
    return [
        dict(zip(axes, combination, strict=True))
        for combination in itertools.product(*axes.values())
    ]


def working_copy(model: GPModel) -> SiteModel:
    """A site model with copies of the model's parts and its data, refused in words if impossible."""
    if isinstance(model, SiteModel):
        return copied(model)
    kind = type(model).__name__
    if getattr(model, "inducing_variable", None) is not None:
        raise InvalidDataError(
            f"model must have a full GP prior at its data; found {kind}, which has inducing "
            "variables. Pass gh.CVIModel((X, Y), kernel, likelihood, mean_function)."
        )
    data = getattr(model, "data", None)
    if not isinstance(model, GPModel) or not isinstance(data, (tuple, list)) or len(data) != 2:
        raise InvalidDataError(
            f"model must be a GPflow model that holds its data (X, Y); found {kind}. Pass a site "
            "model such as gh.CVIModel, or GPR, VGP or GPMC."
        )
    parts = copied((model.kernel, model.likelihood, model.mean_function))
    tensors = tuple(tf.convert_to_tensor(d) for d in data)
    return CVIModel(tensors, *parts, model.num_latent_gps)


class PriorAndTest(NamedTuple):
    """The prior at the data, and ``f* | f ~ N(μ* + weightsᵀ (f − μ₀), variance)`` at test inputs."""

    prior: FactoredPrior
    test_mean: tf.Tensor  # [G, L, N*]
    weights: tf.Tensor  # [G, L or 1, N, N*]
    variance: tf.Tensor  # [G, L or 1, N*]


class Settings:
    """A working copy and the settings that it can be put into."""

    def __init__(self, original: GPModel, settings: Sequence[Setting]) -> None:
        if not isinstance(settings, Sequence) or len(settings) == 0:
            raise InvalidDataError(
                "hyperparameters must be a sequence of dictionaries {path: value}, at least one; found "
                f"{settings!r}."
            )
        self.given = settings
        self.model = model = working_copy(original)
        self._parameters = {
            path: parameter
            for path, parameter in gpflow.utilities.parameter_dict(model).items()
            if path.startswith(_PARTS)
        }
        self._initial = {path: p.numpy() for path, p in self._parameters.items()}
        self.values = [self._read(i, setting) for i, setting in enumerate(settings)]
        # Compiled graphs live as long as their likelihood: the original, if no setting changes it.
        same = all(
            np.array_equal(value, self._initial[path])
            for values in self.values
            for path, value in values.items()
            if path.startswith(".likelihood")
        )
        self.likelihood: Likelihood = (original if same else model).likelihood
        self._units: dict[int, tuple[Hashable, Unit]] = {}

    def _read(self, index: int, setting: Any) -> dict[str, AnyNDArray]:
        """The value of every parameter in a setting; what it does not name is as in the model."""
        if not isinstance(setting, Mapping):
            raise InvalidDataError(
                "hyperparameters must be a sequence of dictionaries {path: value}; found "
                f"{type(setting).__name__} at position {index}."
            )
        values = dict(self._initial)
        for path, value in setting.items():
            if path not in self._parameters:
                raise InvalidDataError(
                    f"hyperparameters[{index}] names {path!r}, which this model does not have; "
                    f"known are {', '.join(self._parameters)}."
                )
            parameter, initial = self._parameters[path], self._initial[path]
            try:
                array = np.asarray(value, dtype=initial.dtype)
            except (TypeError, ValueError):
                raise InvalidDataError(
                    f"hyperparameters[{index}][{path!r}] must be a number or an array of numbers; "
                    f"found {value!r}."
                ) from None
            if array.shape != initial.shape:
                raise InvalidDataError(
                    f"hyperparameters[{index}][{path!r}] must have shape {initial.shape}; found "
                    f"{array.shape}."
                )
            transform = parameter.transform
            unconstrained = array if transform is None else transform.inverse(array)
            if not (np.all(np.isfinite(array)) and np.all(np.isfinite(unconstrained))):
                raise InvalidDataError(
                    f"hyperparameters[{index}][{path!r}] must be finite and in the parameter's "
                    f"domain; found {value!r}."
                )
            # A parameter that several parts share has several paths.
            values |= {other: array for other, p in self._parameters.items() if p is parameter}
        return values

    def apply(self, index: int) -> None:
        """Put the copy into a setting."""
        for path, parameter in self._parameters.items():
            parameter.assign(self.values[index][path])

    def groups(self) -> list[list[int]]:
        """Settings with equal parameters of the likelihood: those can be one batch."""
        groups: dict[Hashable, list[int]] = {}
        for i, values in enumerate(self.values):
            key = tuple(v.tobytes() for path, v in values.items() if path.startswith(".likelihood"))
            groups.setdefault(key, []).append(i)
        return list(groups.values())

    def prior(self, indices: Sequence[int], X_test: tf.Tensor | None = None) -> PriorAndTest:
        """The prior at the data and given f at test inputs, for some settings."""
        X = tf.convert_to_tensor(self.model.data[0])
        X_test = X[:0] if X_test is None else X_test
        num_latent = self.model.num_latent_gps
        priors = []
        for i in indices:
            self.apply(i)
            means = (prior_mean(self.model.mean_function, x, num_latent) for x in (X, X_test))
            mean, test_mean = (tf.transpose(m) for m in means)
            if not np.all(np.isfinite(mean)):
                raise NonFiniteError(
                    "The mean function is not finite at the data: give its parameters proper values."
                )
            units = [self._unit(k, X, X_test) for k in latent_kernels(self.model.kernel)]
            priors.append((mean, test_mean, *(tf.stack(part) for part in zip(*units, strict=True))))
        mean, test_mean, chol, weights, variance = (
            tf.stack(part) for part in zip(*priors, strict=True)
        )
        return PriorAndTest(FactoredPrior(mean, chol), test_mean, weights, variance)

    def infer(self, index: int) -> tuple[tf.Tensor, tf.Tensor]:
        """The sites of the model's own E-step at a setting, ``[L, N]`` each; zero where it fails."""
        self.apply(index)
        sites = self.model.sites
        sites.reset(tf.shape(self.model.data[0])[0])
        try:
            self.model.infer()
        except GPflowHybridError:
            sites.reset(tf.shape(self.model.data[0])[0])
        return tf.transpose(sites.lambda_1), tf.transpose(sites.lambda_2)

    def _unit(self, kernel: Kernel, X: tf.Tensor, X_test: tf.Tensor) -> Unit:
        """``L``, ``K⁻¹k*`` and the conditional variance, from those at unit variance.

        One kernel evaluation and one factorisation for all consecutive settings that differ in the
        variance only.
        """
        parameter = scale_parameter(kernel)
        variance = tf.ones((), X.dtype) if parameter is None else tf.convert_to_tensor(parameter)
        key = tuple(p.numpy().tobytes() for p in kernel.parameters if p is not parameter)
        if self._units.get(id(kernel), (None,))[0] != key:
            self._units[id(kernel)] = key, _unit(kernel, variance, X, X_test)
        chol, weights, conditional = self._units[id(kernel)][1]
        return Unit(tf.sqrt(variance) * chol, weights, variance * conditional)


class Unit(NamedTuple):
    """One kernel at the data, and given the data at test inputs."""

    chol: tf.Tensor  # L, [N, N]
    weights: tf.Tensor  # K⁻¹ k(X, X*), [N, N*]
    variance: tf.Tensor  # k(X*, X*) − k(X*, X) K⁻¹ k(X, X*), its diagonal, [N*]


def _unit(kernel: Kernel, scale: tf.Tensor, X: tf.Tensor, X_test: tf.Tensor) -> Unit:
    """The kernel divided by ``scale``."""
    chol = jittered_cholesky(tf.linalg.set_diag(kernel(X), kernel(X, full_cov=False)) / scale)
    if X_test.shape[0] == 0:
        return Unit(chol, tf.zeros_like(X[:, :0]), tf.zeros_like(X[0, :0]))
    whitened = tf.linalg.triangular_solve(chol, kernel(X, X_test) / scale)
    weights = tf.linalg.triangular_solve(chol, whitened, adjoint=True)
    variance = kernel(X_test, full_cov=False) / scale - tf.reduce_sum(tf.square(whitened), 0)
    return Unit(chol, weights, tf.maximum(variance, 0.0))


def scale_parameter(kernel: Kernel) -> Parameter | None:
    """The parameter by which the whole kernel is multiplied, if it is known to have one."""
    multiplied = (gpflow.kernels.Stationary, gpflow.kernels.Constant)
    if isinstance(kernel, multiplied) and type(kernel).__module__.startswith("gpflow.kernels"):
        return kernel.variance
    return None


def jittered_cholesky(K: tf.Tensor) -> tf.Tensor:
    """Lower triangular factor of K with the least relative jitter that admits one."""
    if not np.all(np.isfinite(K)):
        raise NonFiniteError(
            "The kernel matrix is not finite at these hyperparameters: give them proper values."
        )
    diagonal = tf.linalg.diag_part(K)
    eps = np.finfo(K.dtype.as_numpy_dtype).eps
    for jitter in (j * eps for j in JITTERS):
        chol = tf.linalg.cholesky(
            tf.linalg.set_diag(K, diagonal + jitter * tf.reduce_mean(diagonal))
        )
        if np.all(np.isfinite(chol)):
            return chol
    raise NonFiniteError(
        "The kernel matrix has no Cholesky factor, even with a jitter of "
        f"{JITTERS[-1] * eps:.0e} of its diagonal: it is not positive semi-definite."
    )
