"""Fast path: attention without attention weights.

On a CPU it works block by block, like FlashAttention, and skips fully masked blocks; few scores are
one kernel. On a TPU it is JAX's splash attention, and on a GPU cuDNN's by JAX's
dot_product_attention, with this package's semantics of masks and fully masked rows. Calls that
these do not support store their scores, or work block by block if there are many. A NaN outside of
padding spreads as in JAX's products; see `contained` for kernels in which it reaches only the rows
that attend to it.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from mha_jax.arrays import Array, lies_on_mesh, platform_of
from mha_jax.kernels import library, splash
from mha_jax.kernels.cpu import blockwise, whole, windows
from mha_jax.kernels.cpu.blocks import BlockSizes
from mha_jax.masks import Mask
from mha_jax.scores import Scores
from mha_jax.sharding import head_sharding, token_axis, with_auto_axes
from mha_jax.stages import attend_without_weights


@jax.tree_util.register_static
@dataclass(frozen=True)
class FusedAttention(BlockSizes):
    """Default kernel of layers: the fastest one that supports the call."""

    def __call__(self, query: Array, key: Array, value: Array, mask: Mask, scores: Scores) -> Array:
        """Return the context."""
        platform = platform_of(query, key, value)
        if not (lies_on_mesh(query) or lies_on_mesh(key)):
            return self._attend(query, key, value, mask, scores, platform=platform)
        if token_axis(query, key, mask) is not None:
            # Imported only if tokens are divided.
            from mha_jax.parallel.tokens import ContextParallel

            return ContextParallel(None, self)(query, key, value, mask, scores)
        return with_auto_axes(head_sharding)(self._attend)(
            query, key, value, mask, scores, platform=platform
        )

    def step(self, query: Array, key: Array, value: Array, mask: Mask, scores: Scores) -> Array:
        """Return the context of one new token of each sequence; reads only the filled part of a
        cache.
        """
        is_plain = (
            mask.has_only("is_causal", "span", "q_offset")
            and scores.bias is None
            and not scores.has_dropout
        )
        if not is_plain:
            return self(query, key, value, mask, scores)
        platform = platform_of(query, key, value)
        if not (lies_on_mesh(query) or lies_on_mesh(key)):
            return self._step(query, key, value, mask, scores, platform=platform)
        if token_axis(query, key, mask) is not None:
            return self(query, key, value, mask, scores)
        return with_auto_axes(head_sharding)(self._step)(
            query, key, value, mask, scores, platform=platform
        )

    def _attend(
        self, query: Array, key: Array, value: Array, mask: Mask, scores: Scores, *, platform: str
    ) -> Array:
        is_empty = not query.size or not key.size
        # `jax.export` may have symbolic numbers of tokens, which no kernel can compare or divide.
        is_symbolic = not (isinstance(query.shape[2], int) and isinstance(key.shape[2], int))
        is_unsupported = scores.has_dropout or scores.spec.relative_products is not None
        if is_empty or is_symbolic or is_unsupported:
            return attend_without_weights(query, key, value, mask, scores)
        if platform == "tpu" and splash.supports(query, key, mask, scores):
            return splash.attend(query, key, value, mask, scores)
        has_few = self._has_few_scores(query, key, mask, platform)
        if (
            platform != "cpu"
            and library.supports(query, scores)
            and (has_few or library.is_flash(query, key, value, mask, scores, platform=platform))
        ):
            return library.attend(query, key, value, mask, scores, platform=platform)
        if has_few:
            if platform == "cpu":
                attend = whole.attend
            else:
                attend = attend_without_weights
            return attend(query, key, value, mask, scores)
        if windows.supports(query, key, mask, self, platform):
            kernel = windows
        else:
            kernel = blockwise
        return kernel.attend(query, key, value, mask, scores, sizes=self, platform=platform)

    def _has_few_scores(self, query: Array, key: Array, mask: Mask, platform: str) -> bool:
        """Return whether one kernel for all scores is faster than blocks; accelerators store the
        scores.
        """
        batch_size, num_heads, seq_len_q, _ = query.shape
        _, num_kv_heads, seq_len_k, _ = key.shape
        if platform != "cpu":
            # The scores of one query are fewer than the elements of its keys.
            if seq_len_q == 1:
                return True
            return batch_size * num_heads * seq_len_q * seq_len_k <= self.most_scores
        # Blocks would skip the keys after the last query, as in a cache.
        has_later_keys = mask.is_causal and seq_len_k > max(seq_len_q, self.keys)
        if has_later_keys:
            return False
        group_size = num_heads // num_kv_heads
        return group_size * seq_len_q * min(seq_len_k, self.keys) <= self.few_scores

    def _step(
        self, query: Array, key: Array, value: Array, mask: Mask, scores: Scores, *, platform: str
    ) -> Array:
        if platform != "cpu" and library.supports(query, scores):
            if mask.span is None:  # the library has an argument for lengths
                last_positions: Any = mask.q_offset
                mask = Mask(
                    key_padding_lengths=jnp.broadcast_to(last_positions + 1, query.shape[:1])
                )
            return self._attend(query, key, value, mask, scores, platform=platform)
        is_small = not query.size or (key.shape[2] <= self.keys and platform == "cpu")
        if is_small or scores.spec.relative_products is not None:
            return attend_without_weights(query, key, value, mask, scores)
        return blockwise.attend_to_cache(
            query, key, value, mask, scores, sizes=self, platform=platform
        )


attend = FusedAttention()
"""Returns the context from the fastest kernel that supports the call: the default kernel of
layers.
"""
