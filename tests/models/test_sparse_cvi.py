"""The sparse model against GPflow's SVGP, SGPR and FITC, the dense model, and finite differences."""

from __future__ import annotations

import copy
from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf
from gpflow.optimizers.natgrad import XiSqrtMeanVar
from scipy import stats

import gpflow_hybrid as gh
from gpflow_hybrid import tuning
from gpflow_hybrid.inference.inducing import SummedSites
from gpflow_hybrid.rows import Reference
from tests.likelihood_cases import CASES
from tests.sparse_cases import SparseProblem, sparse_problem

# SVGP's own is random with Softmax, and with RobustMax it is not there after hundreds of steps.
AGAINST_SVGP = [name for name in CASES if name not in ("softmax", "multiclass")]
SMOOTH = [name for name in CASES if name != "multiclass"]


def loss_and_gradients(model: Any, *data: Any) -> tuple[float, dict[str, np.ndarray]]:
    with tf.GradientTape() as tape:
        loss = model.training_loss(*data)
    found = tape.gradient(
        loss, model.trainable_variables, unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    names = [
        name
        for v in model.trainable_variables
        for name, p in gpflow.utilities.parameter_dict(model).items()
        if p.unconstrained_variable is v
    ]
    values = [tf.convert_to_tensor(g).numpy() for g in found]
    return float(loss), dict(zip(names, values, strict=True))


def svgp_like(problem: SparseProblem, model: gh.SparseCVIModel) -> gpflow.models.SVGP:
    """SVGP with the same hyperparameters, its q(u) one per cent off."""
    arguments = problem.arguments() | {
        "q_mu": 1.01 * model.q_mu.numpy() + 1e-3,
        "q_sqrt": 1.01 * model.q_sqrt.numpy(),
    }
    arguments["likelihood"] = model.likelihood
    return gpflow.models.SVGP(**arguments)


@pytest.mark.parametrize("name", AGAINST_SVGP)
def test_elbo_is_that_of_svgp_converged_by_natural_gradients(name: str) -> None:
    problem = sparse_problem(name)
    model = problem.model("elbo")
    assert model.infer(problem.data, tolerance=1e-9).converged
    svgp = svgp_like(problem, model)
    natural = gpflow.optimizers.NaturalGradient(gamma=0.5)
    loss = svgp.training_loss_closure(problem.data)
    for _ in range(60):
        natural.minimize(loss, [(svgp.q_mu, svgp.q_sqrt, XiSqrtMeanVar())])
    np.testing.assert_allclose(model.elbo(problem.data), svgp.elbo(problem.data), rtol=1e-8)
    np.testing.assert_allclose(model.q_mu, svgp.q_mu, rtol=1e-4, atol=1e-5)
    for found, expected in zip(
        model.predict_f(problem.X[:7]), svgp.predict_f(problem.X[:7]), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    gpflow.set_trainable(svgp.q_mu, False)
    gpflow.set_trainable(svgp.q_sqrt, False)
    loss_found, gradients = loss_and_gradients(model, problem.data)
    loss_expected, expected = loss_and_gradients(svgp, problem.data)
    np.testing.assert_allclose(loss_found, loss_expected, rtol=1e-8)
    for path, gradient in gradients.items():
        np.testing.assert_allclose(gradient, expected[path], rtol=1e-4, atol=1e-5, err_msg=path)


def test_with_a_robust_maximum_q_is_stationary_for_svgps_bound() -> None:
    problem = sparse_problem("multiclass")
    model = problem.model("elbo")
    assert model.infer(problem.data, tolerance=1e-9).converged
    arguments = problem.arguments() | {"q_mu": model.q_mu.numpy(), "q_sqrt": model.q_sqrt.numpy()}
    svgp = gpflow.models.SVGP(**arguments)
    np.testing.assert_allclose(model.elbo(problem.data), svgp.elbo(problem.data), rtol=1e-8)
    _, found = loss_and_gradients(model, problem.data)
    _, expected = loss_and_gradients(svgp, problem.data)
    for path, gradient in expected.items():
        np.testing.assert_allclose(found.get(path, 0.0), gradient, atol=1e-5, err_msg=path)


@pytest.mark.parametrize(
    ("objective", "kind"), [("elbo", gpflow.models.SGPR), ("ep_like", gpflow.models.GPRFITC)]
)
def test_a_gaussian_likelihood_gives_sgpr_and_fitc(objective: str, kind: Any) -> None:
    problem = sparse_problem("gaussian", 60, 9)
    model = problem.model(objective)
    arguments = problem.arguments()
    del arguments["likelihood"], arguments["num_latent_gps"]
    exact = kind(problem.data, noise_variance=0.1, **arguments)
    loss, gradients = loss_and_gradients(model, problem.data)
    expected_loss, expected = loss_and_gradients(exact)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-10)
    assert set(gradients) == set(expected)
    for path, gradient in gradients.items():
        np.testing.assert_allclose(gradient, expected[path], rtol=1e-7, atol=1e-7, err_msg=path)
    for found, other in zip(
        model.predict_f(problem.X[:5]), exact.predict_f(problem.X[:5]), strict=True
    ):
        np.testing.assert_allclose(found, other, rtol=1e-8)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9])
def test_a_gaussian_likelihood_gives_power_ep_of_sparse_regression(alpha: float) -> None:
    """``log N(y; μ, Q + αk̃ + σ²) − (1 − α)/2α Σ log(1 + αk̃/σ²)`` with ``Q = K_fu K_uu⁻¹ K_uf``."""
    problem = sparse_problem("gaussian", 60, 9)
    model = problem.model(alpha)
    Kuu, Kuf, kff = (
        x.numpy()
        for x in (
            model.kernel(problem.Z) + 1e-6 * np.eye(9),
            model.kernel(problem.Z, problem.X),
            model.kernel(problem.X, full_cov=False),
        )
    )
    Q, noise = Kuf.T @ np.linalg.solve(Kuu, Kuf), 0.1
    rest = kff - np.diag(Q)
    mean = model.mean_function(problem.X).numpy()[:, 0]
    expected = stats.multivariate_normal.logpdf(
        problem.Y[:, 0], mean, Q + np.diag(alpha * rest + noise)
    ) - (1.0 - alpha) / (2.0 * alpha) * np.sum(np.log1p(alpha * rest / noise))
    np.testing.assert_allclose(-float(model.training_loss(problem.data)), expected, rtol=1e-9)
    np.testing.assert_allclose(
        model.power_ep_log_marginal(problem.data, alpha), expected, rtol=1e-9
    )


@pytest.mark.parametrize("name", ["probit_bernoulli", "bernoulli_probit", "student_t", "poisson"])
@pytest.mark.parametrize("objective", ["elbo", "ep_like"])
def test_inducing_points_at_the_data_give_the_dense_model(name: str, objective: str) -> None:
    problem = sparse_problem(name, 25)
    arguments = problem.arguments()
    del arguments["inducing_variable"]
    dense = gh.CVIModel(problem.data, **arguments, objective=objective)
    # Only the sparse one has a jitter, of K_uu.
    with gpflow.config.as_context(gpflow.config.Config(jitter=1e-11)):
        sparse = problem.model(objective, inducing_variable=problem.X.copy())
        np.testing.assert_allclose(
            sparse.training_loss(problem.data), dense.training_loss(), rtol=1e-8
        )
        np.testing.assert_allclose(
            sparse.ep_like_log_marginal(problem.data), dense.ep_like_log_marginal(), rtol=1e-7
        )
        for found, expected in zip(
            sparse.predict_f(problem.X[:5]), dense.predict_f(problem.X[:5]), strict=True
        ):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow) if n in ("softmax", "heteroskedastic") else n
        for n in SMOOTH
    ],
)
def test_the_gradient_is_that_of_finite_differences(name: str, alpha: float) -> None:
    problem = sparse_problem(name)
    model = problem.model(alpha)
    _, gradients = loss_and_gradients(model, problem.data)
    rng, h = np.random.default_rng(0), 1e-4
    for path, parameter in gpflow.utilities.parameter_dict(model).items():
        variable = parameter.unconstrained_variable
        if not parameter.trainable:
            continue
        direction = rng.normal(size=variable.shape)
        start, ends = variable.numpy(), []
        for sign in (1.0, -1.0):
            variable.assign(start + sign * h * direction)
            ends.append(float(model.training_loss(problem.data)))
        variable.assign(start)
        difference = (ends[0] - ends[1]) / (2.0 * h)
        np.testing.assert_allclose(
            np.sum(gradients[path] * direction), difference, rtol=1e-5, atol=1e-5, err_msg=path
        )


def test_objectives_can_be_compared_at_one_q() -> None:
    problem = sparse_problem("poisson")
    for objective in ("elbo", 0.4, "ep_like"):
        model = problem.model(objective)
        model.infer(problem.data)
        family = [
            float(model.power_ep_log_marginal(problem.data, a)) for a in (0.0, 1e-4, 0.4, 1.0)
        ]
        assert family == sorted(family)
        np.testing.assert_allclose(family[0], model.elbo(problem.data), rtol=1e-12)
        np.testing.assert_allclose(family[1], family[0], rtol=1e-3)  # continuous at zero
        np.testing.assert_allclose(family[3], model.ep_like_log_marginal(problem.data), rtol=1e-12)


def test_compiled_elbo_is_the_same() -> None:
    problem = sparse_problem("student_t")
    model = problem.model("ep_like")
    model.infer(problem.data)
    for arguments in ({}, {"jit_compile": True}):
        found = tf.function(model.elbo, **arguments)(problem.data)
        np.testing.assert_allclose(found, model.elbo(problem.data), rtol=1e-10)


def test_datasets_of_integers_and_of_nothing() -> None:
    problem = sparse_problem("poisson", 40, 6)
    X, Y = problem.data
    expected = problem.model().training_loss((X, Y))
    dataset = tf.data.Dataset.from_tensor_slices((X, Y.astype(np.int64)))
    np.testing.assert_allclose(problem.model().training_loss(dataset), expected, rtol=1e-10)
    for method in ("elbo", "training_loss"):
        with pytest.raises(gh.InvalidDataError, match="a Dataset with at least one row"):
            getattr(problem.model(), method)(dataset.take(0))


def test_blocks_streams_and_whole_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = sparse_problem("student_t", 700, 8)
    whole = loss_and_gradients(problem.model(), problem.data)
    dataset = tf.data.Dataset.from_tensor_slices(problem.data)
    stream = loss_and_gradients(problem.model(), dataset.batch(170))
    rows = loss_and_gradients(problem.model(), dataset)
    monkeypatch.setattr(tuning, "PROJECTED_ELEMENTS", 1)  # blocks of 256 rows
    blocks = loss_and_gradients(problem.model(), problem.data)
    monkeypatch.setattr(tuning, "KEPT_PROJECTIONS", 0)  # projected again for every sum
    again = loss_and_gradients(problem.model(), problem.data)
    monkeypatch.setattr(tuning, "THREADED_PROJECTIONS", 1000)
    monkeypatch.setattr("gpflow_hybrid.inference.projected_rows.num_threads", lambda: 3)
    threaded = loss_and_gradients(problem.model(), problem.data)
    streamed = loss_and_gradients(problem.model(), dataset.batch(170))
    for other in (stream, rows, blocks, again, threaded, streamed):
        np.testing.assert_allclose(other[0], whole[0], rtol=1e-10)
        for path, gradient in whole[1].items():
            np.testing.assert_allclose(other[1][path], gradient, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("objective", ["elbo", "ep_like"])
def test_estimates_on_batches_are_unbiased(objective: str) -> None:
    """At one q(u), the mean over all batches is the value of all data, and so is the gradient."""
    problem = sparse_problem("probit_bernoulli", 60, 6)
    model = problem.model(objective, num_data=60)
    model.infer(problem.data)
    sites = [x.numpy() for x in model.sites.values]
    power = 0.0 if objective == "elbo" else 1.0
    expected = float(model.power_ep_log_marginal(problem.data, power))
    found, gradients = [], []
    for start in range(0, 60, 15):
        batch = tuple(x[start : start + 15] for x in problem.data)
        model.sites.assign(gh.sites.SiteValues(*sites))
        model.sites.weights.assign(tf.zeros_like(model.sites.weights))
        value, gradient = loss_and_gradients(model, batch)
        found.append(-value)
        gradients.append(gradient)
        assert not np.allclose(model.sites.values.lambda_1, sites[0])  # a step was taken
    np.testing.assert_allclose(np.mean(found), expected, rtol=1e-10)
    if objective == "elbo":
        model.sites.assign(gh.sites.SiteValues(*sites))
        _, full = loss_and_gradients(problem.model("elbo"), problem.data)
        for path, gradient in full.items():
            mean = np.mean([g[path] for g in gradients], axis=0)
            np.testing.assert_allclose(mean, gradient, rtol=1e-4, atol=1e-4, err_msg=path)


@pytest.mark.parametrize("name", ["probit_bernoulli", "student_t"])
def test_a_step_on_a_batch_is_that_of_gpflows_natural_gradient(name: str) -> None:
    problem = sparse_problem(name)
    model = problem.model("elbo", num_data=40)
    model.infer(problem.data)
    arguments = problem.arguments() | {"q_mu": model.q_mu.numpy(), "q_sqrt": model.q_sqrt.numpy()}
    svgp = gpflow.models.SVGP(**arguments, num_data=40)
    for start, lr in ((0, 0.3), (10, None), (20, None)):
        batch = tuple(x[start : start + 10] for x in problem.data)
        # ρ_t = 0.7 √(B/N) (1 + t/50)^−0.75
        gamma = lr or 0.35 * (1.0 + int(model.sites.num_steps) / 50.0) ** -0.75
        model.natgrad_step(batch, lr)
        gpflow.optimizers.NaturalGradient(gamma).minimize(
            svgp.training_loss_closure(batch, compile=False), [(svgp.q_mu, svgp.q_sqrt)]
        )
        np.testing.assert_allclose(model.q_mu, svgp.q_mu, rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(model.q_sqrt, svgp.q_sqrt, rtol=1e-6, atol=1e-8)
    assert int(model.sites.num_steps) == 3


def test_one_step_on_all_data_is_exact_for_a_gaussian() -> None:
    problem = sparse_problem("gaussian")
    model = problem.model("elbo")
    model.natgrad_step(problem.data, lr=1.0)
    expected = float(model.elbo(problem.data))
    assert model.infer(problem.data).num_steps == 0
    np.testing.assert_allclose(model.elbo(problem.data), expected, rtol=1e-10)


def test_separate_kernels_and_inducing_points() -> None:
    problem = sparse_problem("heteroskedastic")
    kernels = [gpflow.kernels.Matern52(lengthscales=s) for s in (0.8, 2.0)]
    points = [gpflow.inducing_variables.InducingPoints(problem.X[i : i + 6].copy()) for i in (0, 6)]
    arguments = {
        "kernel": gpflow.kernels.SeparateIndependent(kernels),
        "inducing_variable": gpflow.inducing_variables.SeparateIndependentInducingVariables(points),
        "mean_function": None,
    }
    model = problem.model("elbo", **arguments)
    assert model.infer(problem.data, tolerance=1e-8).converged
    svgp = gpflow.models.SVGP(
        **(problem.arguments() | arguments), q_mu=model.q_mu.numpy(), q_sqrt=model.q_sqrt.numpy()
    )
    np.testing.assert_allclose(model.elbo(problem.data), svgp.elbo(problem.data), rtol=1e-9)
    gpflow.set_trainable(svgp.q_mu, False)
    gpflow.set_trainable(svgp.q_sqrt, False)
    _, found = loss_and_gradients(model, problem.data)
    _, expected = loss_and_gradients(svgp, problem.data)
    for path, gradient in found.items():
        np.testing.assert_allclose(gradient, expected[path], rtol=1e-4, atol=1e-5, err_msg=path)


def test_a_shared_kernel_takes_plain_points() -> None:
    problem = sparse_problem("softmax", 30, 5)
    shared = gpflow.kernels.SharedIndependent(gpflow.kernels.Matern52(), output_dim=3)
    model = problem.model("elbo", kernel=shared, mean_function=None)
    plain = problem.model("elbo", kernel=gpflow.kernels.Matern52(), mean_function=None)
    np.testing.assert_allclose(
        model.training_loss(problem.data), plain.training_loss(problem.data), rtol=1e-10
    )
    np.testing.assert_allclose(
        model.predict_f(problem.X[:4])[1], plain.predict_f(problem.X[:4])[1], rtol=1e-6
    )


def test_a_likelihood_too_narrow_for_the_inner_rule_is_told() -> None:
    problem = sparse_problem("student_t")
    model = problem.model(likelihood=gpflow.likelihoods.StudentT(scale=0.01))
    found = model.infer(problem.data)
    assert not found.converged
    assert "too coarse" in found.message
    assert problem.model().infer(problem.data).converged


def test_sites_say_the_same_of_u_where_factors_have_changed():
    # exp(λ₁ᵀw − ½ wᵀΛ₂w) with w = L⁻¹u is the same function of u for both factors
    rng = np.random.default_rng(5)
    roots = [rng.normal(size=(4, 4)) for _ in range(3)]
    old, new = (np.linalg.cholesky(R @ R.T + np.eye(4)) for R in roots[:2])
    sites = SummedSites(rng.normal(size=(1, 4)), (roots[2] @ roots[2].T)[None])
    moved = sites.at_other_factors([old], [new])
    u = rng.normal(size=4)

    def log_site(at: SummedSites, L: np.ndarray) -> float:
        w = np.linalg.solve(L, u)
        return float(at.lambda_1[0] @ w - 0.5 * w @ at.lambda_2[0] @ w)

    np.testing.assert_allclose(log_site(moved, new), log_site(sites, old), rtol=1e-12)


def test_inference_starts_from_what_the_sites_say_of_u():
    rng = np.random.default_rng(6)
    X = rng.uniform(-2.0, 2.0, (200, 1))
    Y = (np.sin(3.0 * X) + 0.3 * rng.normal(size=X.shape) > 0.0).astype(float)
    kernel = gpflow.kernels.Matern52(variance=2.0)
    likelihood = gh.likelihoods.ProbitBernoulli()
    model = gh.SparseCVIModel(kernel, likelihood, np.linspace(-2.0, 2.0, 15)[:, None])
    model.infer((X, Y))
    without = copy.deepcopy(model)
    without._inferred_from = Reference()
    counts = []
    for each in (model, without):
        each.kernel.variance.assign(8.0)
        counts.append(each.infer((X, Y)).num_evaluations)
    assert counts[0] < counts[1]
    np.testing.assert_allclose(model.elbo((X, Y)), without.elbo((X, Y)), rtol=1e-10)
