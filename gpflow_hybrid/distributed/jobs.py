"""Independent pieces of work, fits and samplers, as tasks of a Dask cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import cloudpickle
import gpflow

from ..display import progress_bar
from ..errors import ClusterError
from .configuration import configured
from .holding import MAX_ATTEMPTS, Holding
from .shard import prepare_process
from .workers import check_client, require_workers


class _Jobs(Holding):
    """Jobs in the hands of a cluster: without shards, and with other words."""

    def _given_up(self, error: BaseException) -> str:
        return (
            f"A job was lost {MAX_ATTEMPTS} times, at last by {type(error).__name__}: {error}. See the "
            "logs of the workers; one that runs out of memory is killed: give them more."
        )

    def _scheduler_lost(self) -> str:
        return (
            f"The scheduler at {self.address} was lost, or the client was closed. Start a scheduler and "
            "workers, and begin again with a new client."
        )

    def _consequence(self, address: str) -> str:
        return "what it had not finished is done by others"


def run_jobs(
    client: Any,
    name: str,
    function: Callable[..., Any],
    common: Any,
    jobs: Sequence[Any],
    *,
    progress: bool | None = False,
) -> list[Any]:
    """``function(common, job)`` of every job, in their order, wherever they ran, under GPflow's
    configuration of this process.

    A job whose worker is lost is given to another, and said (:class:`~gpflow_hybrid.ClusterWarning`). What
    a job raises is raised here.

    :param name: of the tasks, on Dask's dashboard.
    :param common: what all jobs are given; sent once.
    """
    check_client(client)
    require_workers(client)
    held = _Jobs(client, [])
    shared = cloudpickle.dumps((function, common, gpflow.config.config()))
    pickled = [cloudpickle.dumps(job) for job in jobs]
    found: dict[int, bytes] = {}

    with progress_bar(progress, total=len(jobs), desc=name, leave=False) as bar:

        def attempt() -> None:
            """Those that are not done yet."""
            left = [i for i in range(len(jobs)) if i not in found]
            options = {"pure": False, **held.where()}
            sent = client.submit(bytes, shared, key=held.key(f"{name}-common", 0), **options)
            keys = [held.key(name, i) for i in left]
            given = ([sent] * len(left), [pickled[i] for i in left])
            futures = client.map(_run, *given, key=keys, **options)
            try:
                for future in futures:
                    future.add_done_callback(lambda x: bar.update(x.status == "finished"))
                held.gathered(futures)
            finally:
                for i, future in zip(left, futures, strict=True):
                    if future.status == "finished" and client.status == "running":
                        found[i] = future.result()
                    future.release()

        held.with_faults(attempt)
    with suppress(ClusterError):  # Dask may have passed on by itself what a worker has left
        held.look()
    return [cloudpickle.loads(found[i]) for i in range(len(jobs))]


def _run(shared: bytes, job: bytes) -> bytes:
    prepare_process()
    function, common, config = cloudpickle.loads(shared)
    with configured(config):
        return cloudpickle.dumps(function(common, cloudpickle.loads(job)))
