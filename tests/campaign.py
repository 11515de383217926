"""Fits from far starts on awkward data: does an optimiser's success mean a fit, is the loss a function?

A start is *bad* if SciPy, begun again as ``gh.fit`` does, reports success where a derivative is larger than
1e-2, and *path-dependent* if the loss at the end is another one after the sites were reset; both unless a
warning there says that inference did not converge.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import gpflow
import numpy as np
import tensorflow as tf

import gpflow_hybrid as gh

NUM = 36
NUM_STARTS = 10
NUM_RESTARTS = 6
STEEP = 1e-2
SAME = 1e-8
NO_VALUE = "Inference inside the training loss did not converge"


def inputs(kind: str, rng: np.random.Generator) -> np.ndarray:
    """36 rows, two columns."""
    X = rng.normal(size=(NUM, 2))
    if kind == "separable":
        return X + np.sign(X[:, :1]) * [2.0, 0.0]
    if kind == "duplicated":
        return np.repeat(X[: NUM // 3], 3, axis=0)
    if kind == "outlying":
        X[:2] = [[60.0, 0.0], [0.0, -90.0]]
    if kind == "gridded":
        X = X.round(0)
    return X


KINDS = ("separable", "noisy", "duplicated", "outlying", "gridded")


def signal(kind: str, X: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """What observations are made of, ``[N, 1]``."""
    f = np.tanh(X[:, :1]) + 0.3 * np.sin(X[:, 1:])
    if kind == "separable":
        return 2.0 * np.sign(X[:, :1])
    f = f + (0.8 if kind == "noisy" else 0.2) * rng.normal(size=f.shape)
    if kind == "outlying":
        f[5:7] += [[4.0], [-4.0]]
    return f


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one start ended."""

    kind: str
    start: int
    loss: float
    cold: float
    gradient: float
    success: bool
    warned: tuple[str, ...]

    @property
    def has_value(self) -> bool:
        """Unless a warning says that the E-step there has none; a coarse quadrature is no excuse."""
        return not any(text.startswith(NO_VALUE) for text in self.warned)

    @property
    def is_bad(self) -> bool:
        return self.success and self.gradient > STEEP and self.has_value

    @property
    def depends_on_path(self) -> bool:
        return abs(self.loss - self.cold) > SAME * max(1.0, abs(self.cold)) and self.has_value


def run(
    make: Callable[[Any], Any], observe: Callable[[np.ndarray, np.random.Generator], np.ndarray]
) -> list[Outcome]:
    """Every data set, every start, with one graph.

    :param make: a model of data in variables.
    :param observe: observations of a signal.
    """
    data = []
    for i, kind in enumerate(KINDS):
        rng = np.random.default_rng(i)
        X = inputs(kind, rng)
        data.append((X, observe(signal(kind, X, rng), rng)))
    model = make(tuple(tf.Variable(x, trainable=False) for x in data[0]))
    found = []
    optimizer, rng = gpflow.optimizers.Scipy(), np.random.default_rng(100)
    for kind, rows in zip(KINDS, data, strict=True):
        model.update_data(rows)
        for start in range(NUM_STARTS):
            scale = 6.0 if start % 5 == 4 else 2.0
            for variable in model.trainable_variables:
                variable.assign(scale * rng.normal(size=variable.shape))
            model.sites.reset(len(rows[0]))
            outcome = one(kind, start, model, optimizer, len(rows[0]))
            if outcome is not None:
                found.append(outcome)
    return found


def one(kind: str, start: int, model: Any, optimizer: Any, num: int) -> Outcome | None:
    """From where the model is; None where an error says that there is no value."""
    result: Any = None
    variables = model.trainable_variables
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gh.ConvergenceWarning)
        for _ in range(NUM_RESTARTS):  # as gh.fit does
            try:
                result = optimizer.minimize(
                    model.training_loss, variables, options={"maxiter": 200}
                )
            except (gh.NonFiniteError, tf.errors.InvalidArgumentError):
                return None
            if np.max(np.abs(result.jac)) <= STEEP:
                break
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model._remarks.forget()
        warm = float(model.training_loss())
        model.sites.reset(num)
        model._remarks.forget()
        with tf.GradientTape() as tape:
            cold = model.training_loss()
    words = tuple(str(w.message) for w in said if w.category is gh.ConvergenceWarning)
    gradients = [np.max(np.abs(g)) for g in tape.gradient(cold, variables)]
    gradient = max(float(np.max(np.abs(result.jac))), *map(float, gradients))
    return Outcome(kind, start, warm, float(cold), gradient, bool(result.success), words)
