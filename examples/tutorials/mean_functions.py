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
# # Mean functions
#
# Away from the data a Gaussian process returns to its prior mean. Unless told otherwise that mean
# is zero, which for a count with an exponential link says: far away, one event per observation. A
# mean function $m$ says something else, and its parameters are learnt along with the kernel:
#
# $$f \sim \mathcal{GP}(m, k), \qquad m(x) = a x + b, \qquad y_n \mid f \sim
# \operatorname{Poisson}\bigl(\exp f(x_n)\bigr).$$
#
# With `GPR` the mean function can be subtracted from the observations. Here it cannot: the counts
# are not $f$ plus something. It is a part of the prior, and inference has to know it.

# %%
import gpflow
import matplotlib.pyplot as plt
import numpy as np
from tutorial_tools import compare, shortened

import gpflow_hybrid as gh

# %% [markdown]
# ## Counts with a trend
#
# The log rate climbs in a straight line and swings around it. Training data end at $x = 6$. The
# test data go on to $x = 9$.

# %%
rng = np.random.default_rng(4)


def log_rate(X):
    return 0.4 * X + 0.6 * np.sin(2.5 * X)


X = np.sort(rng.uniform(0.0, 6.0, size=(shortened(80, 30), 1)), axis=0)
X_test = rng.uniform(6.0, 9.0, size=(60, 1))
data = X, rng.poisson(np.exp(log_rate(X))).astype(float)
test_data = X_test, rng.poisson(np.exp(log_rate(X_test))).astype(float)

# %% [markdown]
# ## Three mean functions
#
# `CVIModel` takes `mean_function` where `VGP` does. `Linear` begins with slope one unless told
# otherwise, so the slope is set to zero here: all three fits then start from the same model.


# %%
def make(mean_function, **options):
    kernel = gpflow.kernels.SquaredExponential()
    likelihood = gpflow.likelihoods.Poisson()
    return gh.CVIModel(data, kernel, likelihood, mean_function, **options)


def line():
    return gpflow.mean_functions.Linear(A=[[0.0]], b=[0.0])


fits = {
    "zero": make(None),
    "constant": make(gpflow.mean_functions.Constant(np.zeros(1))),
    "linear": make(line()),
}
print(f"{'mean':<10}{'lengthscale':>12}{'variance':>10}{'EP-like':>10}{'test log density':>18}")
extrapolation = {}
for name, model in fits.items():
    gpflow.optimizers.Scipy().minimize(model.training_loss, model.trainable_variables)
    extrapolation[name] = np.mean(model.predict_log_density(test_data))
    lengthscale, variance = model.kernel.lengthscales.numpy(), model.kernel.variance.numpy()
    print(
        f"{name:<10}{lengthscale:>12.3f}{variance:>10.3f}"
        f"{model.ep_like_log_marginal():>10.3f}{extrapolation[name]:>18.3f}"
    )

# %% [markdown]
# The kernel's variance falls with every mean function that is put in front of it: what the mean
# explains, the kernel need not. The objective rises each time, and so does the test log density.
# The learnt line climbs as the one behind the data does. It need not be the same line: a few
# swings leave room for more than one.

# %%
gpflow.utilities.print_summary(fits["linear"], "simple")

# %% [markdown]
# Among the data the three agree. Beyond them, each goes to its own mean at the speed of its own
# lengthscale. The band is that of $f$, on the scale of the rate.

# %%
X_new = np.linspace(-1.0, 9.5, 200)[:, None]
figure, axes = plt.subplots(3, 1, figsize=(8, 8), sharex=True, sharey=True, constrained_layout=True)
for axis, (name, model) in zip(axes, fits.items(), strict=True):
    mean, variance = (moment.numpy()[:, 0] for moment in model.predict_f(X_new))
    spread = 1.96 * np.sqrt(variance)
    axis.fill_between(X_new[:, 0], np.exp(mean - spread), np.exp(mean + spread), alpha=0.2)
    axis.plot(X_new, np.exp(mean), color="tab:blue", label="posterior median of the rate")
    axis.plot(X_new, np.exp(model.mean_function(X_new)), "--", color="tab:red", label="exp(m)")
    axis.plot(X_new, np.exp(log_rate(X_new)), color="black", linewidth=0.8, label="true rate")
    axis.plot(*data, "k|", markersize=7, label="training data")
    axis.plot(*test_data, "+", color="tab:green", markersize=6, label="test data")
    title = f"Mean function: {name}. Test log density {extrapolation[name]:.2f}"
    axis.set(ylim=(-2.0, 75.0), ylabel="count", title=title)
axes[0].legend(loc="upper left", ncols=2, fontsize=8)
_ = axes[-1].set(xlabel="x")

# %% [markdown]
# A mean function is not safe in itself. Its slope is one number, found by optimisation, and the
# model is not in doubt about it: the band at $x = 9$ is as wide as the kernel's prior, wherever
# the line has gone. Where the trend itself is uncertain, put it into the kernel
# (`gpflow.kernels.Linear() + gpflow.kernels.Constant() + ...`), which integrates over lines.
#
# Everything that holds for GPflow's parameters holds here:
# `gpflow.set_trainable(model.mean_function.b, False)` holds the intercept, a prior may sit on the
# slope, and several latent functions take an `A` of shape `[D, L]`. The training loss has the
# exact gradient in all of them. The mean moves the prior, the prior moves $q(f)$, and the
# gradient contains both.
#
# ## The same model in `VGP` and in `CVIModel`
#
# With the linear mean.

# %%
models = {
    "VGP": gpflow.models.VGP(
        data, gpflow.kernels.SquaredExponential(), gpflow.likelihoods.Poisson(), line()
    ),
    "CVIModel, ELBO": make(line(), objective="elbo"),
    "CVIModel, EP-like": make(line(), objective="ep_like"),
}
comparison = compare(models, test_data)
print(comparison)
for name, model in models.items():
    slope, intercept = model.mean_function.A.numpy().item(), model.mean_function.b.numpy().item()
    print(f"{name:<20}slope {slope:.4f}, intercept {intercept:.4f}")

# %% [markdown]
# All three learn the same line to the digits that matter. A count of ten says a lot about its
# rate, so that the posterior of $f$ is nearly Gaussian, the ELBO nearly tight, and the EP-like
# objective has little left to correct. What is left of the difference is in the work: `VGP` moves
# its variational mean and covariance through the optimiser along with the line, `CVIModel` the
# line and the kernel alone.

# %%
figure, axis = plt.subplots(figsize=(8, 3.5), constrained_layout=True)
for (name, model), style in zip(models.items(), ("-", "--", ":"), strict=True):
    axis.plot(X_new, np.exp(model.predict_f(X_new)[0]), style, linewidth=2, label=name)
axis.plot(*data, "k|", markersize=7, label="training data")
axis.set(xlabel="x", ylabel="count", title="Posterior median of the rate")
_ = axis.legend()
