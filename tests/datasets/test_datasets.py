"""The shipped benchmarks against their provenance table, and the helpers against scikit-learn."""

import hashlib
import re
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from sklearn.model_selection import KFold
from sklearn.preprocessing import StandardScaler

from gpflow_hybrid import datasets

DATA = files("gpflow_hybrid.datasets") / "data"

# name: (file, N, D, number of ones)
EXPECTED = {
    "sonar": ("sonar.csv", 208, 60, 111),
    "ionosphere": ("ionosphere.csv", 351, 34, 225),
    "diabetes": ("diabetes.csv", 768, 8, 268),
    "usps": ("usps_3v5.npz", 1540, 256, 824),
    "banana": ("banana.csv", 5300, 2, 2376),
    "magic": ("magic.npz", 19020, 10, 12332),
}


def provenance() -> dict[str, list[str]]:
    """The rows of the provenance table, by file name."""
    text = (DATA / "README.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if re.match(r"\| \w+\.(csv|npz) ", line)
    ]
    return {row[0]: row[1:] for row in rows}


class TestLoad:
    @pytest.mark.parametrize("name", EXPECTED)
    def test_shapes_types_and_label_counts(self, name):
        _, num_data, num_inputs, num_ones = EXPECTED[name]
        X, Y = datasets.load(name)
        assert X.shape == (num_data, num_inputs)
        assert Y.shape == (num_data, 1)
        assert X.dtype == Y.dtype == np.float64
        assert np.isfinite(X).all()
        assert set(np.unique(Y)) == {0.0, 1.0}
        assert Y.sum() == num_ones

    def test_names_lists_every_dataset(self):
        assert datasets.names() == tuple(EXPECTED)

    def test_is_a_pair_with_named_fields(self):
        dataset = datasets.load("sonar")
        assert dataset._fields == ("X", "Y")
        X, Y = dataset
        assert X is dataset.X
        assert Y is dataset.Y

    @pytest.mark.parametrize(
        ("name", "row", "start", "label"),
        [
            ("sonar", 0, [0.02, 0.0371, 0.0428], 0),
            ("ionosphere", 0, [1, 0, 0.99539, -0.05889], 1),
            ("diabetes", 0, [6, 148, 72, 35, 0, 33.6, 0.627, 50], 1),
            ("banana", 0, [1.617466, -0.919233], 0),
            ("magic", 0, [28.7967, 16.0021, 2.6449, 0.3918, 0.1982, 27.7004, 22.011, -8.2027], 1),
        ],
    )
    def test_first_row_is_that_of_the_original(self, name, row, start, label):
        X, Y = datasets.load(name)
        np.testing.assert_array_equal(X[row, : len(start)], start)
        assert Y[row, 0] == label

    def test_usps_is_the_gpml_split_with_unit_pixels(self):
        X, Y = datasets.load("usps")
        with np.load(str(DATA / "usps_3v5.npz")) as arrays:
            np.testing.assert_array_equal(np.flatnonzero(arrays["is_train"]), np.arange(767))
            np.testing.assert_array_equal(X, arrays["X"])
            np.testing.assert_array_equal(Y[:, 0], arrays["y"])
        assert X.min() >= -1
        assert X.max() <= 1

    def test_magic_has_the_decimals_of_the_original_in_order_of_class(self):
        X, Y = datasets.load("magic")
        np.testing.assert_array_equal(X, np.round(X, 4))
        np.testing.assert_array_equal(Y[:, 0], np.arange(len(Y)) < 12332)

    def test_usps_3v5_is_usps(self):
        for left, right in zip(datasets.load("usps_3v5"), datasets.load("usps"), strict=True):
            np.testing.assert_array_equal(left, right)

    def test_each_call_returns_fresh_arrays(self):
        first = datasets.load("sonar")
        first.X[:] = 0
        assert datasets.load("sonar").X.any()

    @pytest.mark.parametrize(
        ("name", "closest"), [("sonnar", "sonar"), ("Banana", "banana"), ("usps_35", "usps_3v5")]
    )
    def test_unknown_name_lists_names_and_closest(self, name, closest):
        message = (
            f"name must be one of sonar, ionosphere, diabetes, usps, banana, magic; "
            f"found '{name}'. "
            f"Did you mean '{closest}'?"
        )
        with pytest.raises(ValueError, match=re.escape(message)):
            datasets.load(name)

    def test_unknown_name_without_resemblance_suggests_nothing(self):
        with pytest.raises(ValueError, match=r"found 'zzzz'\.$"):
            datasets.load("zzzz")


class TestIntegrity:
    @pytest.mark.parametrize("name", EXPECTED)
    def test_file_matches_the_provenance_table(self, name):
        filename, num_data, num_inputs, num_ones = EXPECTED[name]
        row = provenance()[filename]
        assert row[:3] == [str(num_data), str(num_inputs), str(num_ones)]
        digest = row[-1].strip("`")
        assert hashlib.sha256((DATA / filename).read_bytes()).hexdigest() == digest
        assert datasets._FILES[name] == (filename, digest)

    def test_table_and_directory_list_the_same_files(self):
        shipped = {path.name for path in DATA.iterdir()} - {"README.md"}
        assert shipped == set(provenance()) == {entry[0] for entry in EXPECTED.values()}

    @pytest.mark.parametrize("name", ["sonar", "usps"])
    def test_damage_is_found_before_parsing(self, name, tmp_path: Path, monkeypatch):
        filename = EXPECTED[name][0]
        content = bytearray((DATA / filename).read_bytes())
        content[len(content) // 2] ^= 1
        (tmp_path / filename).write_bytes(content)
        monkeypatch.setattr(datasets, "_DATA", tmp_path)
        found = hashlib.sha256(content).hexdigest()
        expected = provenance()[filename][-1].strip("`")
        message = (
            f"{filename} is damaged: expected SHA-256 {expected}; found {found}. "
            "Reinstall gpflow-hybrid."
        )
        with pytest.raises(ValueError, match=re.escape(message)) as raised:
            datasets.load(name)
        assert raised.type is ValueError

    def test_converted_line_endings_are_damage(self, tmp_path: Path, monkeypatch):
        content = (DATA / "banana.csv").read_bytes().replace(b"\n", b"\r\n")
        (tmp_path / "banana.csv").write_bytes(content)
        monkeypatch.setattr(datasets, "_DATA", tmp_path)
        with pytest.raises(ValueError, match="banana.csv is damaged"):
            datasets.load("banana")


class TestStandardise:
    def test_equals_sklearn_on_train_and_test_rows(self):
        X = datasets.load("diabetes").X
        scaler = StandardScaler().fit(X[:500])
        train, test = datasets.standardise(X[:500], X[500:])
        np.testing.assert_allclose(train, scaler.transform(X[:500]), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(test, scaler.transform(X[500:]), rtol=1e-12, atol=1e-12)

    def test_constant_column_of_ionosphere_stays_finite(self):
        X = datasets.load("ionosphere").X
        assert np.ptp(X[:, 1]) == 0
        (Z,) = datasets.standardise(X)
        np.testing.assert_array_equal(Z[:, 1], 0.0)
        others = np.delete(Z, 1, axis=1)
        np.testing.assert_allclose(others.mean(axis=0), 0.0, atol=1e-12)
        np.testing.assert_allclose(others.std(axis=0), 1.0, rtol=1e-12)

    def test_constant_column_with_inexact_mean_is_exactly_zero(self):
        # The mean of 0.1 repeated 10 times is not 0.1 in float64, nor is the std exactly 0.
        Z, other = datasets.standardise(np.full((10, 1), 0.1), [[0.6]])
        np.testing.assert_array_equal(Z, np.zeros((10, 1)))
        np.testing.assert_allclose(other, [[0.5]], rtol=1e-12)

    def test_leaves_its_arguments_alone(self):
        X = datasets.load("sonar").X
        before = X.copy()
        datasets.standardise(X, X)
        np.testing.assert_array_equal(X, before)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((np.zeros(3),), r"X_train must have shape \[N, D\]; found shape \[3\]"),
            ((np.zeros((0, 2)),), "X_train must have at least one row"),
            ((np.array([[np.nan]]),), "X_train must be finite; found NaN or infinity"),
            (
                (np.zeros((3, 2)), np.zeros((3, 2)), np.zeros((3, 4))),
                r"others\[1\] must have the 2 columns of X_train; found 4",
            ),
        ],
    )
    def test_rejects_what_it_cannot_scale(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            datasets.standardise(*arguments)


class TestFolds:
    @pytest.mark.parametrize("num_data", [5, 208, 351, 768, 1540])
    @pytest.mark.parametrize("num_folds", [2, 5])
    @pytest.mark.parametrize("seed", [0, 42])
    def test_equal_those_of_sklearn(self, num_data, num_folds, seed):
        expected = KFold(num_folds, shuffle=True, random_state=seed).split(np.zeros((num_data, 1)))
        pairs = zip(datasets.folds(num_data, num_folds, seed), expected, strict=True)
        for (train, test), (expected_train, expected_test) in pairs:
            np.testing.assert_array_equal(train, expected_train)
            np.testing.assert_array_equal(test, expected_test)

    def test_defaults_are_five_folds_with_seed_42_over_the_rows_of_a_dataset(self):
        dataset = datasets.load("sonar")
        expected = KFold(5, shuffle=True, random_state=42).split(dataset.X)
        pairs = zip(datasets.folds(dataset), expected, strict=True)
        for (train, test), (expected_train, expected_test) in pairs:
            np.testing.assert_array_equal(train, expected_train)
            np.testing.assert_array_equal(test, expected_test)

    def test_leave_the_global_generator_alone(self):
        np.random.seed(0)
        expected = np.random.random()
        np.random.seed(0)
        list(datasets.folds(20))
        assert np.random.random() == expected

    @pytest.mark.parametrize("num_folds", [0, 1, 11])
    def test_reject_impossible_numbers_at_the_call(self, num_folds):
        message = f"num_folds must be between 2 and the number of rows, 10; found {num_folds}"
        with pytest.raises(ValueError, match=message):
            datasets.folds(10, num_folds)

    def test_reject_a_plain_pair(self):
        with pytest.raises(TypeError, match=r"found tuple\. Pass len\(X\)\."):
            datasets.folds((np.zeros((4, 1)), np.zeros((4, 1))))


def test_typing_marker_is_shipped():
    assert (files("gpflow_hybrid") / "py.typed").is_file()
