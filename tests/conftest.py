"""Quiet TensorFlow, one thread for each xdist worker, and a GPflow configuration per test."""

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
_IN_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if _IN_WORKER:
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import signal  # noqa: E402
from collections.abc import Iterator  # noqa: E402

import gpflow  # noqa: E402
import pytest  # noqa: E402
import tensorflow as tf  # noqa: E402

if _IN_WORKER:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


# What a shell starts in the background ignores interrupts, and Python with it; tests send some.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _restore_gpflow_config() -> Iterator[None]:
    before = gpflow.config.config()
    yield
    gpflow.config.set_config(before)
