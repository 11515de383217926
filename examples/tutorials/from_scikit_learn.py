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
# # From scikit-learn
#
# `gpflow_hybrid.sklearn` has two estimators. `HybridGPClassifier` takes the place of
# `GaussianProcessClassifier`, which approximates the posterior by Laplace's method;
# `HybridGPRegressor` takes the place of `GaussianProcessRegressor`, and has other noises than the
# Gaussian. They scale the data themselves, start the lengthscale at the distances between rows,
# train, and go wherever scikit-learn's own estimators go.

# %%
import gpflow
import matplotlib.pyplot as plt
import numpy as np
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import Matern
from sklearn.metrics import accuracy_score, log_loss
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tutorial_tools import compare, shortened

import gpflow_hybrid as gh
from gpflow_hybrid.sklearn import HybridGPClassifier, HybridGPRegressor

X, Y = gh.datasets.load("ionosphere")
y = np.where(Y[:, 0] > 0, "good", "bad")  # labels may be strings
X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=0, stratify=y)

# %% [markdown]
# ## Classification
#
# The same kernel for both: Matérn-5/2 with a variance and a lengthscale that are trained.
# (`GaussianProcessClassifier()` without a kernel trains nothing.)

# %%
ours = HybridGPClassifier("matern52").fit(X_train, y_train)
theirs = make_pipeline(StandardScaler(), GaussianProcessClassifier(1.0 * Matern(1.0, nu=2.5)))
theirs.fit(X_train, y_train)
scores = {
    name: (
        log_loss(y_test, estimator.predict_proba(X_test)),
        accuracy_score(y_test, estimator.predict(X_test)),
    )
    for name, estimator in {"HybridGPClassifier": ours, "GaussianProcessClassifier": theirs}.items()
}
for name, (loss, accuracy) in scores.items():
    print(f"{name:<28}log loss {loss:.3f}, accuracy {accuracy:.3f}")

# %% [markdown]
# The accuracies are close; the probabilities are not. Laplace's approximation is centred at the
# mode, where a skewed posterior has little of its mass, and its probabilities shy away from 0 and 1.

# %%
_, ax = plt.subplots(figsize=(6, 3))
bins = np.linspace(0.0, 1.0, 21)
for name, estimator in (("ours", ours), ("Laplace", theirs)):
    ax.hist(estimator.predict_proba(X_test)[:, 1], bins, alpha=0.5, label=name)
ax.set_xlabel("probability of a good return, rows not seen")
ax.legend()
plt.tight_layout()

# %% [markdown]
# What was trained is a GPflow model, of the scaled inputs, and all that the other tutorials say
# applies to it.

# %%
gpflow.utilities.print_summary(ours.model_)
print(ours.fit_result_)
print("log marginal likelihood", round(ours.log_marginal_likelihood_value_, 2))

# %% [markdown]
# ## Hyperparameters integrated out
#
# `integrate_hyperparameters=True` predicts by the mixture over the posterior of the hyperparameters
# instead of their optimum; `model_` is then a `HyperparameterPosterior`, with quantiles of each, and
# the log marginal likelihood that of the model class. It costs several fits, and need not
# predict better: ask your own data.

# %%
part = slice(shortened(150, 60))
integrated = HybridGPClassifier(integrate_hyperparameters=True).fit(X_train[part], y_train[part])
optimised = HybridGPClassifier().fit(X_train[part], y_train[part])
print(integrated.model_)
for name, estimator in (("integrated", integrated), ("optimised", optimised)):
    print(f"{name:<12}log loss {log_loss(y_test, estimator.predict_proba(X_test)):.3f}")

# %% [markdown]
# ## In a search
#
# Parameters have scikit-learn's ways: `get_params`, `set_params`, `clone`, pipelines, searches.
# More than two classes are each trained against the rest. There are no weights, of rows or classes.

# %%
search = GridSearchCV(
    HybridGPClassifier(),
    {"kernel": shortened(["matern52", "rbf", "matern12"], ["matern52", "rbf"])},
    scoring="neg_log_loss",
    cv=shortened(5, 2),
)
search.fit(X_train, y_train)
for parameters, score in zip(
    search.cv_results_["params"], search.cv_results_["mean_test_score"], strict=True
):
    print(f"{parameters['kernel']:<10}{-score:.3f}")

# %% [markdown]
# ## Regression with another noise
#
# Counts around $\exp(f(x))$, with quantiles of what may be observed.

# %%
rng = np.random.default_rng(0)
hours = np.sort(rng.uniform(0.0, 24.0, size=(120, 1)), axis=0)
rate = 15.0 * np.exp(np.sin(hours[:, 0] / 24.0 * 2.0 * np.pi))
visits = rng.poisson(rate)
counts = HybridGPRegressor(likelihood="poisson").fit(hours, visits)
grid = np.linspace(0.0, 24.0, 200)[:, None]
low, middle, high = counts.predict_quantiles(grid, (0.05, 0.5, 0.95)).T

_, ax = plt.subplots(figsize=(6, 3))
ax.fill_between(grid[:, 0], low, high, alpha=0.3, step="mid", label="5 % to 95 %")
ax.plot(grid[:, 0], counts.predict(grid), label="mean")
ax.plot(hours, visits, "k.", markersize=4, label="counts")
ax.set_xlabel("hour")
ax.legend()
plt.tight_layout()

# %% [markdown]
# ## More rows
#
# Up to 2500 rows the model is dense; beyond, `inducing_points="auto"` takes a sparse one and says
# so, in a warning and in `approximation_`. A number asks for it.

# %%
rows, labels = gh.datasets.load("banana")
few = shortened(5300, 400)
sparse = HybridGPClassifier(inducing_points=30, random_state=0)
sparse.fit(rows[:few], labels[:few, 0])
print(sparse.approximation_, type(sparse.model_).__name__)

# %% [markdown]
# ## The same model in `VGP` and in `CVIModel`
#
# What the estimator did, by hand.

# %%
train, test = (
    ((x - ours.X_offset_) / ours.X_scale_, (labels == "good")[:, None].astype(float))
    for x, labels in ((X_train, y_train), (X_test, y_test))
)
num = shortened(len(train[0]), 80)
data, test_data = tuple(d[:num] for d in train), test


def kernel():
    return gpflow.kernels.Matern52(lengthscales=np.sqrt(X.shape[1]))


models = {
    "VGP": gpflow.models.VGP(data, kernel(), gh.likelihoods.ProbitBernoulli()),
    "CVIModel, ELBO": gh.CVIModel(
        data, kernel(), gh.likelihoods.ProbitBernoulli(), objective="elbo"
    ),
    "CVIModel, EP-like": gh.CVIModel(data, kernel(), gh.likelihoods.ProbitBernoulli()),
}
comparison = compare(models, test_data)
print(comparison)

_, ax = plt.subplots(figsize=(6, 3))
for name, model in models.items():
    ax.plot(np.sort(model.predict_y(test_data[0])[0][:, 0]), label=name)
ax.set_xlabel("rows not seen, sorted")
ax.set_ylabel("probability of a good return")
ax.legend()
plt.tight_layout()
