"""Layers that are divided over devices: one with every part that can be divided, and one with
latents.
"""

from mha_spec import AttentionSpec, Gate, Latent, Norm, RelativeBias, Rope

EVERYTHING = AttentionSpec(
    *(32, 8),
    num_kv_heads=4,
    head_dim=6,
    value_head_dim=10,
    rope=Rope(),
    qk_norm=Norm("layer", per_head=True, bias=True),
    v_norm=Norm(),
    gate=Gate(per_head=True, bias=True),
    sinks=True,
    relative_bias=RelativeBias(8, 8),
)
LATENT = AttentionSpec(
    32, 8, head_dim=8, value_head_dim=6, latent=Latent(12, 4, q_rank=10), gate=Gate()
)
