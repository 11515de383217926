"""Chains over hyperparameters: GPflow's SamplingHelper on our models, and ours."""

from __future__ import annotations

import gpflow
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from scipy.stats import multivariate_normal

import gpflow_hybrid as gh
from gpflow_hybrid.integration.bridge import bridge_sampling
from tests.integration.cases import classifier


def test_gpflows_sampling_helper_in_a_compiled_chain() -> None:
    """As in GPflow's tutorial: the E-step runs inside of ``tfp.mcmc.sample_chain``."""
    model = classifier()
    gpflow.optimizers.Scipy().minimize(model.training_loss, model.trainable_variables)
    helper = gpflow.optimizers.SamplingHelper(
        model.log_posterior_density, model.trainable_parameters
    )
    kernel = tfp.mcmc.HamiltonianMonteCarlo(
        helper.target_log_prob_fn, num_leapfrog_steps=3, step_size=0.4
    )

    @tf.function(reduce_retracing=True)
    def run() -> tuple[list[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
        return tfp.mcmc.sample_chain(
            num_results=60,
            num_burnin_steps=10,
            current_state=helper.current_state,
            kernel=kernel,
            trace_fn=lambda _, results: (
                results.is_accepted,
                results.accepted_results.target_log_prob,
            ),
            seed=1,
        )

    states, (accepted, log_density) = run()
    assert np.mean(accepted) > 0.6
    samples = helper.convert_to_constrained_values(states)
    assert all(np.std(s) > 0.05 for s in samples)
    # What the chain believed of its last state is what the model says there.
    for parameter, values in zip(model.trainable_parameters, samples, strict=True):
        parameter.assign(values[-1])
    jacobian = sum(
        p.transform.forward_log_det_jacobian(p.unconstrained_variable, 0)
        for p in model.trainable_parameters
    )
    np.testing.assert_allclose(log_density[-1], model.log_posterior_density() + jacobian, atol=1e-6)


# While the step size is adapted, a chain may try hyperparameters at which the EP-like value does not exist,
# or so far out that inference does not end.
@pytest.mark.filterwarnings("ignore:A cavity does not exist:gpflow_hybrid.ConvergenceWarning")
@pytest.mark.filterwarnings(
    "ignore:Inference inside the training loss:gpflow_hybrid.ConvergenceWarning"
)
@pytest.mark.slow
def test_chains_of_a_classifier_agree_with_the_lattice() -> None:
    lattice = gh.integrate_hyperparameters(classifier())
    chains = gh.integrate_hyperparameters(
        classifier(), method="hmc", num_chains=2, num_samples=300, num_burnin=80
    )
    assert chains.converged
    assert chains.chains is not None
    for one, two, n in zip(
        lattice.marginals, chains.marginals, chains.chains.effective_sample_size, strict=True
    ):
        assert abs(one.mean - two.mean) < 4.0 * two.deviation / np.sqrt(n)
    assert abs(lattice.log_evidence - chains.log_evidence) < 4.0 * chains.log_evidence_error


@pytest.mark.slow
def test_one_lengthscale_for_each_input_by_chains() -> None:
    """Seven free scalars: chains by default; of six inputs the two that matter have short lengthscales."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 6))
    Y = (np.sin(2.0 * X[:, :1]) + X[:, 1:2] + 0.3 * rng.normal(size=(60, 1)) > 0.0).astype(float)
    kernel = gpflow.kernels.SquaredExponential(lengthscales=np.full(6, 2.0))
    model = gh.CVIModel((X, Y), kernel, gh.likelihoods.ProbitBernoulli())
    found = gh.integrate_hyperparameters(model, num_chains=2, num_samples=150, num_burnin=80)
    assert found.method == "hmc"
    medians = [found[f".kernel.lengthscales[{i}]"].quantiles[0.5] for i in range(6)]
    assert max(medians[:2]) < min(medians[2:])
    assert found.predict_y(X[:3])[0].shape == (3, 1)


def test_the_normaliser_of_a_gaussian_by_bridge_sampling() -> None:
    rng = np.random.default_rng(0)
    A = rng.normal(size=(3, 3))
    density = multivariate_normal(np.arange(3.0), A @ A.T + np.eye(3))
    x = density.rvs(1000, random_state=rng)

    def scaled(v: np.ndarray) -> float:
        return float(density.logpdf(v)) + 4.2

    logs = np.array([scaled(v) for v in x])
    found, error = bridge_sampling(x, logs, scaled, 1000.0, rng)
    assert abs(found - 4.2) < 4.0 * error
    assert error < 0.05
