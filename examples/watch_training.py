"""Variational EM as in the paper, watched in TensorBoard.

    python -m examples.watch_training --log-dir logs/banana
    tensorboard --logdir logs

The first 200 points of Banana, E-steps to convergence, M-steps of Adam on the EP-like value.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import gpflow

import gpflow_hybrid as gh
from gpflow_hybrid.training import GradientSteps


def run(log_dir: str, max_iterations: int) -> gh.TrainingResult:
    """Train and write everything that there is to see."""
    X, Y = gh.datasets.load("banana")
    model = gh.CVIModel(
        (X[:200], Y[:200]), gpflow.kernels.Matern52(), gh.likelihoods.ProbitBernoulli()
    )
    trainer = gh.VEMTrainer(model, "ep_like", m_step=GradientSteps(10, "adam", lr=0.05))
    return trainer.fit(max_iterations, log_dir=log_dir, image_period=5)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--log-dir", default="logs/banana", help="where TensorBoard files go")
    parser.add_argument("--max-iterations", type=int, default=60)
    arguments = parser.parse_args()
    result = run(arguments.log_dir, arguments.max_iterations)
    print(result)
    print(f"Wrote {result.log_dir}.")
