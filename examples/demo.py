"""Two minutes with gpflow_hybrid: the same model trained with the ELBO and with the EP-like objective.

    make demo            (or: python -m examples.demo --output demo.png)

One fold of Sonar. Prints both fits side by side and saves a picture: the two objectives along the
kernel's magnitude σ, and what each fit says of the held-out data.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import gpflow
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

import gpflow_hybrid as gh

LABELS = {"elbo": "ELBO", "ep_like": "EP-like"}


def train(X: np.ndarray, Y: np.ndarray, objective: str) -> gh.CVIModel:
    """All of training, as in any GPflow script."""
    model = gh.CVIModel(
        (X, Y),
        gpflow.kernels.Matern52(),
        gh.likelihoods.ProbitBernoulli(),
        objective=objective,
    )
    gpflow.optimizers.Scipy().minimize(model.training_loss, model.trainable_variables)
    return model


def describe(model: gh.CVIModel, X_test: np.ndarray, Y_test: np.ndarray) -> dict[str, float]:
    """The rows of the table for one fit."""
    probability, _ = model.predict_y(X_test)
    return {
        "lengthscale": float(model.kernel.lengthscales.numpy()),
        "magnitude σ": float(np.sqrt(model.kernel.variance.numpy())),
        "ELBO": float(model.elbo()),
        "EP-like value": float(model.ep_like_log_marginal()),
        "test accuracy": float(np.mean((probability.numpy() > 0.5) == (Y_test > 0.5))),
        "test log predictive density": float(np.mean(model.predict_log_density((X_test, Y_test)))),
    }


def slices(model: gh.CVIModel, log_sigmas: np.ndarray) -> dict[str, list[float]]:
    """Both objectives at λ*(σ), along σ at the model's lengthscale; the model is restored."""
    kept = model.kernel.variance.numpy()
    values: dict[str, list[float]] = {"elbo": [], "ep_like": []}
    for log_sigma in log_sigmas:
        model.kernel.variance.assign(np.exp(2.0 * log_sigma))
        model.infer()
        values["elbo"].append(float(model.elbo()))
        values["ep_like"].append(float(model.ep_like_log_marginal()))
    model.kernel.variance.assign(kept)
    model.infer()
    return values


def draw(models: dict[str, gh.CVIModel], X_test: np.ndarray, Y_test: np.ndarray, path: str) -> None:
    """Left: the objectives as functions of σ. Right: probability given to the true class."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    log_sigmas = np.linspace(-1.0, 5.0, 25)
    curves = slices(models["ep_like"], log_sigmas)
    for (key, label), colour in zip(LABELS.items(), ("tab:blue", "tab:orange"), strict=True):
        values = np.array(curves[key])
        left.plot(log_sigmas, values, color=colour, label=label)
        best = np.argmax(values)
        left.plot(log_sigmas[best], values[best], "o", color=colour)
        probability = models[key].predict_y(X_test)[0].numpy()
        of_truth = np.sort(np.where(Y_test > 0.5, probability, 1.0 - probability).ravel())
        right.step(np.arange(1, len(of_truth) + 1), of_truth, color=colour, label=label)
    left.set(
        xlabel="log σ",
        ylabel="log marginal likelihood",
        title="Learning objectives at the EP-like fit's lengthscale",
    )
    left.legend()
    right.axhline(0.5, color="grey", linewidth=0.8, linestyle="--")
    right.set(
        xlabel="held-out datum, sorted",
        ylabel="probability of its true class",
        ylim=(0, 1),
        title="Predictions for the held-out fold",
    )
    right.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train both, print the table, save the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="demo.png", help="where to save the picture")
    arguments = parser.parse_args()
    start = time.perf_counter()
    X, Y = gh.datasets.load("sonar")
    train_rows, test_rows = next(iter(gh.datasets.folds(len(X))))
    X_train, X_test = gh.datasets.standardise(X[train_rows], X[test_rows])
    Y_train, Y_test = Y[train_rows], Y[test_rows]

    models = {objective: train(X_train, Y_train, objective) for objective in LABELS}
    rows = {key: describe(model, X_test, Y_test) for key, model in models.items()}
    print(f"Sonar, {len(X_train)} training and {len(X_test)} test rows; trained with the")
    print(f"{'':<29}" + "".join(f"{label:>12}" for label in LABELS.values()))
    for name in rows["elbo"]:
        print(f"{name:<29}" + "".join(f"{rows[key][name]:>12.4f}" for key in LABELS))
    draw(models, X_test, Y_test, arguments.output)
    print(f"Picture: {arguments.output}. {time.perf_counter() - start:.0f} seconds in all.")


if __name__ == "__main__":
    main()
