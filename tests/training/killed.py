"""Training in processes that can be killed: commands on standard input, answers on standard output.

``DIRECTORY ITERATIONS PERIOD M_STEP`` forks a process that trains, saves and resumes in the directory
and leaves what it found in ``outcome.npz``. The answers are ``started PID`` and ``ended CODE``.
TensorFlow is imported once, and forked before it has begun anything: it does not survive a fork after
its first operation.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import gpflow
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

import gpflow_hybrid as gh
from gpflow_hybrid.training import GradientSteps, LBFGSSteps, NaturalGradientSteps, VEMTrainer


def draw(model: gh.SiteModel) -> float:
    """From both generators whose state a checkpoint keeps."""
    return float(np.random.random() + tf.random.get_global_generator().normal([], dtype=tf.float64))


def train(directory: Path, num_iterations: int, period: int, m_step: str) -> None:
    from tests.training.cases import Measuring, binary, columns, values  # makes tensors

    np.random.seed(7)
    tf.random.get_global_generator().reset_from_seed(11)
    likelihood = gpflow.likelihoods.Poisson()  # quicker to compile than the probit
    trainer = VEMTrainer(
        gh.CVIModel(binary(), gpflow.kernels.Matern32(), likelihood),
        "elbo",
        e_step=NaturalGradientSteps(5, 0.5),
        m_step=GradientSteps(2, "adam", 0.03) if m_step == "adam" else LBFGSSteps(2),
        stopping=Measuring(draw),
    )
    result = trainer.fit(
        num_iterations,
        checkpoint_dir=directory,
        checkpoint_period=period,
        resume=True,
        progress=False,
    )
    optimizer = () if trainer.optimizer is None else trainer.optimizer.variables
    outcome = values(trainer.model) | columns(result.history)
    outcome |= {f"optimizer {i}": np.array(v) for i, v in enumerate(optimizer)}
    outcome["best_iteration"] = np.array(result.best_iteration)
    with (directory / "outcome.npz").open("wb") as file:
        np.savez(file, **outcome)


def main() -> None:
    assert context.context()._context_handle is None, "an import has started TensorFlow"
    for command in sys.stdin:
        directory, num_iterations, period, m_step = command.split()
        child = os.fork()
        if child == 0:
            train(Path(directory), int(num_iterations), int(period), m_step)
            os._exit(0)
        print("started", child, flush=True)
        _, status = os.waitpid(child, 0)
        print("ended", os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
