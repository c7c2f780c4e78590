"""What lies beside the tensors of a model and describes its layers: GGUF's own values, Hugging Face's config.json."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mha_spec import Rope
from parity.files import TensorFile
from parity.models.config import read_config
from parity.models.specs import ModelLayer, known_parts, sections_of, specs_of, why_unknown

HEADS = ("num_heads", "num_kv_heads", "head_dim", "rope")


@dataclass(frozen=True)
class Beside:
    """What lies beside the tensors of a model and describes its layers.

    Attributes:
        heads: those of `HEADS` that it has, of a model whose family is not known.
        origin: where they were read.
        not_carried: what it says of attention that is not read from it; if that is of RoPE, `rope` is left out of the
            heads.
        parts: of a model, the layers of those of its parts whose families are known, by the keys of their
            configurations; under no name those of a model that is one.
        sections: the keys of all its parts.
        why_unknown: why no layers are told of, in words.
    """

    heads: dict[str, Any] = field(default_factory=dict)
    origin: str = ""
    not_carried: tuple[str, ...] = ()
    parts: Mapping[str, Sequence[ModelLayer]] = field(default_factory=dict)
    sections: tuple[str, ...] = ()
    why_unknown: str = ""


def beside(file: TensorFile, *, is_told: bool = False) -> Beside:
    """What lies beside the tensors of a file that is not a checkpoint of ours; nothing where nothing does.

    Who asks must see whether the shapes agree: a config.json may be that of another model.

    Args:
        file: open.
        is_told: the caller says how many heads there are: of a model whose family is known, what its configuration
            says of RoPE is told, too, for layers that have other numbers of them.

    Raises:
        ValueError: if the family is known, and the configuration is not understood, unless the caller tells.
    """
    if file.format == "gguf":
        heads, not_carried = _in_gguf(file)
        family = str(file.metadata.get("general.architecture"))
        unread = [name for name in not_carried if not (family in GGUF_LAYOUTS and name.startswith(READ_OF_FAMILIES))]
        layers = () if is_told or unread else _layers_of_gguf(file)
        return Beside(origin="GGUF", parts={"": layers}) if layers else _beside("GGUF", heads, not_carried)
    path = Path(file.path)
    path = (path if path.is_dir() else path.parent) / "config.json"
    try:
        config = read_config(path)
    except OSError:
        return Beside(why_unknown="no config.json lies beside it")
    except ValueError as error:  # cut off, or something else: nobody says what of the model is in it
        raise ValueError(f"{path} must be a configuration, or not be there: {error}") from None
    parts = known_parts(config)
    plain = _beside("config.json", *_in_config(config))
    if not parts:
        return replace(plain, why_unknown=f"its config.json does not tell: {why_unknown(config)}")
    try:
        layers = {name: specs_of(part) for name, part in parts.items()}
    except ValueError as error:
        if is_told:
            return plain
        raise ValueError(f"config.json beside {file.path} must be understood: {error}") from None
    known = plain if is_told else Beside()
    return replace(known, origin="config.json", parts=layers, sections=tuple(sections_of(config)))


GGUF_LAYOUTS = {"llama": "gguf.LLaMA", "qwen2": "gguf.Qwen2", "qwen3": "gguf.Qwen2"}
"""The layouts of the architectures whose values are read as a configuration; Mistral's is `llama`, too."""


OF_ATTENTION = re.compile(r"attention\.|attn_|rope\.")
"""What the keys of a GGUF file begin with that are about attention, after the name of its architecture."""

READ_IN_GGUF = re.compile(
    r"attention\.(head_count(_kv)?|key_length|causal|(layer_norm|layer_norm_rms|group_norm)_epsilon|group_norm_groups)|"
    r"rope\.(dimension_count|freq_base|scale_linear|scaling\.(type|factor|original_context_length|finetuned))"
)
"""Those that are read, or say nothing of what attention computes: norms before it, and how long RoPE was trained."""

READ_OF_FAMILIES = "attention.sliding_window="
"""What is not carried but of the families of `GGUF_LAYOUTS`."""

NOTHING_IN_GGUF = ("0", "0.0", "False", "none")


def _layers_of_gguf(file: TensorFile) -> tuple[ModelLayer, ...]:
    """The layers of a model whose GGUF file says all of them.

    Raises:
        ValueError: if it says something that is not understood, or too little.
    """
    family = str(file.metadata.get("general.architecture"))
    if family not in GGUF_LAYOUTS:
        return ()
    keys = {
        "hidden_size": ("embedding_length", int),
        "num_hidden_layers": ("block_count", int),
        "num_attention_heads": ("attention.head_count", int),
        "num_key_value_heads": ("attention.head_count_kv", int),
        "head_dim": ("attention.key_length", int),
        "max_position_embeddings": ("context_length", int),
        "rms_norm_eps": ("attention.layer_norm_rms_epsilon", float),
        "rope_theta": ("rope.freq_base", float),
        "sliding_window": ("attention.sliding_window", int),
    }
    said = {name: file.metadata.get(f"{family}.{key}") for name, (key, _) in keys.items()}
    if any(value is not None and value.startswith("a list") for value in said.values()):
        return ()  # layers have each their own
    config: dict[str, Any] = {name: keys[name][1](value) for name, value in said.items() if value is not None}
    if "num_hidden_layers" not in config or "num_attention_heads" not in config:
        return ()  # it is no whole model
    config.setdefault("num_key_value_heads", config["num_attention_heads"])  # as llama.cpp takes it
    config.setdefault("rope_theta", 10000.0)
    if family == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.infos
    layout = GGUF_LAYOUTS[family]
    try:
        found = specs_of({"model_type": family, **config})
    except ValueError as error:
        raise ValueError(f"the values of {file.path} must be understood: {error}") from None
    return tuple(replace(layer, path=f"blk.{layer.index}", layout=layout) for layer in found)


def _in_gguf(file: TensorFile) -> tuple[dict[str, Any], list[str]]:
    values = file.metadata

    def number(key: str, kind: type) -> Any:
        try:
            return kind(values[f"{values.get('general.architecture')}.{key}"])
        except (KeyError, ValueError):
            return None

    head_dim, rotated = number("attention.key_length", int), number("rope.dimension_count", int)
    heads, width = number("attention.head_count", int), number("embedding_length", int)
    size = head_dim or (width // heads if heads and width else None)
    scaling = {key: number(f"rope.{key}", str) for key in ("scaling.type", "scaling.factor", "scale_linear")}
    not_carried = [f"rope.{key}={value}" for key, value in scaling.items() if value not in (None, "none", "1.0", "1")]
    not_carried += ["rope_freqs.weight"] if "rope_freqs.weight" in file.infos else []  # a factor for each frequency
    not_carried += [f"rope.dimension_count={rotated}"] if rotated not in (None, size) else []
    not_carried += _unread_in_gguf(values, {"attention.value_length": str(size)})
    found = {
        "num_heads": heads,
        "num_kv_heads": number("attention.head_count_kv", int),
        "head_dim": head_dim,
        "rope_theta": number("rope.freq_base", float),
    }
    return found, not_carried


def _unread_in_gguf(values: Mapping[str, str], usual: Mapping[str, str]) -> list[str]:
    """What the metadata of a model say of its attention and nothing here reads, unless it is what is usual."""
    begin = f"{values.get('general.architecture')}."
    found: list[str] = []
    for key, value in values.items():
        name = key.removeprefix(begin)
        is_ours = key.startswith(begin) and OF_ATTENTION.match(name) and not READ_IN_GGUF.fullmatch(name)
        if is_ours and value not in (*NOTHING_IN_GGUF, usual.get(name)):
            found.append(f"{name}={value}")
    return found


def is_of_rope(name: str) -> bool:
    """Whether something that is not carried is about RoPE: a caller who says that has said it all."""
    return name.startswith(("rope", "partial_rotary_factor", "rotary_pct"))


def _in_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    rope = config.get("rope_parameters")
    rope = {**config, **rope} if isinstance(rope, dict) else config
    # Only plain RoPE is read: neither frequencies that are scaled, nor features that are not rotated.
    usual = {"rope_scaling": None, "rope_type": "default", "partial_rotary_factor": 1.0, "rotary_pct": 1.0}
    not_carried = [f"{name}={rope[name]}" for name in usual if rope.get(name) not in (None, usual[name])]
    found = {
        "num_heads": config.get("num_attention_heads", config.get("n_head")),
        "num_kv_heads": config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"),
        "rope_theta": rope.get("rope_theta"),
    }
    return found, not_carried


def _beside(origin: str, told: Mapping[str, Any], not_carried: list[str]) -> Beside:
    """Those heads that are numbers, if the most important one is."""
    heads = {name: told[name] for name in HEADS[:3] if type(told[name]) is int and told[name] > 0}
    theta = told["rope_theta"]
    if type(theta) in (int, float) and 0 < theta < math.inf and not any(map(is_of_rope, not_carried)):
        heads["rope"] = Rope(theta)
    if "num_heads" not in heads:
        heads = {}
    return Beside(heads, origin, tuple(not_carried)) if heads or not_carried else Beside()
