"""Who is there, and whether they can compute with this process."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ClusterError, InvalidDataError

PACKAGES = ("gpflow_hybrid", "gpflow", "tensorflow", "numpy")

# Evaluated on a worker, which need not have the package: only what Python brings.
_VERSIONS = (
    "{'python': '.'.join(map(str, __import__('sys').version_info[:2])), "
    f"**{{name: __import__(name).__version__ for name in {PACKAGES!r}}}}}"
)


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


def own_versions() -> dict[str, str]:
    """Those that a worker must have."""
    found: dict[str, str] = eval(_VERSIONS)
    return found


def refused(versions: Mapping[str, Any]) -> dict[str, str]:
    """Why a worker cannot take part, by its address.

    :param versions: what workers have, or the exception that asking them raised.
    """
    own, reasons = own_versions(), {}
    for address, found in versions.items():
        if isinstance(found, BaseException):
            reasons[address] = f"{type(found).__name__}: {found}"
        elif found != own:
            names = [name for name in own if found.get(name) != own[name]]
            reasons[address] = ", ".join(
                f"{name} {found.get(name)} where this process has {own[name]}" for name in names
            )
    return reasons


def versions_on(client: Any, workers: Sequence[str]) -> dict[str, Any]:
    """What each of some workers has, or the exception that it raised; the package is imported there."""
    found: dict[str, Any] = client.run(
        eval, _VERSIONS, workers=list(workers), on_error="return", wait=True
    )
    return found


def require_equal(client: Any, workers: Sequence[str]) -> None:
    """Refuse a cluster with a worker that would compute something else, or nothing."""
    reasons = refused(versions_on(client, workers))
    if reasons:
        address, reason = next(iter(reasons.items()))
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        raise ClusterError(
            f"The worker {address}{more} cannot compute with this process: {reason}. Install the same "
            f"versions there (Python {platform.python_version()}; pip install gpflow-hybrid=="
            f"{own_versions()['gpflow_hybrid']}), and start the worker again."
        )


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
