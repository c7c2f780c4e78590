"""Layers whose heads are divided over the chips of a mesh, in the words of `ttnn`."""

from mha_tt.parallel.heads import shard

__all__ = ["shard"]
