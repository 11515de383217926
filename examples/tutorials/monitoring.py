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
# # Monitoring with TensorBoard
#
# The model is that of binary classification,
#
# $$f \sim \mathcal{GP}(0, k), \qquad p(y_n = 1 \mid f) = \Phi(f(x_n)),$$
#
# and the subject is what can be seen of its training. GPflow's monitor tasks work with `CVIModel`
# as they do with `VGP`. `VEMTrainer` writes TensorBoard files by itself. What was written is read
# back and plotted here.
#
# TensorBoard is an extra: `pip install 'gpflow_hybrid[tensorboard]'`.

# %%
import tempfile
from pathlib import Path

import gpflow
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from gpflow.monitor import (
    ImageToTensorBoard,
    ModelToTensorBoard,
    Monitor,
    MonitorTaskGroup,
    ScalarToTensorBoard,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tutorial_tools import compare, shortened

import gpflow_hybrid as gh

# %%
rng = np.random.default_rng(0)


def sample(num_data):
    X = rng.uniform(0.0, 6.0, size=(num_data, 1))
    f = 3.0 * np.cos(1.5 * X)
    return X, (f + rng.normal(size=f.shape) > 0.0).astype(float)


data, test_data = sample(shortened(80, 30)), sample(200)


def cvi(objective):
    kernel, likelihood = gpflow.kernels.Matern52(), gh.likelihoods.ProbitBernoulli()
    return gh.CVIModel(data, kernel, likelihood, objective=objective)


# %% [markdown]
# Everything is written to a temporary directory. In a project one would take a fixed one, such as
# `logs`, and watch it with `tensorboard --logdir logs` while training runs.

# %%
temporary = tempfile.TemporaryDirectory()
logs = Path(temporary.name)

# %% [markdown]
# ## An optimiser's run, with GPflow's tasks
#
# A task writes something, a group says how often, a monitor holds the groups. The scalars below are
# functions of the model without arguments. They may be `model.elbo` and
# `model.ep_like_log_marginal`: after an evaluation of the training loss the sites are at their
# optimum for the present hyperparameters, so these read values and infer nothing.

# %%
model = cvi("ep_like")
Xnew = np.linspace(-1.0, 7.0, 100)[:, None]


def draw(figure, axes):
    axes.plot(Xnew, model.predict_y(Xnew)[0])
    axes.plot(*data, "k|")
    axes.set(xlabel="x", ylabel="p(y = 1)")


log_dir = str(logs / "l-bfgs")
every_step = MonitorTaskGroup(
    [
        ModelToTensorBoard(log_dir, model),
        ScalarToTensorBoard(log_dir, model.elbo, "objectives/elbo"),
        ScalarToTensorBoard(log_dir, model.ep_like_log_marginal, "objectives/ep_like"),
    ]
)
now_and_then = MonitorTaskGroup(ImageToTensorBoard(log_dir, draw, "fit"), period=5)

# %% [markdown]
# The optimiser calls the monitor after each of its steps.

# %%
_ = gpflow.optimizers.Scipy().minimize(
    model.training_loss,
    model.trainable_variables,
    step_callback=Monitor(every_step, now_and_then),
)
# %% [markdown]
# `ModelToTensorBoard` writes the parameters of kernel and likelihood, as in GPflow; the sites are
# not among them.
#
# ## `VEMTrainer`
#
# The trainer that alternates E- and M-steps needs no tasks: `log_dir` is enough. It writes both
# objectives and their gap, the hyperparameters, how the E- and M-steps went, the leave-one-out
# density and, with one or two inputs, images of the fit. If the directory has a run already, it
# takes the next free name; `result.log_dir` says which.
#
# An iteration is an M-step, here the default of at most ten steps of L-BFGS at fixed sites, and the
# E-step after it. A monitor of one's own is called after each. This one writes the test log
# density, to another directory.

# %%
alternated = cvi("ep_like")
trainer = gh.VEMTrainer(alternated, "ep_like")


def test_log_density():
    return np.mean(alternated.predict_log_density(test_data))


task = ScalarToTensorBoard(str(logs / "vem-test"), test_log_density, "predictions/test")
result = trainer.fit(
    log_dir=logs / "vem",
    image_period=5,
    monitor=Monitor(MonitorTaskGroup(task)),
)
print(result)

# %% [markdown]
# ## Reading the files back
#
# TensorBoard's own reader gives what was written, by tag. `tf.summary` writes scalars as tensors of
# no dimensions, in single precision. Unless told otherwise the reader keeps a sample of ten steps
# per tag; the zero tells it to keep all.


# %%
def read(log_dir):
    events = EventAccumulator(str(log_dir), size_guidance={"tensors": 0})
    events.Reload()
    return events


def curve(events, tag):
    found = events.Tensors(tag)
    return [e.step for e in found], np.array([tf.make_ndarray(e.tensor_proto) for e in found])


runs = {"L-BFGS": read(logs / "l-bfgs"), "VEMTrainer": read(result.log_dir)}
for name, events in runs.items():
    print(f"{name}: {', '.join(sorted(events.Tags()['tensors']))}")

# %%
figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 7), constrained_layout=True)
for colour, (name, events) in enumerate(runs.items()):
    for tag, style in (("objectives/ep_like", "-"), ("objectives/elbo", "--")):
        top.plot(*curve(events, tag), f"C{colour}{style}", label=f"{name}, {tag}")
top.set(xlabel="step of L-BFGS, or iteration of VEMTrainer", ylabel="nats")
top.legend(fontsize="small")
bottom.plot(
    *curve(runs["VEMTrainer"], "predictions/loo_log_predictive_density"),
    "C1-",
    label="leave-one-out",
)
bottom.plot(*curve(read(logs / "vem-test"), "predictions/test"), "k-", label="test")
bottom.set(xlabel="iteration of VEMTrainer", ylabel="mean log density")
_ = bottom.legend()

# %% [markdown]
# Both runs end at nearly the same values. An iteration of `VEMTrainer` is many steps of an
# optimiser, so the lengths of the two runs say nothing about their speed. The leave-one-out density
# is computed from the training data without fitting again, and is optimistic. Here it rises
# throughout, while the test density is best early in the run: that can be seen only with data that
# were not trained on.
#
# The trainer's curves need no TensorBoard to be seen: `result.history["elbo"]` is the column that
# was written, and `result.plot()` draws the most important ones.

# %%
steps, written = curve(runs["VEMTrainer"], "objectives/elbo")
print(f"Largest difference: {np.max(np.abs(written - result.history['elbo'])):.1e}")

# %% [markdown]
# ## The same model in `VGP` and in `CVIModel`
#
# The same monitor for both classes, which writes the ELBO after each of the optimiser's steps.


# %%
def train(model):
    name = next(name for name, each in models.items() if each is model)
    task = ScalarToTensorBoard(str(logs / name), model.elbo, "objectives/elbo")
    gpflow.optimizers.Scipy().minimize(
        model.training_loss,
        model.trainable_variables,
        step_callback=Monitor(MonitorTaskGroup(task)),
        options={"maxiter": 3000},
    )


models = {
    "VGP": gpflow.models.VGP(data, gpflow.kernels.Matern52(), gh.likelihoods.ProbitBernoulli()),
    "CVIModel, ELBO": cvi("elbo"),
    "CVIModel, EP-like": cvi("ep_like"),
}
comparison = compare(models, test_data, train)
print(comparison)

# %% [markdown]
# Trained with the ELBO, both classes arrive at the same optimum. The curves show how: `VGP` starts
# from a poor $q(f)$ and needs many times the steps, because it searches for $q(f)$ and the kernel
# at once. `CVIModel` has the best $q(f)$ at each step. Its EP-like curve levels off below the
# optimum of the ELBO, which is not what it climbs; on these data it predicts a little worse.

# %%
figure, axes = plt.subplots(figsize=(8, 4), constrained_layout=True)
for name in models:
    steps, elbos = curve(read(logs / name), "objectives/elbo")
    axes.plot(steps, comparison["CVIModel, ELBO"].elbo - elbos, ".-", label=name)
axes.set(xlabel="step of L-BFGS", ylabel="optimum less ELBO", yscale="log", ylim=(1e-4, 1e2))
_ = axes.legend()

# %%
temporary.cleanup()
