"""Tensor and context parallelism of layers, based on `torch.distributed.tensor.parallel`."""

from mha_torch.parallel.heads import plan, shard
from mha_torch.parallel.ring import ring_attention

__all__ = ["plan", "ring_attention", "shard"]
