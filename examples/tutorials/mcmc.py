# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # MCMC over hyperparameters
#
# A fit finds one setting of lengthscale and variance. With thirty labels many others explain the
# data nearly as well, and a prediction should average over them:
#
# $$p(y_* \mid y) = \int p(y_* \mid y, \theta)\, p(\theta \mid y)\, d\theta, \qquad
# p(\theta \mid y) \propto p(y \mid \theta)\, p(\theta).$$
#
# Three ways to do that, on the same data and with the same priors:
#
# - GPflow's `GPMC` samples the latent function and θ together, by Hamiltonian Monte Carlo: right,
#   given time, and as many unknowns as data;
# - GPflow's `SamplingHelper` on a `CVIModel` samples θ alone: f is integrated out by the EP-like
#   estimate of $\log p(y \mid \theta)$, inside every step of the chain;
# - `gh.integrate_hyperparameters` sums over a lattice around the mode of the same density.

# %%
import time

import gpflow
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
from tutorial_tools import compare, shortened

import gpflow_hybrid as gh

rng = np.random.default_rng(5)


def latent(X):
    return 2.0 * np.sin(2.0 * X)


def draw(num_data):
    X = rng.uniform(0.0, 5.0, (num_data, 1))
    return X, (latent(X) + rng.normal(size=X.shape) > 0.0).astype(float)


data, test_data = draw(30), draw(500)


def kernel():
    kernel = gpflow.kernels.SquaredExponential()
    kernel.lengthscales.prior = tfp.distributions.LogNormal(np.float64(0.0), np.float64(0.5))
    kernel.variance.prior = tfp.distributions.LogNormal(np.log(4.0), np.float64(0.7))
    return kernel


# %% [markdown]
# ## The lattice
#
# One call. The result prints the quantiles of every hyperparameter, the evidence of the model
# class, and which priors were assumed: here the model's own; a parameter without one would get a
# weak default.

# %%
seconds, log_samples = {}, {}
model = gh.CVIModel(data, kernel(), gh.likelihoods.ProbitBernoulli())
start = time.perf_counter()
posterior = gh.integrate_hyperparameters(model, progress=False)
seconds["integrate_hyperparameters"] = time.perf_counter() - start
print(posterior)
_ = posterior.plot()

# %% [markdown]
# On the diagonal are the marginals, below them the joint density with the settings of the lattice,
# the larger the more they count. The model itself was left as it was.
#
# ## The chain of GPflow's tutorial
#
# `SamplingHelper` needs a log density and parameters with priors. A `CVIModel` has both:
# `log_posterior_density` infers the sites for whatever θ the chain is at, in the compiled graph, and
# has the exact gradient that Hamiltonian Monte Carlo asks for. Start at a fit.

# %%


def run_chain(model, num_samples, num_burnin, num_leapfrog_steps, step_size):
    """Samples of every parameter, as in GPflow's tutorial."""
    helper = gpflow.optimizers.SamplingHelper(
        model.log_posterior_density, model.trainable_parameters
    )
    hmc = tfp.mcmc.HamiltonianMonteCarlo(
        helper.target_log_prob_fn, num_leapfrog_steps=num_leapfrog_steps, step_size=step_size
    )
    adaptive = tfp.mcmc.SimpleStepSizeAdaptation(
        hmc, num_adaptation_steps=num_burnin, target_accept_prob=np.float64(0.8)
    )

    @tf.function(reduce_retracing=True)
    def run():
        return tfp.mcmc.sample_chain(
            num_results=num_samples,
            num_burnin_steps=num_burnin,
            current_state=helper.current_state,
            kernel=adaptive,
            trace_fn=lambda _, results: results.inner_results.is_accepted,
            seed=1,
        )

    states, accepted = run()
    print(f"accepted {np.mean(accepted):.2f}")
    values = helper.convert_to_constrained_values(states)
    return dict(zip(map(id, model.trainable_parameters), values, strict=True))


def log_hyperparameters(model, samples):
    parameters = model.kernel.lengthscales, model.kernel.variance
    return np.stack([np.log(samples[id(p)]) for p in parameters], axis=1)


start = time.perf_counter()
gh.fit(model, progress=False)
samples = run_chain(model, shortened(1000, 150), shortened(100, 30), 4, 0.3)
seconds["SamplingHelper, CVIModel"] = time.perf_counter() - start
log_samples["SamplingHelper, CVIModel"] = log_hyperparameters(model, samples)

# %% [markdown]
# ## GPMC: the latent function too
#
# `GPMC` keeps $f = L v$ as a parameter, $v \sim \mathcal N(0, I)$. Its samples of θ are from the exact
# posterior, once the chain is long enough.

# %%
sampler = gpflow.models.GPMC(data, kernel(), gh.likelihoods.ProbitBernoulli())
start = time.perf_counter()
gpflow.optimizers.Scipy().minimize(
    sampler.training_loss, sampler.trainable_variables, options={"maxiter": 20}
)
samples = run_chain(sampler, shortened(4000, 800), shortened(300, 100), 10, 0.1)
seconds["GPMC"] = time.perf_counter() - start
log_samples["GPMC"] = log_hyperparameters(sampler, samples)

# %% [markdown]
# ## The same marginals
#
# Samples of a chain depend on each other: the effective sample size says how many independent ones
# they are worth, and so how far their mean may be off.


# %%
def effective_size(samples):
    return np.asarray(tfp.mcmc.effective_sample_size(samples, filter_beyond_positive_pairs=True))


settings = posterior.mixture.values(posterior.draws.x)
log_draws = np.log(
    np.stack([settings[f".kernel.{name}"] for name in ("lengthscales", "variance")], axis=1)
)
weights = posterior.draws.weights
means = {"integrate_hyperparameters": weights @ log_draws}
errors = {"integrate_hyperparameters": np.zeros(2)}
for name, values in log_samples.items():
    means[name] = values.mean(0)
    errors[name] = values.std(0) / np.sqrt(effective_size(values))
print(f"{'':<28}{'seconds':>8}{'mean log ℓ':>18}{'mean log variance':>20}")
for name in seconds:
    cells = [f"{m:.3f} ± {e:.3f}" for m, e in zip(means[name], errors[name], strict=True)]
    print(f"{name:<28}{seconds[name]:>8.1f}{cells[0]:>18}{cells[1]:>20}")

figure, axes = plt.subplots(1, 2, figsize=(10, 3.5), constrained_layout=True)
for i, (axis, name) in enumerate(zip(axes, ("log lengthscale", "log variance"), strict=True)):
    span = np.quantile(log_samples["GPMC"][:, i], [0.0, 1.0])
    bins = np.linspace(*span, 25)
    density = {"bins": bins, "density": True, "histtype": "step", "linewidth": 1.5}
    axis.hist(log_draws[:, i], weights=weights, label="integrate_hyperparameters", **density)
    for label, values in log_samples.items():
        axis.hist(values[:, i], label=label, **density)
    axis.set(xlabel=name, yticks=[])
_ = axes[1].legend(fontsize="small")

# %% [markdown]
# All three agree within the errors of the chains. The EP-like value is that close to
# $\log p(y \mid \theta)$, and the lattice has no error of sampling.
#
# ## What it does to predictions
#
# The result predicts like a model: a mixture over the settings, in GPflow's shapes.

# %%
X_new = np.linspace(-1.0, 6.0, 150)[:, None]
figure, axis = plt.subplots(figsize=(8, 3.5), constrained_layout=True)
axis.plot(
    X_new, gh.likelihoods.ProbitBernoulli().conditional_mean(X_new, latent(X_new)), "k", lw=0.8
)
gh.fit(model, progress=False)
axis.plot(X_new, model.predict_y(X_new)[0], label="at the MAP")
axis.plot(X_new, posterior.predict_y(X_new)[0], label="integrated")
axis.plot(*data, "k|", markersize=14)
axis.set(xlabel="x", ylabel="p(y = 1)")
_ = axis.legend()
for name, predictor in (("at the MAP", model), ("integrated", posterior)):
    density = np.mean(predictor.predict_log_density(test_data))
    print(f"{name}: test log density {density:.4f}")

# %% [markdown]
# Up to three hyperparameters are summed over a lattice, four to six over a design, and more are sampled:
# one lengthscale for each input, for instance, by the No-U-Turn sampler, with several chains, R̂ and
# effective sample sizes in the result. `method="hmc"` asks for that with fewer, too.
#
# ## The same model in `VGP` and in `CVIModel`
#
# What there was to average over: the MAP of each.

# %%
models = {
    "VGP": gpflow.models.VGP(data, kernel(), gh.likelihoods.ProbitBernoulli()),
    "CVIModel, ELBO": gh.CVIModel(
        data, kernel(), gh.likelihoods.ProbitBernoulli(), objective="elbo"
    ),
    "CVIModel, EP-like": gh.CVIModel(data, kernel(), gh.likelihoods.ProbitBernoulli()),
}
comparison = compare(models, test_data)
print(comparison)

# %%
figure, axis = plt.subplots(figsize=(8, 3.5), constrained_layout=True)
for (name, fitted), style in zip(models.items(), ("-", "--", ":"), strict=True):
    axis.plot(X_new, fitted.predict_y(X_new)[0], style, linewidth=2, label=name)
axis.plot(*data, "k|", markersize=14)
axis.set(xlabel="x", ylabel="p(y = 1)", title="MAP of each objective")
_ = axis.legend()
