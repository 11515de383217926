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
# # Priors on the parameters, and MAP
#
# A dozen labels say little about the lengthscale and the variance of a kernel. The likelihood of
# these two, maximised, can run to values that nobody believes. A prior $p(\theta)$ on them
# changes what is maximised to
#
# $$\log p(\theta \mid y) = \log p(y \mid \theta) + \log p(\theta) + \text{const},$$
#
# and the maximum is called MAP. `CVIModel` puts one of its estimates of $\log p(y \mid \theta)$
# into the first term: the EP-like one, the ELBO, or a power in between. The prior is attached as
# in GPflow, and `training_loss` takes it in.

# %%
import gpflow
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
from tutorial_tools import compare, shortened

import gpflow_hybrid as gh

# %% [markdown]
# ## Few data
#
# Twelve labels, the sign of a sine with noise. The test data come from the same function.

# %%
rng = np.random.default_rng(1)


def latent(X):
    return 2.5 * np.sin(2.0 * X)


def sample(num_data):
    X = rng.uniform(0.0, 4.0, size=(num_data, 1))
    return X, (latent(X) + rng.normal(size=X.shape) > 0.0).astype(float)


data = sample(12)
test_data = sample(1000)

# %% [markdown]
# ## The prior
#
# Any distribution of TensorFlow Probability will do, with parameters in `float64`, as GPflow's
# parameters are. The median of a log-normal is the exponential of its first argument: here a
# lengthscale around 1 and a variance around 4, give or take factors of $e^{1/2}$ and $e$.


# %%
def kernel(with_priors=True):
    kernel = gpflow.kernels.SquaredExponential()
    if with_priors:
        kernel.lengthscales.prior = tfp.distributions.LogNormal(np.float64(0.0), np.float64(0.5))
        kernel.variance.prior = tfp.distributions.LogNormal(np.log(4.0), np.float64(1.0))
    return kernel


fits = {
    "maximum likelihood": gh.CVIModel(data, kernel(False), gh.likelihoods.ProbitBernoulli()),
    "MAP": gh.CVIModel(data, kernel(), gh.likelihoods.ProbitBernoulli()),
}
for name, model in fits.items():
    gpflow.optimizers.Scipy().minimize(model.training_loss, model.trainable_variables)
    print(f"{name}: test log density {np.mean(model.predict_log_density(test_data)):.3f}")
    gpflow.utilities.print_summary(model.kernel, "simple")

# %% [markdown]
# The lengthscales are alike. The variances are not: without a prior the latent function is scaled
# up until the labels are all but certain. Twelve labels do not support that, and the test log
# density shows it.
#
# ## The surface
#
# `training_loss` infers the sites for whatever the parameters are when it is called. A surface
# over the parameters is a function that assigns them and calls it, and `tf.function` compiles all
# of that. No point needs training of its own.

# %%
model = gh.CVIModel(data, kernel(), gh.likelihoods.ProbitBernoulli())


@tf.function(autograph=False)
def log_densities(lengthscale, variance):
    model.kernel.lengthscales.assign(lengthscale)
    model.kernel.variance.assign(variance)
    log_posterior, log_prior = -model.training_loss(), model.log_prior_density()
    return log_posterior - log_prior, log_posterior


lengthscales = np.geomspace(0.2, 3.0, shortened(25, 7))
variances = np.geomspace(0.3, 1000.0, shortened(25, 7))
grid = [(tf.constant(x), tf.constant(v)) for v in variances for x in lengthscales]
values = np.array([log_densities(*point) for point in grid])
log_likelihood, log_posterior = values.T.reshape(2, len(variances), len(lengthscales))

figure, axes = plt.subplots(1, 2, figsize=(10, 4.5), sharey=True, constrained_layout=True)
surfaces = {
    "EP-like log likelihood": log_likelihood,
    "EP-like log posterior": log_posterior,
}
for axis, (title, surface) in zip(axes, surfaces.items(), strict=True):
    levels = np.linspace(-6.0, 0.0, 13)
    below = surface - surface.max()
    shades = axis.contourf(lengthscales, variances, below, levels=levels, extend="min")
    for (name, fit), marker in zip(fits.items(), ("o", "*"), strict=True):
        place = fit.kernel.lengthscales.numpy(), fit.kernel.variance.numpy()
        axis.plot(*place, marker, color="white", markeredgecolor="black", ms=12, label=name, ls="")
    axis.set(xscale="log", yscale="log", xlabel="lengthscale", title=title)
    axis.set_xticks(ticks := [0.2, 0.5, 1.0, 2.0], ticks)
    axis.minorticks_off()
axes[0].set(ylabel="variance")
axes[0].legend(loc="lower right")
_ = figure.colorbar(shades, ax=axes, label="nats below the maximum")

# %% [markdown]
# The likelihood is a ridge that hardly falls towards large variances: the data rule out small
# ones, and have no opinion beyond. The prior closes the ridge.
#
# What that does to the predictions:

# %%
X_new = np.linspace(-0.5, 4.5, 200)[:, None]
figure, axis = plt.subplots(figsize=(8, 3.5), constrained_layout=True)
truth = gh.likelihoods.ProbitBernoulli().conditional_mean(X_new, latent(X_new))
axis.plot(X_new, truth, color="black", linewidth=0.8, label="truth")
for name, fit in fits.items():
    axis.plot(X_new, fit.predict_y(X_new)[0], label=name)
axis.plot(*data, "k|", markersize=14, label="data")
axis.set(xlabel="x", ylabel="p(y = 1)")
_ = axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))

# %% [markdown]
# ## Every objective
#
# The prior is added outside of the estimate of $\log p(y \mid \theta)$, so it works with each in
# the same way.

# %%
model = fits["MAP"]
for objective in ("elbo", 0.5, "ep_like"):
    model.objective = objective
    estimate, prior = model.maximum_log_likelihood_objective(), model.log_prior_density()
    print(
        f"{objective!s:<8} estimate {estimate:.4f}  log prior {prior:.4f}  "
        f"training loss {model.training_loss():.4f}"
    )

# %% [markdown]
# Three things to know, all of them GPflow's:
#
# - Priors are densities of the parameter itself, not of the optimiser's unconstrained variable.
#   MAP depends on that choice; `Parameter(..., prior_on="unconstrained")` makes the other.
# - `log_prior_density()` counts trainable parameters only. Hold one fixed, and its prior is gone
#   from the loss, which changes by a constant.
# - `elbo()` and `ep_like_log_marginal()` never contain the prior. They estimate $\log p(y \mid
#   \theta)$.
#
# MAP is still one point. Where the ridge is to be integrated over, `model.log_posterior_density`
# is what a sampler asks for.
#
# ## The same model in `VGP` and in `CVIModel`
#
# With the priors, in all three.

# %%
models = {
    "VGP": gpflow.models.VGP(data, kernel(), gh.likelihoods.ProbitBernoulli()),
    "CVIModel, ELBO": gh.CVIModel(
        data, kernel(), gh.likelihoods.ProbitBernoulli(), objective="elbo"
    ),
    "CVIModel, EP-like": gh.CVIModel(
        data, kernel(), gh.likelihoods.ProbitBernoulli(), objective="ep_like"
    ),
}
comparison = compare(models, test_data)
print(comparison)
for name, model in models.items():
    values = model.kernel.lengthscales.numpy(), model.kernel.variance.numpy()
    print(f"{name:<20}lengthscale {values[0]:.4f}, variance {values[1]:.4f}")

# %% [markdown]
# `VGP` and `CVIModel` with the ELBO end at the same MAP. The EP-like MAP has a larger variance,
# since its estimate does not pay for the gap of the bound, which grows with the variance. With
# twelve data the prior decides more than the choice of objective does.

# %%
figure, axis = plt.subplots(figsize=(8, 3.5), constrained_layout=True)
for (name, model), style in zip(models.items(), ("-", "--", ":"), strict=True):
    axis.plot(X_new, model.predict_y(X_new)[0], style, linewidth=2, label=name)
axis.plot(*data, "k|", markersize=14, label="data")
axis.set(xlabel="x", ylabel="p(y = 1)", title="MAP of each objective")
_ = axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
