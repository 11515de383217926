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
# # Several classes and many rows
#
# GPflow's tutorial on several classes has inducing points, and so has this one: one latent function
# for each of $C$ classes, all of them seen through the same $M$ inputs $Z$. What `SparseCVIModel` is,
# [More data than a matrix holds](more_data.ipynb) says.

# %%
import gpflow
import matplotlib.pyplot as plt
import numpy as np
from tutorial_tools import compare, shortened

import gpflow_hybrid as gh

# %% [markdown]
# The label is the largest of three waves. With Gumbel noise added to the waves before they are
# compared, the labels follow `Softmax` exactly; without noise they follow `RobustMax`.

# %%
rng = np.random.default_rng(0)
num_classes = 3


def sample(num_data, noise):
    X = np.sort(rng.uniform(0.0, 10.0, size=(num_data, 1)), axis=0)
    waves = 3.0 * np.sin(X + 2.0 * np.pi / num_classes * np.arange(num_classes))
    waves += noise * rng.gumbel(size=waves.shape)
    return X, np.argmax(waves, axis=1)[:, None]


def train(model, data, max_iterations=1000):
    return gpflow.optimizers.Scipy().minimize(
        model.training_loss_closure(data),
        model.trainable_variables,
        options={"maxiter": max_iterations},
    )


Xnew = np.linspace(-1.0, 11.0, 200)[:, None]


def plot_probabilities(axis, model, data):
    probability, _ = model.predict_y(Xnew)
    for c in range(num_classes):
        axis.plot(Xnew, probability[:, c], color=f"C{c}", label=f"class {c}")
        members = data[0][data[1] == c]
        axis.plot(members, np.full(len(members), -0.08 - 0.06 * c), "|", color=f"C{c}")
    Z = model.inducing_variable.Z.numpy()
    axis.plot(Z, np.full(len(Z), 1.08), "k^", label="Z")
    axis.set(yticks=[0.0, 0.5, 1.0])


# %% [markdown]
# ## `Softmax`
#
# A sparse model has to be told the number of latent functions: there are no data in its constructor
# to count them in. The EP-like objective integrates over all latents of a datum twice, given $u$ and
# under $q(u)$, which takes its time; here we learn from `SVGP`'s bound.

# %%
data = sample(shortened(200, 30), noise=1.0)
softmax = gh.SparseCVIModel(
    gpflow.kernels.SquaredExponential(),
    gpflow.likelihoods.Softmax(num_classes),
    gh.inducing_points(data[0], shortened(12, 5)),
    num_latent_gps=num_classes,
    objective="elbo",
)
gpflow.set_trainable(softmax.inducing_variable, False)
result = train(softmax, data, shortened(100, 12))
print(
    f"{result.nfev} evaluations, ELBO {softmax.elbo(data):.3f}; q_mu is {list(softmax.q_mu.shape)}"
)

# %%
softmax.likelihood.num_monte_carlo_points = 2000  # predictions draw at random, as GPflow's do
figure, axis = plt.subplots(figsize=(8, 3), constrained_layout=True)
plot_probabilities(axis, softmax, data)
axis.set(xlabel="x", ylabel="probability")
_ = axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))

# %% [markdown]
# ## A lengthscale for each class
#
# `SharedIndependent` and `SeparateIndependent` kernels, and inducing variables of their own for each
# latent, are those of GPflow's multi-output models. Here the classes share the inducing points, not
# the lengthscale.

# %%
separate = gh.SparseCVIModel(
    gpflow.kernels.SeparateIndependent(
        [gpflow.kernels.SquaredExponential() for _ in range(num_classes)]
    ),
    gpflow.likelihoods.Softmax(num_classes),
    gpflow.inducing_variables.SharedIndependentInducingVariables(
        gpflow.inducing_variables.InducingPoints(softmax.inducing_variable.Z.numpy())
    ),
    num_latent_gps=num_classes,
    objective="elbo",
)
gpflow.set_trainable(separate.inducing_variable, False)
train(separate, data, shortened(100, 12))
for c, kernel in enumerate(separate.kernel.kernels):
    print(f"class {c}: lengthscale {kernel.lengthscales.numpy():.3f}")
elbos = float(softmax.elbo(data)), float(separate.elbo(data))
print(f"ELBO {elbos[1]:.3f} with four numbers more, {elbos[0]:.3f} without")

# %% [markdown]
# The model above is one of these, with all lengthscales and variances equal: the bound can only rise.
#
# ## The same model in `SVGP` and in `SparseCVIModel`
#
# Labels without noise and `MultiClass`, whose link is `RobustMax`, as in GPflow's tutorial. Its
# expectation is a one-dimensional quadrature, the same in both classes. Only the order of the
# functions matters, not their size: the kernel's variance cannot be learnt and stays where it is.

# %%
data, test_data = sample(shortened(500, 40), noise=0.0), sample(1000, noise=0.0)
Z = gh.inducing_points(data[0], shortened(20, 8))


def build(model, **arguments):
    built = model(
        gpflow.kernels.SquaredExponential(),
        gpflow.likelihoods.MultiClass(num_classes),
        Z,
        num_latent_gps=num_classes,
        **arguments,
    )
    gpflow.set_trainable(built.inducing_variable, False)
    gpflow.set_trainable(built.kernel.variance, False)
    return built


models = {
    "SVGP": build(gpflow.models.SVGP),
    "SparseCVI, ELBO": build(gh.SparseCVIModel, objective="elbo"),
}
comparison = compare(models, test_data, lambda model: train(model, data), data=data)
print(comparison)
accuracy = {}
for name, model in models.items():
    hits = np.argmax(model.predict_y(test_data[0])[0], axis=1) == test_data[1][:, 0]
    accuracy[name] = float(hits.mean())
    lengthscale = model.kernel.lengthscales.numpy()
    print(f"{name:<20}lengthscale {lengthscale:.3f}, accuracy {accuracy[name]:.3f}")

# %% [markdown]
# Trained with the ELBO, both arrive at the same optimum: `SVGP`'s optimiser moves the means and
# covariances of three posteriors, that of `SparseCVIModel` one number.

# %%
figure, axes = plt.subplots(2, 1, figsize=(8, 5), sharex=True, constrained_layout=True)
for (name, model), axis in zip(models.items(), axes, strict=True):
    plot_probabilities(axis, model, data)
    axis.set(
        title=f"{name}: test log density {comparison[name].test_log_density:.3f}",
        ylabel="probability",
    )
axes[0].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
_ = axes[-1].set(xlabel="x")
