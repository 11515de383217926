"""gh.fit of a sparse model that begins on a part of the rows: an optimum of all, fewer passes over them."""

from __future__ import annotations

import itertools
from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf

import gpflow_hybrid as gh
from gpflow_hybrid import InvalidDataError
from gpflow_hybrid.display import progress_bar
from gpflow_hybrid.inference.row_sums import RowSums
from gpflow_hybrid.rows import ArrayRows, DatasetRows
from gpflow_hybrid.training import FitStep
from gpflow_hybrid.training import first_rows as parts
from gpflow_hybrid.training.curvatures import inverse_curvature
from gpflow_hybrid.training.minimisation import Minimisation, loss_closure

NUM_ROWS, NUM_INDUCING = 2000, 10


def data(num: int = NUM_ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Probit labels, ordered by class, as rows of many data sets are."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(num, 2))
    f = 2.0 * np.sin(1.5 * X[:, :1]) + X[:, 1:]
    Y = (f + rng.normal(size=f.shape) > 0.0).astype(float)
    order = np.argsort(Y[:, 0], kind="stable")
    return X[order], Y[order]


def new_model(objective: Any = "elbo", **given: Any) -> gh.SparseCVIModel:
    kernel = gpflow.kernels.Matern52(lengthscales=0.3)
    Z = gh.inducing_points(data()[0], NUM_INDUCING)
    likelihood = gh.likelihoods.ProbitBernoulli()
    model = gh.SparseCVIModel(kernel, likelihood, Z, objective=objective, **given)
    gpflow.set_trainable(model.inducing_variable, False)
    return model


class Counted:
    """Sums over rows, in units of all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes = 0.0
        take = RowSums._sum

        def counting(sums: RowSums, *given: Any) -> Any:
            self.passes += sums.rows.num_rows / NUM_ROWS
            return take(sums, *given)

        monkeypatch.setattr(RowSums, "_sum", counting)

    def of(self, first_rows: Any, objective: Any, log_scale: bool) -> tuple[gh.FitResult, float]:
        """A fit, and its passes."""
        self.passes = 0.0
        return fitted(new_model(objective), first_rows=first_rows, log_scale=log_scale), self.passes


def fitted(model: gh.SparseCVIModel, rows: Any = None, **given: Any) -> gh.FitResult:
    settings = {"log_scale": True, "first_rows": 250, "progress": False, **given}
    return gh.fit(model, data=data() if rows is None else rows, **settings)


@pytest.mark.parametrize(("objective", "log_scale"), [("elbo", False), ("ep_like", True)])
def test_the_same_optimum(objective: Any, log_scale: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    count = Counted(monkeypatch)
    whole, passes = count.of(None, objective, log_scale)
    found, fewer = count.of(250, objective, log_scale)
    assert whole.converged
    assert found.converged
    assert found.loss == pytest.approx(whole.loss, abs=1e-4)
    for path, value in whole.hyperparameters.items():
        np.testing.assert_allclose(found.hyperparameters[path], value, rtol=1e-2, err_msg=path)
    assert whole.part_evaluations == 0.0
    assert 0.0 < found.part_evaluations < 0.25 * whole.num_evaluations
    if not log_scale:  # where the curvature is not guessed: it is learnt on the part
        assert found.num_evaluations <= 0.8 * whole.num_evaluations
        assert fewer <= 0.9 * passes


def test_rows_are_drawn_by_the_seed() -> None:
    ends = [fitted(new_model(), seed=seed) for seed in (1, 1, 2)]
    first, again, other = (tuple(e.hyperparameters[".kernel.variance"].ravel()) for e in ends)
    assert first == again
    assert first != other  # in the last digits: both are the optimum
    assert np.allclose(first, other, rtol=1e-2)


def test_each_part_is_in_the_next_and_has_all_kinds_of_rows() -> None:
    rows = ArrayRows(*data(100_000))
    found = parts.parts_of(new_model(), rows, "auto", 0)
    assert [p.num_rows for p in found] == [400, 3200]
    assert [p.num_rows for p in parts.parts_of(new_model(), rows, 100, 0)] == [100, 800, 6400]
    for part, following in itertools.pairwise(found):
        np.testing.assert_array_equal(following.X[: part.num_rows], part.X)
    assert 0.4 < np.mean(found[0].Y) < 0.6


@pytest.mark.parametrize(
    ("num_rows", "first_rows", "sizes"),
    [
        (1599, "auto", []),
        (1600, "auto", [400]),
        (10_000, None, []),
        (10_000, 100, [100, 800]),
        (120, 100, [100]),
        (100, 100, []),
    ],
)
def test_sizes(num_rows: int, first_rows: Any, sizes: list[int]) -> None:
    assert parts.sizes_of_parts(num_rows, 20, first_rows) == sizes


def test_a_dataset_is_read_for_the_same_rows() -> None:
    X, Y = data()
    rng = [np.random.default_rng(3) for _ in range(2)]
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(300)
    stream = DatasetRows(dataset, gh.likelihoods.ProbitBernoulli())
    expected = ArrayRows(X, Y).random_rows(400, rng[0])
    for x, y in zip(stream.random_rows(400, rng[1]), expected, strict=True):
        np.testing.assert_array_equal(x, y)
    assert len(np.unique(expected[0], axis=0)) == 400
    whole, streamed = (fitted(new_model(), d) for d in ((X, Y), dataset))
    assert streamed.part_evaluations == pytest.approx(whole.part_evaluations)
    assert streamed.loss == pytest.approx(whole.loss, abs=1e-6)


def test_num_data_and_trained_inducing_points_are_as_before() -> None:
    model = new_model(num_data=NUM_ROWS)
    gpflow.set_trainable(model.inducing_variable, True)
    before, seen = model.inducing_variable.Z.numpy(), []

    def note(step: FitStep) -> None:
        seen.append(
            (
                step.num_rows,
                model.num_data,
                bool((model.inducing_variable.Z.numpy() == before).all()),
            )
        )

    found = fitted(model, callback=note, max_iterations=3)
    assert found.status == "max_iterations"
    assert {x for x in seen if x[0] == 250} == {(250, None, True)}  # Z stays on a part
    assert {x[:2] for x in seen if x[0] != 250} == {(NUM_ROWS, NUM_ROWS)}
    assert model.num_data == NUM_ROWS
    assert model.inducing_variable.Z.trainable
    assert not (model.inducing_variable.Z.numpy() == before).all()


def test_a_part_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise gh.errors.NonFiniteError("on few rows")

    whole = fitted(new_model(), first_rows=None)
    evaluate = gh.SparseCVIModel._evaluate

    def failing(model: Any, rows: Any, *given: Any) -> Any:
        return fails() if rows.num_rows < NUM_ROWS else evaluate(model, rows, *given)

    monkeypatch.setattr(gh.SparseCVIModel, "_evaluate", failing)
    found = fitted(new_model())
    assert found.loss == pytest.approx(whole.loss, abs=1e-9)
    assert found.num_evaluations == whole.num_evaluations


@pytest.mark.parametrize("missing", ["value", "convergence"])
def test_a_first_loss_of_all_rows_is_no_penalty(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fitted(new_model(), first_rows=None)
    infer, calls = gh.SparseCVIModel._collapse, []

    def failing(model: Any, sums: RowSums) -> Any:
        found = infer(model, sums)
        if sums.rows.num_rows < NUM_ROWS:
            return found
        calls.append(model.kernel.variance.numpy())
        if len(calls) > 1:
            return found
        if missing == "value":
            return found._replace(gradient=None)
        return found._replace(solution=found.solution._replace(residual=1.0))

    monkeypatch.setattr(gh.SparseCVIModel, "_collapse", failing)
    model = new_model()
    start = model.kernel.variance.numpy()
    if missing == "value":
        found = fitted(model)
        assert calls[1] == start  # without the part
        assert found.num_evaluations == whole.num_evaluations
    else:
        with pytest.warns(gh.ConvergenceWarning):
            found = fitted(model)
        assert start not in calls
    assert found.converged
    assert found.loss == pytest.approx(whole.loss, abs=1e-4)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("inferred", [False, True])
def test_a_part_that_is_left_leaves_nothing(error: type[BaseException], inferred: bool) -> None:
    model = new_model(num_data=NUM_ROWS)
    if inferred:
        model.infer(data())

    def state() -> list[np.ndarray]:
        return [
            *(v.numpy() for v in model.trainable_variables),
            *(x.numpy() for x in model.sites.values),
        ]

    before = state()

    def leave(step: FitStep) -> None:
        if step.iteration == 2:
            assert step.num_rows == 250
            assert model.kernel.variance.numpy() != 1.0
            raise error

    with pytest.raises(error):
        fitted(model, callback=leave)
    for value, expected in zip(state(), before, strict=True):
        np.testing.assert_array_equal(value, expected)
    assert model.is_inferred_for_present() == inferred
    assert model.num_data == NUM_ROWS
    if inferred:  # and where the hyperparameters move, from the rows of before
        model.kernel.variance.assign(2.0)
        model.q_mu.numpy()
        assert model._inferred_from.rows.num_rows == NUM_ROWS


def test_a_fit_goes_on_from_where_the_model_is() -> None:
    model = new_model()
    first = fitted(model, first_rows="auto")
    assert first.part_evaluations > 0.0
    again = fitted(model, first_rows="auto")
    assert again.part_evaluations == 0.0
    assert again.num_evaluations <= 3
    assert again.loss == pytest.approx(first.loss, abs=1e-4)
    model.kernel.lengthscales.assign(1.2 * model.kernel.lengthscales)
    assert fitted(model, first_rows="auto", max_iterations=1).part_evaluations > 0.0


@pytest.mark.parametrize("log_scale", [False, True])
def test_no_part_where_only_inducing_points_are_trained(log_scale: bool) -> None:
    model = new_model()
    gpflow.set_trainable(model.kernel, False)
    gpflow.set_trainable(model.inducing_variable, True)
    found = fitted(model, log_scale=log_scale, max_iterations=2)
    assert found.status == "max_iterations"
    assert found.part_evaluations == 0.0


def test_a_part_takes_no_more_iterations_than_asked_for() -> None:
    seen: list[FitStep] = []
    fitted(new_model(), max_iterations=2, callback=seen.append, log_scale=False)
    assert max(step.iteration for step in seen if step.num_rows == 250) == 2


def test_a_part_of_a_stream_is_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MOST_ROWS", 300)
    stream = DatasetRows(
        tf.data.Dataset.from_tensor_slices(data()).batch(300), gh.likelihoods.ProbitBernoulli()
    )
    for rows, sizes in ((stream, [300]), (ArrayRows(*data()), [450])):
        assert [p.num_rows for p in parts.parts_of(new_model(), rows, 450, 0)] == sizes


def test_only_what_was_inferred_from_a_part_is_repeated() -> None:
    rows, others = (ArrayRows(*data(num)) for num in (200, 100))
    for of, times in ((others, 1.0), (rows, 3.0)):
        model = new_model()
        model.infer(rows)
        before = [x.numpy() for x in model.sites.values]
        model.repeat_sites(of, 3.0)
        for x, y in zip(model.sites.values, before, strict=True):
            np.testing.assert_array_equal(x, times * y)
        assert not bool(model.sites.is_inferred())
        warm = model._warm_start(model._prior()).lambda_2  # as it says of u, at the same factors
        np.testing.assert_allclose(warm, times * before[1], rtol=1e-8, atol=1e-8)


def test_a_start_knows_nothing_of_the_one_before() -> None:
    counts = []
    for covariance in (None, 1e-8 * np.eye(2)):
        model = new_model()
        rows = model.all_rows(data())
        task = Minimisation(model, loss_closure(model, rows), 100, 1e-2, rows, True)
        if covariance is not None:
            task.expect_curvature(covariance)
        with progress_bar(False) as bar:
            run = parts.run_from_parts(task, rows, None, 0, bar)
        counts.append((run.loss, task.num_evaluations))
    assert counts[0] == counts[1]


def test_a_callback_sees_parts_then_all_and_ends_the_fit() -> None:
    seen: list[FitStep] = []

    def note(step: FitStep) -> None:
        seen.append(step)
        if step.num_rows == NUM_ROWS and step.iteration == 2:
            raise StopIteration

    model = new_model()
    found = fitted(model, callback=note)
    sizes = [step.num_rows for step in seen]
    assert sizes == sorted(sizes)
    assert set(sizes) == {250, NUM_ROWS}
    assert [s.iteration for s in seen if s.num_rows == NUM_ROWS] == [0, 1, 2]
    assert found.status == "interrupted"
    assert found.loss == pytest.approx(seen[-1].loss, abs=1e-6)

    def at_once(step: FitStep) -> None:
        raise StopIteration

    found = fitted(model, callback=at_once)
    assert (found.status, found.num_evaluations) == ("interrupted", 1)
    assert found.part_evaluations == pytest.approx(250 / NUM_ROWS)


def test_the_curvature_of_a_quadratic() -> None:
    A = np.diag([4.0, 1.0, 0.25])

    class Pairs:
        sk = np.eye(3)
        yk = np.eye(3) @ A

    np.testing.assert_allclose(inverse_curvature(Pairs), np.linalg.inv(A))


def test_a_part_keeps_all_pairs_of_the_curvature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "RELATIVE_GAIN", 1e-15)
    seen = []

    def keeping(found: Any) -> Any:
        seen.append((found, inverse_curvature(found)))
        return seen[-1][1]

    monkeypatch.setattr("gpflow_hybrid.training.minimisation.inverse_curvature", keeping)
    model = new_model()
    model.kernel.lengthscales = gpflow.Parameter([0.3, 3.0], transform=gpflow.utilities.positive())
    model.mean_function = gpflow.functions.Linear(np.zeros((2, 1)))
    fitted(model, log_scale=False, max_iterations=30)
    ((found, H),) = seen  # of the part alone
    assert len(found.sk) > 10
    np.testing.assert_allclose(H @ found.yk[-1], found.sk[-1], rtol=1e-6)


@pytest.mark.parametrize(
    ("first_rows", "message"),
    [
        (0, "first_rows must be a positive integer"),
        ("most", r'first_rows must be "auto", None or a number of rows; found \'most\''),
        (5, "first_rows must be at least the number of inducing points, 10; found 5"),
    ],
)
def test_first_rows_are_refused(first_rows: Any, message: str) -> None:
    with pytest.raises(InvalidDataError, match=message):
        gh.fit(new_model(), data=data(), first_rows=first_rows)


def test_a_dense_model_takes_no_part() -> None:
    X, Y = data(30)
    model = gh.CVIModel((X, Y), gpflow.kernels.Matern52(), gh.likelihoods.ProbitBernoulli())
    with pytest.raises(
        InvalidDataError, match="first_rows is for SparseCVIModel; found 20 for CVI"
    ):
        gh.fit(model, first_rows=20)


def test_a_callback_is_refused_with_a_client() -> None:
    with pytest.raises(InvalidDataError, match="callback must be left out with client"):
        gh.fit(new_model(), data=data(), callback=print, client=object())
