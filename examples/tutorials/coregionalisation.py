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
# # Coregionalisation
#
# Two related quantities are measured at different places, with outliers. Output $i$ has a latent
# function $f_i(x)$, and
#
# $$\operatorname{cov}(f_i(x), f_j(x')) = B_{ij}\, k(x, x'), \qquad
# B = WW^\top + \operatorname{diag}(\kappa), \qquad
# y_n \mid f \sim \text{Student-}t_3(f_{i_n}(x_n), \sigma_{i_n}).$$
#
# The off-diagonal element of $B$ lets one output learn from the other. The heavy tails of the
# Student-t density let the model disbelieve single observations; each output has a scale $\sigma_i$
# of its own.

# %%
import copy

import gpflow
import matplotlib.pyplot as plt
import numpy as np
from tutorial_tools import compare, shortened

import gpflow_hybrid as gh

# %% [markdown]
# ## Data
#
# The first output is observed from 0 to 10, the second only up to 6. One observation in ten is off
# by a large error. The output's index is the last column of `X`, where the kernel looks for it, and
# the last column of `Y`, where the likelihood does. So both outputs are one data set with one
# latent GP.

# %%
rng = np.random.default_rng(0)
truth = [lambda x: 2.0 * np.sin(x), lambda x: -1.5 * np.sin(x) + 0.3 * np.cos(2.3 * x)]
noise = [0.3, 0.1]


def observe(output, num_data, upto, outliers=0.1):
    x = rng.uniform(0.0, upto, size=(num_data, 1))
    y = truth[output](x) + noise[output] * rng.normal(size=x.shape)
    y += (rng.uniform(size=x.shape) < outliers) * rng.normal(scale=2.5, size=x.shape)
    index = np.full_like(x, output)
    return np.hstack([x, index]), np.hstack([y, index])


def both(*observed):
    return tuple(np.vstack(part) for part in zip(*observed, strict=True))


data = both(observe(0, shortened(50, 30), 10.0), observe(1, shortened(30, 20), 6.0))
test_data = both(observe(0, 200, 10.0), observe(1, 200, 10.0))

# %% [markdown]
# ## The model
#
# The kernel is a product of one on the input and `Coregion` on the index. The variance of the first
# would only scale $B$, so it stays at one. `SwitchedLikelihood` takes one likelihood per output.
# None of this is particular to `CVIModel`.


# %%
def kernel():
    base = gpflow.kernels.SquaredExponential(active_dims=[0])
    gpflow.set_trainable(base.variance, False)
    return base * gpflow.kernels.Coregion(output_dim=2, rank=1, active_dims=[1])


def likelihood():
    return gpflow.likelihoods.SwitchedLikelihood(
        [gpflow.likelihoods.StudentT(scale=0.3), gpflow.likelihoods.StudentT(scale=0.3)]
    )


# %% [markdown]
# ## The same model in `VGP` and in `CVIModel`
#
# With the same arguments. `compare` calls `gpflow.optimizers.Scipy().minimize(model.training_loss,
# model.trainable_variables)` for each.

# %%
models = {
    "VGP": gpflow.models.VGP(data, kernel(), likelihood()),
    "CVIModel, ELBO": gh.CVIModel(data, kernel(), likelihood(), objective="elbo"),
    "CVIModel, EP-like": gh.CVIModel(data, kernel(), likelihood(), objective="ep_like"),
}
comparison = compare(models, test_data)
print(comparison)

# %% [markdown]
# The ELBO has the same optimum in both classes, and here the EP-like fit is next to it: on these
# data the two objectives hardly differ. `CVIModel` brings no speed either. With so few data its
# time is that of TensorFlow's tracing, and two likelihoods with quadrature make a large graph; an
# evaluation of the loss takes milliseconds.
#
# $W$ and $\kappa$ are four numbers and $B$ has three, so compare $B$.

# %%
for name, model in models.items():
    base, coregion = model.kernel.kernels
    scales = [float(part.scale.numpy()) for part in model.likelihood.likelihoods]
    B = coregion.output_covariance().numpy()
    print(
        f"{name:<20}B = {B[0].round(2)} {B[1].round(2)}  "
        f"lengthscale {base.lengthscales.numpy():.3f}  scales {scales[0]:.3f}, {scales[1]:.3f}"
    )

# %% [markdown]
# ### What the outliers do to the sites
#
# A Student-t density is not log-concave. Where an observation is far from what the others say, its
# site has a negative precision $\lambda_2$: the datum makes $q(f)$ wider, not narrower. `CVIModel`
# treats such sites exactly.

# %%
model = models["CVIModel, EP-like"]
negative = model.sites.lambda_2.numpy()[:, 0] < 0.0
print(f"{np.sum(negative)} of {len(negative)} sites are negative.")

# %% [markdown]
# ### What the coupling is worth
#
# Remove the off-diagonal element of $B$ from a copy of the model and infer again. Only the second
# output beyond 6 should change much.

# %%
uncoupled = copy.deepcopy(model)
coregion = uncoupled.kernel.kernels[1]
variances = coregion.output_variance()
coregion.W.assign(np.zeros((2, 1)))
coregion.kappa.assign(variances)
uncoupled.infer()

grid = np.linspace(0.0, 10.0, 200)[:, None]
figure, axes = plt.subplots(2, 1, figsize=(8, 7), sharex=True, constrained_layout=True)
for output, axis in enumerate(axes):
    Xnew = np.hstack([grid, np.full_like(grid, output)])
    for name, fitted, colour in (("uncoupled", uncoupled, "tab:grey"), ("coupled", model, "C0")):
        mean, variance = (part[:, 0] for part in fitted.predict_f(Xnew))
        spread = 1.96 * np.sqrt(variance)
        axis.plot(grid, mean, color=colour, label=f"{name}, mean and 95 % band of f")
        axis.fill_between(grid[:, 0], mean - spread, mean + spread, color=colour, alpha=0.25)
    axis.plot(grid, truth[output](grid), "k--", linewidth=1, label="truth")
    for rows, marker, label in (
        (~negative, "k.", "data"),
        (negative, "rx", r"data, $\lambda_2 < 0$"),
    ):
        rows = rows & (data[0][:, 1] == output)
        axis.plot(data[0][rows, 0], data[1][rows, 0], marker, label=label)
    axis.set(ylabel="y", title=f"Output {output}")
axes[0].legend(fontsize="small", ncols=2, loc="upper right")
_ = axes[1].set(xlabel="x")

# %% [markdown]
# Beyond 6 the uncoupled second output returns to the prior. The coupled one follows the first
# output, with a band for the part that the first does not determine.
