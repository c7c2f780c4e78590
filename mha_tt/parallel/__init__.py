"""Tensor parallelism of layers over the chips of a mesh."""

from mha_tt.parallel.heads import shard

__all__ = ["shard"]
