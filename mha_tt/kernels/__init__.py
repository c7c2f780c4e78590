"""Attention kernels. Each returns the context of queries, keys and values under a `Mask` and
`Scores`.
"""

from collections.abc import Callable

from ttnn import Tensor

from mha_tt.masks import Mask
from mha_tt.scores import Scores

Kernel = Callable[[Tensor, Tensor, Tensor, Mask, Scores], Tensor]
"""Returns the context (B, N, T, Hv) of q (B, N, T, H), k (B, K, S, H) and v (B, K, S, Hv). Shapes
are checked.

Query head n uses key/value head n // (N // K). The context of a fully masked row is 0. A layer
calls its `kernel` unless attention weights are requested; set it to replace the kernel.
"""
