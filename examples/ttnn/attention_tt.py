"""A draft of a layer in the style of Tenstorrent models: separate prefill and decode, with fused
kernels.
"""

import numpy as np
import torch
import ttnn

MAX_SEQ_LEN, TILE = 128, 32


class Attention:
    """Grouped heads with RoPE and a cache, in bfloat16; built from a Hugging Face state dict."""

    def __init__(self, state, n_heads, n_kv_heads, theta, users, device):
        self.device, self.n_heads, self.n_kv_heads = device, n_heads, n_kv_heads
        self.head_dim = len(state["q_proj.weight"]) // n_heads
        q, k, v = (state[f"{name}_proj.weight"] for name in "qkv")
        self.wqkv = self._tiles(np.concatenate([self.rows(q), self.rows(k), v]).T)
        self.wo = self._tiles(state["o_proj.weight"].T)
        angles = np.outer(
            np.arange(MAX_SEQ_LEN), theta ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        )
        self.cos, self.sin = (
            np.repeat(table, 2, axis=1) for table in (np.cos(angles), np.sin(angles))
        )
        self.swap = np.kron(np.eye(TILE // 2), [[0, 1], [-1, 0]])  # (a, b) -> (-b, a), pair by pair
        slots = np.zeros((users, n_kv_heads, MAX_SEQ_LEN, self.head_dim))
        self.keys, self.values = self._tiles(slots), self._tiles(slots)
        self.arithmetic = ttnn.init_device_compute_kernel_config(
            device.arch(),
            math_fidelity=ttnn.MathFidelity.HiFi3,
            math_approx_mode=False,
            fp32_dest_acc_en=True,
        )

    def rows(self, weight):
        """Return the rows of a projection in the order that the RoPE kernel expects."""
        return weight

    def prefill(self, x):
        """Process prompts (B, T, E), and cache their keys and values."""
        batch, seq_len, width = x.shape
        packed = self._linear(ttnn.reshape(x, (batch, 1, seq_len, width)), self.wqkv)
        q, k, v = ttnn.experimental.nlp_create_qkv_heads(
            packed, num_heads=self.n_heads, num_kv_heads=self.n_kv_heads, transpose_k_heads=False
        )
        tables = [
            self._tiles(x[None, None]) for x in (self.cos[:seq_len], self.sin[:seq_len], self.swap)
        ]
        q, k = (self._rotated(heads, *tables, is_decode_mode=False) for heads in (q, k))
        for user in range(batch):
            ttnn.fill_cache(self.keys, k[user : user + 1], user)
            ttnn.fill_cache(self.values, v[user : user + 1], user)
        context = ttnn.transformer.scaled_dot_product_attention(
            q, k, v, is_causal=True, compute_kernel_config=self.arithmetic
        )
        output = self._linear(ttnn.experimental.nlp_concat_heads(context), self.wo)
        return ttnn.reshape(output, (batch, seq_len, width))

    def decode(self, x, positions):
        """Process one token per user, (B, 1, E), at these positions, over all cached tokens."""
        batch, _, width = x.shape
        packed = self._linear(ttnn.reshape(x, (1, 1, batch, width)), self.wqkv)
        q, k, v = ttnn.experimental.nlp_create_qkv_heads_decode(
            packed, num_heads=self.n_heads, num_kv_heads=self.n_kv_heads
        )
        tables = [
            self._on_cores(table[None, positions, None], batch) for table in (self.cos, self.sin)
        ]
        tables.append(self._on_cores(np.tile(self.swap, (1, 1, batch, 1)), batch))
        q, k = (self._rotated(heads, *tables, is_decode_mode=True) for heads in (q, k))
        positions_on_device = ttnn.from_torch(
            torch.tensor(positions, dtype=torch.int32), device=self.device
        )
        ttnn.experimental.paged_update_cache(self.keys, k, update_idxs_tensor=positions_on_device)
        ttnn.experimental.paged_update_cache(self.values, v, update_idxs_tensor=positions_on_device)
        context = ttnn.transformer.scaled_dot_product_attention_decode(
            q,
            self.keys,
            self.values,
            cur_pos_tensor=positions_on_device,
            compute_kernel_config=self.arithmetic,
        )
        context = ttnn.to_memory_config(
            context, self._one_core_each(batch, self.n_heads, self.head_dim)
        )
        context = ttnn.experimental.nlp_concat_heads_decode(context, num_heads=self.n_heads)
        context = ttnn.to_memory_config(context, ttnn.DRAM_MEMORY_CONFIG)[:, :, :batch]
        return ttnn.reshape(self._linear(context, self.wo), (batch, 1, width))

    # Memory layouts of tensors.

    def _linear(self, x, weight):
        return ttnn.linear(x, weight, compute_kernel_config=self.arithmetic)

    def _rotated(self, heads, *tables, is_decode_mode):
        return ttnn.experimental.rotary_embedding_llama(
            heads, *tables, is_decode_mode=is_decode_mode
        )

    def _tiles(self, array):
        tensor = torch.tensor(np.asarray(array, np.float32))
        return ttnn.from_torch(
            tensor, dtype=ttnn.bfloat16, layout=ttnn.TILE_LAYOUT, device=self.device
        )

    def _on_cores(self, array, users):
        """Return the rows of users, each on its own core."""
        rows, width = array.size // users // array.shape[-1], array.shape[-1]
        return ttnn.to_memory_config(self._tiles(array), self._one_core_each(users, rows, width))

    def _one_core_each(self, users, rows, width):
        grid = self.device.compute_with_storage_grid_size()
        return ttnn.create_sharded_memory_config(
            (-(-rows // TILE) * TILE, width),
            core_grid=ttnn.num_cores_to_corerangeset(users, grid, row_wise=True),
            strategy=ttnn.ShardStrategy.HEIGHT,
            use_height_and_width_as_shard_shape=True,
        )
