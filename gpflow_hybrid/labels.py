"""Which observations a likelihood has a density for, and what to do about others."""

from __future__ import annotations

from typing import Any

import numpy as np
from gpflow.base import AnyNDArray
from gpflow.likelihoods import (
    Bernoulli,
    Beta,
    Exponential,
    Gamma,
    Likelihood,
    MultiClass,
    Ordinal,
    Poisson,
    Softmax,
    SwitchedLikelihood,
)

from .errors import InvalidDataError
from .likelihoods import ProbitBernoulli
from .namespaces import functions_of


def check_labels(Y: AnyNDArray, likelihood: Likelihood, rows: AnyNDArray | None = None) -> None:
    """Refuse observations outside the likelihood's support, naming one and the remedy.

    :param rows: the rows of the data that Y holds; all by default.
    """
    rows = np.arange(len(Y)) if rows is None else rows
    if len(Y) == 0:
        return
    if isinstance(likelihood, SwitchedLikelihood):
        _check_switched(Y, likelihood)
        return
    if Y.shape[1] != 1 and isinstance(likelihood, (MultiClass, Softmax)):
        raise InvalidDataError(
            f"Y must have one column of class numbers for {type(likelihood).__name__}; found "
            f"{Y.shape[1]} columns. Pass Y.argmax(1)[:, None] if it is one-hot."
        )
    _require(Y, rows, likelihood, (has_density(Y, likelihood), *_words(Y, likelihood)))


def has_density(Y: Any, likelihood: Likelihood) -> Any:
    """Which observations ``[..., N, P]`` a likelihood has a density for, of an array or a tensor."""
    whole = Y == functions_of(Y).round(Y)
    if isinstance(likelihood, SwitchedLikelihood):
        index = Y[..., -1:]
        known = (index >= 0) & (index < len(likelihood.likelihoods)) & whole[..., -1:]
        for i, part in enumerate(likelihood.likelihoods):
            known = known & ((index != i) | has_density(Y[..., :-1], part))
        return known
    if isinstance(likelihood, (Bernoulli, ProbitBernoulli)):
        return (Y == 0) | (Y == 1)
    if isinstance(likelihood, Poisson):
        return (Y >= 0) & whole
    if isinstance(likelihood, Beta):
        return (Y > 0) & (Y < 1)
    if isinstance(likelihood, Gamma):
        return Y > 0
    if isinstance(likelihood, Exponential):
        return Y >= 0
    if isinstance(likelihood, (MultiClass, Softmax, Ordinal)):
        return (Y >= 0) & (Y < _num_classes(likelihood)) & whole
    return Y == Y  # all but NaN


def _num_classes(likelihood: Any) -> int:
    is_ordinal = isinstance(likelihood, Ordinal)
    return int(likelihood.num_bins if is_ordinal else likelihood.num_classes)


def _words(Y: AnyNDArray, likelihood: Likelihood) -> tuple[str, str]:
    """What observations a likelihood has a density for, and what to do about others."""
    if isinstance(likelihood, (Bernoulli, ProbitBernoulli)):
        values = set(np.unique(Y).tolist())
        remedy = "Recode the two classes as 0 and 1."
        if values <= {-1, 1}:
            remedy = "Pass (Y + 1) / 2."
        elif values <= {1, 2}:
            remedy = "Pass Y - 1."
        return "0 or 1", remedy
    if isinstance(likelihood, Poisson):
        return "a count (0, 1, 2, …)", "Pass counts; model rates or scores with another likelihood."
    if isinstance(likelihood, Beta):
        remedy = "Rescale Y, or move exact zeros and ones inside the interval."
        return "strictly between 0 and 1", remedy
    if isinstance(likelihood, Gamma):
        return "positive", "Remove or shift values that are not."
    if isinstance(likelihood, Exponential):
        return "non-negative", "Remove or shift values that are not."
    if isinstance(likelihood, (MultiClass, Softmax, Ordinal)):
        num = _num_classes(likelihood)
        remedy = "Pass Y - 1." if Y.min() == 1 and Y.max() == num else "Number the classes from 0."
        return f"a class number from 0 to {num - 1}", remedy
    return "", ""


def _require(
    Y: AnyNDArray, rows: AnyNDArray, likelihood: Likelihood, support: tuple[AnyNDArray, str, str]
) -> None:
    inside, words, remedy = support
    if not inside.all():
        row, column = np.argwhere(~inside)[0]
        raise InvalidDataError(
            f"Y must be {words} for {type(likelihood).__name__}; found {Y[row, column]:g} at row "
            f"{rows[row]}. {remedy}"
        )


def _check_switched(Y: AnyNDArray, likelihood: SwitchedLikelihood) -> None:
    num = len(likelihood.likelihoods)
    if Y.shape[1] < 2:
        raise InvalidDataError(
            "Y must have a last column that selects the likelihood for SwitchedLikelihood; found "
            f"{Y.shape[1]} column. Append the index of each row's likelihood."
        )
    index = Y[:, -1:]
    inside = (index >= 0) & (index < num) & (index == np.round(index))
    words = f"an index from 0 to {num - 1} in its last column"
    support = (inside, words, "It selects each row's likelihood.")
    _require(index, np.arange(len(Y)), likelihood, support)
    for i, part in enumerate(likelihood.likelihoods):
        rows = np.flatnonzero(index[:, 0] == i)
        check_labels(Y[rows, :-1], part, rows)
