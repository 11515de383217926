"""Independent pieces of work, fits and samplers, as tasks of a Dask cluster."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from ..display import progress_bar
from ..errors import ClusterError, GPflowHybridError
from .shard import prepare_process
from .workers import check_client, require_workers


def run_jobs(
    client: Any,
    name: str,
    function: Callable[..., Any],
    common: Any,
    jobs: Sequence[Any],
    *,
    progress: bool | None = False,
) -> list[Any]:
    """``function(common, job)`` of every job, in their order, wherever they ran.

    A job whose worker is lost is given to another by Dask. What a job raises is raised here.

    :param name: of the tasks, on Dask's dashboard.
    :param common: what all jobs are given; sent once.
    """
    from distributed import CancelledError, KilledWorker, as_completed

    check_client(client)
    require_workers(client)
    address = str(client.scheduler.address)
    run = uuid.uuid4().hex[:8]
    sent = client.submit(bytes, cloudpickle.dumps((function, common)), key=f"{name}-{run}-common")
    pickled = [cloudpickle.dumps(job) for job in jobs]
    keys = [f"{name}-{run}-{i}" for i in range(len(jobs))]
    futures = client.map(_run, [sent] * len(jobs), pickled, key=keys, pure=False)
    try:
        with progress_bar(progress, total=len(jobs), desc=name, leave=False) as bar:
            for _ in as_completed(futures, loop=client.loop):
                bar.update(1)
        return [cloudpickle.loads(future.result()) for future in futures]
    except GPflowHybridError:
        raise
    except (CancelledError, KilledWorker, OSError) as error:
        raise ClusterError(
            f"A job ({name}) was lost on the cluster at {address}: {type(error).__name__}: {error}. "
            "See the logs of its workers; one that runs out of memory is killed."
        ) from error
    finally:
        for future in futures:
            future.release()


def _run(common: bytes, job: bytes) -> bytes:
    prepare_process()
    function, shared = cloudpickle.loads(common)
    return cloudpickle.dumps(function(shared, cloudpickle.loads(job)))
