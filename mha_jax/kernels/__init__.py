"""Attention kernels: each returns the context of queries, keys and values, under a `Mask` and `Scores`."""

from collections.abc import Callable

from jaxtyping import Array

from mha_jax.masks import Mask
from mha_jax.scores import Scores

Kernel = Callable[[Array, Array, Array, Mask, Scores], Array]
"""Returns the context (B, N, T, Hv) of q (B, N, T, H), k (B, K, S, H) and v (B, K, S, Hv), whose shapes are checked.

Query head n uses key/value head n // (N // K). A fully masked row gives 0. A layer calls its `kernel` unless attention
weights are asked for; yours takes its place. It must be hashable where the layer goes through `nnx.jit`. One with a
method `step` of the same parameters has that called for one new token of each sequence over a cache.
"""


def step_of(kernel: Kernel) -> Kernel:
    """Return what attends from one new token of each sequence over a cache: a method of a kernel, or the kernel."""
    return getattr(kernel, "step", kernel)
