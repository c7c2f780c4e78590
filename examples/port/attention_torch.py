"""The original in PyTorch: causal attention with grouped heads and RoPE, as in a language model."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def rotary(x: Tensor, base: float) -> Tensor:
    """Rotate each pair of features (i, i + half) of x, (batch, heads, tokens, features), by an
    angle per position.
    """
    seq_len, head_dim = x.shape[-2:]
    inv_freq = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(seq_len)[:, None] * inv_freq
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)


class Attention(nn.Module):
    """Causal attention over x, (batch, tokens, dim)."""

    def __init__(
        self, dim: int = 64, n_heads: int = 8, n_kv_heads: int = 2, rope_base: float = 10000.0
    ) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        self.rope_base = rope_base
        self.wqkv = nn.Linear(dim, (n_heads + 2 * n_kv_heads) * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq_len, dim = x.shape
        heads = self.wqkv(x).view(batch, seq_len, -1, self.head_dim).transpose(1, 2)
        q, k, v = heads.split([self.n_heads, self.n_kv_heads, self.n_kv_heads], dim=1)
        q, k = rotary(q, self.rope_base), rotary(k, self.rope_base)
        k, v = (t.repeat_interleave(self.n_heads // self.n_kv_heads, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, seq_len, dim))
