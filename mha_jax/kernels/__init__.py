"""Attention kernels. Each returns the context of queries, keys and values under a `Mask` and
`Scores`.
"""

from collections.abc import Callable

from mha_jax.arrays import Array
from mha_jax.masks import Mask
from mha_jax.scores import Scores

Kernel = Callable[[Array, Array, Array, Mask, Scores], Array]
"""Returns the context (B, N, T, Hv) of q (B, N, T, H), k (B, K, S, H) and v (B, K, S, Hv). Shapes
are checked.

Query head n uses key/value head n // (N // K). The context of a fully masked row is 0. A layer
calls its `kernel` unless attention weights are requested; set it to replace the kernel. It must be
hashable if the layer is passed to `nnx.jit`. A method `step` with the same parameters, if any, is
called for one new token of each sequence over a cache. A method `find_padding` replaces
`padding.find_padding` in a kernel for divided tokens.
"""


def step_of(kernel: Kernel) -> Kernel:
    """Return the function for one new token of each sequence over a cache: the `step` of a kernel,
    or the kernel.
    """
    return getattr(kernel, "step", kernel)
