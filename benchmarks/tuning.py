"""What the sizes in ``gpflow_hybrid/tuning.py`` are worth: time and memory with other values.

    python -m benchmarks.tuning                          # all of them
    python -m benchmarks.tuning DIRECTIONS BLOCK_ROWS --repetitions 5

Every value has a process of its own, which does the same work some times: the shortest time, seconds of the
processor in brackets, and the memory at the peak of all of it. The middle value is that of the library.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Case(NamedTuple):
    """Work that a size matters to, and the values to try."""

    work: str
    values: tuple[float, ...]


CASES = {
    "FEW_DATA": Case("dense", (100, 300, 1000)),
    "DIRECTIONS": Case("coupled", (200, 3000, 10_000)),
    "DIRECTIONS_PER_DATUM": Case("coupled", (0.3, 1.25, 6.0)),
    "LARGE_MATRIX": Case("dense", (500, 3000, 10_000)),
    "KEPT_DISTANCES": Case("eager", (500, 4000, 16_000)),
    "KEPT_BYTES": Case("dense", (2**18, 2**25, 2**28)),
    "CACHED_ELEMENTS": Case("eager", (10_000, 160_000, 2_560_000)),
    "QUADRATURE_ELEMENTS": Case("quadrature", (4_000, 60_000, 1_000_000)),
    "BLOCK_ROWS": Case("dense", (16, 64, 256)),
    "COLUMN_CHUNK": Case("weak", (16, 256, 4096)),
    "RANK_CHUNK": Case("dense", (64, 512, 4096)),
    "PARALLEL_BLOCKS": Case("blocks", (1, 2, 8)),
    "PREDICTED_ELEMENTS": Case("predictions", (2**18, 2**22, 2**26)),
    "PROJECTED_ELEMENTS": Case("sparse", (2**17, 2**21, 2**25)),
    "KEPT_PROJECTIONS": Case("sparse", (2**20, 2**30, 2**34)),
    "SCANNED_ROWS": Case("scan", (64, 4096, 262_144)),
    "SMALLEST_BLOCK": Case("narrow", (16, 256, 4096)),
    "ANNEALED_CHAINS": Case("annealing", (16, 4096, 65_536)),
    "ANNEALED_FLOATS": Case("annealing", (100_000, 100_000_000, 10**10)),
    "PREDICTED_INTEGRALS": Case("annealing", (200, 20_000, 2_000_000)),
    "COMPILED_SETTINGS": Case("mixture", (1, 8, 1000)),
    "THREADED_PROJECTIONS": Case("sparse", (2**14, 2**20, 2**26)),
    "THREADED_ELEMENTS": Case("dense", (2**14, 2**18, 2**22)),
}
"""THREADED_ELEMENTS beside other work is ``benchmarks.busy``'s."""


def _labels(n: int, num_inputs: int = 8) -> tuple[Any, Any]:
    import numpy as np

    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, num_inputs))
    return X, (X[:, :1] + 0.5 * rng.normal(size=(n, 1)) > 0.0).astype(float)


def _losses(model: Any, *, in_graph: bool = True) -> Callable[[], Any]:
    """A training loss with its gradient, 1 % from the last."""
    import tensorflow as tf

    def loss_and_gradient() -> Any:
        with tf.GradientTape() as tape:
            loss = model.training_loss()
        return loss, tape.gradient(loss, model.trainable_variables)

    evaluate = tf.function(loss_and_gradient, autograph=False) if in_graph else loss_and_gradient
    lengthscale, sign = float(model.kernel.lengthscales.numpy()), 1.0

    def work() -> None:
        nonlocal sign
        sign = -sign
        model.kernel.lengthscales.assign(lengthscale * (1.0 + 0.005 * sign))
        evaluate()

    return work


def _probit(n: int, variance: float = 4.0) -> Any:
    import gpflow

    import gpflow_hybrid as gh

    kernel = gpflow.kernels.Matern52(variance=variance, lengthscales=3.0)
    return gh.CVIModel(_labels(n), kernel, gh.likelihoods.ProbitBernoulli())


def dense(size: int) -> Callable[[], Any]:
    """Losses of one latent in a graph, where n is 700."""
    return _losses(_probit(7 * size))


def eager(size: int) -> Callable[[], Any]:
    """The same with kernels on arrays."""
    import numpy as np

    loss, at = _probit(7 * size).loss_on_arrays(), np.array([1.0, 3.0])

    def work() -> None:
        nonlocal at
        at = at + 1e-3
        loss(at)

    return work


def blocks(size: int) -> Callable[[], Any]:
    """The same outside of a graph: kernels in blocks of rows by TensorFlow."""
    return _losses(_probit(7 * size), in_graph=False)


def weak(size: int) -> Callable[[], Any]:
    """Losses with sites that say next to nothing, whose columns are taken by triangular products."""
    return _losses(_probit(7 * size, 1e-6))


def _likelihood_case(name: str, n: int, lengthscale: float) -> Any:
    import gpflow

    import gpflow_hybrid as gh
    from benchmarks.peers.likelihood_fit import problem

    data, likelihood, num_latent = problem(name, n)
    kernel = gpflow.kernels.Matern52(lengthscales=lengthscale)
    return gh.CVIModel(data, kernel, likelihood, num_latent_gps=num_latent)


def coupled(size: int) -> Callable[[], Any]:
    """Losses whose latents are coupled and curve much."""
    return _losses(_likelihood_case("heteroskedastic", 4 * size, 0.2))


def quadrature(size: int) -> Callable[[], Any]:
    """Losses with a quadrature for every datum."""
    return _losses(_likelihood_case("student_t", 4 * size, 1.0))


def predictions(size: int) -> Callable[[], Any]:
    """``predict_f`` at many new rows."""
    model = _probit(4 * size)
    model.infer()
    new = _labels(200 * size)[0]
    return lambda: model.predict_f(new)


def _sparse(num_rows: int, num_inducing: int) -> Callable[[], Any]:
    import gpflow
    import tensorflow as tf

    import gpflow_hybrid as gh

    X, Y = _labels(num_rows)
    kernel = gpflow.kernels.Matern52(variance=4.0, lengthscales=3.0)
    probit = gh.likelihoods.ProbitBernoulli()
    model = gh.SparseCVIModel(kernel, probit, X[:num_inducing].copy(), num_data=None)
    gpflow.set_trainable(model.inducing_variable, False)

    def work() -> None:
        kernel.lengthscales.assign(3.0 if kernel.lengthscales.numpy() > 3.005 else 3.01)
        with tf.GradientTape() as tape:
            loss = model.training_loss((X, Y))
        tape.gradient(loss, model.trainable_variables)

    return work


def sparse(size: int) -> Callable[[], Any]:
    """Losses of a sparse model with M = 100."""
    return _sparse(200 * size, size)


def narrow(size: int) -> Callable[[], Any]:
    """Losses with so many inducing points that blocks of rows are short."""
    return _sparse(20 * size, 5 * size)


def scan(size: int) -> Callable[[], Any]:
    """Looking for distinct rows among many that are the same."""
    import numpy as np

    import gpflow_hybrid as gh

    X = np.repeat(_labels(size)[0], 2000, axis=0)
    return lambda: gh.inducing_points(X, size // 2)


def annealing(size: int) -> Callable[[], Any]:
    """Annealing of 25 settings with predictions."""
    import gpflow_hybrid as gh

    model, (X, Y) = _probit(size), _labels(size)
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    settings = gh.evidence.grid({".kernel.lengthscales": values, ".kernel.variance": values})
    return lambda: gh.annealed_importance_sampling(
        model,
        hyperparameters=settings,
        num_temperatures=10,
        test_data=(X[: size // 2], Y[: size // 2]),
        progress=False,
    )


def mixture(size: int) -> Callable[[], Any]:
    """A first prediction by all settings of integrated hyperparameters."""
    import gpflow_hybrid as gh

    model = _probit(size // 2)
    posterior = gh.integrate_hyperparameters(model, progress=False)
    new = _labels(size)[0]
    return lambda: posterior.predict_f(new)


def set_before_import(name: str, value: float) -> None:
    """Give a size another value, before anything reads it."""
    assert "gpflow_hybrid" not in sys.modules
    path = ROOT / "gpflow_hybrid" / "tuning.py"
    spec = importlib.util.spec_from_file_location("gpflow_hybrid.tuning", path)
    assert spec is not None
    assert spec.loader is not None
    sizes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sizes)
    setattr(sizes, name, type(getattr(sizes, name))(value))
    sys.modules["gpflow_hybrid.tuning"] = sizes


def _alone(name: str, value: float, size: int, repetitions: int) -> None:
    """Work with that value, and print what it took as JSON."""
    set_before_import(name, value)
    work = globals()[CASES[name].work](size)
    work()  # traced, and warm
    times = []
    for _ in range(repetitions):
        began = time.perf_counter(), time.process_time()
        work()
        times.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps([*(min(x) for x in zip(*times, strict=True)), peak]))


def measure(name: str, value: float, size: int, repetitions: int) -> tuple[float, float, float]:
    """Seconds, those of the processor, and MiB at the peak, with that value."""
    command = [sys.executable, "-m", "benchmarks.tuning", name, "--alone", repr(value)]
    command += ["--size", str(size), "--repetitions", str(repetitions)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} = {value}: {done.stderr[-2000:]}")
    seconds, processor, peak = json.loads(done.stdout.splitlines()[-1])
    return seconds, processor, peak


def main() -> None:
    """Measure and print a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="all by default")
    parser.add_argument("--size", type=int, default=100, help="of the problems; 100 is theirs")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--alone", type=float, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if unknown := set(a.names) - set(CASES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(CASES)}")
    if a.alone is not None:
        _alone(a.names[0], a.alone, a.size, a.repetitions)
        return
    for name in a.names or CASES:
        cells = []
        for value in CASES[name].values:
            seconds, processor, peak = measure(name, value, a.size, a.repetitions)
            cells.append(f"{value:g}: {seconds:.3f} s ({processor:.3f}), {peak:.0f} MiB")
        print(f"{name:22s} {CASES[name].work:12s} " + "   ".join(cells), flush=True)


if __name__ == "__main__":
    main()
