"""Sparse models on a Dask cluster: only sums over rows are taken elsewhere. Needs the extra ``dask``."""

from .rows import ClusterEvent, ShardedRows, shards

__all__ = ["ClusterEvent", "ShardedRows", "shards"]
