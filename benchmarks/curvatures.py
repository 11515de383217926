"""How EP-like objectives curve at the scale of the data: the first guess of ``fit(log_scale=True)``.

    python -m benchmarks.curvatures

Five data sets of ``benchmarks.sklearn_compare``, each class against the rest: second derivatives of the
loss in ``log ℓ`` and ``log σ²`` by differences of its gradient, in nats a datum, at the median distance
and a variance of ten, where the estimators start.
"""

from __future__ import annotations

import numpy as np

from .sklearn_compare import load

DATASETS = ("sonar", "ionosphere", "diabetes", "iris", "wine")
STEP = 1e-3


def curvature(X: np.ndarray, Y: np.ndarray) -> np.ndarray:
    """``[2, 2]``, in nats a datum."""
    import gpflow

    import gpflow_hybrid as gh
    from gpflow_hybrid.training.optimiser_coordinates import Coordinates
    from gpflow_hybrid.training.starts import lengthscales

    kernel = gpflow.kernels.Matern52(10.0, lengthscales(X, 0))
    model = gh.CVIModel((X, Y), kernel, gh.likelihoods.ProbitBernoulli())
    loss = model.loss_on_arrays()
    coordinates = Coordinates(np.array([True, True]))
    start = np.log([kernel.lengthscales.numpy(), kernel.variance.numpy()])

    def gradient(t: np.ndarray) -> np.ndarray:
        return coordinates.gradient_inward(t, loss(coordinates.outward(t))[1])

    steps = STEP * np.eye(2)
    rows = [(gradient(start + s) - gradient(start - s)) / (2.0 * STEP) for s in steps]
    return np.stack(rows) / len(X)


def main() -> None:
    """The command."""
    found = []
    for name in DATASETS:
        X, y = load(name)
        deviation = X.std(axis=0)
        X = (X - X.mean(axis=0)) / np.where(deviation > 0.0, deviation, 1.0)
        classes = np.unique(y)
        for label in classes[1:] if len(classes) == 2 else classes:
            H = curvature(X, (y == label).astype(float)[:, None])
            ridge = -H[0, 1] / H[1, 1]
            row = (H[0, 0] - ridge**2 * H[1, 1], H[1, 1], ridge)
            found.append(row)
            print(f"{name} {label}: " + ", ".join(f"{x:.4f}" for x in row), flush=True)
    medians = np.median(found, axis=0)
    print("in log ℓ along the ridge, in log σ², ρ: " + ", ".join(f"{x:.3f}" for x in medians))


if __name__ == "__main__":
    main()
