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
# # Natural gradients
#
# Counts $y_n$ are observed at inputs $x_n$, and
#
# $$f \sim \mathcal{GP}(0, k), \qquad y_n \mid f \sim \text{Poisson}(\exp f(x_n)).$$
#
# GPflow can move the $q(f)$ of a `VGP` by natural gradients, which climb the ELBO in the geometry
# of distributions instead of that of `q_mu` and `q_sqrt`. `CVIModel` has the same step. This
# tutorial shows that the two are equal, and what `infer()` does instead.

# %%
import gpflow
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
import tf_keras
from tutorial_tools import compare, fit, shortened

import gpflow_hybrid as gh

# %%
rng = np.random.default_rng(0)


def sample(num_data):
    X = rng.uniform(0.0, 6.0, size=(num_data, 1))
    return X, rng.poisson(np.exp(2.5 * np.sin(1.5 * X))).astype(float)


data = sample(shortened(100, 40))
test_data = sample(200)
X, Y = data

# %% [markdown]
# ## One step, twice
#
# `VGP`'s $q(f)$ has a free mean and covariance. In `CVIModel` it is the prior times one Gaussian
# site per datum, $t_n(f_n) = \exp(\lambda_{1n} f_n - \tfrac12 \lambda_{2n} f_n^2)$. A
# natural-gradient step from such a $q(f)$ leads to another: with its mean parameters $\eta_n =
# (\mathbb{E} f_n, -\tfrac12 \mathbb{E} f_n^2)$ it is
#
# $$\lambda_n \leftarrow (1 - \rho)\, \lambda_n +
# \rho\, \nabla_{\eta_n} \mathbb{E}_q[\log p(y_n \mid f_n)].$$
#
# So it suffices to move two numbers per datum. `natgrad_step(lr)` does that, with $\rho$ = `lr`.
# GPflow's `NaturalGradient(gamma)` takes the same step, with $\rho$ = `gamma`, in the $N +
# N(N+1)/2$ numbers of `q_mu` and `q_sqrt`. Both models start with $q(f)$ equal to the prior, which
# is $\lambda = 0$.


# %%
def kernel():
    return gpflow.kernels.SquaredExponential(variance=4.0)


def difference(vgp, cvi):
    """The largest in the mean or variance of f at the data."""
    pairs = zip(vgp.predict_f(X), cvi.predict_f(X), strict=True)
    return max(np.max(np.abs(theirs - ours)) for theirs, ours in pairs)


cvi = gh.CVIModel(data, kernel(), gpflow.likelihoods.Poisson())
vgp = gpflow.models.VGP(data, kernel(), gpflow.likelihoods.Poisson())
natural_gradient = gpflow.optimizers.NaturalGradient(gamma=0.5)

print(f"{'step':<6}{'VGP, ELBO':>14}{'CVIModel, ELBO':>18}{'difference of q(f)':>22}")
differences = []
for step in range(11):
    differences.append(difference(vgp, cvi))
    print(f"{step:<6}{vgp.elbo():>14.5f}{cvi.elbo():>18.5f}{differences[-1]:>22.1e}")
    natural_gradient.minimize(vgp.training_loss, [(vgp.q_mu, vgp.q_sqrt)])
    cvi.natgrad_step(lr=0.5)

# %% [markdown]
# The same $q(f)$ after every step, up to the jitter of $10^{-6}$ that GPflow adds to the kernel
# matrix.
#
# ## The step size
#
# Were the likelihood Gaussian, the gradient in the formula would not depend on $q$, and one step
# with $\rho = 1$ would give the exact posterior. Otherwise the gradient holds at the present $q$
# only: small steps are safe and slow, large ones may overshoot. Three sizes, for both classes:


# %%
def elbos_of_vgp(gamma, num_steps):
    model = gpflow.models.VGP(data, kernel(), gpflow.likelihoods.Poisson())
    optimizer = gpflow.optimizers.NaturalGradient(gamma)
    found = [model.elbo()]
    for _ in range(num_steps):
        optimizer.minimize(model.training_loss, [(model.q_mu, model.q_sqrt)])
        found.append(model.elbo())
    return np.array(found)


def elbos_of_cvi(lr, num_steps):
    cvi.sites.reset(len(X))
    found = [cvi.elbo()]
    for _ in range(num_steps):
        cvi.natgrad_step(lr)
        found.append(cvi.elbo())
    return np.array(found)


num_steps = 15
sizes = (0.1, 0.5, 1.0)
by_vgp = {size: elbos_of_vgp(size, num_steps) for size in sizes}
by_cvi = {size: elbos_of_cvi(size, num_steps) for size in sizes}

# %% [markdown]
# ## `infer()` has no step size
#
# Write $g(\lambda)$ for the gradient in the formula. The optimum is where $g(\lambda) = \lambda$.
# `infer()` solves this equation by a damped Newton iteration, whose step $\delta$ is
#
# $$(J + \mu I)\, \delta = g(\lambda) - \lambda, \qquad J = I - \partial g / \partial \lambda.$$
#
# For large $\mu$ it is a short natural-gradient step, which raises the ELBO if it is short enough.
# With $\mu = 0$ it is Newton's, which doubles the number of right digits once it is near. The
# iteration chooses $\mu$ by looking at the ELBO: where a step would lower it, the step is taken
# back and $\mu$ rises; where steps succeed, $\mu$ falls. Nothing is left to tune. A step costs more
# than a natural-gradient step, because a linear system is solved in it.
#
# `max_steps` ends the iteration early, so that its ELBO can be seen by step.

# %%
by_newton = [by_cvi[1.0][0]]
for max_steps in range(1, num_steps + 1):
    cvi.sites.reset(len(X))
    result = cvi.infer(max_steps=max_steps)
    by_newton.append(result.elbo)
print(result.message)
optimum = cvi.infer(tolerance=1e-10).elbo

# %%
figure, axes = plt.subplots(figsize=(8, 5), constrained_layout=True)
for colour, size in enumerate(sizes):
    axes.plot(optimum - by_cvi[size], f"C{colour}-", label=f"CVIModel, natgrad_step({size})")
    axes.plot(
        optimum - by_vgp[size], f"C{colour}o", mfc="none", label=f"VGP, NaturalGradient({size})"
    )
axes.plot(optimum - np.array(by_newton), "k.-", linewidth=2, label="CVIModel, infer()")
axes.set(xlabel="step", ylabel="optimum less ELBO", yscale="log", ylim=(1e-4, 1e5))
_ = axes.legend(fontsize="small")

# %% [markdown]
# The circles of `NaturalGradient` lie on the lines of `natgrad_step`. With 0.1 the climb is far
# from finished when the plot ends. With 1.0 the second step overshoots to an ELBO far below that of
# the prior; here the iteration recovers from it. 0.5 climbs steadily, but that is known only
# afterwards. `infer()` never falls, and needs the fewest steps.
#
# With a likelihood that is not log-concave a step may even leave no valid $q(f)$. `natgrad_step`
# refuses it and keeps the sites; `infer()` would shorten it and go on.

# %%
student = gh.CVIModel(data, kernel(), gpflow.likelihoods.StudentT(scale=0.3))
refusal = None
try:
    for _ in range(5):
        student.natgrad_step(lr=1.0)
except gh.InvalidPosteriorError as error:
    refusal = error
print(refusal)

# %% [markdown]
# ## The same model in `VGP` and in `CVIModel`
#
# Now the hyperparameters are trained too. With natural gradients a `VGP` is trained in turns: a
# step on $q(f)$, then a step of Adam on the kernel. There are two step sizes and a number of
# iterations to choose. `CVIModel` is trained by L-BFGS as always: its training loss contains the
# inference.


# %%
def train(model, num_steps=400):
    if isinstance(model, gh.CVIModel):
        fit(model)
        return
    gpflow.set_trainable(model.q_mu, False)
    gpflow.set_trainable(model.q_sqrt, False)
    natural_gradient = gpflow.optimizers.NaturalGradient(gamma=0.5)
    adam = tf_keras.optimizers.Adam(0.1)

    @tf.function
    def step():
        natural_gradient.minimize(model.training_loss, [(model.q_mu, model.q_sqrt)])
        adam.minimize(model.training_loss, model.trainable_variables)

    for _ in range(num_steps):
        step()


models = {
    "VGP": gpflow.models.VGP(data, kernel(), gpflow.likelihoods.Poisson()),
    "CVIModel, ELBO": gh.CVIModel(data, kernel(), gpflow.likelihoods.Poisson(), objective="elbo"),
    "CVIModel, EP-like": gh.CVIModel(
        data, kernel(), gpflow.likelihoods.Poisson(), objective="ep_like"
    ),
}
comparison = compare(models, test_data, train)
print(comparison)

# %% [markdown]
# The same optimum by both ways; `VGP` comes as near to it as its number of iterations allows. Each
# of them differentiates through factorisations of $N \times N$ matrices, and there are hundreds.
# The EP-like objective changes next to nothing here: with this likelihood and these data the two
# estimates of $\log p(y)$ are nearly equal.

# %%
model = models["CVIModel, EP-like"]
print(f"ELBO {model.elbo():.4f}, EP-like {model.ep_like_log_marginal():.4f}")

# %%
Xnew = np.linspace(-0.5, 6.5, 200)[:, None]
figure, axes = plt.subplots(figsize=(8, 4), constrained_layout=True)
for name, style in (("CVIModel, EP-like", "C0-"), ("VGP", "C1--")):
    mean, variance = (part[:, 0] for part in models[name].predict_f(Xnew))
    axes.plot(Xnew, np.exp(mean), style, label=f"{name}: median of exp(f)")
    for side in (-1.96, 1.96):
        axes.plot(Xnew, np.exp(mean + side * np.sqrt(variance)), style, linewidth=0.7)
axes.plot(X, Y, "k.", label="data")
axes.set(xlabel="x", ylabel="y", ylim=(-1.0, 1.5 * Y.max()), title="Rate, with its 95 % band")
_ = axes.legend()
