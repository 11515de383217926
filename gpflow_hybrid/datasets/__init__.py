"""Six binary classification benchmarks that ship with the package.

`data/README.md` gives their provenance.
"""

import difflib
import hashlib
import io
import operator
from collections.abc import Iterator
from importlib.resources import files
from typing import NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

__all__ = ["Dataset", "folds", "load", "names", "standardise"]

FloatArray = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.intp]

_DATA = files(__name__) / "data"


# Name: (file, SHA-256)
_FILES = {
    "sonar": ("sonar.csv", "61b3320b7ead6e01943ecb4e42e3c83a6982b71d79e8fa4e1d634ca3293f3ac4"),
    "ionosphere": (
        "ionosphere.csv",
        "29a671354db3eafcce059e1b55cb1b98914ef958f24f0550a728c4648e045682",
    ),
    "diabetes": (
        "diabetes.csv",
        "be88263da8351255cb06963da18d1e010b9a0b3ca96ac04cc7b2a0d4321f076b",
    ),
    "usps": ("usps_3v5.npz", "31f8bd81864e851af1aa9dc1bebbb760445b2234fe93fbdb7e5297e6cbc40887"),
    "banana": ("banana.csv", "d028e7423fd524bed2953647f27d81b8a8ce72254d919ca7b9d3886eee18dbde"),
    "magic": ("magic.npz", "9c4c28d807ee5550141bdffafaede86597c01b283c7ce6377d4b76fd80582764"),
}
_ALIASES = {"usps_3v5": "usps"}


class Dataset(NamedTuple):
    """Inputs `X` [N, D] and labels `Y` [N, 1] in {0, 1}, both float64.

    It is a pair, so `len(dataset)` is 2; the number of rows is `len(dataset.X)`.
    """

    X: FloatArray
    Y: FloatArray


def names() -> tuple[str, ...]:
    """The names that `load` accepts; `"usps_3v5"` is a second name for `"usps"`."""
    return tuple(_FILES)


def load(name: str) -> Dataset:
    """The benchmark called `name`, its file's SHA-256 verified before parsing.

    Values are raw: see `standardise`. Ionosphere has one constant column; diabetes codes missing
    values as zero; the first 767 rows of usps are the training half in Rasmussen and Williams
    (2006); the rows of magic are ordered by class.
    """
    entry = _FILES.get(_ALIASES.get(name, name))
    if entry is None:
        raise ValueError(_unknown(name))
    filename, expected = entry
    content = _DATA.joinpath(filename).read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != expected:
        raise ValueError(
            f"{filename} is damaged: expected SHA-256 {expected}; found {digest}. "
            "Reinstall gpflow-hybrid."
        )
    if filename.endswith(".npz"):
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            X, y = arrays["X"], arrays["y"]
            if "scale" in arrays:  # integers in units of 1/10^k: the quotient is the decimal
                X = X / np.rint(1.0 / arrays["scale"])
    else:
        table = np.loadtxt(io.BytesIO(content), delimiter=",", skiprows=1)
        X, y = table[:, :-1], table[:, -1]
    return Dataset(*(np.ascontiguousarray(a, dtype=np.float64) for a in (X, y[:, None])))


def standardise(X_train: npt.ArrayLike, *others: npt.ArrayLike) -> tuple[FloatArray, ...]:
    """`X_train` and `others`, each shifted and scaled by the column mean and std of `X_train`.

    Columns constant over the training rows are divided by 1. The result is always a tuple, with one
    array for each argument: `(X,) = standardise(X)`.
    """
    train = _matrix("X_train", X_train)
    if not len(train):
        raise ValueError("X_train must have at least one row; found none.")
    if not np.isfinite(train).all():
        raise ValueError(
            "X_train must be finite; found NaN or infinity. Drop or impute those rows."
        )
    arrays = [train, *(_matrix(f"others[{i}]", other) for i, other in enumerate(others))]
    for i, other in enumerate(arrays[1:]):
        if other.shape[1] != train.shape[1]:
            raise ValueError(
                f"others[{i}] must have the {train.shape[1]} columns of X_train; "
                f"found {other.shape[1]}."
            )
    # The range is exactly 0 for a constant column; its std may be a rounding error instead.
    constant = np.ptp(train, axis=0) == 0
    mean = np.where(constant, train[0], train.mean(axis=0))
    scale = np.where(constant, 1.0, train.std(axis=0))
    return tuple((array - mean) / scale for array in arrays)


def folds(
    dataset_or_n: Dataset | SupportsIndex, num_folds: int = 5, seed: int = 42
) -> Iterator[tuple[IndexArray, IndexArray]]:
    """Pairs `(train_idx, test_idx)` of a shuffled cross-validation over a dataset or N rows.

    The pairs equal those of scikit-learn's `KFold(num_folds, shuffle=True, random_state=seed)`;
    indices are sorted, so row order within a fold carries no shuffling.
    """
    if isinstance(dataset_or_n, Dataset):
        num_data = len(dataset_or_n.X)
    else:
        try:
            num_data = operator.index(dataset_or_n)
        except TypeError:
            raise TypeError(
                "dataset_or_n must be a Dataset or a number of rows; "
                f"found {type(dataset_or_n).__name__}. Pass len(X)."
            ) from None
    if not 2 <= num_folds <= num_data:
        raise ValueError(
            f"num_folds must be between 2 and the number of rows, {num_data}; found {num_folds}."
        )
    order = np.arange(num_data)
    np.random.RandomState(seed).shuffle(order)
    # The first num_data % num_folds folds get one row more, as in scikit-learn.
    tests = (np.sort(members) for members in np.array_split(order, num_folds))
    return ((np.setdiff1d(order, test), test) for test in tests)


def _matrix(name: str, value: npt.ArrayLike) -> FloatArray:
    array = np.asarray(value, dtype=np.float64)
    if array.ndim != 2:
        raise ValueError(
            f"{name} must have shape [N, D]; found shape {list(array.shape)}. "
            "Reshape a single column with X[:, None]."
        )
    return array


def _unknown(name: str) -> str:
    message = f"name must be one of {', '.join(_FILES)}; found {name!r}."
    closest = difflib.get_close_matches(str(name).lower(), [*_FILES, *_ALIASES], n=1, cutoff=0.5)
    return f"{message} Did you mean {closest[0]!r}?" if closest else message
