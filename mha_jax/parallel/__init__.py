"""Tensor, context and fully sharded data parallelism of layers and caches, based on
`jax.sharding`.
"""

from mha_jax.parallel.heads import shard, shard_cache
from mha_jax.parallel.tokens import ContextParallel

__all__ = ["ContextParallel", "shard", "shard_cache"]
