"""How much memory something takes, said before it is computed, and refused where there is not so much."""

from __future__ import annotations

import functools
import os
import warnings
from pathlib import Path

from .errors import InvalidDataError, LargeModelWarning

SHARED_MATRICES = 2
"""N×N matrices at the peak of a training loss with its gradient, for every kernel,"""

MATRICES_PER_LATENT = 3
"""and for every latent: measured with ``benchmarks.memory``, 4.7 in all for one latent at N = 5000."""

INDUCING_MATRICES = 3
"""M×M matrices for every latent without which nothing is computed: of the sites, of u and its factor."""

LARGE_PART = 0.5
"""Part of the machine's memory above which a model warns of what it will take."""

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@functools.cache
def machine_memory() -> int | None:
    """Bytes that this process may use at most; None where that cannot be found out."""
    found = []
    try:
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, OSError, ValueError):  # not on this system
        pass
    for path in CGROUP_LIMITS:
        try:
            found.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # none, or "max"
            continue
    return min(found) if found else None


def in_gigabytes(num_bytes: float) -> str:
    """For a message."""
    return f"{num_bytes / 2**30:.3g} GiB"


def check_dense_model(num_data: int, num_latent_gps: int, num_kernels: int, itemsize: int) -> None:
    """Refuse data whose matrices no machine like this can hold; warn where they fill most of it."""
    matrices = SHARED_MATRICES * num_kernels + MATRICES_PER_LATENT * num_latent_gps
    needed, there = matrices * itemsize * num_data**2, machine_memory()
    if there is None or needed <= LARGE_PART * there:
        return
    words = (
        f"training on {num_data:,} rows takes about {in_gigabytes(needed)}, {matrices} matrices "
        f"of {num_data:,}² numbers; this machine has {in_gigabytes(there)}. Use "
        "gpflow_hybrid.SparseCVIModel with gpflow_hybrid.inducing_points(X, M), or a subset of the rows."
    )
    if needed > there:
        raise InvalidDataError(f"X has too many rows for a dense model: {words}")
    warnings.warn(f"A large dense model: {words}", LargeModelWarning, stacklevel=4)


def check_inducing_points(number: int, num_latent_gps: int) -> None:
    """Refuse so many inducing points that no machine like this can hold their matrices."""
    needed, there = INDUCING_MATRICES * num_latent_gps * 8 * number**2, machine_memory()
    if there is not None and needed > there:
        raise InvalidDataError(
            f"inducing_variable has too many points: {number:,} need more than {in_gigabytes(needed)}; "
            f"this machine has {in_gigabytes(there)}. Pass fewer: gpflow_hybrid.inducing_points(X, M)."
        )


def check_covariance(num_points: int, num_latent_gps: int, itemsize: int) -> None:
    """Refuse a covariance between so many new points that no machine like this can hold it."""
    needed, there = 3 * num_latent_gps * itemsize * num_points**2, machine_memory()
    if there is not None and needed > there:
        raise InvalidDataError(
            f"full_cov=True for {num_points:,} points takes about {in_gigabytes(needed)}; this machine has "
            f"{in_gigabytes(there)}. Leave it out, or predict fewer points at a time."
        )
