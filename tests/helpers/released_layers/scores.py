"""Operations of released models between projections and softmax, such as soft caps, windows and
temperatures.
"""

from functools import partial

import torch
from transformers.masking_utils import (
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from helpers.released import made, plain_spec
from mha_spec import Temperature

CAPPED = {"attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 3, "head_dim": 8}
UNROTATED = {
    "use_qk_norm": False,
    "no_rope_layers": [0],
    "attn_temperature_tuning": False,
    "head_dim": 8,
}
NO_PADDING = torch.zeros(1, dtype=torch.int64)
gemma2 = partial(made, "gemma2", "Gemma2")
LAYERS = {
    "Gemma 2": partial(
        gemma2,
        plain_spec(scale=3.0**-0.5, soft_cap=1.5),
        options={**CAPPED, "layer_types": ["full_attention"]},
    ),
    "Gemma 2, sliding": partial(
        gemma2,
        plain_spec(scale=3.0**-0.5, soft_cap=1.5, window_size=3),
        options={**CAPPED, "layer_types": ["sliding_attention"], "sliding_window": 3},
        sees=sliding_window_causal_mask_function(3),
    ),
    "Llama 4, tempered": partial(
        made,
        "llama4",
        "Llama4",
        plain_spec(rope=None, temperature=Temperature(4, 0.5, first_position=1)),
        options={**UNROTATED, "attn_temperature_tuning": True, "floor_scale": 4, "attn_scale": 0.5},
        rotary=lambda x, positions: None,
    ),
    "Ministral 3": partial(
        made,
        "ministral3",
        "Ministral3",
        plain_spec(temperature=Temperature(4, 0.5)),
        {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 4},
        options={"head_dim": 8, "sliding_window": None},
        keywords={"position_ids": torch.arange(11)[None]},
    ),
    "Llama 4, chunked": partial(
        made,
        "llama4",
        "Llama4",
        plain_spec(chunk_size=4, rope=None),
        options=UNROTATED,
        sees=chunked_causal_mask_function(4, NO_PADDING),
        rotary=lambda x, positions: None,
    ),
}
