"""Attention kernels: each returns the context of queries, keys and values, under a `Mask` and `Scores`."""

from collections.abc import Callable

from torch import Tensor

from mha_torch.masks import Mask
from mha_torch.scores import Scores

Kernel = Callable[[Tensor, Tensor, Tensor, Mask, Scores], Tensor]
"""Returns the context (B, N, T, Hv) of q (B, N, T, H), k (B, K, S, H) and v (B, K, S, Hv), whose shapes are checked.

Query head n uses key/value head n // (N // K). A fully masked row gives 0. A layer calls its `kernel` unless attention
weights are asked for; yours takes its place. It may have a method `check`, with the same parameters, instead of
`stages.check_attention`.
"""
