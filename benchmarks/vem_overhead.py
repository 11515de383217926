"""The part of a VEM iteration's wall time that is not spent inside compiled graphs.

    python -m benchmarks.vem_overhead sonar

The first fold of a data set, after a run that has traced everything. What TensorFlow's runtime executes is
timed where Python hands it over; the rest is Python: SciPy's L-BFGS, records, rules, files.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import gpflow
import tensorflow as tf
from tensorflow.python import pywrap_tfe

import gpflow_hybrid as gh
from gpflow_hybrid.training import GradientSteps, NaturalGradientSteps

ITERATIONS = 15
ADAM = {"m_step": GradientSteps(10, "adam", 0.05)}
PAPER = {"e_step": NaturalGradientSteps(20, 0.1), "m_step": GradientSteps(20, "sgd", 0.001)}
SETTINGS: dict[str, tuple[dict[str, Any], bool]] = {
    "default (L-BFGS, infer)": ({}, False),
    "Adam, infer": (ADAM, False),
    "the paper's": (PAPER, False),
    "the paper's, with files": (PAPER, True),
}


class InsideTensorFlow:
    """While active, adds up the wall time of TensorFlow's runtime."""

    def __enter__(self) -> InsideTensorFlow:
        self.seconds, self._execute = 0.0, pywrap_tfe.TFE_Py_Execute

        def execute(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return self._execute(*arguments)
            finally:
                self.seconds += time.perf_counter() - began

        pywrap_tfe.TFE_Py_Execute = execute
        return self

    def __exit__(self, *_: object) -> None:
        pywrap_tfe.TFE_Py_Execute = self._execute


def run(name: str, label: str) -> float:
    """One set of settings; prints and returns the part of the time outside."""
    arguments, with_files = SETTINGS[label]
    X, Y = gh.datasets.load(name)
    train, _ = next(iter(gh.datasets.folds(len(X))))
    (X_train,) = gh.datasets.standardise(X[train])
    model = gh.CVIModel(
        (X_train, Y[train]), gpflow.kernels.Matern52(), gh.likelihoods.ProbitBernoulli()
    )
    trainer = gh.VEMTrainer(model, "ep_like", stopping=[], **arguments)
    trainer.fit(2)
    for parameter in model.kernel.parameters:
        parameter.assign(tf.ones_like(parameter))
    model.sites.reset(len(X_train))
    with tempfile.TemporaryDirectory() as directory, InsideTensorFlow() as inside:
        files = {"log_dir": f"{directory}/log", "checkpoint_dir": f"{directory}/saved"}
        began = time.perf_counter()
        trainer.fit(ITERATIONS, **(files if with_files else {}))
        seconds = time.perf_counter() - began
    outside = 1.0 - inside.seconds / seconds
    print(
        f"{name} (n = {len(X_train)}), {label}: {1e3 * seconds / (ITERATIONS + 1):.0f} ms an "
        f"iteration, {100 * outside:.0f} % of it outside compiled graphs",
        flush=True,
    )
    return outside


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("datasets", nargs="*", default=["sonar"])
    for dataset in parser.parse_args().datasets:
        for label in SETTINGS:
            run(dataset, label)
