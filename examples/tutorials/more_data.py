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
# # More data than a matrix holds
#
# `VGP` and `CVIModel` need matrices of $N \times N$ numbers and $N^3$ operations. For more data
# GPflow has `SVGP`, which looks at $f$ through its values $u = f(Z)$ at $M$ *inducing points*, and
# costs $N M^2$. `SparseCVIModel` takes its place in a script. As with `CVIModel`, the training loss
# contains the inference, and there is a choice of what to learn from.
#
# We classify the banana data, with all data at once and with minibatches; regression is a detour
# between them. [Several classes and many rows](sparse_multiclass.ipynb) goes on with more than two
# labels.

# %%
import time

import gpflow
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
import tf_keras
from tutorial_tools import compare, shortened

import gpflow_hybrid as gh

# %%
X, Y = gh.datasets.load("banana")
order = np.random.default_rng(0).permutation(len(X))
train_rows, test_rows = np.split(order[: shortened(5300, 700)], [shortened(4240, 300)])
data, test_data = (X[train_rows], Y[train_rows]), (X[test_rows], Y[test_rows])
num_data = len(data[0])

# %% [markdown]
# ## Inducing points, and a model
#
# `inducing_points` chooses them by k-means, or, with `method="greedy"`, one after the other where
# the prior is least certain. The arguments of `SparseCVIModel` are those of `SVGP`: the data are
# not among them.

# %%
Z = gh.inducing_points(data[0], shortened(20, 8))


def build(objective, Z=Z, **arguments):
    return gh.SparseCVIModel(
        gpflow.kernels.SquaredExponential(),
        gh.likelihoods.ProbitBernoulli(),
        Z,
        objective=objective,
        **arguments,
    )


model = build("ep_like")
gpflow.utilities.print_summary(model, "simple")

# %% [markdown]
# `sites.lambda_1` and `sites.lambda_2` hold $q(u)$: with $w$ the whitened inducing variables,
#
# $$q(w) \propto \mathcal N(w; 0, I) \exp(\lambda_1^\top w - \tfrac12 w^\top \Lambda_2 w).$$
#
# They are sums over the data, found by the training loss and never trained. `q_mu` and `q_sqrt` can
# be read, as in `SVGP`. What is left to the optimiser are the kernel and the inducing points.


# %%
def fit(model, data=data):
    return gpflow.optimizers.Scipy().minimize(
        model.training_loss_closure(data),
        model.trainable_variables,
        options={"maxiter": shortened(100, 12)},
    )


def with_fixed_points(objective, Z=Z, **arguments):
    """A model whose Z stay where they are: only the kernel is trained."""
    model = build(objective, Z, **arguments)
    gpflow.set_trainable(model.inducing_variable, False)
    return model


fits = {}
for objective in ("elbo", "ep_like"):
    fits[objective] = with_fixed_points(objective)
    result = fit(fits[objective])
    print(f"{objective:<9}{result.nfev} evaluations, loss {result.fun:.4f}")

# %% [markdown]
# ## Two objectives
#
# Given $u$, the function at a datum is Gaussian, $f_n \mid u \sim \mathcal N(a_n, \tilde k_n)$, where
# $a_n$ is the projection of $u$ on the datum, and the residual variance $\tilde k_n$ is what the
# inducing points do not know about it. `SVGP`'s bound averages $\log p(y_n \mid f_n)$ over both, and
# pays for $\tilde k_n$ as if it were noise that the model could avoid. The EP-like objective integrates
# it out first,
#
# $$\tilde p_n(a) = \int \mathcal N(f; a, \tilde k_n)\, p(y_n \mid f)\, df,$$
#
# and treats that as the likelihood of the projection. What is *inferred* follows the objective too.
# Either value can be computed for either model, at its own $q(u)$:

# %%
values = {}
print(f"{'trained with':<16}{'SVGP’s bound':>16}{'EP-like value':>16}{'test log density':>20}")
for objective, trained in fits.items():
    density = float(np.mean(trained.predict_log_density(test_data)))
    values[objective] = float(trained.elbo(data)), float(trained.ep_like_log_marginal(data))
    print(
        f"{objective:<16}{values[objective][0]:>16.3f}{values[objective][1]:>16.3f}{density:>20.4f}"
    )

# %% [markdown]
# Each is best by the value it was trained with, and the EP-like value is never below the bound. With
# so few inducing points for these data the two differ a good deal; with more, $\tilde k_n$ goes to
# zero and they draw near each other.
#
# ## Natural gradients, by hand
#
# `natgrad_step(batch, lr)` is the step that GPflow's `NaturalGradient` takes on `q_mu` and `q_sqrt`.
# Here on all data, both from the prior:

# %%
svgp = gpflow.models.SVGP(
    gpflow.kernels.SquaredExponential(), gh.likelihoods.ProbitBernoulli(), Z, num_data=num_data
)
by_hand = build("elbo")
natural_gradient = gpflow.optimizers.NaturalGradient(gamma=0.5)
svgp_loss = svgp.training_loss_closure(data)
steps = []
print(f"{'step':<6}{'SVGP':>16}{'SparseCVIModel':>18}")
for step in range(6):
    steps.append((float(svgp.elbo(data)), float(by_hand.elbo(data))))
    print(f"{step:<6}{steps[-1][0]:>16.5f}{steps[-1][1]:>18.5f}")
    natural_gradient.minimize(svgp_loss, [(svgp.q_mu, svgp.q_sqrt)])
    by_hand.natgrad_step(data, lr=0.5)

# %% [markdown]
# The same numbers. `infer(data)` has no step size and goes to the optimum; its report says how.

# %%
report = by_hand.infer(data)
print(report)

# %% [markdown]
# ## Regression: one step is all
#
# With a Gaussian likelihood the step of size one leads to the exact $q(u)$, whatever it was before,
# and both objectives have names: `SVGP`'s bound is then that of `SGPR`, and the marginalised model is
# FITC, GPflow's `GPRFITC`.

# %%
rng = np.random.default_rng(0)
xs = rng.uniform(0.0, 10.0, size=(shortened(5000, 200), 1))
waves = xs, np.sin(3.0 * xs) + 0.3 * rng.normal(size=xs.shape)
Zx = gh.inducing_points(xs, shortened(15, 8))
references = {"elbo": gpflow.models.SGPR, "ep_like": gpflow.models.GPRFITC}
one_step = {}
for objective, reference in references.items():
    kernel, noise = gpflow.kernels.SquaredExponential(), 0.1
    exact = reference(waves, kernel, Zx, noise_variance=noise)
    regression = gh.SparseCVIModel(
        kernel, gpflow.likelihoods.Gaussian(noise), Zx, objective=objective
    )
    regression.natgrad_step(waves, lr=1.0)
    value = {"elbo": regression.elbo, "ep_like": regression.ep_like_log_marginal}[objective]
    one_step[objective] = float(exact.maximum_log_likelihood_objective()), float(value(waves))
    print(
        f"{reference.__name__:<9}{one_step[objective][0]:>14.5f}, ours {one_step[objective][1]:>14.5f}"
    )

# %% [markdown]
# ## Data from a stream
#
# All that the model needs of the data are sums over rows. They are computed block by block, so that
# memory does not grow with $N$, and a `tf.data.Dataset`, which may read from files, is as good as
# arrays. It is read once for each sum; batches of it are blocks of full data, not minibatches.

# %%
dataset = tf.data.Dataset.from_tensor_slices(data)
trained = fits["ep_like"]
from_arrays = float(trained.training_loss(data))
from_stream = float(trained.training_loss(dataset.batch(100)))
print(f"loss from arrays {from_arrays:.9f}, from a stream {from_stream:.9f}")

# %% [markdown]
# ## What a batch says
#
# With `num_data` given, `elbo` and `ep_like_log_marginal` of a batch are estimates of those of all
# data: the sum over the batch is scaled by $N/B$. They are unbiased, and scatter the more, the smaller
# the batch.

# %%
estimated = with_fixed_points("ep_like", num_data=num_data)
estimated.infer(data)
of_all = float(estimated.ep_like_log_marginal(data))
shuffled = np.random.default_rng(0).permutation(num_data)
batch_sizes = shortened((40, 106, 424), (20, 50, 100))
estimates = {
    size: [
        float(estimated.ep_like_log_marginal((data[0][rows], data[1][rows])))
        for rows in shuffled.reshape(-1, size)
    ]
    for size in batch_sizes
}
print(f"all data          {of_all:10.4f}")
for size, found in estimates.items():
    print(f"batches of {size:<7}{np.mean(found):10.4f} on average, ± {np.std(found):.1f} each")

# %%
figure, axis = plt.subplots(figsize=(8, 3), constrained_layout=True)
axis.boxplot(list(estimates.values()), orientation="horizontal")
axis.axvline(of_all, color="k", linestyle="--")
_ = axis.set(
    yticklabels=batch_sizes, ylabel="rows of a batch", xlabel="estimate of the EP-like value"
)

# %% [markdown]
# Every row is in one batch of each size, so that the averages are the value of all data.
#
# ## Minibatches
#
# A sum over all data for every step of the optimiser is more than needed if there are very many. With an
# iterator over batches in the place of the data, each evaluation of the training loss returns such an
# estimate at the present $q(u)$, which then takes a natural-gradient step on the batch. Adam does the
# rest, here compiled. Its step size has to fall for the noise to average out; that of the natural
# gradients does so by itself.

# %%
batch_size, num_steps = shortened(200, 100), shortened(600, 45)


def batches():
    return iter(dataset.repeat().shuffle(num_data, seed=0).batch(batch_size))


def adam():
    return tf_keras.optimizers.Adam(tf_keras.optimizers.schedules.CosineDecay(0.1, num_steps))


def ours(objective):
    """A model and one step of its training."""
    model = with_fixed_points(objective, num_data=num_data)
    loss, optimizer = model.training_loss_closure(batches()), adam()

    @tf.function
    def step():
        optimizer.minimize(loss, model.trainable_variables)

    return model, step


def follow(model, step, value):
    """Values of all data, every fifteenth of the way."""
    every = num_steps // 15
    trace = [(0, float(value(data)))]
    for count in range(1, num_steps + 1):
        step()
        if count % every == 0:
            trace.append((count, float(value(data))))
    return trace


on_batches, step = ours("ep_like")
trace = follow(on_batches, step, on_batches.ep_like_log_marginal)

# %% [markdown]
# In `SVGP` the same takes two optimisers, GPflow's `NaturalGradient` for `q_mu` and `q_sqrt`, with a step
# size to choose, and Adam for the rest. Beside it ours with the same objective, the ELBO, and the same
# batches in the same order.


# %%
def theirs():
    """SVGP and one step of its training."""
    model = gpflow.models.SVGP(
        gpflow.kernels.SquaredExponential(), gh.likelihoods.ProbitBernoulli(), Z, num_data=num_data
    )
    for parameter in (model.inducing_variable, model.q_mu, model.q_sqrt):
        gpflow.set_trainable(parameter, False)
    natural_gradient, optimizer = gpflow.optimizers.NaturalGradient(gamma=0.1), adam()
    source = batches()

    @tf.function
    def step():
        loss = model.training_loss_closure(next(source), compile=False)
        natural_gradient.minimize(loss, [(model.q_mu, model.q_sqrt)])
        optimizer.minimize(loss, model.trainable_variables)

    return model, step


traces = {}
for name, built in (("SparseCVIModel", ours("elbo")), ("SVGP", theirs())):
    model, step = built
    traces[name] = follow(model, step, model.elbo)

# %%
optimum, best_bound = values["ep_like"][1], values["elbo"][0]
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
left.plot(*np.transpose(trace[1:]), "o-", label=f"Adam, batches of {batch_size}")
left.axhline(optimum, color="k", linestyle="--", label="L-BFGS, all data")
left.set(xlabel="step", ylabel="EP-like value of all data")
for name, found in traces.items():
    right.plot(*np.transpose(found[1:]), "o-", label=name)
right.axhline(best_bound, color="k", linestyle="--", label="L-BFGS, all data")
right.set(xlabel="step", ylabel="ELBO of all data")
for axis in (left, right):
    axis.legend()

# %% [markdown]
# On the same batches `SVGP` goes much the same way. Most of it is made in few steps; then the noise of
# the batches and the falling step size decide how near to L-BFGS they end, and more steps are needed to
# go further. For these data L-BFGS is the better choice: it has no learning rate and knows when it has
# converged.
#
# ## How many inducing points?
#
# More of them cost more and lose less. Here $Z$ is fixed at k-means' choice and the kernel is trained,
# with both objectives.

# %%
sizes = shortened((5, 10, 20, 40, 80), (4, 16))
curves = {}
for objective in ("elbo", "ep_like"):
    for M in sizes:
        sparse = with_fixed_points(objective, gh.inducing_points(data[0], M))
        start = time.perf_counter()
        fit(sparse)
        seconds = time.perf_counter() - start
        density = float(np.mean(sparse.predict_log_density(test_data)))
        curves[objective, M] = density, seconds
        print(f"{objective:<9}M = {M:<4}density {density:.4f}, {seconds:.1f} seconds")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
for objective, label in (("elbo", "SVGP’s bound"), ("ep_like", "EP-like")):
    density, seconds = np.transpose([curves[objective, M] for M in sizes])
    left.plot(sizes, density, "o-", label=label)
    right.plot(sizes, seconds, "o-", label=label)
for axis in (left, right):
    axis.set(xlabel="M", xscale="log", xticks=sizes, xticklabels=sizes)
    axis.minorticks_off()
left.set(ylabel="test log density", title="How it predicts")
right.set(ylabel="seconds", title="How long the fit takes")
_ = left.legend()

# %% [markdown]
# Five points cannot follow the boundary between the classes; from there on every doubling gains less
# than the one before. The two objectives predict alike on these data.
#
# ## The same model in `SVGP` and in `SparseCVIModel`
#
# The kernel is trained by L-BFGS, the inducing points stay at k-means' choice. (They are trainable, in
# both classes, unless told otherwise. A few free points give the EP-like value much freedom: it
# may prefer a very large variance, at which the residual variances stand for noise.)


# %%
def train(model):
    gpflow.optimizers.Scipy().minimize(
        model.training_loss_closure(data), model.trainable_variables, options={"maxiter": 1000}
    )


svgp = gpflow.models.SVGP(
    gpflow.kernels.SquaredExponential(), gh.likelihoods.ProbitBernoulli(), Z, num_data=num_data
)
gpflow.set_trainable(svgp.inducing_variable, False)
models = {
    "SVGP": svgp,
    "SparseCVI, ELBO": with_fixed_points("elbo"),
    "SparseCVI, EP-like": with_fixed_points("ep_like"),
}
comparison = compare(models, test_data, train, data=data)
print(comparison)

# %% [markdown]
# Trained with the ELBO, both arrive at the same optimum. The optimiser of `SVGP` moves the mean and the
# covariance of $q(u)$ beside the kernel; that of `SparseCVIModel` moves two numbers. The EP-like fit
# has a lower bound, which is not what it maximises.

# %%
grid = np.linspace(-3.5, 3.5, 60)
mesh = np.stack([g.ravel() for g in np.meshgrid(grid, grid)], axis=-1)
figure, axes = plt.subplots(1, 3, figsize=(12, 4), sharey=True, constrained_layout=True)
for (name, model), axis in zip(models.items(), axes, strict=True):
    probability = model.predict_y(mesh)[0].numpy().reshape(len(grid), len(grid))
    shades = axis.contourf(grid, grid, probability, levels=np.linspace(0, 1, 11), cmap="RdBu_r")
    axis.contour(grid, grid, probability, levels=[0.5], colors="k")
    axis.scatter(*data[0][:400].T, c=data[1][:400, 0], cmap="RdBu_r", s=5, alpha=0.5)
    axis.plot(*model.inducing_variable.Z.numpy().T, "k^", markersize=7, mfc="w")
    density = comparison[name].test_log_density
    axis.set(
        title=f"{name}\ntest log density {density:.3f}", xlim=grid[[0, -1]], ylim=grid[[0, -1]]
    )
_ = figure.colorbar(shades, ax=axes, label="p(y = 1)")
