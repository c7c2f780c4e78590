"""Layers and caches divided over the devices of a mesh, and attention of arrays that lie on several devices."""

from mha_jax.parallel.heads import shard, shard_cache
from mha_jax.parallel.tokens import ContextParallel

__all__ = ["ContextParallel", "shard", "shard_cache"]
