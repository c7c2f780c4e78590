"""Defaults of most families, and helpers to define a family by its differences."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from parity.port.models.rules import Family, Stack, key, optional, required_or_none, rope

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
"""LLaMA's keys, which most families share. A family is defined by the fields that differ."""

SOME_BIAS = key("attention_bias", default=False)
"""Biases only if the configuration has them."""

MOST_BIAS = key("attention_bias", default=True)
"""Biases unless the configuration excludes them."""

# Fields in which several families differ from the usual ones.
BIASES = {"qkv_bias": SOME_BIAS, "out_bias": SOME_BIAS}
HEADS = {"num_kv_heads": required_or_none("num_key_value_heads")}
WIDTH = {"head_dim": required_or_none("head_dim")}
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
"""Multi-head attention as wide as the model, with biases and without positions."""


def family(
    *bases: Mapping[str, Any],
    says_nothing: Iterable[str] = (),
    defaults: Mapping[str, Any] | None = None,
    fixed: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Family:
    """Return a family of one stack, see `stack`."""
    return Family((stack(*bases, **fields),), frozenset(says_nothing), defaults or {}, fixed or {})


def stack(*bases: Mapping[str, Any], **fields: Any) -> Stack:
    """Return a stack of layers with the usual fields, except for the fields of the bases and then
    these; also accepts fields of `Stack`.
    """
    of_spec = dict(USUAL)
    for overrides in (*bases, fields):
        of_spec |= overrides
    of_stack = {}
    for name in FIELDS_OF_STACK & of_spec.keys():
        of_stack[name] = of_spec.pop(name)
    return Stack(of_spec, **of_stack)


FIELDS_OF_STACK = {field.name for field in dataclasses.fields(Stack)} - {"fields"}
"""Fields of `Stack` itself; all others are fields of `AttentionSpec`."""
