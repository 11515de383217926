"""Sparse models on a Dask cluster: only sums over rows are taken elsewhere. Needs the extra ``dask``."""

from .holding import ClusterEvent
from .predictions import predict_f, predict_log_density, predict_y
from .rows import ShardedRows, shards

__all__ = [
    "ClusterEvent",
    "ShardedRows",
    "predict_f",
    "predict_log_density",
    "predict_y",
    "shards",
]
