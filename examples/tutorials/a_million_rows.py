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
# # A million rows
#
# All that `SparseCVIModel` needs of its data are sums over rows, of $M \times M$ numbers. So they
# need not be in one memory: workers of a [Dask](https://www.dask.org) cluster hold the rows, the
# hyperparameters and $q(u)$ go out, sums come back. Nothing else changes, neither the model nor the
# optimiser nor the result.

# %%
import dask.array as da
import gpflow
import matplotlib.pyplot as plt
import numpy as np
from distributed import Client
from tutorial_tools import compare, shortened

import gpflow_hybrid as gh

# %% [markdown]
# ## A cluster
#
# Here it is two processes of this machine. `Client("tcp://…:8786")` connects to a scheduler
# anywhere; its workers need the same versions of the packages, which is checked. In a script, not a
# notebook, all that follows belongs below `if __name__ == "__main__":`, because new processes import
# it.

# %%
client = Client(
    n_workers=2,
    threads_per_worker=1,
    processes=shortened(True, False),
    dashboard_address="127.0.0.1:0",
)

# %% [markdown]
# ## Data that are never here
#
# Dask reads Parquet, CSV and Zarr (`dask.dataframe.read_parquet`, `dask.array.from_zarr`); DataFrames
# and arrays in any chunks will do. This function makes a chunk of rows where it is needed: eight
# inputs, and a label that depends on all of them.

# %%
num_rows, chunk = shortened(1_000_000, 1_000), shortened(50_000, 300)


def generated(num_rows, seed):
    sizes = [min(chunk, num_rows - i) for i in range(0, num_rows, chunk)]

    def block(number):
        rng = np.random.default_rng([seed, int(number[0])])
        X = rng.normal(size=(sizes[int(number[0])], 8))
        f = 2.0 * np.sin(X[:, :1]) + X[:, 1:2] * X[:, 2:3] + 0.3 * X[:, 3:].sum(1, keepdims=True)
        return np.hstack([X, f + rng.normal(size=f.shape) > 0.0])

    numbers = da.from_array(np.arange(len(sizes)), chunks=1)
    both = numbers.map_blocks(block, chunks=(tuple(sizes), (9,)), new_axis=1, dtype=np.float64)
    return both[:, :8], both[:, 8:]


X, Y = generated(num_rows, seed=0)
rows = gh.distributed.shards(client, X, Y, progress=False)
print(rows)

# %% [markdown]
# ## A model of all of it
#
# Inducing points come from a part of the rows. `gh.fit` begins on random parts of them by itself: a few
# thousand rows say nearly as much about the hyperparameters as a million, and cost nearly nothing.
# `gh.fit`, `model.infer`, `model.elbo`, a training loss in `Scipy().minimize` and `VEMTrainer` take
# `rows` wherever they take `(X, Y)`.

# %%
part = rows.first_rows(shortened(20_000, 200))
Z = gh.inducing_points(part[0], shortened(50, 6))
model = gh.SparseCVIModel(
    gpflow.kernels.Matern52(lengthscales=np.full(8, 3.0)), gh.likelihoods.ProbitBernoulli(), Z
)
gpflow.set_trainable(model.inducing_variable, False)
limit = shortened(1000, 15)
result = gh.fit(model, data=rows, start="data", tolerance=1.0, max_iterations=limit, progress=False)
print(result)
print(f"{rows.num_passes} passes over {rows.num_rows:,} rows")

# %% [markdown]
# The numbers are those of one process. On the rows that fit here:

# %%
few = gh.distributed.shards(client, *part, progress=False)
here, there = (float(model.elbo(data)) for data in (part, few))
print(here, there)

# %% [markdown]
# ## Predictions, lazy and chunked
#
# They are Dask arrays: `to_zarr`, `mean()` or `compute()` has them computed, chunk by chunk, by a
# model that travels once.

# %%
test = generated(shortened(100_000, 500), seed=1)
mean, _ = gh.distributed.predict_y(model, test[0])
log_density = float(client.compute(gh.distributed.predict_log_density(model, test).mean()).result())
print(mean, f"\ntest log density {log_density:.4f}")

# %% [markdown]
# Are probabilities what they say? Of the test rows with a predicted probability near $p$ a share of
# $p$ should be ones.

# %%
probability, label = (x.compute()[:, 0] for x in (mean, test[1]))
bins = np.clip((10 * probability).astype(int), 0, 9)
present = [b for b in range(10) if np.any(bins == b)]
shares = [label[bins == b].mean() for b in present]
_, ax = plt.subplots(figsize=(4, 4))
ax.plot([0, 1], [0, 1], "k:")
ax.plot([probability[bins == b].mean() for b in present], shares, "o-")
ax.set(xlabel="predicted probability", ylabel="share of ones", title="test rows")

# %% [markdown]
# ## When a worker dies
#
# its rows are read again by the others, and the sum is taken again; when one joins, it is given its
# part. Either is said, as a `ClusterWarning` and in `rows.events`; results stay what they are,
# because answers are added in the order of the rows. If the scheduler is lost, a `ClusterError` says
# so, and the model has the hyperparameters and $q(u)$ of its last loss: save it, and go on with new
# shards.

# %%
print(rows.events)

# %% [markdown]
# ## The same model in `SVGP` and in `SparseCVIModel`
#
# On the part of the rows that is here; `SVGP` is trained by L-BFGS on all of $q(u)$.

# %%
test_data = tuple(x[: shortened(10_000, 200)].compute() for x in test)


def arguments():
    kernel = gpflow.kernels.Matern52(lengthscales=3.0)
    return kernel, gh.likelihoods.ProbitBernoulli(), Z.copy()


def train(model):
    gpflow.set_trainable(model.inducing_variable, False)
    gpflow.optimizers.Scipy().minimize(
        model.training_loss_closure(part), model.trainable_variables, options={"maxiter": 2000}
    )


models = {
    "SVGP": gpflow.models.SVGP(*arguments()),
    "SparseCVI, ELBO": gh.SparseCVIModel(*arguments(), objective="elbo"),
    "SparseCVI, EP-like": gh.SparseCVIModel(*arguments()),
}
comparison = compare(models, test_data, train, part)
print(comparison)

# %%
_, ax = plt.subplots(figsize=(6, 2))
ax.barh([row.name for row in comparison.rows], [row.test_log_density for row in comparison.rows])
ax.set(xlabel="test log density")

# %%
client.close()
