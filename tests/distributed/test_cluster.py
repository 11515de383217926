"""A sparse model on a cluster: the numbers of one process, whatever the data come in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import dask.dataframe as frames
import gpflow
import numpy as np
import pandas
import pytest
import tensorflow as tf
from dask.delayed import delayed
from distributed import Client

import gpflow_hybrid as gh
from gpflow_hybrid.distributed import shard, sources
from tests.distributed.conftest import problem
from tests.likelihood_cases import LogCosh
from tests.sparse_cases import sparse_problem

EXACT = 1e-9
"""Sums are taken in another order: rounding, and the E-step's residual of 1e-7 in gradients, which follows
the same path to it."""


def loss_and_gradients(model: Any, data: Any) -> tuple[float, list[Any]]:
    with tf.GradientTape() as tape:
        loss = model.training_loss(data)
    return float(loss), [g.numpy() for g in tape.gradient(loss, model.trainable_variables)]


def assert_same(found: Any, expected: Any, atol: float = 0.0) -> None:
    for x, y in zip(found, expected, strict=True):
        scale = max(float(np.max(np.abs(y))), 1.0)
        np.testing.assert_allclose(x, y, rtol=EXACT, atol=EXACT * scale)


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        ("probit_bernoulli", "elbo"),
        ("probit_bernoulli", "ep_like"),
        ("student_t", 0.5),
        pytest.param("multiclass", "elbo", marks=pytest.mark.slow),
        ("own_log_cosh", "ep_like"),
    ],
)
def test_loss_and_gradient_are_those_of_one_process(
    client: Client, name: str, objective: Any
) -> None:
    case = sparse_problem(name, N=60)
    rows = gh.distributed.shards(client, *case.data)
    here, there = case.model(objective), case.model(objective)
    for step in range(2):  # also from a warm start at other hyperparameters
        expected, gradients = loss_and_gradients(here, case.data)
        found, others = loss_and_gradients(there, rows)
        assert found == pytest.approx(expected, rel=EXACT)
        assert_same(others, gradients)
        assert_same(there.sites.values, here.sites.values)
        for model in (here, there):
            model.kernel.lengthscales.assign(1.2 + 0.3 * (step + 1))
            model.inducing_variable.Z.assign_add(np.full((6, 2), 0.05))


def test_values_and_gradients_at_the_present_q(client: Client) -> None:
    X, Y, make = problem(100)
    rows, here, there = gh.distributed.shards(client, X, Y), make(), make()
    reports = [here.infer((X, Y)), there.infer(rows)]
    assert reports[1].elbo == pytest.approx(reports[0].elbo, rel=EXACT)
    assert reports[1].num_steps == reports[0].num_steps
    assert reports[1].min_cavity_precision == pytest.approx(
        reports[0].min_cavity_precision, rel=EXACT
    )
    for value in ("elbo", "ep_like_log_marginal"):
        found = []
        for model, data in ((here, (X, Y)), (there, rows)):
            with tf.GradientTape() as tape:
                result = getattr(model, value)(data)
            found.append([result, *tape.gradient(result, model.trainable_variables)])
        assert_same(found[1], found[0])
    powers = [
        model.power_ep_log_marginal(data, 0.3) for model, data in ((here, (X, Y)), (there, rows))
    ]
    assert_same(powers[1:], powers[:1])
    diagnoses = [
        model.diagnose_at_fixed_sites(data, (0.0, 1.0))
        for model, data in ((here, (X, Y)), (there, rows))
    ]
    assert diagnoses[1].loo_log_predictive_density == pytest.approx(
        diagnoses[0].loo_log_predictive_density, rel=EXACT
    )
    assert diagnoses[1].min_cavity_precision == pytest.approx(
        diagnoses[0].min_cavity_precision, rel=EXACT
    )


def test_missing_cavity_has_its_number_among_all_rows(client: Client) -> None:
    X, Y, make = problem(50)
    X[:30] += 100.0  # so far from all inducing points that they have cavities
    model = make()
    model.inducing_variable.Z.assign(X[30:38])
    # q(u) is nearly the prior, and every site as precise as the data make it.
    model.kernel.variance.assign(1e4)
    model.sites.lambda_2.assign(1e-6 * np.eye(8)[None])
    messages = []
    for data in ((X, Y), gh.distributed.shards(client, X, Y)):
        with pytest.raises(gh.InvalidPosteriorError, match="cavity of datum 30 ") as error:
            model.ep_like_log_marginal(data)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


class Table:
    """What of a Dask DataFrame is used: its array, whose chunks have unknown lengths."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dask_graph__(self) -> Any:
        return self.array.__dask_graph__()

    def to_dask_array(self) -> Any:
        return self.array


def chunked(X: Any, Y: Any, kind: str, folder: Path) -> tuple[Any, Any]:
    if kind == "unequal":
        return da.from_array(X, chunks=((7, 50, 43), (1, 1))), da.from_array(
            Y, chunks=((60, 40), 1)
        )
    if kind == "one chunk":
        return da.from_array(X, chunks=-1), da.from_array(Y, chunks=-1)
    if kind == "X alone":
        return da.from_array(X, chunks=(30, 2)), Y
    if kind == "table":
        return tuple(map(Table, chunked(X, Y, "unknown lengths", folder)))
    if kind == "unknown lengths":
        both = da.from_array(np.hstack([X, Y]), chunks=(30, 3))
        both = both[both[:, 0] > -np.inf]
        return both[:, :2], both[:, 2:]
    if kind == "zarr":
        pytest.importorskip("zarr")  # not in the oldest environment
        for name, array in (("X", X), ("Y", Y)):
            da.from_array(array, chunks=(40, 1)).to_zarr(str(folder / name))
        return da.from_zarr(str(folder / "X")), da.from_zarr(str(folder / "Y"))
    table = pandas.DataFrame(np.hstack([X, Y]), columns=["a", "b", "y"])
    if kind == "other types":
        labels = frames.from_pandas(table[["y"]].astype("boolean"), npartitions=3)
        return frames.from_pandas(table[["a", "b"]].astype("Float64"), npartitions=3), labels
    if kind == "other indices":  # rows belong together as they come
        labels = table[["y"]].set_axis(np.arange(100)[::-1])
        return tuple(
            frames.from_pandas(x, npartitions=4, sort=False) for x in (table[["a", "b"]], labels)
        )
    if kind == "frame":
        frame = frames.from_pandas(table, npartitions=3)
    elif kind == "parquet":
        for i, part in enumerate(np.array_split(np.arange(100), 5)):  # of which Dask may join some
            table.iloc[part].to_parquet(folder / f"{i}.parquet")
        frame = frames.read_parquet(str(folder / "*.parquet"))
        assert frame[["a", "b"]].to_dask_array().numblocks != frame[["y"]].to_dask_array().numblocks
    else:
        for i, part in enumerate(np.array_split(np.arange(100), 3)):
            table.iloc[part].to_csv(folder / f"{i}.csv", index=False, float_format="%.17g")
        frame = frames.read_csv(str(folder / "*.csv"), float_precision="round_trip")
    return frame[["a", "b"]], frame[["y"]]


@pytest.mark.parametrize(
    "kind",
    [
        "unequal",
        "one chunk",
        "X alone",
        "unknown lengths",
        "table",
        "frame",
        "other indices",
        "other types",
        "parquet",
        "zarr",
        "csv",
    ],
)
def test_data_come_in_any_chunks(client: Client, kind: str, tmp_path: Path) -> None:
    X, Y, make = problem(100)
    rows = gh.distributed.shards(client, *chunked(X, Y, kind, tmp_path))
    assert (rows.num_rows, rows.num_columns, rows.num_outputs) == (100, 2, 1)
    assert rows.num_shards == 2
    assert set(rows.rows_of_shard) != {0}
    read = list(rows.blocks(30))
    np.testing.assert_array_equal(np.concatenate([x for x, _ in read]), X)
    np.testing.assert_array_equal(np.concatenate([y for _, y in read]), Y)
    here, there = make(), make()
    expected, found = here.infer((X, Y)), there.infer(rows)
    assert found.elbo == pytest.approx(expected.elbo, rel=EXACT)


def test_tasks_of_one_table_have_names_of_their_own(tmp_path: Path) -> None:
    """A scheduler takes tasks of one name for one task."""
    X, Y, make = problem(100)
    data = chunked(X, Y, "parquet", tmp_path)
    density = gh.distributed.predict_log_density(make(), data).mean()
    graphs = [dict(dask.optimize(density)[0].__dask_graph__())]
    for source in sources.sources_of(*data, 2, None):
        (made,) = dask.optimize(delayed([source.X, source.Y]))
        graphs.append(dict(made.__dask_graph__()))
    for i, graph in enumerate(graphs):
        for other in graphs[:i]:
            for key in graph.keys() & other.keys():
                assert graph[key] == other[key], key


def test_many_shards_are_added_in_a_tree(client: Client, monkeypatch: Any) -> None:
    X, Y, make = problem(200)
    rows = gh.distributed.shards(client, X, Y, num_shards=19)
    assert rows.num_shards == 19
    monkeypatch.setattr("gpflow_hybrid.distributed.rows.EMBEDDED_BYTES", 0)  # and sent beforehand
    expected, found = make().infer((X, Y)), make().infer(rows)
    assert found.elbo == pytest.approx(expected.elbo, rel=EXACT)
    assert found.min_cavity_precision == pytest.approx(expected.min_cavity_precision, rel=EXACT)


class Bar:
    """What a progress bar is told."""

    def __init__(self) -> None:
        self.passes, self.said = 0, {"objective": ""}

    def update(self, count: int) -> None:
        self.passes += count

    def set_postfix(self, refresh: bool, **said: str) -> None:
        self.said = said


def test_names_of_tasks_and_progress(client: Client, monkeypatch: Any) -> None:
    X, Y, make = problem(200)
    bar, names = Bar(), set()
    mapped = gh.distributed.ShardedRows._mapped

    def watched(self: Any, name: str, *given: Any) -> Any:
        names.add(name)
        found = mapped(self, name, *given)
        assert all(future.key.startswith(f"{name}-") for future in found)
        return found

    monkeypatch.setattr(gh.distributed.ShardedRows, "_mapped", watched)
    monkeypatch.setattr("gpflow_hybrid.distributed.rows.progress_bar", lambda *_, **__: bar)
    rows = gh.distributed.shards(client, X, Y, num_shards=9)
    model = make()
    loss = model.training_loss(rows)
    assert {"e-step", "objective", "gradient", "gradient-product"} <= names
    assert {"e-step-sum", "gradient-sum"} <= names  # more than eight are added up on workers
    assert bar.passes == rows.num_passes > 5
    assert float(bar.said["objective"]) == pytest.approx(-float(loss), abs=1e-3)


def test_structure_travels_once(client: Client) -> None:
    X, Y, make = problem(60)
    rows, model = gh.distributed.shards(client, X, Y), make()

    def known() -> set[str]:
        found = client.run(lambda: list(shard._models))
        return {token for tokens in found.values() for token in tokens}

    before = known()
    for lengthscale in (0.5, 1.0, 2.0):
        model.kernel.lengthscales.assign([lengthscale, 1.0])
        model.training_loss(rows)
    assert len(known() - before) == 1


class CountsTraces(LogCosh):
    """Of itself, in the process that makes them."""

    def _scalar_log_prob(self, X: Any, F: Any, Y: Any) -> Any:
        name = "CALLS" if tf.executing_eagerly() else "TRACES"
        os.environ[name] = str(int(os.environ.get(name, "0")) + 1)
        return super()._scalar_log_prob(X, F, Y)


def test_nothing_is_traced_again_at_other_hyperparameters(client: Client) -> None:
    case = sparse_problem("own_log_cosh", N=60)
    model = case.model("elbo")
    model.likelihood = CountsTraces()
    rows = gh.distributed.shards(client, *case.data)
    counts = []
    for lengthscale in (1.0, 1.1, 1.2, 1.3):
        model.kernel.lengthscales.assign(lengthscale)
        model.training_loss(rows)
        counts.append(client.run(lambda: os.environ.get("TRACES", "0")))
    assert counts[0] == counts[1] == counts[2] == counts[3]
    calls = client.run(
        lambda: int(os.environ.get("CALLS", "0")) + int(os.environ.get("TRACES", "0"))
    )
    assert min(calls.values()) > 0  # workers were asked


@pytest.mark.parametrize("first_rows", [None, 30])
def test_fit_ends_where_one_process_does(
    client: Client, monkeypatch: Any, first_rows: int | None
) -> None:
    monkeypatch.setattr("gpflow_hybrid.training.fitting.ENOUGH_ROWS", 60)
    X, Y, make = problem(120)
    rows, here, there = gh.distributed.shards(client, X, Y), make(), make()
    for model in (here, there):
        gpflow.set_trainable(model.inducing_variable, False)
    given: Any = {"start": "data", "first_rows": first_rows, "progress": False}
    expected = gh.fit(here, data=(X, Y), **given)
    found = gh.fit(there, data=rows, **given)
    assert found.part_evaluations == expected.part_evaluations  # on the same rows
    assert (found.part_evaluations > 0.0) == (first_rows is not None)
    assert found.status == expected.status == "converged"
    assert found.loss == pytest.approx(expected.loss, rel=EXACT)
    assert found.gain == pytest.approx(
        expected.gain, rel=1e-6
    )  # both optimisers end near the optimum


def test_trainer_takes_shards(client: Client) -> None:
    X, Y, make = problem(60)
    rows, here, there = gh.distributed.shards(client, X, Y), make(), make()
    for model, data in ((here, (X, Y)), (there, rows)):
        gh.VEMTrainer(model, data=data).fit(2, progress=False)
    assert_same(there.trainable_variables, here.trainable_variables)


def worded(array: Any) -> Any:
    """A table whose second column holds words."""
    table = pandas.DataFrame(np.array(array), columns=["a", "b"])
    return frames.from_pandas(table.assign(b="high"), npartitions=2)


def frame_of(array: Any) -> Any:
    table = pandas.DataFrame(np.array(array))
    table.iloc[5, 0] = np.nan
    return frames.from_pandas(table, npartitions=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda X, Y: (X, Y[:-1]), "same number of rows; found 60 and 59"),
        (lambda X, Y: (X, Y[:, 0]), r"Y must have two dimensions, \[N, P\]"),
        (lambda X, Y: (frame_of(X), frame_of(Y)[0]), r"Y must have two dimensions, .*; found 1"),
        (lambda X, Y: (X[:0], Y[:0]), "at least one row"),
        (lambda X, Y: (da.from_array(X), da.from_array(Y[:-1])), "same number of rows"),
        (lambda X, Y: (X.astype(str), Y), "X must be numeric"),
        (lambda X, Y: (worded(X), frame_of(Y)), r"X must be numeric; .*by the columns 'b' \(str"),
        (lambda X, Y: (frame_of(X).dropna(), frame_of(Y)), "in every chunk; found 29 and 30. Take"),
    ],
)
def test_data_are_refused_in_words(client: Client, change: Any, message: str) -> None:
    X, Y, _ = problem(60)
    with pytest.raises(gh.InvalidDataError, match=message):
        gh.distributed.shards(client, *change(X, Y))


def test_labels_are_refused_where_they_are(client: Client) -> None:
    X, Y, make = problem(60)
    Y[45] = 7.0
    rows = gh.distributed.shards(client, da.from_array(X, chunks=20), da.from_array(Y, chunks=20))
    with pytest.raises(gh.InvalidDataError, match=r"rows 30 to 59, .*: Y must be 0 or 1 .*found 7"):
        make().infer(rows)


def test_arguments_are_refused_in_words(client: Client) -> None:
    X, Y, _ = problem(60)
    with pytest.raises(gh.InvalidDataError, match="client must be a distributed.Client; found str"):
        gh.distributed.shards("tcp://127.0.0.1:8786", X, Y)
    with pytest.raises(gh.InvalidDataError, match="num_shards must be a positive integer; found 0"):
        gh.distributed.shards(client, X, Y, num_shards=0)
    assert gh.distributed.shards(client, X, Y, num_shards=np.int64(3)).num_shards == 3
