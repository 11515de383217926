"""Who is there, and whether they can compute with this process."""

from __future__ import annotations

import functools
import importlib
import operator
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import ClusterError, InvalidDataError

PACKAGES = ("gpflow_hybrid", "gpflow", "tensorflow", "numpy")


def require_dask() -> None:
    """Say how to get what is missing."""
    try:
        import dask.array  # noqa: F401
        import distributed  # noqa: F401
    except ImportError:
        raise ClusterError(
            "A cluster needs dask.distributed, which is not installed: pip install "
            "'gpflow-hybrid[dask]'."
        ) from None


def check_client(client: Any) -> None:
    """Refuse what is no Dask client, or one that is closed or that only a coroutine can use."""
    require_dask()
    from distributed import Client

    if not isinstance(client, Client):
        raise InvalidDataError(
            f"client must be a distributed.Client; found {type(client).__name__}. Pass "
            "distributed.Client(address), or Client() for the cores of this machine."
        )
    if client.asynchronous:
        raise InvalidDataError(
            "client must not be asynchronous; found one. Pass distributed.Client(address)."
        )
    if client.status != "running":
        raise ClusterError(
            f"client must be connected to a scheduler; found one that is {client.status}. Pass a new "
            "distributed.Client(address)."
        )


def _version(of: str) -> Callable[[], str]:
    """Asks for a version, by what Python and Dask bring: a worker need not have the package."""
    if of == "python":
        return platform.python_version
    from toolz import compose

    return compose(
        operator.attrgetter("__version__"), functools.partial(importlib.import_module, of)
    )


def versions_on(client: Any, workers: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What each of some workers has, or the exception that it raised; packages are imported there."""
    found: dict[str, dict[str, Any]] = {address: {} for address in workers}
    for name in ("python", *PACKAGES):
        answers = client.run(_version(name), workers=list(workers), on_error="return", wait=True)
        for address, answer in answers.items():
            found[address][name] = answer
    return found


def refused(versions: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Why workers cannot take part, by their addresses.

    :param versions: what they have.
    """
    reasons = {}
    for address, found in versions.items():
        for name in ("python", *PACKAGES):
            theirs, ours = found.get(name), _version(name)()
            if isinstance(theirs, BaseException):
                reasons[address] = f"{type(theirs).__name__}: {theirs}"
                break
            if _significant(name, theirs) != _significant(name, ours):
                reasons[address] = f"{name} {theirs} where this process has {ours}"
                break
    return reasons


def _significant(name: str, version: str | None) -> str | None:
    """Of Python the first two numbers."""
    is_python = name == "python" and version is not None
    return ".".join(str(version).split(".")[:2]) if is_python else version


def require_workers(client: Any) -> dict[str, int]:
    """The threads of all workers; refuses a cluster without any, or with one that would compute something
    else, or nothing."""
    threads: dict[str, int] = dict(client.nthreads())
    if not threads:
        raise ClusterError(
            f"The scheduler at {client.scheduler.address} has no workers. Start some, dask worker "
            f"{client.scheduler.address}, or client.wait_for_workers(1)."
        )
    from distributed.comm.core import CommClosedError

    try:
        reasons = refused(versions_on(client, list(threads)))
    except (CommClosedError, OSError) as error:
        raise ClusterError(
            f"The scheduler at {client.scheduler.address} was lost while its workers were asked for "
            "their versions. Start a scheduler and workers, and begin again with a new client."
        ) from error
    if reasons:
        address, reason = next(iter(reasons.items()))
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        raise ClusterError(
            f"The worker {address}{more} cannot compute with this process: {reason}. Install the same "
            f"versions there (Python {platform.python_version()}; pip install gpflow-hybrid=="
            f"{_version('gpflow_hybrid')()}), and start the worker again."
        )
    return threads


def assigned(previous: Sequence[str | None], threads: Mapping[str, int]) -> list[str | None]:
    """A worker for every shard: the one before if it is there and has no more than its part, else the
    one with the fewest shards for each of its threads."""
    count, total = len(previous), sum(threads.values())
    most = {address: -(-count * n // total) for address, n in threads.items()} if total else {}
    load = dict.fromkeys(threads, 0)
    found: list[str | None] = []
    for address in previous:
        keeps = address is not None and address in load and load[address] < most[address]
        if keeps and address is not None:
            load[address] += 1
        found.append(address if keeps else None)
    if not threads:
        return found
    for i, address in enumerate(found):
        if address is None:
            best = min(threads, key=lambda x: ((load[x] + 1) / threads[x], x))
            load[best] += 1
            found[i] = best
    return found
