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
# # From paper to practice
#
# The package rests on one idea of Li, John and Solin (*Towards Improved Learning in Gaussian Processes:
# The Best of Two Worlds*): variational inference is good at finding $q(f)$, but its bound is not the
# best function to choose hyperparameters with. So infer with the one and learn with the other. This page
# shows the idea in pictures, then what the package does differently from the paper, and why.

# %%
import gpflow
import matplotlib.pyplot as plt
import numpy as np
from tutorial_tools import compare, shortened

import gpflow_hybrid as gh

# %% [markdown]
# ## Surfaces
#
# Sonar: 208 echoes, 60 features, rock or metal. With a Matérn-5/2 kernel there are two hyperparameters, a
# lengthscale $\ell$ and a magnitude $\sigma$, so that every objective is a surface that can be drawn.

# %%
X, Y = gh.datasets.load("sonar")
train_rows, test_rows = next(gh.datasets.folds(len(X)))
train_rows = train_rows[:: shortened(1, 4)]
X_train, X_test = gh.datasets.standardise(X[train_rows], X[test_rows])
data, test_data = (X_train, Y[train_rows]), (X_test, Y[test_rows])


def make_model(objective="ep_like"):
    return gh.CVIModel(
        data, gpflow.kernels.Matern52(), gh.likelihoods.ProbitBernoulli(), objective=objective
    )


# %% [markdown]
# At each point of a grid $q(f)$ is inferred once, and both objectives are computed from the same sites:
# the ELBO and the EP-like value. The density of held-out data, which no training can see, is what they
# are for. The truth is affordable as well: annealed importance sampling estimates $\log p(y)$ for a whole
# grid in one call.

# %%
log_lengthscales = np.linspace(0.0, 4.0, shortened(10, 4))
log_sigmas = np.linspace(-1.0, 5.0, shortened(10, 4))
lengthscales, variances = np.exp(log_lengthscales), np.exp(2.0 * log_sigmas)

model = make_model()
elbo, ep_like, density = (np.empty((len(lengthscales), len(variances))) for _ in range(3))
for i, lengthscale in enumerate(lengthscales):
    model.kernel.lengthscales.assign(lengthscale)
    for j, variance in enumerate(variances):
        model.kernel.variance.assign(variance)
        model.infer()
        elbo[i, j] = model.elbo()
        ep_like[i, j] = model.ep_like_log_marginal()
        density[i, j] = np.mean(model.predict_log_density(test_data))

settings = gh.evidence.grid({".kernel.lengthscales": lengthscales, ".kernel.variance": variances})
sampled = gh.annealed_importance_sampling(
    model, hyperparameters=settings, num_temperatures=shortened(40, 20), num_chains=16, seed=0
)
truth = sampled.log_marginal_likelihood.reshape(elbo.shape)


# %%
def draw_surface(axis, values, top, title):
    """Contours from ``top`` to 0.4 below it, and a cross at the best value."""
    levels = top - 0.4 * np.linspace(1, 0, 13)
    shades = axis.contourf(log_lengthscales, log_sigmas, values.T, levels, extend="min")
    i, j = np.unravel_index(np.argmax(values), values.shape)
    axis.plot(log_lengthscales[i], log_sigmas[j], "kx", markersize=10, markeredgewidth=2)
    axis.set(title=f"{title}\nheld-out density at the cross {density[i, j]:.3f}")
    return shades


surfaces = {
    name: values / len(X_train)
    for name, values in {"ELBO": elbo, "EP-like": ep_like, "log p(y), sampled": truth}.items()
}
top = max(values.max() for values in surfaces.values())
figure, axes = plt.subplots(2, 2, figsize=(9, 8), sharex=True, sharey=True, constrained_layout=True)
for axis, (title, values) in zip(axes.flat[:3], surfaces.items(), strict=True):
    shades = draw_surface(axis, values, top, title)
figure.colorbar(shades, ax=axes[0], label="log p(y), nats per datum")
shades = draw_surface(axes[1, 1], density, density.max(), "density of held-out data")
figure.colorbar(shades, ax=axes[1], label="held-out density, nats per datum")
for axis in axes[1]:
    axis.set_xlabel("log ℓ")
for axis in axes[:, 0]:
    axis.set_ylabel("log σ")

# %% [markdown]
# The ELBO falls away where $\sigma$ is large, because a Gaussian is a poor picture of the skewed
# posterior there and the bound pays for it. Its optimum lies at a smaller $\sigma$ than that of the
# sampled surface. The EP-like value, made from the same sites, follows the sampled one closely. Its
# optimum, too, lies at a smaller $\sigma$, but where the sampled surface is almost flat.

# %%
for name in ("ELBO", "EP-like"):
    error = np.abs(surfaces[name] - surfaces["log p(y), sampled"]).mean()
    print(f"{name:<8} differs from the sampled log p(y) by {error:.4f} nats per datum")

# %% [markdown]
# ## Trajectories
#
# The paper trains by turns: an E-step moves the sites towards the optimum of the ELBO, an M-step moves
# the hyperparameters with the sites fixed, along the gradient of whichever objective is learnt from.
# `VEMTrainer` does that. Here the E-step converges and the M-step is at most ten iterations of L-BFGS.
# No stopping rule, to see where it leads.

# %%
trajectories = {}
for objective in ("elbo", "ep_like"):
    trainer = gh.VEMTrainer(make_model(), objective, stopping=[])
    history = trainer.fit(shortened(25, 4)).history
    trajectories["alternating", objective] = np.log(
        [history[".kernel.lengthscales"], np.sqrt(history[".kernel.variance"])]
    )

# %% [markdown]
# With the ELBO the two steps climb one function. With the EP-like value they climb two: the M-step
# gains at fixed sites what the next E-step takes away, and where the pair comes to rest, if it does,
# need not be an optimum of anything.
#
# The collapsed objective is one function again: $\theta \mapsto L(\lambda^*(\theta), \theta)$, the
# surface drawn above. Its gradient knows how the sites will follow, and any optimiser can climb it.


# %%
def position(model):
    kernel = model.kernel
    return np.log([kernel.lengthscales.numpy(), np.sqrt(kernel.variance.numpy())])


for objective in ("elbo", "ep_like"):
    model = make_model(objective)
    steps = [position(model)]
    gpflow.optimizers.Scipy().minimize(
        model.training_loss,
        model.trainable_variables,
        step_callback=lambda *_, model=model, steps=steps: steps.append(position(model)),
    )
    trajectories["collapsed", objective] = np.transpose(steps)

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 4.5), sharey=True, constrained_layout=True)
for axis, objective, title in zip(axes, ("elbo", "ep_like"), ("ELBO", "EP-like"), strict=True):
    draw_surface(axis, surfaces[title], top, title)
    for way, style in (("alternating", "w.-"), ("collapsed", "r.-")):
        axis.plot(*trajectories[way, objective], style, linewidth=1, markersize=4, label=way)
        axis.plot(*trajectories[way, objective][:, -1], style[0] + "o", markeredgecolor="k")
    axis.set(xlabel="log ℓ", xlim=log_lengthscales[[0, -1]], ylim=log_sigmas[[0, -1]])
    axis.legend(loc="lower right", facecolor="0.6")
_ = axes[0].set_ylabel("log σ")

# %% [markdown]
# Both ways start at $\ell = \sigma = 1$. The collapsed objective arrives at the optimum of either
# surface. Alternation arrives there on the ELBO's; on the EP-like surface it passes the optimum by and
# is still going towards larger $\sigma$ at the end. With its own stopping rules `VEMTrainer` notices,
# and goes back to the best iteration.
#
# So the package keeps the paper's inference and the paper's objective, and changes how one climbs it.

# %% [markdown]
# ## The same model in `VGP` and in `CVIModel`

# %%
models = {
    "VGP": gpflow.models.VGP(data, gpflow.kernels.Matern52(), gh.likelihoods.ProbitBernoulli()),
    "CVIModel, ELBO": make_model("elbo"),
    "CVIModel, EP-like": make_model("ep_like"),
}
comparison = compare(models, test_data)
print(comparison)

# %% [markdown]
# The ELBO's optimum is the same in both classes. The EP-like fit has the lower ELBO and the higher
# density of held-out data. One fold proves little; `examples/paper/results/summary.md` has five, for
# four data sets, with a test of significance: the difference is real on Sonar and USPS, and there is
# none on Ionosphere and Diabetes.

# %%
X_test, Y_test = test_data
figure, axis = plt.subplots(figsize=(8, 3.5), constrained_layout=True)
for (name, model), style in zip(models.items(), ("-", "--", "-"), strict=True):
    probability = model.predict_y(X_test)[0].numpy()
    of_truth = np.sort(np.where(Y_test > 0.5, probability, 1.0 - probability).ravel())
    axis.plot(np.arange(1, len(of_truth) + 1), of_truth, style, label=name)
axis.axhline(0.5, color="grey", linewidth=0.8)
axis.set(xlabel="held-out echo, sorted", ylabel="probability of its true class", ylim=(0, 1))
_ = axis.legend()
