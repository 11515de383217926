"""Predictions at Dask arrays, and starts, folds and settings as jobs: the results of one process."""

from __future__ import annotations

import importlib
import threading
import time
import warnings
from typing import Any

import dask.array as da
import gpflow
import numpy as np
import pytest
from distributed import Client

import gpflow_hybrid as gh
from gpflow_hybrid.distributed.configuration import configured
from gpflow_hybrid.distributed.jobs import run_jobs
from tests.distributed.conftest import problem


def dense(N: int = 40) -> gh.CVIModel:
    X, Y, _ = problem(N)
    kernel = gpflow.kernels.Matern52(lengthscales=np.ones(2))
    return gh.CVIModel((X, Y), kernel, gh.likelihoods.ProbitBernoulli())


def test_predictions_are_lazy_and_chunked(client: Client) -> None:
    X, Y, make = problem(90)
    model = make()
    model.infer((X, Y))
    blocks = (da.from_array(X, chunks=(40, 1)), da.from_array(Y, chunks=(25, 1)))
    for name in ("predict_f", "predict_y"):
        found = getattr(gh.distributed, name)(model, blocks[0])
        assert [x.chunks for x in found] == [((40, 40, 10), (1,))] * 2
        for x, y in zip(client.gather(client.compute(found)), getattr(model, name)(X), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9)
    density = gh.distributed.predict_log_density(model, blocks)
    assert density.shape == (90,)
    expected = model.predict_log_density((X, Y))
    np.testing.assert_allclose(client.compute(density).result(), expected, rtol=1e-9)


def test_predictions_are_of_the_model_as_it_is(client: Client) -> None:
    X, Y, make = problem(90)
    model = make()
    rows = gh.distributed.shards(client, X, Y)
    model.training_loss(rows)
    model.kernel.variance.assign(2.0)  # q(u) has to follow, which workers could not do
    mean, _ = gh.distributed.predict_f(model, da.from_array(X, chunks=40))
    expected = model.predict_f(X)[0]
    model.kernel.variance.assign(3.0)
    np.testing.assert_allclose(client.compute(mean).result(), expected, rtol=1e-9)


def test_arrays_in_memory_are_refused() -> None:
    X, Y, make = problem(90)
    with pytest.raises(gh.InvalidDataError, match="Xnew must be a Dask array .*found ndarray"):
        gh.distributed.predict_f(make(), X)
    with pytest.raises(gh.InvalidDataError, match="Y must be a Dask array .*found ndarray"):
        gh.distributed.predict_log_density(make(), (da.from_array(X), Y))
    with pytest.raises(gh.InvalidDataError, match="same number of rows; found 90 and 80"):
        gh.distributed.predict_log_density(make(), (da.from_array(X), da.from_array(Y[:80])))


def test_chunk_that_cannot_be_predicted_is_named(client: Client) -> None:
    X, Y, make = problem(90)
    model = make()
    bad = X.copy()
    bad[47, 1] = np.nan
    mean, _ = gh.distributed.predict_f(model, da.from_array(bad, chunks=(20, 2)))
    words = "Chunk 2 of the rows, counted from its first: .* found nan at row 7,"
    with pytest.raises(gh.InvalidDataError, match=words):
        client.compute(mean).result()
    both = da.from_array(np.hstack([X, Y]), chunks=(30, 3))
    Xs, Ys = both[both[:, 0] > 0.0][:, :2], both[both[:, 0] < 0.0][:, 2:]  # 13 and 17 of the first
    density = gh.distributed.predict_log_density(model, (Xs, Ys))
    with pytest.raises(gh.InvalidDataError, match="in every chunk; found (13 and 17|17 and 13)"):
        client.compute(density).result()


def test_starts_of_a_fit(client: Client) -> None:
    here, there = dense(), dense()
    expected = gh.fit(here, num_starts=3, max_iterations=30, progress=False)
    found = gh.fit(there, num_starts=3, max_iterations=30, progress=False, client=client)
    assert found.status == expected.status
    # Where an E-step starts depends on what was run before it here: to its tolerance.
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.num_evaluations == pytest.approx(expected.num_evaluations, rel=0.2)


def test_starts_of_a_sparse_fit_and_shards_are_not_both(client: Client) -> None:
    X, Y, make = problem(60)
    here, there = make(), make()
    for model in (here, there):
        gpflow.set_trainable(model.inducing_variable, False)
    options: dict[str, Any] = {"num_starts": 2, "max_iterations": 10, "progress": False}
    expected = gh.fit(here, data=(X, Y), **options)
    found = gh.fit(there, data=(X, Y), client=client, **options)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
    rows = gh.distributed.shards(client, X, Y)
    with pytest.raises(gh.InvalidDataError, match="client must be left out where data are on"):
        gh.fit(there, data=rows, client=client)


def test_settings_of_annealing(client: Client) -> None:
    model = dense()
    settings = gh.evidence.grid(
        {".kernel.lengthscales": [np.full(2, 0.7), np.full(2, 1.5)], ".kernel.variance": [1.0, 4.0]}
    )
    options: dict[str, Any] = {"num_chains": 4, "num_temperatures": 20, "progress": False}
    expected = gh.annealed_importance_sampling(model, hyperparameters=settings, **options)
    found = gh.annealed_importance_sampling(
        model, hyperparameters=settings, client=client, **options
    )
    np.testing.assert_allclose(found.log_weights, expected.log_weights, rtol=1e-9)
    np.testing.assert_allclose(found.samples, expected.samples, rtol=1e-6, atol=1e-8)


def test_folds_of_a_comparison(client: Client) -> None:
    X, Y, make = problem(60)
    options: dict[str, Any] = {"data": (X, Y), "num_folds": 2, "max_iterations": 5}
    expected = gh.compare_objectives(make(), **options)
    found = gh.compare_objectives(make(), client=client, **options)
    for x, y in zip(found.fits, expected.fits, strict=True):
        np.testing.assert_allclose(x.log_densities, y.log_densities, rtol=1e-9)
        assert x.elbo == pytest.approx(y.elbo, rel=1e-9)
        assert x.num_evaluations == y.num_evaluations
        np.testing.assert_allclose(x.model.predict_y(X)[0], y.model.predict_y(X)[0], rtol=1e-9)


def test_folds_are_drawn_from_arrays(client: Client) -> None:
    X, Y, make = problem(60)
    rows = gh.distributed.shards(client, X, Y)
    with pytest.raises(gh.InvalidDataError, match="found ShardedRows.*client=client"):
        gh.compare_objectives(make(), data=rows)


def test_folds_of_a_comparison_with_integrated_hyperparameters(client: Client) -> None:
    X, Y, _ = problem(30)
    model = gh.CVIModel((X, Y), gpflow.kernels.Matern52(), gh.likelihoods.ProbitBernoulli())
    options: dict[str, Any] = {"num_folds": 2, "integrate": True}
    (expected,) = gh.compare_objectives(model, ("ep_like",), **options).fits
    (found,) = gh.compare_objectives(model, ("ep_like",), client=client, **options).fits
    np.testing.assert_allclose(
        found.integrated_log_densities, expected.integrated_log_densities, rtol=1e-6
    )
    assert found.integrated.log_evidence == pytest.approx(
        expected.integrated.log_evidence, abs=1e-6
    )
    # The posterior has come back whole.
    np.testing.assert_allclose(
        found.integrated.predict_y(X)[0], expected.integrated.predict_y(X)[0], rtol=1e-6
    )


@pytest.mark.slow
def test_settings_of_compared_evidence(client: Client) -> None:
    model = dense()
    settings = gh.evidence.grid({".kernel.variance": [1.0, 4.0]})
    options: dict[str, Any] = {"annealing": {"num_chains": 4, "num_temperatures": 20}}
    expected = gh.compare_evidence(model, hyperparameters=settings, **options)
    found = gh.compare_evidence(model, hyperparameters=settings, client=client, **options)
    for x, y in zip(found, expected, strict=True):
        assert x.as_dict().keys() == y.as_dict().keys()
        np.testing.assert_allclose(
            list(x.as_dict().values()), list(y.as_dict().values()), rtol=1e-9
        )
    model.kernel.variance.assign(4.0)
    alone = gh.compare_evidence(model, **options)
    assert alone["elbo"].value == pytest.approx(expected[1]["elbo"].value, rel=1e-9)


def refuse(common: type[Exception], job: int) -> None:
    raise common(f"not this {job}")


@pytest.mark.parametrize("kind", [gh.InvalidDataError, RuntimeError, OSError])
def test_what_a_job_raises_is_raised_here(client: Client, kind: type[Exception]) -> None:
    """At once: it is no fault of the cluster's, after which a job is begun again."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(kind, match="not this 1"):
            run_jobs(client, "refuse", refuse, kind, [1, 2])


def jitter_of(common: None, job: int) -> float:
    return gpflow.config.default_jitter()


def test_workers_compute_under_this_process_s_configuration(client: Client) -> None:
    with gpflow.config.as_context(gpflow.config.Config(jitter=1e-3)):
        assert run_jobs(client, "jitter", jitter_of, None, [1, 2]) == [1e-3, 1e-3]
        X, Y, _ = problem(30)
        vgp = gpflow.models.VGP((X, Y), gpflow.kernels.Matern52(), gpflow.likelihoods.Bernoulli())
        vgp.q_mu.assign(Y - 0.5)
        mean, _ = gh.distributed.predict_f(vgp, da.from_array(X, chunks=20))
        expected = vgp.predict_f(X)[0]
    np.testing.assert_allclose(client.compute(mean).result(), expected, rtol=1e-9)
    assert np.max(np.abs(expected - vgp.predict_f(X)[0])) > 1e-6


def test_threads_of_a_worker_compute_under_the_configuration_of_their_task() -> None:
    """Tasks with one overlap, those with another wait; then the process has its own again."""
    found: dict[str, float] = {}
    own = gpflow.config.default_jitter()
    inside = threading.Barrier(2, timeout=20.0)

    def compute(name: str, jitter: float, meet: bool) -> None:
        with configured(gpflow.config.Config(jitter=jitter)):
            if meet:
                inside.wait()
            time.sleep(0.1 if name == "short" else 0.3)
            found[name] = gpflow.config.default_jitter()

    tasks = [("short", 1e-3, True), ("long", 1e-3, True), ("other", 1e-2, False)]
    threads = [threading.Thread(target=compute, args=task) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"short": 1e-3, "long": 1e-3, "other": 1e-2}
    assert gpflow.config.default_jitter() == own


def use(common: None, job: Any) -> Any:
    return job


def test_modules_that_workers_do_not_have(client: Client, tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "only_here.py").write_text("class Job:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("only_here")
    words = "A worker cannot import what it was sent: No module named 'only_here'"
    with pytest.raises(gh.ClusterError, match=words):
        run_jobs(client, "use", use, None, [module.Job()])


def test_predictions_need_no_cluster() -> None:
    """Dask's own schedulers take them too."""
    X, Y, make = problem(90)
    model = make()
    model.infer((X, Y))
    mean, _ = gh.distributed.predict_f(model, da.from_array(X, chunks=40))
    found = mean.compute(scheduler="synchronous")
    np.testing.assert_allclose(found, model.predict_f(X)[0], rtol=1e-9)
    with pytest.raises(gh.InvalidDataError, match="model must be a GPflow model; found Matern52"):
        gh.distributed.predict_f(gpflow.kernels.Matern52(), da.from_array(X))


def test_annealing_refuses_what_is_no_client() -> None:
    with pytest.raises(
        gh.InvalidDataError, match=r"client must be a distributed.Client; found str"
    ):
        gh.annealed_importance_sampling(dense(), client="tcp://127.0.0.1:8786")
