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
# # Binary classification
#
# A label $y_n \in \{0, 1\}$ is observed at each input $x_n$, and
#
# $$f \sim \mathcal{GP}(0, k), \qquad p(y_n = 1 \mid f) = \Phi(f(x_n)).$$
#
# The posterior of $f$ is not Gaussian. `VGP` approximates it by a Gaussian with a free mean and
# covariance and trains these together with the kernel. `CVIModel` approximates it by the same
# Gaussian, but finds it by an iteration of its own: there is nothing variational to train.
#
# We do one dimension first, where everything can be seen, then the banana data in two.

# %%
import gpflow
import matplotlib.pyplot as plt
import numpy as np
from tutorial_tools import compare, shortened

import gpflow_hybrid as gh

# %% [markdown]
# ## One dimension
#
# Labels of a smooth function that crosses zero a few times, observed through noise.

# %%
rng = np.random.default_rng(0)


def sample(num_data):
    X = rng.uniform(0.0, 6.0, size=(num_data, 1))
    f = 3.0 * np.cos(1.5 * X)
    return X, (f + rng.normal(size=f.shape) > 0.0).astype(float)


X, Y = sample(shortened(50, 25))

# %% [markdown]
# With GPflow one would write `gpflow.models.VGP((X, Y), kernel, likelihood)`. Here only the class
# changes. `gh.likelihoods.ProbitBernoulli` is GPflow's `Bernoulli` without its squeezing of
# probabilities into $[0.001, 0.999]$ and with exact expectations; either works.

# %%
model = gh.CVIModel((X, Y), gpflow.kernels.SquaredExponential(), gh.likelihoods.ProbitBernoulli())
gpflow.optimizers.Scipy().minimize(model.training_loss, model.trainable_variables)
gpflow.utilities.print_summary(model, "simple")

# %% [markdown]
# Two things differ from what `VGP` would print. `sites.lambda_1` and `sites.lambda_2`, two numbers
# per datum, stand where `q_mu` and the $N \times N$ matrix `q_sqrt` stood. And they are not
# trainable: the training loss brings them to their optimum whenever it is evaluated, so the optimiser
# sees the two parameters of the kernel only.
#
# Predictions are made as always. `predict_f` gives the latent function, `predict_y` the probability
# of label 1.

# %%
Xnew = np.linspace(-1.0, 7.0, 200)[:, None]
f_mean, f_var = model.predict_f(Xnew)
probability, _ = model.predict_y(Xnew)
samples = model.predict_f_samples(Xnew, 5)

figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, constrained_layout=True)
top.plot(Xnew, samples[..., 0].numpy().T, color="tab:blue", linewidth=0.7, alpha=0.6)
top.plot(Xnew, f_mean, color="tab:blue", linewidth=2)
spread = 1.96 * np.sqrt(f_var[:, 0])
top.fill_between(Xnew[:, 0], f_mean[:, 0] - spread, f_mean[:, 0] + spread, alpha=0.2)
top.set(ylabel="f", title="Latent function: mean, 95 % band and five samples")
bottom.plot(Xnew, probability, color="tab:orange", label="model")
bottom.plot(X, Y, "k|", markersize=12, label="data")
bottom.set(xlabel="x", ylabel="p(y = 1)", title="Probability of label 1")
_ = bottom.legend()

# %% [markdown]
# ### What is inside
#
# Each datum contributes one unnormalised Gaussian *site* $t_n(f_n) = \exp(\lambda_{1n} f_n - \tfrac12
# \lambda_{2n} f_n^2)$, and $q(f) \propto p(f) \prod_n t_n(f_n)$. `infer()` runs the iteration that finds
# the sites, and says how it went.

# %%
result = model.infer()
print(result)

# %% [markdown]
# From the same sites the model computes two estimates of $\log p(y)$: the ELBO, a lower bound, and the
# EP-like value, which is closer to the truth and is what `CVIModel` trains with unless told otherwise.

# %%
print(f"ELBO    {model.elbo():.4f}")
print(f"EP-like {model.ep_like_log_marginal():.4f}")
print(f"AIS     {gh.annealed_importance_sampling(model, seed=1)}")

# %% [markdown]
# ## Two dimensions: the banana
#
# 400 of the 5300 points of two interleaved classes. Half of them train, the other half test.

# %%
X, Y = gh.datasets.load("banana")
order = np.random.default_rng(1).permutation(len(X))
train_rows, test_rows = np.split(order[: shortened(400, 120)], [shortened(200, 40)])
data, test_data = (X[train_rows], Y[train_rows]), (X[test_rows], Y[test_rows])


def kernel():
    return gpflow.kernels.SquaredExponential(lengthscales=[1.0, 1.0])


# %% [markdown]
# ## The same model in `VGP` and in `CVIModel`
#
# `VGP` has one objective. `CVIModel` has the same one, `objective="elbo"`, and the EP-like one.

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

# %% [markdown]
# Trained with the ELBO, both classes arrive at the same optimum. `VGP` needs longer because its optimiser
# moves 20 300 numbers more for 200 data; `CVIModel`'s moves three in all. The EP-like fit has a lower
# ELBO, which is not what it maximises, and predicts no better here.

# %%
grid = np.linspace(-3.5, 3.5, 60)
mesh = np.stack([g.ravel() for g in np.meshgrid(grid, grid)], axis=-1)
figure, axes = plt.subplots(1, 3, figsize=(12, 4), sharey=True, constrained_layout=True)
for (name, model), axis in zip(models.items(), axes, strict=True):
    probability = model.predict_y(mesh)[0].numpy().reshape(len(grid), len(grid))
    shades = axis.contourf(grid, grid, probability, levels=np.linspace(0, 1, 11), cmap="RdBu_r")
    axis.contour(grid, grid, probability, levels=[0.5], colors="k")
    axis.scatter(*data[0].T, c=data[1][:, 0], cmap="RdBu_r", edgecolors="k", s=14, linewidths=0.5)
    axis.set(title=f"{name}\ntest log density {comparison[name].test_log_density:.3f}")
_ = figure.colorbar(shades, ax=axes, label="p(y = 1)")
