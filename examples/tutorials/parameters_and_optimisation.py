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
# # Parameters and optimisation
#
# What a GPflow user does with parameters and optimisers works on a `CVIModel` as it does on a
# `GPR`. There is one thing that `GPR` does not have, the sites $\lambda$, and this tutorial says
# who moves them and when. The model is a regression with positive, skewed observations,
#
# $$f \sim \mathcal{GP}(0, k), \qquad y_n \mid f \sim
# \operatorname{Gamma}\bigl(\text{shape } s,\ \text{scale } \exp f(x_n)\bigr),$$
#
# so that kernel and likelihood both have something to learn.

# %%
import gpflow
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
from tutorial_tools import compare, shortened

import gpflow_hybrid as gh

rng = np.random.default_rng(2)


def sample(num_data):
    X = np.sort(rng.uniform(0.0, 5.0, size=(num_data, 1)), axis=0)
    return X, rng.gamma(3.0, np.exp(np.sin(2.0 * X)))


data, test_data = sample(shortened(100, 30)), sample(200)


def make(objective="ep_like"):
    kernel = gpflow.kernels.Matern52()
    return gh.CVIModel(data, kernel, gpflow.likelihoods.Gamma(), objective=objective)


model = make()
gpflow.utilities.print_summary(model, "simple")

# %% [markdown]
# ## Parameters
#
# Three are trainable: the kernel's two and the shape of the likelihood. Each is positive, and its
# `transform` says how: the optimiser moves an unconstrained variable, whose softplus is the
# value. `assign` takes the value itself.

# %%
lengthscales = model.kernel.lengthscales
lengthscales.assign(0.5)
print(f"value         {lengthscales.numpy():.4f}")
print(f"unconstrained {lengthscales.unconstrained_variable.numpy():.4f}")

# %% [markdown]
# A parameter with another transform takes the place of the old one. This one cannot leave $(0.1,
# 10)$, whatever the optimiser tries.

# %%
bounds = tfp.bijectors.Sigmoid(np.float64(0.1), np.float64(10.0))
model.kernel.lengthscales = gpflow.Parameter(1.0, transform=bounds)

# %% [markdown]
# `set_trainable` holds a parameter, or all those of a part of the model. The sites are not up for
# that: they are never among the model's `trainable_variables`, not even when asked for.

# %%
gpflow.set_trainable(model.likelihood, False)
print("held:     ", len(model.trainable_variables), "variables")
gpflow.set_trainable(model, True)
print("released: ", len(model.trainable_variables), "variables")
gpflow.set_trainable(model.sites, False)

# %% [markdown]
# ## Optimisers
#
# `training_loss_closure()` is the loss, compiled. Each evaluation brings the sites to their
# optimum for the present parameters, from where they were, and returns minus the objective there.
# The optimiser sees a function of three variables. Make the closure after the last
# `set_trainable`: its graph knows the gradients of what was trainable when it was traced.

# %%
loss = model.training_loss_closure()
start = gpflow.utilities.read_values(model)
scipy_losses = [loss().numpy()]
result = gpflow.optimizers.Scipy().minimize(
    loss,
    model.trainable_variables,
    step_callback=lambda *_: scipy_losses.append(loss().numpy()),
)
print(f"L-BFGS: loss {result.fun:.6f} after {result.nfev} evaluations")

# %% [markdown]
# A first-order optimiser takes a tape. The optimisers of Keras 3 have no `minimize`;
# `apply_gradients` is all that is needed, and `tf.function` compiles loss, gradient and step into
# one graph.

# %%
gpflow.utilities.multiple_assign(model, start)
optimiser = tf.keras.optimizers.Adam(learning_rate=0.1)
optimiser.build(model.trainable_variables)


@tf.function(autograph=False)
def adam_step():
    with tf.GradientTape() as tape:
        value = model.training_loss()
    gradients = tape.gradient(value, model.trainable_variables)
    optimiser.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return value


adam_losses = [adam_step().numpy() for _ in range(shortened(200, 150))]
print(f"Adam:   loss {adam_losses[-1]:.6f} after {len(adam_losses)} evaluations")

figure, axis = plt.subplots(figsize=(8, 3.5), constrained_layout=True)
axis.plot(np.array(scipy_losses) - result.fun + 1e-8, "o-", markersize=3, label="L-BFGS")
axis.plot(np.array(adam_losses) - result.fun + 1e-8, label="Adam, learning rate 0.1")
axis.set(yscale="log", xlabel="step", ylabel="loss above the lowest, nats")
_ = axis.legend()

# %% [markdown]
# Both end at the same loss. Neither had a step size or a number of iterations to choose for the
# inference. With few parameters and a loss without noise there is little reason to prefer Adam.
#
# ## The gradient
#
# The loss is a function of the parameters $\theta$ in two ways: directly, and through the
# optimal sites $\lambda^*(\theta)$. The gradient that the tape returns contains both. Central
# differences of the loss, which know nothing of how it is computed, agree with it. The last
# column has the derivative with the sites held still, which is what an alternation between
# inference and learning would follow.

# %%
parameters = {
    "lengthscale": model.kernel.lengthscales,
    "variance": model.kernel.variance,
    "shape": model.likelihood.shape,
}
variables = [parameter.unconstrained_variable for parameter in parameters.values()]


def difference(variable, half=1e-4):
    middle, losses = variable.numpy(), []
    for shift in (half, -half):
        variable.assign(middle + shift)
        losses.append(loss().numpy())
    variable.assign(middle)
    return (losses[0] - losses[1]) / (2.0 * half)


gpflow.utilities.multiple_assign(model, start)
with tf.GradientTape() as tape:
    value = loss()
exact = np.array(tape.gradient(value, variables))
differences = np.array([difference(variable) for variable in variables])
model.infer()
with tf.GradientTape() as tape:
    value = -model.ep_like_log_marginal()
held = np.array(tape.gradient(value, variables))

print(f"{'':<12}{'exact':>14}{'differences':>14}{'sites held':>14}")
for name, *row in zip(parameters, exact, differences, held, strict=True):
    print(f"{name:<12}" + "".join(f"{number:>14.7f}" for number in row))

# %% [markdown]
# For the ELBO the last column would equal the first, because $\lambda^*$ maximises the ELBO and
# its motion has no effect to first order. It does not maximise the EP-like value. The term is
# small here. It is not for labels and large kernel variances, where following the last column can
# drift away from the optimum.
#
# ## Who owns the sites
#
# After a training loss, $\lambda$ follows the parameters: ask for a prediction or an objective,
# and the model first infers what has changed since. After `infer()`, $\lambda$ is yours, and
# nothing moves it until the next `infer()` or training loss. The same goes for `natgrad_step()`
# and for an assignment to the sites.


# %%
def elbo_at(lengthscale):
    model.kernel.lengthscales.assign(lengthscale)
    return float(model.elbo())


loss()
followed = elbo_at(3.0)
model.kernel.lengthscales.assign(1.0)
model.infer()
stale = elbo_at(3.0)
print(model.infer().message)
inferred = elbo_at(3.0)
print(f"after a training loss, lengthscale moved:  {followed:.6f}")
print(f"after infer(), lengthscale moved:          {stale:.6f}")
print(f"and infer() once more:                     {inferred:.6f}")

# %% [markdown]
# The first and the last agree. The second is a valid bound too, of a $q(f)$ that belongs to
# another lengthscale, and so it is lower. That is what one wants when one alternates by hand, and
# not otherwise.
#
# There are two exceptions. A function that you compile with `tf.function` cannot infer behind
# your back: where the sites are those of other parameters it refuses, and asks for
# `model.infer()`. And values that are read without the model's help (`read_values`, a checkpoint)
# are what they are: call `infer()` before, if the last thing that happened was a step of an
# optimiser.
#
# ## The same model in `VGP` and in `CVIModel`

# %%
models = {
    "VGP": gpflow.models.VGP(data, gpflow.kernels.Matern52(), gpflow.likelihoods.Gamma()),
    "CVIModel, ELBO": make("elbo"),
    "CVIModel, EP-like": make("ep_like"),
}
comparison = compare(models, test_data)
print(comparison)
for name, fitted in models.items():
    print(f"{name:<20}{sum(tf.size(v) for v in fitted.trainable_variables)} numbers to train")

X_new = np.linspace(-0.5, 5.5, 200)[:, None]
figure, axis = plt.subplots(figsize=(8, 4), constrained_layout=True)
axis.plot(*data, "k.", markersize=4, label="data")
axis.plot(X_new, 3.0 * np.exp(np.sin(2.0 * X_new)), color="black", linewidth=0.8, label="true mean")
for (name, fitted), style in zip(models.items(), ("-", "--", ":"), strict=True):
    axis.plot(X_new, fitted.predict_y(X_new)[0], style, linewidth=2, label=name)
axis.set(xlabel="x", ylabel="y", title="Predictive mean")
_ = axis.legend()

# %% [markdown]
# The three curves lie on each other. The two fits of the ELBO are the same optimum, and the
# EP-like one is close by: a hundred observations of this kind leave $f$ with a nearly Gaussian
# posterior. What differs is what the optimiser had to move. For `VGP` it is a mean and a triangle
# of $N(N+1)/2$ numbers beside the three parameters, and one tolerance has to serve both.
