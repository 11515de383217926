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
# # Classification into several classes
#
# A label $y_n \in \{0, \dots, C - 1\}$ is observed at each input $x_n$. Every class has a
# function of its own,
#
# $$f_c \sim \mathcal{GP}(0, k), \qquad c = 0, \dots, C - 1,$$
#
# and the likelihood turns their values at $x_n$ into probabilities. GPflow has two ways:
#
# - `Softmax`: $p(y_n = c \mid f) \propto \exp f_c(x_n)$;
# - `MultiClass`, whose link is `RobustMax`: the class with the largest $f_c(x_n)$ has the
#   probability $1 - \varepsilon$, the others share $\varepsilon$.
#
# `CVIModel` takes both. The sites are two numbers per datum and class.

# %%
import gpflow
import matplotlib.pyplot as plt
import numpy as np
from tutorial_tools import compare, fit, shortened

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


Xnew = np.linspace(-1.0, 11.0, 200)[:, None]


def plot_probabilities(axis, model):
    probability, _ = model.predict_y(Xnew)
    X, Y = (tensor.numpy()[:, 0] for tensor in model.data)
    for c in range(num_classes):
        axis.plot(Xnew, probability[:, c], color=f"C{c}", label=f"class {c}")
        axis.plot(X[Y == c], np.full(np.sum(Y == c), -0.08 - 0.06 * c), "|", color=f"C{c}")
    axis.set(xlabel="x", yticks=[0.0, 0.5, 1.0])


# %% [markdown]
# ## `Softmax`
#
# The expectation $\mathrm{E}_q[\log p(y_n \mid f)]$ has no closed form and is an integral over
# all classes. GPflow estimates it with random draws, new ones at every evaluation. So `VGP`'s
# ELBO is random, and an optimiser that compares values, as L-BFGS does, is misled by it.
# `CVIModel` replaces the draws by a fixed rule, the same at every evaluation.

# %%
data = sample(shortened(80, 30), noise=1.0)
vgp = gpflow.models.VGP(
    data,
    gpflow.kernels.SquaredExponential(),
    gpflow.likelihoods.Softmax(num_classes),
    num_latent_gps=num_classes,
)
draws = [vgp.elbo().numpy() for _ in range(50)]
print(f"VGP, fifty times: {np.mean(draws):.4f} ± {np.std(draws):.4f}")

softmax = gh.CVIModel(
    data, gpflow.kernels.SquaredExponential(), gpflow.likelihoods.Softmax(num_classes)
)
fixed = [softmax.elbo().numpy() for _ in range(2)]
print("CVIModel, twice:  ", *(f"{value:.4f}" for value in fixed))

# %% [markdown]
# Nothing is trained yet, and $q$ is the prior in both: `VGP`'s values scatter about `CVIModel`'s
# (which fifty of them locate to a seventh of their spread).
# Training is the same call as always. With three classes the fixed rule is a Gauss-Hermite
# product; with more than three it is 1024 low-discrepancy points.

# %%
fit(softmax)
gpflow.utilities.print_summary(softmax, "simple")

# %% [markdown]
# Only the objectives are free of chance. `predict_y` and `predict_log_density` are the
# likelihood's own and still draw at random, as in `VGP`; more draws make the curves smooth.

# %%
softmax.likelihood.num_monte_carlo_points = 2000
figure, axis = plt.subplots(figsize=(8, 3), constrained_layout=True)
plot_probabilities(axis, softmax)
axis.set(ylabel="probability", title="Softmax: probabilities, and below them the data")
_ = axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))

# %% [markdown]
# ## `RobustMax`
#
# Here the expectation is a one-dimensional integral, which GPflow does with Gauss-Hermite
# quadrature. Nothing is random. Only the order of the three functions matters, not their size:
# multiply all of them by ten, and no probability changes. The kernel's variance cannot be learnt
# from such data, and stays where it is.

# %%
data, test_data = sample(shortened(80, 30), noise=0.0), sample(1000, noise=0.0)


def kernel():
    kernel = gpflow.kernels.SquaredExponential()
    gpflow.set_trainable(kernel.variance, False)
    return kernel


# %% [markdown]
# ## The same model in `VGP` and in `CVIModel`

# %%
models = {
    "VGP": gpflow.models.VGP(
        data, kernel(), gpflow.likelihoods.MultiClass(num_classes), num_latent_gps=num_classes
    ),
    "CVIModel, ELBO": gh.CVIModel(
        data, kernel(), gpflow.likelihoods.MultiClass(num_classes), objective="elbo"
    ),
    "CVIModel, EP-like": gh.CVIModel(
        data, kernel(), gpflow.likelihoods.MultiClass(num_classes), objective="ep_like"
    ),
}
comparison = compare(models, test_data)
print(comparison)
for name, model in models.items():
    hits = np.argmax(model.predict_y(test_data[0])[0], axis=1) == test_data[1][:, 0]
    lengthscale = model.kernel.lengthscales.numpy()
    print(f"{name:<20}lengthscale {lengthscale:.3f}, accuracy {hits.mean():.3f}")

# %% [markdown]
# Trained with the ELBO, `VGP` and `CVIModel` arrive at the same optimum. The optimiser of `VGP`
# moves the means and covariances of three posteriors, `CVIModel`'s moves one number, the
# lengthscale. That does not make it faster here: with so few data most of the time is TensorFlow's
# tracing. The EP-like fit has a shorter lengthscale and a lower ELBO, but labels this clear leave
# little to choose: it predicts neither better nor worse to speak of.

# %%
figure, axes = plt.subplots(3, 1, figsize=(8, 7), sharex=True, constrained_layout=True)
for (name, model), axis in zip(models.items(), axes, strict=True):
    plot_probabilities(axis, model)
    axis.set(
        title=f"{name}: test log density {comparison[name].test_log_density:.3f}",
        xlabel=None,
        ylabel="probability",
    )
axes[0].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
_ = axes[-1].set(xlabel="x")
