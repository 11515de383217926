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
# # Saving and loading
#
# Durations $y_n > 0$ are observed at inputs $x_n$, and
#
# $$f \sim \mathcal{GP}(0, k), \qquad y_n \mid f \sim \text{Exponential with mean } \exp f(x_n).$$
#
# A trained `CVIModel` is saved by the means that GPflow's models have: TensorFlow's checkpoints, a
# dictionary of values, a SavedModel. One thing differs, and it comes first.

# %%
import subprocess
import sys
import tempfile
from pathlib import Path

import gpflow
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from gpflow.utilities import multiple_assign, read_values
from tutorial_tools import compare, shortened

import gpflow_hybrid as gh

tf.get_logger().setLevel("ERROR")  # no remark for every file that is written

# %%
rng = np.random.default_rng(0)


def sample(num_data):
    X = rng.uniform(0.0, 6.0, size=(num_data, 1))
    return X, rng.exponential(np.exp(np.sin(2.0 * X)))


data, test_data = sample(shortened(150, 40)), sample(200)


def build(objective="ep_like"):
    kernel, likelihood = gpflow.kernels.SquaredExponential(), gpflow.likelihoods.Exponential()
    return gh.CVIModel(data, kernel, likelihood, objective=objective)


temporary = tempfile.TemporaryDirectory()
directory = Path(temporary.name)

# %% [markdown]
# ## `infer()` before saving
#
# During training the sites follow the hyperparameters: whatever the optimiser did last, predictions
# and objectives of the model are those at the optimal sites. The numbers in the sites are those of
# the optimiser's last evaluation, which need not have been at its last step. A file has the numbers
# only. So call `infer()` once after training and before values leave the model. It takes no step if
# there is none to take.

# %%
model = build()
gpflow.optimizers.Scipy().minimize(model.training_loss, model.trainable_variables)
print(model.infer().message)

Xnew = np.linspace(0.0, 6.0, 100)[:, None]
expected = np.stack(model.predict_y(Xnew))


def difference(other):
    """The largest in the mean or variance of y."""
    return np.max(np.abs(np.stack(other.predict_y(Xnew)) - expected))


# %% [markdown]
# ## A checkpoint
#
# It has every variable of the model, and not the data. To load it, build the model by the same code
# with the same data, then read the values into it. `assert_consumed` fails if something in the file
# had no place in the model.

# %%
path = tf.train.Checkpoint(model=model).write(str(directory / "checkpoint"))

restored = build()
tf.train.Checkpoint(model=restored).read(path).assert_consumed()
print(f"Largest difference of the predictions: {difference(restored):.1e}")

# %% [markdown]
# ## A dictionary of values
#
# `read_values` gives NumPy arrays by name, to be kept in any format. `multiple_assign` puts them
# into another model.

# %%
values = read_values(model)
np.savez(directory / "values.npz", **values)
for name, value in values.items():
    print(f"{name:<24}{value.shape}")

loaded = build()
multiple_assign(loaded, dict(np.load(directory / "values.npz")))
print(f"Largest difference of the predictions: {difference(loaded):.1e}")

# %% [markdown]
# There are two numbers per datum beside the hyperparameters, where `VGP` has a mean and a
# triangular matrix. Even these can be left out: they follow from the hyperparameters and the data.
# Assign the rest and infer.

# %%
hyperparameters = {name: value for name, value in values.items() if ".sites" not in name}
inferred = build()
multiple_assign(inferred, hyperparameters)
print(inferred.infer().message)
print(f"Largest difference of the predictions: {difference(inferred):.1e}")

# %% [markdown]
# ## A SavedModel, served elsewhere
#
# A compiled function is saved with all that it needs, data included. Where it is loaded, TensorFlow
# is enough. A compiled function cannot infer; if the hyperparameters had moved since the training
# loss inferred the sites, it would refuse and ask for `infer()`.

# %%
model.serve = tf.function(
    lambda Xnew: model.predict_y(Xnew),
    input_signature=[tf.TensorSpec([None, 1], tf.float64)],
    autograph=False,
)
tf.saved_model.save(model, str(directory / "served"))
np.save(directory / "inputs.npy", Xnew)

program = """
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

directory = Path(sys.argv[1])
model = tf.saved_model.load(str(directory / "served"))
np.save(directory / "outputs.npy", model.serve(np.load(directory / "inputs.npy")))
print("GPflow was imported:", "gpflow" in sys.modules)
"""
process = subprocess.run(
    [sys.executable, "-c", program, str(directory)], check=True, capture_output=True, text=True
)
print(process.stdout.strip())
served = np.load(directory / "outputs.npy")
print(f"Largest difference of the predictions: {np.max(np.abs(served - expected)):.1e}")

# %% [markdown]
# Predictions and objectives, such as `model.elbo`, can be exported. A training loss cannot: its E-step
# runs on the host, outside of the graph.
#
# ## A run that goes on
#
# What is above saves a model. `VEMTrainer` also saves the run: iteration, history, the optimiser's
# state, random generators. With `resume=True` it goes on from there if there is something to go on
# from, and ends as if it had not been interrupted. Here it is stopped after two iterations; a new
# model and a new trainer go on.

# %%
first = gh.VEMTrainer(build(), "ep_like").fit(2, checkpoint_dir=directory / "run")
print(first)
resumed = gh.VEMTrainer(build(), "ep_like").fit(50, checkpoint_dir=directory / "run", resume=True)
print(resumed)

# %% [markdown]
# ## The same model in `VGP` and in `CVIModel`

# %%
vgp = gpflow.models.VGP(data, gpflow.kernels.SquaredExponential(), gpflow.likelihoods.Exponential())
models = {"VGP": vgp, "CVIModel, ELBO": build("elbo"), "CVIModel, EP-like": build("ep_like")}
comparison = compare(models, test_data)
print(comparison)
for name, trained in models.items():
    print(f"{name:<20}{sum(np.size(v) for v in read_values(trained).values()):>8} numbers to save")

# %% [markdown]
# The three fits agree: with this likelihood the two objectives hardly differ. `CVIModel` saves two
# numbers per datum; in `VGP` most of what is saved is `q_sqrt`, which `read_values` gives as a full
# matrix and which grows with the square of the number of data.

# %%
figure, axes = plt.subplots(figsize=(8, 4.5), constrained_layout=True)
for name, style in (("CVIModel, EP-like", "C0-"), ("VGP", "C1--")):
    mean, variance = (part[:, 0] for part in models[name].predict_f(Xnew))
    axes.plot(Xnew, np.exp(mean), style, label=f"{name}: median of exp(f)")
    for side in (-1.96, 1.96):
        axes.plot(Xnew, np.exp(mean + side * np.sqrt(variance)), style, linewidth=0.7)
axes.plot(Xnew, np.exp(np.sin(2.0 * Xnew)), "k:", label="truth")
axes.plot(*data, "k.", markersize=3, label="data")
axes.set(xlabel="x", ylabel="y", yscale="log", title="Mean duration, with its 95 % band")
_ = axes.legend(fontsize="small")

# %%
temporary.cleanup()
