"""The tutorial: multi-head attention as in the paper. It imports nothing of this package.

Axes: B batch, T query tokens, S key tokens, P cached tokens, N heads, H features per head,
E = N * H features per token.
A mask is boolean, True = masked (the query may not attend to the key), and broadcasts to
(B, N, T, S).

Tokens, heads and weights are tensors on a device, in tiles; masks are NumPy arrays on the host.

Source: Attention Is All You Need, arXiv:1706.03762, section 3.2.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import ttnn
from ttnn import Tensor

# ---- Masks ---------------------------------------------------------------------------------------


def create_causal_mask(seq_len_q: int, seq_len_k: int | None = None) -> np.ndarray:
    """Return the mask (T, S) that hides later keys: query i attends to keys 0..i."""
    seq_len_k = seq_len_q if seq_len_k is None else seq_len_k
    queries = np.arange(seq_len_q)[:, None]
    keys = np.arange(seq_len_k)[None, :]
    return keys > queries


def create_padding_mask(lengths: np.ndarray | Sequence[int], seq_len_k: int) -> np.ndarray:
    """Return the mask (B, 1, 1, S) that hides padding: keys at or after a sequence's length."""
    lengths = np.asarray(lengths)[:, None, None, None]
    keys = np.arange(seq_len_k)[None, None, None, :]
    return keys >= lengths


def create_attention_mask(
    seq_len_q: int,
    seq_len_k: int | None = None,
    *,
    is_causal: bool = False,
    key_padding_lengths: np.ndarray | Sequence[int] | None = None,
) -> np.ndarray:
    """Return the mask (B or 1, 1, T, S) that hides later keys, padding, or both."""
    seq_len_k = seq_len_q if seq_len_k is None else seq_len_k
    mask = np.zeros((1, 1, seq_len_q, seq_len_k), dtype=bool)
    if is_causal:
        mask = mask | create_causal_mask(seq_len_q, seq_len_k)
    if key_padding_lengths is not None:
        mask = mask | create_padding_mask(key_padding_lengths, seq_len_k)
    return mask


def create_causal_mask_with_cache(seq_len_q: int, seq_len_k: int, cache_len: int) -> np.ndarray:
    """Return the mask (T, S) after P = cache_len tokens: query i attends to keys 0..(P + i)."""
    queries = cache_len + np.arange(seq_len_q)[:, None]
    keys = np.arange(seq_len_k)[None, :]
    return keys > queries


# ---- The device ----------------------------------------------------------------------------------

MASKED = -1e9
"""Score of a masked key, far below any other. Not -inf: the softmax of a row of -inf may be NaN."""


def upload(array: np.ndarray, device: ttnn.MeshDevice, dtype: ttnn.DataType) -> Tensor:
    """Copy an array of any shape to a device, in tiles."""
    # ttnn reads neither float64 nor arrays whose memory is in a different order.
    array = np.array(array, dtype=np.float32, order="C")
    on_host = ttnn.Tensor(array, dtype, None, ttnn.TILE_LAYOUT)
    return ttnn.to_device(on_host, device)


def accurate_config(device: ttnn.MeshDevice) -> ttnn.DeviceComputeKernelConfig:
    """Return an arithmetic with all bits of bfloat16, sums in float32, and no approximations."""
    # HiFi4 with float32 sums is occasionally wrong on Wormhole (tt-metal#38306).
    is_wormhole = device.arch() == ttnn.Arch.WORMHOLE_B0
    if is_wormhole:
        fidelity = ttnn.MathFidelity.HiFi3
    else:
        fidelity = ttnn.MathFidelity.HiFi4
    return ttnn.init_device_compute_kernel_config(
        device.arch(),
        math_fidelity=fidelity,
        math_approx_mode=False,
        fp32_dest_acc_en=True,
        packer_l1_acc=True,
    )


# ---- Attention -----------------------------------------------------------------------------------


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Split the features of each token into heads: (B, T, E) to (B, N, T, H)."""
    batch_size, seq_len, d_model = x.shape
    x = ttnn.reshape(x, (batch_size, seq_len, num_heads, d_model // num_heads))
    return ttnn.transpose(x, 1, 2)


def combine_heads(x: Tensor) -> Tensor:
    """Concatenate the heads of each token: (B, N, T, H) to (B, T, E)."""
    batch_size, num_heads, seq_len, head_dim = x.shape
    return ttnn.reshape(ttnn.transpose(x, 1, 2), (batch_size, seq_len, num_heads * head_dim))


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: np.ndarray | None = None,
    dropout: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to key and value (B, N, S, H): context (B, N, T, H) and weights (B, N, T, S)."""
    device = query.device()
    config = accurate_config(device)
    # The softmax would magnify the rounding of scores in half precision.
    options: Any = {"dtype": ttnn.float32, "compute_kernel_config": config}
    scores = ttnn.matmul(query, key, transpose_b=True, **options)
    scores = ttnn.multiply(scores, 1 / math.sqrt(query.shape[-1]))
    device_mask = None
    if mask is not None:
        device_mask = upload(np.broadcast_to(mask, tuple(scores.shape)), device, ttnn.float32)
        scores = ttnn.where(device_mask, MASKED, scores)
    attn_weights = ttnn.softmax(scores, dim=-1, numeric_stable=True, compute_kernel_config=config)
    if device_mask is not None:
        # The softmax of a row without a visible key is uniform: that row becomes 0.
        attn_weights = ttnn.where(device_mask, 0.0, attn_weights)
    attn_weights = ttnn.typecast(attn_weights, query.dtype)
    if dropout is None:
        dropped = attn_weights
    else:
        dropped = dropout(attn_weights)
    context = ttnn.matmul(dropped, value, dtype=value.dtype, compute_kernel_config=config)
    return context, attn_weights


def multi_head_attention_core(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_heads: int,
    mask: np.ndarray | None = None,
    dropout: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to projected key and value (B, S, E): output (B, T, E) and weights (B, N, T, S)."""
    q = split_heads(query, num_heads)
    k = split_heads(key, num_heads)
    v = split_heads(value, num_heads)
    context, attn_weights = scaled_dot_product_attention(q, k, v, mask, dropout)
    return combine_heads(context), attn_weights


# ---- Layers --------------------------------------------------------------------------------------


class Linear:
    """Linear map of tokens, (B, T, in) to (B, T, out); random weights until others are loaded."""

    def __init__(
        self,
        d_in: int,
        d_out: int,
        *,
        bias: bool,
        device: ttnn.MeshDevice,
        dtype: ttnn.DataType,
        rng: np.random.Generator,
    ) -> None:
        self.device = device
        self.dtype = dtype
        # As the weight of torch.nn.Linear; the bias is 0 here.
        limit = 1 / math.sqrt(d_in)
        self.load(rng.uniform(-limit, limit, (d_out, d_in)), np.zeros(d_out) if bias else None)

    def load(self, weight: np.ndarray, bias: np.ndarray | None) -> None:
        """Replace the weight (out, in) and the bias (out,)."""
        self.weight = upload(weight.T, self.device, self.dtype)
        if bias is None:
            self.bias = None
        else:
            self.bias = upload(bias[None], self.device, self.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias: (B, T, in) to (B, T, out)."""
        config = accurate_config(self.device)
        options = {"dtype": x.dtype, "compute_kernel_config": config}
        return ttnn.linear(x, self.weight, bias=self.bias, **options)


class Dropout:
    """Dropout of tensors of any shape, in training; on the device it exists in bfloat16 only."""

    def __init__(self, rate: float, rng: np.random.Generator) -> None:
        self.rate = rate
        self.rng = rng
        self.training = True

    def __call__(self, x: Tensor) -> Tensor:
        """Drop each element with the probability `rate`, and divide the others by 1 - rate."""
        if self.rate == 0.0 or not self.training:
            return x
        seed = int(self.rng.integers(2**31))
        scale = 1 / (1 - self.rate)
        return ttnn.experimental.dropout(x, probability=self.rate, scale=scale, seed=seed)


class AttentionLayer:
    """The parts of each layer below: four projections (E, E), and dropout of attention weights."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        device: ttnn.MeshDevice,
        dtype: ttnn.DataType = ttnn.bfloat16,
        rng: np.random.Generator | None = None,
    ) -> None:
        if d_model % num_heads != 0:
            sizes = f"d_model={d_model} and num_heads={num_heads}"
            raise ValueError(f"d_model must be a multiple of num_heads, got {sizes}")
        rng = np.random.default_rng() if rng is None else rng
        options: Any = {"bias": bias, "device": device, "dtype": dtype, "rng": rng}
        self.num_heads = num_heads
        self.q_proj = Linear(d_model, d_model, **options)
        self.k_proj = Linear(d_model, d_model, **options)
        self.v_proj = Linear(d_model, d_model, **options)
        self.out_proj = Linear(d_model, d_model, **options)
        self.dropout = Dropout(dropout, rng)

    def load_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Replace all weights by name: `q_proj.weight` (out, in), `q_proj.bias` (out,), …"""
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            projection: Linear = getattr(self, name)
            projection.load(weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def train(self, mode: bool = True) -> None:
        """Switch dropout on or off."""
        self.dropout.training = mode

    def eval(self) -> None:
        """Switch dropout off."""
        self.train(False)


class MultiHeadSelfAttention(AttentionLayer):
    """Multi-head attention of a sequence over itself."""

    def __call__(self, x: Tensor, *, mask: np.ndarray | None = None) -> Tensor:
        """Attend from each token of x (B, T, E) to all tokens of its sequence: output (B, T, E)."""
        q = self.q_proj(x)
        k = self.k_proj(x)
        v = self.v_proj(x)
        context, _ = multi_head_attention_core(q, k, v, self.num_heads, mask, self.dropout)
        return self.out_proj(context)


class MultiHeadAttention(AttentionLayer):
    """Multi-head attention of queries over keys and values."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: np.ndarray | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to key and value (B, S, E): output (B, T, E), and weights (B, N, T, S) or None."""
        key = query if key is None else key
        value = key if value is None else value
        q = self.q_proj(query)
        k = self.k_proj(key)
        v = self.v_proj(value)
        context, attn_weights = multi_head_attention_core(
            q, k, v, self.num_heads, mask, self.dropout
        )
        output = self.out_proj(context)
        if need_weights:
            return output, attn_weights
        return output, None


class MultiHeadAttentionWithCache(AttentionLayer):
    """Causal self-attention with cached keys and values, (B, N, P, H) each, at first None."""

    def __call__(
        self, x: Tensor, cache_k: Tensor | None = None, cache_v: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attend to cached and new tokens: output (B, T, E), keys and values (B, N, P + T, H)."""
        q = split_heads(self.q_proj(x), self.num_heads)
        k = split_heads(self.k_proj(x), self.num_heads)
        v = split_heads(self.v_proj(x), self.num_heads)
        if cache_k is not None:
            k = ttnn.concat([cache_k, k], dim=2)
        if cache_v is not None:
            v = ttnn.concat([cache_v, v], dim=2)
        num_new = x.shape[1]
        num_keys = k.shape[2]
        mask = create_causal_mask_with_cache(num_new, num_keys, num_keys - num_new)
        context, _ = scaled_dot_product_attention(q, k, v, mask, self.dropout)
        return self.out_proj(combine_heads(context)), k, v
