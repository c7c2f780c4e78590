"""What layers are in most families, and how a family says in what its own differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from parity.models.rules import Family, Stack, asked, key, optional, rope

USUAL: dict[str, Any] = {
    "d_model": key("hidden_size"),
    "num_heads": key("num_attention_heads"),
    "num_kv_heads": optional("num_key_value_heads"),
    "head_dim": optional("head_dim"),
    "dropout": key("attention_dropout", default=0.0),
    "qkv_bias": False,
    "out_bias": False,
    "rope": rope(),
}

SOME_BIAS, MOST_BIAS = (key("attention_bias", default=default) for default in (False, True))
BIASES = {"qkv_bias": SOME_BIAS, "out_bias": SOME_BIAS}
HEADS = {"num_kv_heads": asked("num_key_value_heads")}
WIDTH = {"head_dim": asked("head_dim")}
PAIRED = {"rope": rope(pairs="interleaved")}
IN_PART = {"rope": rope(fraction=0.5)}


PLAIN: dict[str, Any] = {
    "path": "encoder.layers.{i}.self_attn",
    "layout": "canonical",
    "is_causal": False,
    "num_kv_heads": None,
    "head_dim": None,
    "qkv_bias": True,
    "out_bias": True,
    "rope": None,
}
"""As many key/value heads as query heads, which together are as wide as the model; biases; no positions."""


def family(
    *others: Mapping[str, Any],
    says_nothing: Iterable[str] = (),
    defaults: Mapping[str, Any] | None = None,
    fixed: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Family:
    """A family of one stack, as `stack` has it."""
    return Family((stack(*others, **fields),), frozenset(says_nothing), defaults or {}, fixed or {})


def stack(*others: Mapping[str, Any], **fields: Any) -> Stack:
    """Layers whose fields are the usual ones but for these; fields of `Stack` are its own."""
    held = dict(USUAL)
    for each in (*others, fields):
        held |= each
    own = {name: held.pop(name) for name in OF_STACK & held.keys()}
    return Stack(held, **own)


OF_STACK = {each.name for each in dataclasses.fields(Stack)} - {"fields"}
