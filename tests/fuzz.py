"""Models of all kinds on awkward data: whatever comes, a finite answer or an error of this package."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import gpflow
import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

import gpflow_hybrid as gh
from tests.likelihood_cases import CASES

_K = gpflow.kernels
KERNELS = {
    "matern52": _K.Matern52,
    "matern12": _K.Matern12,
    "squared_exponential": _K.SquaredExponential,
    "rational_quadratic": _K.RationalQuadratic,
    "linear": _K.Linear,
    "polynomial": lambda: _K.Polynomial(degree=2),
    "constant": _K.Constant,
    "periodic": lambda: _K.Periodic(_K.SquaredExponential()),
    "arc_cosine": _K.ArcCosine,
    "with_noise": lambda: _K.Matern32() + _K.White(0.1),
    "product": lambda: _K.SquaredExponential() * _K.Linear(),
}
MEANS = {
    "none": lambda _: None,
    "constant": lambda _: gpflow.mean_functions.Constant(),
    "linear": lambda d: gpflow.mean_functions.Linear(np.ones((d, 1)), np.zeros(1)),
}
MODELS = ("ep_like", "elbo", 0.5, "ep", "laplace", "sparse")
CLASSES = (
    "bernoulli_probit",
    "bernoulli_logit",
    "probit_bernoulli",
    "ordinal",
    "multiclass",
    "softmax",
)
REAL = ("gaussian", "student_t", "heteroskedastic", "own_log_cosh")
SHAPES = ("plain", "duplicated", "equal", "one_value", "one_outlier")


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its data, by their names."""

    kernel: str
    likelihood: str
    mean: str
    model: Any
    shape: str
    num_rows: int
    num_columns: int
    scale: float
    offset: float
    y_scale: float
    y_offset: float
    variance: float
    seed: int

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(self.seed)
        X = rng.normal(size=(self.num_rows, self.num_columns))
        if self.shape == "duplicated":
            X[1::2] = X[: len(X[1::2])]
        if self.shape == "equal":
            X[:] = X[0]
        if self.shape == "one_outlier":
            X[-1] += 1e6
        f = np.sin(2.0 * X[:, :1])
        Y = CASES[self.likelihood].observe(f, rng)
        if self.shape == "one_value":  # one class, one count
            Y[:] = Y[0]
        if self.likelihood in REAL:
            Y = self.y_offset + self.y_scale * Y
        if self.likelihood in ("gamma", "exponential"):
            Y = self.y_scale * Y
        return self.offset + self.scale * X, Y

    def build(self, X: np.ndarray, Y: np.ndarray) -> tuple[Any, tuple[Any, ...]]:
        """The model, and what its loss takes."""
        case = CASES[self.likelihood]
        kernel, likelihood = KERNELS[self.kernel](), case.make()
        for parameter in kernel.parameters:
            if parameter.name == "variance":
                parameter.assign(self.variance)
        mean = MEANS[self.mean](X.shape[1])
        if self.model == "sparse":
            Z = X[: max(1, len(X) // 2)].copy()
            latents = {"num_latent_gps": case.num_latent}
            return gh.SparseCVIModel(kernel, likelihood, Z, mean_function=mean, **latents), (
                (X, Y),
            )
        kinds = {"ep": gh.EPModel, "laplace": gh.LaplaceModel}
        more = {} if self.model in kinds else {"objective": self.model}
        more["mean_function"] = mean
        kind = kinds.get(self.model, gh.CVIModel)
        return kind((X, Y), kernel, likelihood, num_latent_gps=case.num_latent, **more), ()


powers_of_ten = st.integers(-6, 6).map(lambda x: 10.0**x)
offsets = st.sampled_from([0.0, 0.0, 1.0, -1e8, 1e8])

cases = st.builds(
    Case,
    kernel=st.sampled_from(sorted(KERNELS)),
    likelihood=st.sampled_from(sorted(CASES)),
    mean=st.sampled_from(sorted(MEANS)),
    model=st.sampled_from(MODELS),
    shape=st.sampled_from(SHAPES),
    num_rows=st.sampled_from([1, 2, 3, 9]),
    num_columns=st.sampled_from([1, 3]),
    scale=powers_of_ten,
    offset=offsets,
    y_scale=powers_of_ten,
    y_offset=offsets,
    variance=powers_of_ten,
    seed=st.integers(0, 10),
)


def check(case: Case) -> str:
    """Every answer is finite, or an error of this package says why there is none.

    :return: how it ended.
    """
    X, Y = case.data()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", gh.ConvergenceWarning)
        try:
            model, arguments = case.build(X, Y)
            with tf.GradientTape() as tape:
                loss = model.training_loss(*arguments)
            gradients = tape.gradient(loss, model.trainable_variables)
            answers = {"loss": loss}
            answers |= {
                f"gradient in {v.name}": g
                for v, g in zip(model.trainable_variables, gradients, strict=True)
                if g is not None
            }
            model.infer(*arguments)
            answers["elbo"] = model.elbo(*arguments)
            answers["mean"], answers["variance"] = model.predict_f(X)
            answers["mean of y"], answers["variance of y"] = model.predict_y(X)
            answers["log density"] = model.predict_log_density((X, Y))
            if case.seed == 0:  # a graph takes as long as all else
                data = {"data": arguments[0]} if arguments else {}
                result = gh.fit(model, max_iterations=3, progress=False, **data)
                answers["loss of the fit"] = result.loss
        except gh.GPflowHybridError as error:
            return f"{type(error).__name__}: {error}"
    wrong = {name: x for name, x in answers.items() if not np.all(np.isfinite(x))}
    assert not wrong, (case, wrong)
    assert np.all(answers["variance"] >= 0.0), (case, answers["variance"])
    return "finite"
