"""Fits one after the other in one process; prints its resident memory in bytes after 50 and at the end."""

from __future__ import annotations

import gc
import os
import sys

import gpflow
import numpy as np

import gpflow_hybrid as gh

EARLY = 50


def resident() -> int:
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(num_fits: int) -> None:
    rng = np.random.default_rng(0)
    makers = [
        gh.likelihoods.ProbitBernoulli,
        gpflow.likelihoods.Bernoulli,
        gpflow.likelihoods.Poisson,
    ]
    for i in range(num_fits):
        X = rng.normal(size=(30, 2))
        Y = (X[:, :1] + 0.3 * rng.normal(size=(30, 1)) > 0.0).astype(float)
        likelihood = makers[i % 3]()
        if i % 5 == 4:
            model = gh.SparseCVIModel(gpflow.kernels.Matern52(), likelihood, X[:8].copy())
            gh.fit(model, data=(X, Y), max_iterations=5, progress=False)
        else:
            model = gh.CVIModel((X, Y), gpflow.kernels.Matern52(), likelihood)
            gh.fit(model, max_iterations=5, progress=False)
        model.predict_y(X)
        if i + 1 in (EARLY, num_fits):
            print(resident(), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
