"""What each tutorial's text claims, checked on the namespace of its short run; one function each."""

from __future__ import annotations

from typing import Any

import gpflow
import numpy as np

import gpflow_hybrid as gh

Run = dict[str, Any]


def same_elbo(run: Run) -> None:
    """VGP by L-BFGS stops a little below its optimum, and has its jitter; CVIModel is at it."""
    assert abs(run["comparison"].gap) < 1e-3


def binary_classification(run: Run) -> None:
    same_elbo(run)
    comparison = run["comparison"]
    assert abs(comparison["VGP"].elbo - comparison["CVIModel, ELBO"].elbo) < 1e-3
    assert comparison["CVIModel, EP-like"].elbo < comparison["CVIModel, ELBO"].elbo
    assert run["result"].converged
    model = run["models"]["CVIModel, EP-like"]
    assert len(model.trainable_variables) == 2
    assert not model.sites.lambda_1.trainable
    accuracy = np.mean((model.predict_y(run["test_data"][0])[0] > 0.5) == (run["test_data"][1] > 0))
    assert accuracy > 0.75


def from_paper_to_practice(run: Run) -> None:
    same_elbo(run)
    elbo, ep_like, sampled = run["surfaces"].values()
    assert np.abs(ep_like - sampled).mean() < 0.3 * np.abs(elbo - sampled).mean()
    assert np.all(elbo <= ep_like + 1e-9)
    # The collapsed objective ends above every point of the grid.
    for objective, values in (("elbo", elbo), ("ep_like", ep_like)):
        name = {"elbo": "CVIModel, ELBO", "ep_like": "CVIModel, EP-like"}[objective]
        model = run["models"][name]
        found = -model.training_loss() / len(run["X_train"])
        assert found >= values.max() - 1e-6
        end = run["trajectories"]["collapsed", objective][:, -1]
        np.testing.assert_allclose(end, run["position"](model), atol=1e-3)


def coregionalisation(run: Run) -> None:
    same_elbo(run)
    comparison = run["comparison"]
    assert abs(comparison["VGP"].elbo - comparison["CVIModel, ELBO"].elbo) < 1e-2
    assert 0 < np.sum(run["negative"]) < len(run["negative"]) // 3  # the outliers only
    assert run["B"][0, 1] < -0.5  # the outputs are anticorrelated
    beyond = np.array([[9.0, 1.0]])
    coupled, uncoupled = (run[m].predict_f(beyond)[1].numpy() for m in ("model", "uncoupled"))
    assert coupled < 0.8 * uncoupled


def natural_gradients(run: Run) -> None:
    same_elbo(run)
    assert max(run["differences"]) < 1e-5  # VGP's jitter
    for size in run["sizes"]:
        np.testing.assert_allclose(run["by_cvi"][size], run["by_vgp"][size], rtol=1e-4)
    assert np.all(np.diff(run["by_newton"]) >= -1e-9)
    assert abs(run["by_newton"][-1] - run["optimum"]) < 1e-6
    assert run["by_cvi"][0.1][-1] < run["optimum"] - 0.1  # slow
    assert np.min(np.diff(run["by_cvi"][1.0])) < -1.0  # overshoots
    assert isinstance(run["refusal"], gh.InvalidPosteriorError)


def monitoring(run: Run) -> None:
    same_elbo(run)
    assert len(run["written"]) == len(run["result"].history) > 2
    np.testing.assert_allclose(run["written"], run["result"].history["elbo"], rtol=1e-6)
    tags = {name: set(events.Tags()["tensors"]) for name, events in run["runs"].items()}
    assert {"fit", "kernel.variance", "objectives/ep_like"} <= tags["L-BFGS"] & tags["VEMTrainer"]
    steps, values = run["curve"](run["runs"]["L-BFGS"], "objectives/ep_like")
    assert steps == list(range(len(steps)))
    assert values[-1] > values[0]


def saving_and_loading(run: Run) -> None:
    same_elbo(run)
    assert max(run["difference"](run[m]) for m in ("restored", "loaded")) < 1e-12
    assert run["difference"](run["inferred"]) < 1e-6
    np.testing.assert_allclose(run["served"], run["expected"], rtol=1e-10)
    assert run["process"].stdout.strip() == "GPflow was imported: False"
    first, resumed = run["first"], run["resumed"]
    assert resumed.num_iterations > first.num_iterations == 2
    assert np.array_equal(resumed.history["elbo"][:3], first.history["elbo"])


def other_likelihoods(run: Run) -> None:
    same_elbo(run)
    student = [row.test_log_density for row in run["comparison"].rows]
    assert np.ptp(student) < 0.01
    assert min(student) > np.mean(run["gaussian"].predict_log_density(run["test_data"])) + 0.5
    assert run["outlier"].any()
    assert abs(run["positive"].likelihood.shape.numpy() - 4.0) < 2.0  # learnt, from one
    assert run["counts"].ep_like_log_marginal() >= run["counts"].elbo()


def multiclass_classification(run: Run) -> None:
    same_elbo(run)
    draws = run["draws"]
    assert np.std(draws) > 0.0  # Monte Carlo
    assert abs(np.mean(draws) - run["fixed"][0]) < 4.0 * np.std(draws) / np.sqrt(len(draws))
    assert run["fixed"][0] == run["fixed"][1]
    elbo, ep_like = (run["models"][f"CVIModel, {name}"] for name in ("ELBO", "EP-like"))
    assert elbo.elbo() > ep_like.elbo()
    assert ep_like.kernel.lengthscales.numpy() < elbo.kernel.lengthscales.numpy()
    assert all(model.kernel.variance.numpy() == 1.0 for model in run["models"].values())


def ordinal_regression(run: Run) -> None:
    same_elbo(run)
    assert np.ptp([row.test_log_density for row in run["comparison"].rows]) < 0.01
    own = gpflow.likelihoods.Ordinal(run["edges"])
    twin = gh.CVIModel(run["data"], gpflow.kernels.Matern52(), own)
    assert type(twin.likelihood) is gh.likelihoods.Ordinal
    assert twin.likelihood.sigma is own.sigma
    np.testing.assert_allclose(twin.elbo(), run["vgp"].elbo(), rtol=1e-5)  # q = prior; VGP's jitter
    np.testing.assert_allclose(run["probability"].sum(0), 0.998, atol=1e-4)


def heteroskedastic_noise(run: Run) -> None:
    same_elbo(run)
    assert run["failure"] is not None  # VGP with separate kernels
    assert run["plain"].elbo() < run["comparison"].vgp_elbo - 5.0  # trained at once, VGP is stuck
    mean, noise = run["separate"].kernel.kernels
    assert noise.lengthscales.numpy() > 2.0 * mean.lengthscales.numpy()
    shared = run["models"]["CVIModel, EP-like"]
    assert run["separate"].ep_like_log_marginal() > shared.ep_like_log_marginal()


def mean_functions(run: Run) -> None:
    same_elbo(run)
    extrapolation = run["extrapolation"]
    assert extrapolation["linear"] > extrapolation["constant"] > extrapolation["zero"]
    variances = [float(fit.kernel.variance.numpy()) for fit in run["fits"].values()]
    assert variances[0] > variances[1] > variances[2]
    slopes = [model.mean_function.A.numpy().item() for model in run["models"].values()]
    assert np.ptp(slopes) < 5e-3  # three optimisers' ways to a flat optimum
    assert slopes[0] > 0.0  # learnt, and from zero


def priors_and_map(run: Run) -> None:
    same_elbo(run)
    likelihood, posterior = (fit.kernel.variance.numpy() for fit in run["fits"].values())
    assert likelihood > 5.0 * posterior
    refit = run["models"]["CVIModel, EP-like"].kernel.variance.numpy()
    np.testing.assert_allclose(refit, posterior, rtol=1e-3)
    model = run["fits"]["MAP"]
    expected = model.ep_like_log_marginal() + model.log_prior_density()
    np.testing.assert_allclose(-model.training_loss(), expected, rtol=1e-9)
    assert run["log_posterior"].max() <= expected + 1e-6  # no point of the grid beats the MAP


def parameters_and_optimisation(run: Run) -> None:
    same_elbo(run)
    assert abs(run["adam_losses"][-1] - run["result"].fun) < 1e-3
    np.testing.assert_allclose(run["exact"], run["differences"], rtol=1e-4, atol=1e-6)
    assert np.max(np.abs(run["held"] - run["exact"])) > 1e-5  # the path through the sites is felt
    assert abs(run["followed"] - run["inferred"]) < 1e-6
    assert run["stale"] < run["followed"] - 1e-4
    assert all(not p.trainable for p in run["model"].sites.parameters)
    assert len(run["model"].trainable_variables) == 3


def which_objective(run: Run) -> None:
    same_elbo(run)
    evidence = run["evidence"].as_dict()
    assert evidence["elbo"] < evidence["power_ep_0.5"] < evidence["ep_like"]
    off = {name: abs(evidence[name] - evidence["ais"]) for name in ("elbo", "ep_like")}
    assert off["ep_like"] < 0.5 * off["elbo"]
    assert np.argmax(run["curves"]["ELBO"]) <= np.argmax(run["curves"]["EP-like"])
    assert run["comparison"]["CVIModel, EP-like"].elbo < run["comparison"]["CVIModel, ELBO"].elbo
    sonar, diabetes = (
        float(model.ep_like_log_marginal() - model.elbo())
        for model in (run["models"]["CVIModel, EP-like"], run["fits"]["diabetes", "ep_like"])
    )
    assert sonar > 3.0 * diabetes > 0.0
    assert {row["data set"] for row in run["table"]} >= {"sonar", "diabetes"}


def more_data(run: Run) -> None:
    same_elbo(run)
    comparison = run["comparison"]
    assert abs(comparison["SVGP"].elbo - comparison["SparseCVI, ELBO"].elbo) < 1e-2
    assert comparison["SparseCVI, EP-like"].elbo < comparison["SparseCVI, ELBO"].elbo
    by_elbo, by_ep_like = run["values"]["elbo"], run["values"]["ep_like"]
    assert by_elbo[0] > by_ep_like[0]  # each is best by its own value
    assert by_ep_like[1] > by_elbo[1]
    assert all(bound <= value for bound, value in (by_elbo, by_ep_like))
    theirs, ours = np.transpose(run["steps"])
    np.testing.assert_allclose(ours, theirs, rtol=1e-8)
    assert run["report"].converged
    np.testing.assert_allclose(run["from_stream"], run["from_arrays"], rtol=1e-10)
    for theirs, ours in run["one_step"].values():
        np.testing.assert_allclose(ours, theirs, rtol=1e-8)
    spreads = [np.std(found) for found in run["estimates"].values()]
    assert spreads == sorted(spreads, reverse=True)
    for found in run["estimates"].values():
        np.testing.assert_allclose(np.mean(found), run["of_all"], rtol=1e-10)
    # From the prior most of the way to the optimum; the full run is longer.
    ends = ((run["trace"], "optimum"), *((found, "best_bound") for found in run["traces"].values()))
    for trace, best in ends:
        (_, first), *_, (_, last) = trace
        assert run[best] > last > run[best] - 0.3 * (run[best] - first)
    few, *_, many = run["sizes"]
    for objective in ("elbo", "ep_like"):
        assert run["curves"][objective, many][0] > run["curves"][objective, few][0]
    gaps = []
    for M in (few, many):  # the two objectives draw near each other at equal hyperparameters
        at = [run["build"](o, gh.inducing_points(run["data"][0], M)) for o in ("elbo", "ep_like")]
        bound, value = (-float(model.training_loss(run["data"])) for model in at)
        gaps.append(value - bound)
    assert gaps[0] > gaps[1] > 0.0


def sparse_multiclass(run: Run) -> None:
    same_elbo(run)
    comparison = run["comparison"]
    assert abs(comparison["SVGP"].elbo - comparison["SparseCVI, ELBO"].elbo) < 1e-2
    assert run["softmax"].q_mu.shape[1] == run["num_classes"]
    without, with_more = run["elbos"]
    assert with_more > without
    assert all(accuracy > 0.9 for accuracy in run["accuracy"].values())
    assert len(run["models"]["SparseCVI, ELBO"].trainable_variables) == 1


def from_scikit_learn(run: Run) -> None:
    same_elbo(run)
    ours, theirs = run["scores"]["HybridGPClassifier"], run["scores"]["GaussianProcessClassifier"]
    assert ours[0] < theirs[0]  # log loss
    assert abs(ours[1] - theirs[1]) < 0.06  # accuracies are close
    p, q = (run[name].predict_proba(run["X_test"])[:, 1] for name in ("ours", "theirs"))
    assert np.mean(np.abs(p - 0.5)) > np.mean(np.abs(q - 0.5)) + 0.02  # Laplace shies away
    assert isinstance(run["integrated"].model_, gh.HyperparameterPosterior)
    assert run["integrated"].model_.converged
    mixture, optimum = (
        run[name].score(run["X_test"], run["y_test"]) for name in ("integrated", "optimised")
    )
    assert abs(mixture - optimum) < 0.06
    assert run["search"].best_score_ > -0.35
    rate = 15.0 * np.exp(np.sin(run["grid"][:, 0] / 24.0 * 2.0 * np.pi))
    assert np.mean(np.abs(run["counts"].predict(run["grid"]) / rate - 1.0)) < 0.2
    assert run["sparse"].approximation_ == "sparse, 30 inducing points"
    assert isinstance(run["sparse"].model_, gh.SparseCVIModel)


def a_million_rows(run: Run) -> None:
    same_elbo(run)
    rows, model = run["rows"], run["model"]
    assert rows.num_rows == run["num_rows"]
    assert rows.num_passes > 0
    assert rows.events == []
    assert run["result"].status in ("converged", "max_iterations")  # few in the short run
    assert run["result"].gain > 10.0  # over independent labels
    assert run["log_density"] > -0.6
    X, Y = (x.compute() for x in run["test"])
    np.testing.assert_allclose(
        np.mean(model.predict_log_density((X, Y))), run["log_density"], rtol=1e-9
    )
    assert abs(run["here"] - run["there"]) < 1e-9 * abs(run["here"])


def mcmc(run: Run) -> None:
    same_elbo(run)
    assert run["posterior"].converged
    # The same marginals, within the errors of the chains.
    lattice = run["means"]["integrate_hyperparameters"]
    for name, mean in run["means"].items():
        assert np.all(np.abs(mean - lattice) <= 4.0 * run["errors"][name])
    spread = np.sqrt(run["weights"] @ (run["log_draws"] - lattice) ** 2)
    for name, values in run["log_samples"].items():
        assert np.all(run["errors"][name] < 0.5 * spread)  # the chains have something to say
        np.testing.assert_allclose(values.std(0), spread, rtol=0.5)
    assert run["model"].sites.lambda_1.shape == (30, 1)
