"""Layers with a bias of scores by distance: ALiBi and the buckets of T5."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt import modeling_mpt
from transformers.models.t5 import modeling_t5

from helpers.released import Released, Weights
from mha_spec import Alibi, AttentionSpec, RelativeBias


@dataclass(frozen=True)
class Biased(Released):
    """A released layer that is called with its bias, which is computed from its input.

    Attributes:
        call: returns the output of the module from the input and the hidden keys, (1, 1, T, T).
    """

    call: Callable[[Any, Tensor, Tensor], Tensor] = lambda module, x, hidden: x

    def __call__(self, x: Tensor, past: int = 0, **keywords: Any) -> Tensor:
        """Return the output."""
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)[None, None]
        return self.call(self.module, x, hidden)


def added(hidden: Tensor, x: Tensor) -> Tensor:
    return torch.zeros(hidden.shape, dtype=x.dtype).masked_fill(hidden, torch.finfo(x.dtype).min)


def bloom() -> Released:
    config = transformers.BloomConfig(
        hidden_size=48, n_head=6, hidden_dropout=0.0, attention_dropout=0.0
    )

    def call(module: Any, x: Tensor, hidden: Tensor) -> Tensor:
        alibi = modeling_bloom.build_alibi_tensor(torch.ones(x.shape[:2]), 6, x.dtype)
        return module(x, torch.zeros_like(x), alibi, added(hidden, x))[0]

    module = modeling_bloom.BloomAttention(config, layer_idx=0)
    return Biased(module, AttentionSpec(48, 6, alibi=Alibi()), call=call)


def mpt() -> Released:
    attn_config = {"clip_qkv": 1.5, "alibi_bias_max": 4}
    config = transformers.MptConfig(d_model=48, n_heads=6, max_seq_len=32, attn_config=attn_config)

    def call(module: Any, x: Tensor, hidden: Tensor) -> Tensor:
        bias = modeling_mpt.build_mpt_alibi_tensor(6, 32, alibi_bias_max=4)
        return module(x, bias, attention_mask=hidden)[0]

    def repacked(parameters: dict[str, Tensor]) -> Weights:
        parts = parameters.pop("Wqkv.weight").chunk(3)
        return parameters | {
            f"{letter}_proj.weight": part for letter, part in zip("qkv", parts, strict=True)
        }

    spec = AttentionSpec(
        48, 6, qkv_bias=False, out_bias=False, clip_qkv=1.5, alibi=Alibi(max_bias=4.0)
    )
    return Biased(
        modeling_mpt.MptAttention(config, layer_idx=0), spec, repacked=repacked, call=call
    )


def falcon() -> Released:
    """Return a layer of 4 heads, because bfloat16, to which this model rounds slopes, represents
    theirs exactly.
    """
    config = transformers.FalconConfig(
        hidden_size=32,
        num_attention_heads=4,
        alibi=True,
        multi_query=False,
        new_decoder_architecture=False,
        bias=True,
    )
    config._attn_implementation = "eager"

    def call(module: Any, x: Tensor, hidden: Tensor) -> Tensor:
        alibi = modeling_falcon.build_alibi_tensor(torch.ones(x.shape[:2]), 4, x.dtype)
        return module(x, alibi, added(hidden, x))[0]

    module = modeling_falcon.FalconAttention(config, layer_idx=0)
    return Biased(module, AttentionSpec(32, 4, alibi=Alibi(scaled=True)), call=call)


def t5(is_decoder: bool) -> Released:
    """Return a layer with a different inner width, whose farthest keys are beyond the largest
    distance.
    """
    config = transformers.T5Config(
        d_model=32,
        d_kv=12,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=8,
        is_decoder=is_decoder,
    )
    config._attn_implementation = "eager"

    def call(module: Any, x: Tensor, hidden: Tensor) -> Tensor:
        return module(x, mask=added(hidden, x) if is_decoder else None)[0]

    def repacked(parameters: dict[str, Tensor]) -> Weights:
        names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
        weights = {
            f"{ours}.weight": parameters[f"{theirs}.weight"] for theirs, ours in names.items()
        }
        return weights | {"relative_bias": parameters["relative_attention_bias.weight"]}

    relative_bias = RelativeBias(8, 8, bidirectional=not is_decoder)
    spec = AttentionSpec(
        32, 4, head_dim=12, qkv_bias=False, out_bias=False, scale=1.0, relative_bias=relative_bias
    )
    module = modeling_t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    return Biased(module, spec, repacked=repacked, call=call)


LAYERS = {"BLOOM": bloom, "MPT": mpt, "Falcon": falcon}
LAYERS |= {
    "T5, encoder": partial(t5, is_decoder=False),
    "T5, decoder": partial(t5, is_decoder=True),
}
