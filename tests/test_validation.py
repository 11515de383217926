"""What is refused, in which words, and that a refusal leaves the model as it was."""

import re
from collections.abc import Callable
from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf
from gpflow.base import AnyNDArray
from gpflow.likelihoods import Likelihood

from gpflow_hybrid import CVIModel, InvalidDataError, InvalidPosteriorError
from gpflow_hybrid.inputs import inputs_of
from gpflow_hybrid.likelihoods import ProbitBernoulli

N = 6


def inputs(seed: int = 0) -> AnyNDArray:
    return np.random.default_rng(seed).uniform(-1.0, 1.0, size=(N, 2))


def build(
    X: Any, Y: Any, likelihood: Likelihood | None = None, kernel: Any = None, **kwargs: Any
) -> CVIModel:
    kernel = gpflow.kernels.Matern32() if kernel is None else kernel
    likelihood = gpflow.likelihoods.Gaussian() if likelihood is None else likelihood
    return CVIModel((X, Y), kernel, likelihood, **kwargs)


def binary_model() -> CVIModel:
    """A model whose sites are not at zero, so that a change of λ shows."""
    model = build(inputs(), np.arange(N)[:, None] % 2.0, gpflow.likelihoods.Bernoulli())
    set_sites(model)
    return model


def set_sites(model: CVIModel) -> None:
    model.sites.lambda_1.assign(np.linspace(-0.5, 0.5, N)[:, None])
    model.sites.lambda_2.assign(np.linspace(0.1, 0.7, N)[:, None])


def lambdas(model: CVIModel) -> AnyNDArray:
    return np.stack([x.numpy() for x in model.sites.values])


def column(*values: float) -> AnyNDArray:
    return np.resize(np.array(values, dtype=float), (N, 1))


# Shapes, types and finiteness


def test_an_invalid_data_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="^X must have two dimensions"):
        build(np.zeros(N), np.zeros((N, 1)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["X", "Y"])
def test_non_finite_values_are_named_with_their_row(name: str, value: float) -> None:
    X, Y = inputs(), column(0.1, 0.2)
    {"X": X, "Y": Y}[name][4, 0] = value
    pattern = rf"^{name} must be finite; found {value} at row 4, column 0 \(1 such value in all\)"
    with pytest.raises(InvalidDataError, match=pattern + r"\. Remove or impute"):
        build(X, Y)


def test_all_non_finite_values_are_counted() -> None:
    X = inputs()
    X[2:4] = np.nan
    with pytest.raises(InvalidDataError, match=r"row 2, column 0 \(4 such values in all\)"):
        build(X, column(0.0))


def test_non_finite_values_in_variables_are_refused() -> None:
    Y = column(0.1)
    Y[3] = np.nan
    with pytest.raises(InvalidDataError, match="^Y must be finite; found nan at row 3"):
        build(tf.Variable(inputs()), tf.Variable(Y))


def test_rows_that_differ() -> None:
    with pytest.raises(InvalidDataError, match="^X and Y .* same number of rows; found 6 and 5"):
        build(inputs(), np.zeros((N - 1, 1)))


@pytest.mark.parametrize("shape", [(N,), (N, 1, 1), ()])
@pytest.mark.parametrize("name", ["X", "Y"])
def test_data_without_two_dimensions(name: str, shape: tuple[int, ...]) -> None:
    data = {"X": inputs(), "Y": column(0.0)} | {name: np.zeros(shape)}
    pattern = rf"^{name} must have two dimensions, \[N, .\]; found shape {re.escape(str(shape))}\."
    with pytest.raises(InvalidDataError, match=pattern + rf" Pass {name}\.reshape\(-1, 1\)"):
        build(**data)


@pytest.mark.parametrize("name", ["X", "Y"])
def test_no_columns(name: str) -> None:
    data = {"X": inputs(), "Y": column(0.0)} | {name: np.zeros((N, 0))}
    with pytest.raises(InvalidDataError, match=f"^{name} must have at least one column"):
        build(**data)


@pytest.mark.parametrize(
    ("shape", "pattern"),
    [([None, None], "a fixed number of columns.*shape=\\[None"), (None, "two dimensions")],
)
def test_variables_without_a_number_of_columns(shape: Any, pattern: str) -> None:
    with pytest.raises(InvalidDataError, match=f"^X must have {pattern}"):
        build(tf.Variable(inputs(), shape=tf.TensorShape(shape)), tf.Variable(column(0.0)))


def test_zero_rows() -> None:
    with pytest.raises(InvalidDataError, match="^X and Y must have at least one row"):
        build(np.zeros((0, 2)), np.zeros((0, 1)))


@pytest.mark.parametrize("convert", [np.asarray, tf.constant, tf.Variable])
@pytest.mark.parametrize("name", ["X", "Y"])
def test_float32_data_under_float64(name: str, convert: Callable[[Any], Any]) -> None:
    data = {"X": inputs(), "Y": column(0.0)}
    data[name] = convert(data[name].astype(np.float32))
    pattern = rf"^{name} is float32, .* float64\. Pass {name}\.astype\(np\.float64\)"
    with pytest.raises(InvalidDataError, match=pattern):
        build(**data)


@pytest.mark.parametrize("name", ["X", "Y"])
def test_float64_data_under_float32(name: str) -> None:
    gpflow.config.set_default_float(np.float32)
    data = {"X": inputs().astype(np.float32), "Y": column(0.0).astype(np.float32)}
    data[name] = data[name].astype(np.float64)
    with pytest.raises(InvalidDataError, match=rf"^{name} is float64, .*astype\(np\.float32\)"):
        build(**data)


@pytest.mark.parametrize(
    "bad",
    [
        np.full((N, 1), "1"),
        [["1"]] * N,
        np.full((N, 1), 1.0, dtype=object),
        [[None]] * N,
        tf.constant([["1"]] * N),
        np.full((N, 1), 1.0 + 1j),
        [[1.0], [1.0, 2.0]],
    ],
    ids=["strings", "string_list", "objects", "nones", "string_tensor", "complex", "ragged"],
)
@pytest.mark.parametrize("name", ["X", "Y"])
def test_data_that_are_not_numbers(name: str, bad: Any) -> None:
    data = {"X": inputs(), "Y": column(0.0)} | {name: bad}
    with pytest.raises(InvalidDataError, match=f"^{name} must be (a )?numeric"):
        build(**data)


def test_columns_without_numbers_are_named() -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"age": [30.0] * N, "town": ["Bonn"] * N, "sex": [None] * N})
    words = r"^X must be numeric; .* by the columns 'town' \(.*\), 'sex' \(object\)\. Encode such"
    with pytest.raises(InvalidDataError, match=words):
        build(table, column(0.0))


def test_integer_variable_inputs_are_refused_with_the_remedy() -> None:
    with pytest.raises(InvalidDataError, match="^X is a tf.Variable of int64; make it float64"):
        build(tf.Variable(np.arange(N)[:, None]), column(0.0))


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (np.zeros((N, 2)), r"ndarray of shape \(6, 2\)"),
        ((np.zeros((N, 2)),), "tuple"),
        ((np.zeros((N, 2)),) * 3, "tuple"),
        (None, "NoneType"),
        ("ab", "str"),
    ],
    ids=["array", "one", "three", "none", "string"],
)
def test_data_that_are_not_a_pair(data: Any, found: str) -> None:
    with pytest.raises(InvalidDataError, match=rf"^data must be a pair \(X, Y\); found {found}"):
        CVIModel(data, gpflow.kernels.Matern32(), gpflow.likelihoods.Gaussian())


# Labels


@pytest.mark.parametrize("likelihood", [gpflow.likelihoods.Bernoulli, ProbitBernoulli])
@pytest.mark.parametrize(
    ("labels", "found", "remedy"),
    [
        ((-1, 1), "-1 at row 0", r"Pass \(Y \+ 1\) / 2"),
        ((1, 2), "2 at row 1", "Pass Y - 1"),
        ((0, 1, 2), "2 at row 2", "Recode the two classes as 0 and 1"),
        ((0, 0.5), "0.5 at row 1", "Recode the two classes as 0 and 1"),
    ],
    ids=["-1/1", "1/2", "three", "fraction"],
)
def test_binary_labels(
    likelihood: Callable[[], Likelihood], labels: tuple[float, ...], found: str, remedy: str
) -> None:
    name = likelihood.__name__  # type: ignore[attr-defined]
    pattern = rf"^Y must be 0 or 1 for {name}; found {re.escape(found)}\. {remedy}\."
    with pytest.raises(InvalidDataError, match=pattern):
        build(inputs(), column(*labels), likelihood())


@pytest.mark.parametrize(
    ("likelihood", "labels", "pattern"),
    [
        (
            gpflow.likelihoods.Poisson(),
            (0, 3, -2),
            r"a count .* for Poisson; found -2 at row 2\. Pass counts",
        ),
        (
            gpflow.likelihoods.Poisson(),
            (0, 1.5),
            r"a count .* for Poisson; found 1.5 at row 1\. Pass counts",
        ),
        (
            gpflow.likelihoods.MultiClass(3),
            (0, 1, 2, 3),
            r"a class number from 0 to 2 for MultiClass; found 3 at row 3\. Number the classes",
        ),
        (
            gpflow.likelihoods.MultiClass(3),
            (1, 2, 3),
            r"a class number from 0 to 2 for MultiClass; found 3 at row 2\. Pass Y - 1",
        ),
        (
            gpflow.likelihoods.MultiClass(3),
            (0, 1.5),
            r"a class number .* for MultiClass; found 1.5 at row 1\. Number the classes",
        ),
        (
            gpflow.likelihoods.Softmax(3),
            (0, -1, 2),
            r"a class number from 0 to 2 for Softmax; found -1 at row 1\. Number the classes",
        ),
        (
            gpflow.likelihoods.Ordinal(np.array([-1.0, 1.0])),
            (0, 3),
            r"a class number from 0 to 2 for Ordinal; found 3 at row 1\. Number the classes",
        ),
        (
            gpflow.likelihoods.Beta(),
            (0.5, 0.0),
            r"strictly between 0 and 1 for Beta; found 0 at row 1\. Rescale Y, or move",
        ),
        (
            gpflow.likelihoods.Beta(),
            (1.0, 0.5),
            r"strictly between 0 and 1 for Beta; found 1 at row 0\. Rescale Y, or move",
        ),
        (
            gpflow.likelihoods.Gamma(),
            (1.0, 0.0),
            r"positive for Gamma; found 0 at row 1\. Remove or shift",
        ),
        (
            gpflow.likelihoods.Exponential(),
            (0.0, -0.5),
            r"non-negative for Exponential; found -0.5 at row 1\. Remove or shift",
        ),
    ],
)
def test_labels_outside_the_support(
    likelihood: Likelihood, labels: tuple[float, ...], pattern: str
) -> None:
    with pytest.raises(InvalidDataError, match=f"^Y must be {pattern}"):
        build(inputs(), column(*labels), likelihood)


def test_integer_labels_are_checked_too() -> None:
    with pytest.raises(InvalidDataError, match=r"^Y must be 0 or 1 .*found -1.*\(Y \+ 1\) / 2"):
        build(inputs(), column(-1, 1).astype(int), gpflow.likelihoods.Bernoulli())


def test_one_hot_classes() -> None:
    Y = np.eye(3)[np.arange(N) % 3]
    with pytest.raises(InvalidDataError, match=r"^Y must have one column .*Y\.argmax\(1\)"):
        build(inputs(), Y, gpflow.likelihoods.MultiClass(3))


@pytest.mark.parametrize(
    ("index", "pattern"),
    [
        ((0, 2), r"an index from 0 to 1 in its last column .*; found 2 at row 1"),
        ((0, 0.5), r"an index from 0 to 1 in its last column .*; found 0.5 at row 1"),
        ((-1, 0), r"an index from 0 to 1 in its last column .*; found -1 at row 0"),
    ],
)
def test_switched_index(index: tuple[float, ...], pattern: str) -> None:
    likelihood = gpflow.likelihoods.SwitchedLikelihood(
        [gpflow.likelihoods.Gaussian(), gpflow.likelihoods.Poisson()]
    )
    Y = np.hstack([column(1.0), column(*index)])
    with pytest.raises(InvalidDataError, match=f"^Y must be {pattern}"):
        build(inputs(), Y, likelihood)


def test_switched_parts_check_their_own_rows() -> None:
    likelihood = gpflow.likelihoods.SwitchedLikelihood(
        [gpflow.likelihoods.Gaussian(), gpflow.likelihoods.Poisson()]
    )
    index = column(0, 1)
    fine = np.hstack([column(-0.5, 2.0), index])  # −0.5 is a Gaussian's
    assert build(inputs(), fine, likelihood).num_latent_gps == 1
    bad = np.hstack([column(2.0, 2.0, 2.0, -3.0), index])
    # The row is that of the data, not one of the part's own.
    with pytest.raises(InvalidDataError, match=r"a count .* for Poisson; found -3 at row 3"):
        build(inputs(), bad, likelihood)


def test_switched_part_without_rows() -> None:
    likelihood = gpflow.likelihoods.SwitchedLikelihood(
        [gpflow.likelihoods.Gaussian(), gpflow.likelihoods.Ordinal(np.array([0.0]))]
    )
    model = build(inputs(), np.hstack([column(-0.5), column(0)]), likelihood)
    model.natgrad_step(1.0)
    # Every row is Gaussian with noise variance 1: one full step is exact.
    np.testing.assert_allclose(lambdas(model)[0], column(-0.5), rtol=1e-12)
    np.testing.assert_allclose(lambdas(model)[1], column(1.0), rtol=1e-12)


def test_switched_without_an_index_column() -> None:
    likelihood = gpflow.likelihoods.SwitchedLikelihood([gpflow.likelihoods.Gaussian()] * 2)
    with pytest.raises(InvalidDataError, match="^Y must have a last column .*Append the index"):
        build(inputs(), column(1.0), likelihood)


# The number of latents


@pytest.mark.parametrize("num", [0, -1, 1.5, "2", float("nan")])
def test_num_latent_gps_that_is_no_number_of_latents(num: Any) -> None:
    with pytest.raises(InvalidDataError, match="^num_latent_gps must be a positive integer; found"):
        build(inputs(), column(0.0), num_latent_gps=num)


def two_kernels() -> gpflow.kernels.MultioutputKernel:
    return gpflow.kernels.SeparateIndependent([gpflow.kernels.Matern32() for _ in range(2)])


@pytest.mark.parametrize(
    ("make", "implied"),
    [
        (
            lambda: build(
                inputs(), column(0, 1, 2), gpflow.likelihoods.MultiClass(3), num_latent_gps=2
            ),
            "num_latent_gps implies 2, likelihood implies 3",
        ),
        (
            lambda: build(inputs(), np.zeros((N, 2)), kernel=two_kernels(), num_latent_gps=3),
            "num_latent_gps implies 3, kernel implies 2, Y implies 2",
        ),
        (
            lambda: build(inputs(), column(0.0), kernel=two_kernels()),
            "kernel implies 2, Y implies 1",
        ),
        (
            lambda: build(inputs(), column(0.0), num_latent_gps=2),
            "num_latent_gps implies 2, Y implies 1",
        ),
        (
            lambda: build(inputs(), column(0, 1, 2), gpflow.likelihoods.Softmax(3), two_kernels()),
            "kernel implies 2, likelihood implies 3",
        ),
    ],
    ids=["likelihood", "kernel", "kernel_and_Y", "Y", "kernel_and_likelihood"],
)
def test_contradictory_numbers_of_latents(make: Callable[[], CVIModel], implied: str) -> None:
    pattern = f"contradictory: {implied}. Give the likelihood, the kernel and num_latent_gps"
    with pytest.raises(InvalidDataError, match=pattern):
        make()


def test_coregionalised_kernels_are_refused_with_an_alternative() -> None:
    kernel = gpflow.kernels.LinearCoregionalization(
        [gpflow.kernels.Matern32() for _ in range(2)], W=np.eye(2)
    )
    pattern = "^kernel .* independent; found LinearCoregionalization. Use .*SeparateIndependent"
    with pytest.raises(InvalidDataError, match=pattern):
        build(inputs(), np.zeros((N, 2)), kernel=kernel)


# Arguments of methods, and that a refusal changes nothing


@pytest.mark.parametrize("lr", [0, 0.0, -1, 1.5, "a", float("nan"), float("inf"), None, True])
def test_natgrad_step_refuses_step_sizes(lr: Any) -> None:
    model = binary_model()
    before = lambdas(model)
    with pytest.raises(InvalidDataError, match=r"^lr must be a number in \(0, 1\]; found"):
        model.natgrad_step(lr)
    np.testing.assert_array_equal(lambdas(model), before)


@pytest.mark.parametrize("lr", [0, 0.0, -1, 1.5, "a", float("nan")])
def test_infer_refuses_step_sizes(lr: Any) -> None:
    model = binary_model()
    before = lambdas(model)
    with pytest.raises(InvalidDataError, match=r"^lr must be a number in \(0, 1\]; found"):
        model.infer(lr=lr)
    np.testing.assert_array_equal(lambdas(model), before)


def test_step_sizes_as_tensors() -> None:
    model, other = binary_model(), binary_model()
    before = lambdas(model)
    for lr in (0.0, -1.0, 1.5, np.nan):
        with pytest.raises(InvalidDataError, match=r"^lr must be a number in \(0, 1\]"):
            model.natgrad_step(tf.constant(lr, tf.float64))

    step = tf.function(model.natgrad_step)
    for lr in (0.0, -1.0, 1.5, np.nan):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"lr must be in \(0, 1\]"):
            step(tf.constant(lr, tf.float64))
        np.testing.assert_array_equal(lambdas(model), before)
    step(tf.constant(0.3, tf.float64))
    other.natgrad_step(0.3)
    np.testing.assert_allclose(lambdas(model), lambdas(other), rtol=1e-12)


def test_step_sizes_as_python_numbers_inside_a_graph() -> None:
    model = binary_model()
    before = lambdas(model)
    with pytest.raises(InvalidDataError, match=r"lr must be a number in \(0, 1\]; found 1.5"):
        tf.function(lambda: model.natgrad_step(1.5))()
    np.testing.assert_array_equal(lambdas(model), before)


@pytest.mark.parametrize("tolerance", [0, -1e-6, float("nan"), float("inf"), "a", None])
def test_infer_refuses_tolerances(tolerance: Any) -> None:
    model = binary_model()
    before = lambdas(model)
    with pytest.raises(
        InvalidDataError, match="^tolerance must be a positive, finite number; found"
    ):
        model.infer(tolerance=tolerance)
    np.testing.assert_array_equal(lambdas(model), before)


@pytest.mark.parametrize("max_steps", [0, -3, 2.5, float("nan"), float("inf"), "a", None])
def test_infer_refuses_numbers_of_steps(max_steps: Any) -> None:
    model = binary_model()
    before = lambdas(model)
    with pytest.raises(InvalidDataError, match="^max_steps must be a positive integer; found"):
        model.infer(max_steps=max_steps)
    np.testing.assert_array_equal(lambdas(model), before)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan"), "a", None])
def test_powers_outside_the_unit_interval(alpha: Any) -> None:
    model = binary_model()
    with pytest.raises(InvalidDataError, match=r"^alpha must be a number in \[0, 1\]"):
        model.power_ep_log_marginal(alpha)


@pytest.mark.parametrize("objective", ["ELBO", "ep", 1.5, -0.1, float("nan"), None, True])
def test_unknown_objectives(objective: Any) -> None:
    pattern = r"^objective must be .*\[0, 1\]"
    with pytest.raises(InvalidDataError, match=pattern):
        build(inputs(), column(0.0), objective=objective)
    model = build(inputs(), column(0.0), objective="elbo")
    with pytest.raises(InvalidDataError, match=pattern):
        model.objective = objective
    assert model.objective == "elbo"


def variable_model() -> CVIModel:
    X, Y = inputs(), column(0.0, 1.0)
    model = build(
        tf.Variable(X, shape=[None, 2]),
        tf.Variable(Y, shape=[None, 1]),
        gpflow.likelihoods.Bernoulli(),
    )
    set_sites(model)
    return model


@pytest.mark.parametrize(
    ("X", "Y", "pattern"),
    [
        (np.zeros((3, 2)), np.zeros((4, 1)), "^X and Y must have the same number of rows"),
        (np.zeros((3, 2)), -np.ones((3, 1)), "^Y must be 0 or 1"),
        (np.full((3, 2), np.nan), np.zeros((3, 1)), "^X must be finite"),
        (np.zeros((3, 2)), np.zeros(3), "^Y must have two dimensions"),
        (np.zeros((3, 1)), np.zeros((3, 1)), r"^X must have 2 column\(s\).*found 1\. Build a new"),
        (np.zeros((3, 2)), np.zeros((3, 2)), r"^Y must have 1 column\(s\).*found 2\. Build a new"),
    ],
    ids=["rows", "labels", "nan", "rank", "columns_X", "columns_Y"],
)
def test_refused_update_data_changes_nothing(X: Any, Y: Any, pattern: str) -> None:
    model = variable_model()
    before = lambdas(model)
    with pytest.raises(InvalidDataError, match=pattern):
        model.update_data((X, Y))
    np.testing.assert_array_equal(lambdas(model), before)
    np.testing.assert_array_equal(model.data[0], inputs())
    np.testing.assert_array_equal(model.data[1], column(0.0, 1.0))


def test_update_data_to_a_length_that_fixed_variables_cannot_take() -> None:
    model = build(tf.Variable(inputs()), tf.Variable(column(0.0, 1.0)))
    set_sites(model)
    before = lambdas(model)
    with pytest.raises(InvalidDataError, match=r"^X must have 6 rows.*found 3\..*shape=\[None"):
        model.update_data((inputs()[:3], column(0.0, 1.0)[:3]))
    np.testing.assert_array_equal(lambdas(model), before)
    np.testing.assert_array_equal(model.data[0], inputs())


def test_update_data_of_a_model_with_constant_data() -> None:
    model = binary_model()
    before = lambdas(model)
    with pytest.raises(InvalidDataError, match="^data must have been given as tf.Variables"):
        model.update_data((inputs(1), column(0.0, 1.0)))
    np.testing.assert_array_equal(lambdas(model), before)


# Sites for which there is no q


@pytest.fixture
def invalid_model() -> CVIModel:
    model = binary_model()
    lambda_2 = model.sites.lambda_2.numpy()
    lambda_2[2] = -50.0  # the prior's precision is 1 and more
    model.sites.lambda_2.assign(lambda_2)
    return model


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.elbo(),
        lambda model: model.ep_like_log_marginal(),
        lambda model: model.loo_log_predictive_density(),
        lambda model: model.predict_f(inputs(1)),
        lambda model: model.predict_f(inputs(1), full_cov=True),
        lambda model: model.predict_y(inputs(1)),
        lambda model: model.posterior(),
        lambda model: model.natgrad_step(0.1),
        lambda model: model.infer(),
    ],
    ids=["elbo", "ep", "loo", "predict_f", "full_cov", "predict_y", "posterior", "step", "infer"],
)
def test_invalid_sites_are_refused_in_words(
    invalid_model: CVIModel, call: Callable[[CVIModel], Any]
) -> None:
    before = lambdas(invalid_model)
    pattern = r"no valid q\(f\).*not positive definite.* -50 at datum 2 .*model\.infer\(\)"
    with pytest.raises(InvalidPosteriorError, match=pattern):
        call(invalid_model)
    np.testing.assert_array_equal(lambdas(invalid_model), before)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.elbo(),
        lambda model: model.predict_f(inputs(1)),
        lambda model: model.natgrad_step(0.1),
    ],
    ids=["elbo", "predict_f", "step"],
)
def test_invalid_sites_are_refused_in_graphs(
    invalid_model: CVIModel, call: Callable[[CVIModel], Any]
) -> None:
    before = lambdas(invalid_model)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"[Nn]o valid q\(f\)"):
        tf.function(call, autograph=False)(invalid_model)
    np.testing.assert_array_equal(lambdas(invalid_model), before)


def test_a_step_out_of_the_cone_is_refused_and_leaves_the_sites() -> None:
    """Student-t with outliers and a wide prior: the full step takes too much precision away."""
    X = np.linspace(0.0, 1.0, N)[:, None]
    Y = column(0.0, 8.0, 0.1, -8.0)
    model = build(
        X,
        Y,
        gpflow.likelihoods.StudentT(scale=0.2, df=3.0),
        gpflow.kernels.Matern32(variance=4.0, lengthscales=0.1),
    )
    seen = [lambdas(model)]

    def steps() -> None:
        for _ in range(20):
            model.natgrad_step(1.0)
            seen.append(lambdas(model))

    with pytest.raises(InvalidPosteriorError, match="step leaves no valid q.* λ is unchanged"):
        steps()
    np.testing.assert_array_equal(lambdas(model), seen[-1])
    assert np.isfinite(model.elbo())


def test_lists_have_the_floats_that_gpflow_computes_in() -> None:
    gpflow.config.set_default_float(np.float32)
    assert inputs_of([[0.5, 1.0]]).dtype == np.float32
