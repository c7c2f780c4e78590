"""Cases drawn at random."""

from __future__ import annotations

from typing import Any

import numpy as np

from mha_spec import AttentionSpec, Rope
from parity.core.cases.case import Case


def random_case(seed: int) -> Case:
    """A case whose layer, sizes and mask are drawn at random: `random-0`, `random-1`, …"""
    rng = np.random.default_rng([0x9A817, seed])

    def choose(*options: Any) -> Any:
        return options[rng.integers(len(options))]

    num_kv_heads = choose(1, 2, 3)
    head_dim = choose(2, 4, 8, 16, 32, 64)
    is_cross = bool(choose(False, False, True))
    batch, seq_len, seq_len_k = choose(1, 2, 3), int(rng.integers(1, 65)), int(rng.integers(1, 65))
    key_len = seq_len_k if is_cross else seq_len
    spec = AttentionSpec(
        d_model=int(rng.integers(3, 65)),
        num_heads=num_kv_heads * choose(1, 2, 4),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        d_in=int(rng.integers(3, 65)),
        d_kv=int(rng.integers(3, 65)) if is_cross else None,  # pyright: ignore[reportArgumentType]
        qkv_bias=bool(choose(True, False)),
        out_bias=bool(choose(True, False)),
        out_proj=bool(choose(True, True, False)),
        fused_qkv=bool(choose(True, False)) and not is_cross,
        rope=None if is_cross else choose(None, Rope(10000.0), Rope(500000.0)),
    )
    return Case(
        f"random-{seed}",
        spec,
        "a layer, sizes and a mask drawn at random",
        batch=batch,
        seq_len=seq_len,
        seq_len_k=seq_len_k if is_cross else None,
        is_causal=bool(choose(True, False)),
        key_padding_lengths=choose(None, tuple(int(n) for n in rng.integers(0, key_len + 1, batch))),
        random_mask=bool(choose(True, False, False)),
        bias=bool(choose(True, False, False)),
        gain=choose(1.0, 3.0, 12.0),
    )
