"""What lies beside the tensors of a model and tells of its heads: GGUF's own values, Hugging Face's config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parity.formats import TensorFile
from parity.formats.tensor_file import parse_json

HEADS = ("num_heads", "num_kv_heads", "head_dim", "rope_theta")

MAX_CONFIG = 1 << 24  # bytes


def heads_beside(file: TensorFile) -> tuple[dict[str, Any], str]:
    """What a file that is no checkpoint of ours tells of the heads, and where; nothing where nothing does.

    Who asks must see whether the shapes agree: a config.json may be that of another model.
    """
    if file.format == "gguf":
        return _known(_in_gguf(file.metadata)), "GGUF values"
    path = Path(file.path)
    config = (path if path.is_dir() else path.parent) / "config.json"
    try:
        if config.stat().st_size > MAX_CONFIG:
            return {}, ""
        content = parse_json(config.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}, ""
    return (_known(_in_config(content)), "config.json") if isinstance(content, dict) else ({}, "")


def _in_gguf(values: Mapping[str, str]) -> dict[str, Any]:
    def number(key: str, kind: type) -> Any:
        try:
            return kind(values[f"{values.get('general.architecture')}.{key}"])
        except (KeyError, ValueError):
            return None

    head_dim, rotated = number("attention.key_length", int), number("rope.dimension_count", int)
    heads, width = number("attention.head_count", int), number("embedding_length", int)
    size = head_dim or (width // heads if heads and width else None)
    return {
        "num_heads": heads,
        "num_kv_heads": number("attention.head_count_kv", int),
        "head_dim": head_dim,
        "rope_theta": number("rope.freq_base", float) if rotated in (None, size) else None,
    }


def _in_config(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters")
    rope = {**config, **rope} if isinstance(rope, dict) else config
    # A specification can say neither of frequencies that are scaled, nor of features that are not rotated.
    is_plain = config.get("rope_scaling") is None and rope.get("rope_type", "default") == "default"
    is_plain &= all(rope.get(name, 1.0) == 1.0 for name in ("partial_rotary_factor", "rotary_pct"))
    return {
        "num_heads": config.get("num_attention_heads", config.get("n_head")),
        "num_kv_heads": config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"),
        "rope_theta": rope.get("rope_theta") if is_plain else None,
    }


def _known(heads: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are numbers, if the most important one is."""
    found = {name: heads[name] for name in HEADS[:3] if type(heads[name]) is int and heads[name] > 0}
    theta = heads["rope_theta"]
    if type(theta) in (int, float) and 0 < theta < math.inf:
        found["rope_theta"] = float(theta)
    return found if "num_heads" in found else {}
