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
# # Other likelihoods: counts, positive data, heavy tails
#
# A likelihood says how an observation comes about once the function is known,
#
# $$f \sim \mathcal{GP}(m, k), \qquad y_n \sim p(y_n \mid f(x_n)).$$
#
# `CVIModel` takes every likelihood of GPflow as it is. Three of them follow. The first two are
# short; the last one, Student's t, is where `VGP` and `CVIModel` are set side by side.

# %%
import gpflow
import matplotlib.pyplot as plt
import numpy as np
from tutorial_tools import compare, fit, shortened

import gpflow_hybrid as gh

rng = np.random.default_rng(1)

# %% [markdown]
# ## Counts
#
# With `Poisson`, $y_n$ is a count whose rate is $e^{f(x_n)}$. The data are events per bin of a
# process with a varying rate. A constant mean function takes up the overall level, so that the
# kernel need not.

# %%
X = np.linspace(0.0, 10.0, shortened(80, 30))[:, None]


def rate(x):
    return np.exp(1.0 + np.sin(1.2 * x) - 0.1 * x)


Y = rng.poisson(rate(X)).astype(float)

counts = gh.CVIModel(
    (X, Y),
    gpflow.kernels.SquaredExponential(),
    gpflow.likelihoods.Poisson(),
    mean_function=gpflow.mean_functions.Constant(),
)
fit(counts)
print(f"ELBO {counts.elbo():.4f}, EP-like value {counts.ep_like_log_marginal():.4f}")

# %% [markdown]
# `fit` is L-BFGS on `training_loss`, as for any model of GPflow; the tutorials share it. The ELBO
# is exact here: GPflow has the Poisson's expected log density in closed form. The EP-like value is
# an integral over each $f_n$, done with a fixed rule.
#
# ## Positive data
#
# With `Gamma`, $y_n$ has the mean $\alpha e^{f(x_n)}$ and a standard deviation proportional to
# it. The shape $\alpha$ is a parameter of the likelihood. It is trained with the kernel, and its
# gradient accounts for the sites that move with it.


# %%
def scale(x):
    return np.exp(0.7 * np.cos(x))


Y = rng.gamma(4.0, scale(X))

positive = gh.CVIModel(
    (X, Y), gpflow.kernels.SquaredExponential(), gpflow.likelihoods.Gamma(shape=1.0)
)
fit(positive)
gpflow.utilities.print_summary(positive, "simple")

# %% [markdown]
# In both models the expected observation is proportional to $e^f$. Its uncertainty is that of
# $f$, transformed; `predict_y` gives its mean, and the variance of a new observation.

# %%
Xnew = np.linspace(-0.5, 10.5, 200)[:, None]
figure, axes = plt.subplots(2, 1, figsize=(8, 6), sharex=True, constrained_layout=True)
for axis, model, factor, truth, title in (
    (axes[0], counts, 1.0, rate(Xnew), "Poisson: counts and their rate"),
    (axes[1], positive, positive.likelihood.shape, 4.0 * scale(Xnew), "Gamma: data and their mean"),
):
    f_mean, f_var = (moment.numpy()[:, 0] for moment in model.predict_f(Xnew))
    spread = 1.96 * np.sqrt(f_var)
    low, high = (factor * np.exp(f_mean + sign * spread) for sign in (-1.0, 1.0))
    axis.fill_between(Xnew[:, 0], low, high, alpha=0.2, label="95 % band")
    axis.plot(Xnew, model.predict_y(Xnew)[0], color="tab:blue", label="predicted mean")
    axis.plot(Xnew, truth, "--", color="tab:orange", label="truth")
    axis.plot(*model.data, "k.", markersize=4, label="data")
    axis.set(ylabel="y", title=title)
axes[0].legend(ncols=2)
_ = axes[1].set(xlabel="x")

# %% [markdown]
# ## Heavy tails
#
# `StudentT` is for data with outliers: $y_n = f(x_n) + \sigma \epsilon_n$, where $\epsilon_n$ has
# a t distribution with a few degrees of freedom. Its density falls so slowly that one datum far
# away hardly moves $f$. The noise here is wilder still than the likelihood assumes: 1.5 degrees
# of freedom instead of 4.


# %%
def sample(num_data):
    X = np.sort(rng.uniform(0.0, 10.0, size=(num_data, 1)), axis=0)
    return X, signal(X) + 0.15 * rng.standard_t(1.5, size=X.shape)


def signal(x):
    return np.sin(1.5 * x) + 0.1 * x


data, test_data = sample(shortened(100, 40)), sample(500)

# %% [markdown]
# The logarithm of this density is not concave. Away from its centre it curves upwards, and the
# best Gaussian site of a datum that lies there has $\lambda_2 < 0$: the datum makes $f$ *less*
# certain. `CVIModel` keeps the sign, because without it the optimum would be another one than
# `VGP`'s.
#
# ## The same model in `VGP` and in `CVIModel`

# %%
models = {
    "VGP": gpflow.models.VGP(
        data, gpflow.kernels.Matern52(), gpflow.likelihoods.StudentT(scale=0.5, df=4.0)
    ),
    "CVIModel, ELBO": gh.CVIModel(
        data,
        gpflow.kernels.Matern52(),
        gpflow.likelihoods.StudentT(scale=0.5, df=4.0),
        objective="elbo",
    ),
    "CVIModel, EP-like": gh.CVIModel(
        data,
        gpflow.kernels.Matern52(),
        gpflow.likelihoods.StudentT(scale=0.5, df=4.0),
        objective="ep_like",
    ),
}
comparison = compare(models, test_data)
print(comparison)

# %% [markdown]
# For scale, the same kernel with Gaussian noise:

# %%
gaussian = gpflow.models.GPR(data, gpflow.kernels.Matern52())
fit(gaussian)
print(f"GPR, test log density {np.mean(gaussian.predict_log_density(test_data)):.4f}")

# %% [markdown]
# All three fits with Student's t agree, and predict better than the one with Gaussian noise. The
# EP-like objective gains nothing here: each $f_n$ is known well against the noise, its posterior
# is close to a Gaussian, and the two estimates of $\log p(y)$ all but coincide. Nor is time an
# argument: with so few data most of it goes into TensorFlow's tracing. What remains is the size
# of $q$, two numbers per datum, and that these two can be read. The lower panel shows
# $\lambda_2$: the data with negative sites are those that the model takes for outliers.

# %%
model = models["CVIModel, EP-like"]
X, Y = data
lambda_2 = model.sites.lambda_2.numpy()[:, 0]
outlier = lambda_2 < 0.0
print(f"{outlier.sum()} of {len(X)} sites are negative")

figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, constrained_layout=True)
styles = {"VGP": "-", "CVIModel, EP-like": "--"}
for name, style in styles.items():
    top.plot(Xnew, models[name].predict_f(Xnew)[0], style, linewidth=2, label=name)
top.plot(Xnew, gaussian.predict_f(Xnew)[0], color="tab:green", label="GPR")
top.plot(Xnew, signal(Xnew), "k:", label="truth")
for axis, values in ((top, Y[:, 0]), (bottom, lambda_2)):
    axis.plot(X[~outlier, 0], values[~outlier], "k.", markersize=5, label="data")
    axis.plot(X[outlier, 0], values[outlier], "rx", label=r"data with $\lambda_2 < 0$")
top.set(ylim=(-3.0, 4.0), ylabel="y", title="Mean of f (some data lie outside)")
top.legend(ncols=3, fontsize="small")
bottom.axhline(0.0, color="k", linewidth=0.5)
_ = bottom.set(xlabel="x", ylabel=r"$\lambda_2$", title="Precision of the sites")
