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
# # Ordinal regression
#
# A score $y_n \in \{0, \dots, K\}$ is observed at each input $x_n$: marks, stars, stages of a
# disease. The scores have an order, but the steps between them need not be equal. A function plus
# noise is cut into bins at the edges $a_0 < \dots < a_{K-1}$,
#
# $$f \sim \mathcal{GP}(0, k), \qquad
# p(y_n = j \mid f) = \Phi\left(\frac{a_j - f(x_n)}{\sigma}\right)
# - \Phi\left(\frac{a_{j-1} - f(x_n)}{\sigma}\right),$$
#
# with $a_{-1} = -\infty$ and $a_K = \infty$. The edges are given, $\sigma$ is learnt.

# %%
import gpflow
import matplotlib.pyplot as plt
import numpy as np
from tutorial_tools import compare, shortened

import gpflow_hybrid as gh

# %% [markdown]
# Five scores. The middle bin is the widest one.

# %%
rng = np.random.default_rng(0)
edges = np.array([-1.6, -0.7, 0.7, 1.6])
num_scores = len(edges) + 1


def signal(x):
    return 2.0 * np.sin(x) * np.exp(-0.08 * x)


def sample(num_data):
    X = np.sort(rng.uniform(0.0, 10.0, size=(num_data, 1)), axis=0)
    noisy = signal(X) + 0.3 * rng.normal(size=X.shape)
    return X, np.digitize(noisy, edges).astype(float)


data, test_data = sample(shortened(100, 40)), sample(1000)

# %% [markdown]
# ## GPflow's `Ordinal` and ours
#
# GPflow's `Ordinal` writes the outer edges as $\pm\infty$. Current TensorFlow answers NaN for
# $\mathrm{erf}(\pm\infty)$ in double precision, so that the ELBO of a `VGP` is NaN. Where it is
# not, second derivatives in the outer bins still are, which `CVIModel`'s iteration needs.
# `gh.likelihoods.Ordinal` is the same likelihood with large numbers in place of the infinite
# ones; $\mathrm{erf}$ is $\pm 1$ there to the last digit. Every other value is GPflow's.

# %%
for likelihood in (gpflow.likelihoods.Ordinal(edges), gh.likelihoods.Ordinal(edges)):
    vgp = gpflow.models.VGP(data, gpflow.kernels.Matern52(), likelihood)
    print(f"VGP, {type(likelihood).__module__}.Ordinal: ELBO {vgp.elbo():.4f}")

# %% [markdown]
# A script with GPflow's `Ordinal` need not be changed: `CVIModel` makes the replacement itself.
# The new likelihood shares the parameter $\sigma$ with the old one.

# %%
likelihood = gpflow.likelihoods.Ordinal(edges)
model = gh.CVIModel(data, gpflow.kernels.Matern52(), likelihood)
print(f"{type(model.likelihood)}, shared: {model.likelihood.sigma is likelihood.sigma}")
print(f"ELBO before inference {model.elbo():.4f}, after", end=" ")
model.infer()
print(f"{model.elbo():.4f}")

# %% [markdown]
# Before inference $q$ is the prior, and so is that of the untrained `VGP`: both have the same
# ELBO.
#
# ## The same model in `VGP` and in `CVIModel`
#
# For `VGP` to have a value at all, all three get `gh.likelihoods.Ordinal`.

# %%
models = {
    "VGP": gpflow.models.VGP(data, gpflow.kernels.Matern52(), gh.likelihoods.Ordinal(edges)),
    "CVIModel, ELBO": gh.CVIModel(
        data, gpflow.kernels.Matern52(), gh.likelihoods.Ordinal(edges), objective="elbo"
    ),
    "CVIModel, EP-like": gh.CVIModel(
        data, gpflow.kernels.Matern52(), gh.likelihoods.Ordinal(edges), objective="ep_like"
    ),
}
comparison = compare(models, test_data)
print(comparison)
model = models["CVIModel, EP-like"]
print(f"EP-like fit: ELBO {model.elbo():.4f}, EP-like value {model.ep_like_log_marginal():.4f}")

# %% [markdown]
# All three fits agree. An inner bin holds $f$ from both sides, so the true posterior is close to
# a Gaussian; then the ELBO is close to $\log p(y)$, the EP-like value can add little to it, and
# either objective will do. The gain of `CVIModel` over `VGP` is in what has to be trained: three
# numbers, whatever the number of data.
#
# The probability of each score is what `predict_log_density` says of it. `predict_y` has the mean
# of the score, as if it were a number. The probabilities add up to slightly less than one, with
# GPflow's `Ordinal` as with ours: its $\Phi$ runs from 0.001 to 0.999.

# %%
Xnew = np.linspace(-1.0, 11.0, 200)[:, None]
probability = np.exp(
    [model.predict_log_density((Xnew, np.full_like(Xnew, j))) for j in range(num_scores)]
)

figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, constrained_layout=True)
f_mean, f_var = (moment.numpy()[:, 0] for moment in model.predict_f(Xnew))
spread = 1.96 * np.sqrt(f_var)
top.fill_between(Xnew[:, 0], f_mean - spread, f_mean + spread, alpha=0.2)
top.plot(Xnew, f_mean, linewidth=2, label="CVIModel, EP-like")
top.plot(Xnew, models["VGP"].predict_f(Xnew)[0], "--", label="VGP")
top.plot(Xnew, signal(Xnew), "k:", label="truth")
for edge in edges:
    top.axhline(edge, color="grey", linewidth=0.5)
top.set(ylabel="f", title="Latent function with 95 % band, and the edges")
top.legend(ncols=3)
shades = bottom.pcolormesh(Xnew[:, 0], np.arange(num_scores), probability, cmap="Blues")
bottom.plot(*data, "k|", markersize=12)
bottom.set(xlabel="x", ylabel="score", title="Probability of each score, and the data")
_ = figure.colorbar(shades, ax=bottom, label="probability")
