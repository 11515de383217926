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
# # Heteroskedastic noise
#
# The noise of the data varies with the input. One function is the mean, another one the logarithm
# of the noise's scale,
#
# $$f_1 \sim \mathcal{GP}(0, k_1), \qquad f_2 \sim \mathcal{GP}(0, k_2), \qquad
# y_n = f_1(x_n) + e^{f_2(x_n)} \epsilon_n, \qquad \epsilon_n \sim \mathcal{N}(0, 1).$$
#
# The likelihood is `HeteroskedasticTFPConditional`. It reads two latent GPs for one column of
# data.

# %%
import gpflow
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from tutorial_tools import compare, fit, shortened

import gpflow_hybrid as gh

# %% [markdown]
# The mean oscillates, the noise changes slowly: two functions with different lengthscales.

# %%
rng = np.random.default_rng(0)


def mean(x):
    return 2.0 * np.sin(2.5 * x)


def scale(x):
    return np.exp(-1.0 + 1.2 * np.cos(0.6 * x))


def sample(num_data):
    X = np.sort(rng.uniform(0.0, 10.0, size=(num_data, 1)), axis=0)
    return X, mean(X) + scale(X) * rng.normal(size=X.shape)


data, test_data = sample(shortened(80, 40)), sample(1000)

# %% [markdown]
# ## A kernel for each function
#
# `SeparateIndependent` holds one kernel per latent GP. `VGP` cannot use it: it expects one
# $N \times N$ matrix from the kernel, and gets something of another shape.


# %%
def separate_kernels():
    return gpflow.kernels.SeparateIndependent(
        [gpflow.kernels.SquaredExponential(), gpflow.kernels.SquaredExponential()]
    )


def likelihood():
    return gpflow.likelihoods.HeteroskedasticTFPConditional()


vgp = gpflow.models.VGP(data, separate_kernels(), likelihood(), num_latent_gps=2)
failure = None
try:
    vgp.elbo()
except tf.errors.InvalidArgumentError as error:
    failure = error
print(f"VGP: {type(failure).__name__}")

# %% [markdown]
# In GPflow the way out is `SVGP` with inducing points. `CVIModel` takes the kernels as they are,
# without inducing points, and sees from the likelihood that there are two latent GPs.

# %%
separate = gh.CVIModel(data, separate_kernels(), likelihood())
fit(separate)
gpflow.utilities.print_summary(separate, "simple")

# %% [markdown]
# `predict_f` gives both functions, `predict_y` the mean of an observation and its variance, noise
# included.

# %%
Xnew = np.linspace(0.0, 10.0, 200)[:, None]
f_mean, f_var = (moment.numpy() for moment in separate.predict_f(Xnew))
y_mean, y_var = (moment.numpy()[:, 0] for moment in separate.predict_y(Xnew))

figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, constrained_layout=True)
spread = 1.96 * np.sqrt(y_var)
top.fill_between(Xnew[:, 0], y_mean - spread, y_mean + spread, alpha=0.2, label="95 % band of y")
top.plot(Xnew, y_mean, label="predicted mean")
top.plot(Xnew, mean(Xnew), "k:", label="true mean")
top.plot(*data, "k.", markersize=4, label="data")
top.set(ylabel="y", title="Observations")
top.legend(ncols=2, fontsize="small")
spread = 1.96 * np.sqrt(f_var[:, 1])
low, high = (np.exp(f_mean[:, 1] + sign * spread) for sign in (-1.0, 1.0))
bottom.fill_between(Xnew[:, 0], low, high, color="tab:orange", alpha=0.2, label="95 % band")
bottom.plot(Xnew, np.exp(f_mean[:, 1]), color="tab:orange", label="median of the scale")
bottom.plot(Xnew, scale(Xnew), "k:", label="true scale")
bottom.set(xlabel="x", ylabel="scale of the noise", yscale="log", title="Noise")
_ = bottom.legend(fontsize="small")

# %% [markdown]
# ## The same model in `VGP` and in `CVIModel`
#
# With one kernel for both functions `VGP` can do it too. It has to be told how many latent GPs
# there are, and it has to be trained with care. L-BFGS from the usual start moves $q$ and the
# kernel together. While $q$ is still poor, the quickest gain is to explain everything by noise:

# %%
plain = gpflow.models.VGP(data, gpflow.kernels.SquaredExponential(), likelihood(), num_latent_gps=2)
fit(plain)
print(f"VGP, trained at once: ELBO {plain.elbo():.4f}")

# %% [markdown]
# From there it does not come back. For the comparison `VGP` is trained in two stages, $q$ first
# and then all of it. `CVIModel` needs no such help: its $q$ is the best one for every kernel that
# the optimiser tries.


# %%
def fit_in_stages(model):
    if isinstance(model, gpflow.models.VGP):
        gpflow.set_trainable(model.kernel, False)
        fit(model)
        gpflow.set_trainable(model.kernel, True)
    fit(model)


models = {
    "VGP": gpflow.models.VGP(
        data, gpflow.kernels.SquaredExponential(), likelihood(), num_latent_gps=2
    ),
    "CVIModel, ELBO": gh.CVIModel(
        data, gpflow.kernels.SquaredExponential(), likelihood(), objective="elbo"
    ),
    "CVIModel, EP-like": gh.CVIModel(
        data, gpflow.kernels.SquaredExponential(), likelihood(), objective="ep_like"
    ),
}
comparison = compare(models, test_data, train=fit_in_stages)
print(comparison)
separate_density = np.mean(separate.predict_log_density(test_data))
print(f"CVIModel with separate kernels, EP-like: test log density {separate_density:.4f}")

# %% [markdown]
# Trained with the ELBO, `VGP` in stages and `CVIModel` at once arrive at the same optimum. The
# EP-like objective does not help here: its fit predicts slightly worse than the ELBO's. What
# helps is a kernel for each function. The shared one has to take the short lengthscale of the
# mean, and then the noise wiggles too; with its own kernel it is smooth, and the test log density
# is higher.

# %%
figure, axis = plt.subplots(figsize=(8, 3.5), constrained_layout=True)
curves = {"VGP": "-", "CVIModel, ELBO": "--", "CVIModel, EP-like": ":"}
for name, style in curves.items():
    f_mean, _ = models[name].predict_f(Xnew)
    axis.plot(Xnew, np.exp(f_mean[:, 1]), style, linewidth=2, label=name)
f_mean, _ = separate.predict_f(Xnew)
axis.plot(Xnew, np.exp(f_mean[:, 1]), label="CVIModel, separate kernels")
axis.plot(Xnew, scale(Xnew), "k", linewidth=0.8, label="truth")
axis.set(xlabel="x", ylabel="scale of the noise", yscale="log")
_ = axis.legend(fontsize="small")
