"""What lies beside the tensors of a model and describes its layers: GGUF's own values, Hugging Face's config.json."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mha_spec import Refusal, Rope
from parity.files import TensorFile
from parity.models.config import Config, read_config
from parity.models.specs import ModelLayer, known_parts, read_layers, sections_of, specs_of, why_unknown

HEADS = ("num_heads", "num_kv_heads", "head_dim", "rope")


@dataclass(frozen=True)
class Beside:
    """What lies beside the tensors of a model and describes its layers.

    Attributes:
        heads: those of `HEADS` that it has, of a model whose family is not known.
        origin: where they were read.
        unread: what it says of attention, by its keys, that is in no specification of a layer without a known family;
            if that is of RoPE, `rope` is left out of the heads.
        unread_of_known: likewise of the layers in `parts`; empty unless the caller says how many heads there are.
        values: its configuration.
        parts: of a model, the layers of those of its parts whose families are known, by the keys of their
            configurations; under no name those of a model that is one.
        sections: the keys of all its parts.
        why_unknown: why no layers are told of, in words.
    """

    heads: dict[str, Any] = field(default_factory=dict)
    origin: str = ""
    unread: Mapping[str, Any] = field(default_factory=dict)
    unread_of_known: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Sequence[ModelLayer]] = field(default_factory=dict)
    sections: tuple[str, ...] = ()
    why_unknown: str = ""


def beside(file: TensorFile, *, is_told: bool = False) -> Beside:
    """What lies beside the tensors of a file that is not a checkpoint of ours; nothing where nothing does.

    Who asks must see whether the shapes agree: a config.json may be that of another model.

    Args:
        file: open.
        is_told: the caller says how many heads there are: of a model whose family is known, what its configuration
            says of RoPE is told, too, for layers that have other numbers of them; what is not understood is unread.

    Raises:
        ValueError: if the family is known, and the configuration is not understood, unless the caller tells.
    """
    if file.format == "gguf":
        return _beside_gguf(file, is_told=is_told)
    path = Path(file.path)
    path = (path if path.is_dir() else path.parent) / "config.json"
    try:
        config = read_config(path)
    except OSError:
        return Beside(why_unknown="no config.json lies beside it")
    except ValueError as error:  # cut off, or something else: nobody says what of the model is in it
        raise Refusal(path, f"be a configuration, or not be there: {error}") from None
    layers: dict[str, Sequence[ModelLayer]] = {}
    unread: dict[str, Any] = {}
    why = ""
    for name, part in known_parts(config).items():
        try:
            layers[name], others = read_layers(part) if is_told else (specs_of(part), {})
            unread |= {f"{name}.{key}" if name else key: value for key, value in others.items()}
        except ValueError as error:
            if not is_told:
                raise Refusal(f"config.json beside {file.path}", f"be understood: {error}") from None
            why = f"it is not understood: {error}"
    plain = _in_config(config, known=layers)
    if not layers:
        return replace(plain, why_unknown=why or f"its config.json does not tell: {why_unknown(config)}")
    plain = plain if is_told else replace(plain, heads={})
    return replace(plain, unread_of_known=unread, parts=layers, sections=tuple(sections_of(config)), why_unknown=why)


def _beside_gguf(file: TensorFile, *, is_told: bool) -> Beside:
    heads, unread = _in_gguf(file)
    family = str(file.metadata.get("general.architecture"))
    others = [name for name in unread if not (family in GGUF_LAYOUTS and name == READ_OF_FAMILIES)]
    layers = () if is_told or others else _layers_of_gguf(file)
    return Beside(origin="GGUF", parts={"": layers}) if layers else _beside("GGUF", heads, unread)


GGUF_LAYOUTS = {"llama": "gguf.LLaMA", "qwen2": "gguf.Qwen2", "qwen3": "gguf.Qwen2"}
"""The layouts of the architectures whose values are read as a configuration; Mistral's is `llama`, too."""


OF_ATTENTION = re.compile(r"attention\.|attn_|rope\.")
"""What the keys of a GGUF file begin with that are about attention, after the name of its architecture."""

READ_IN_GGUF = re.compile(
    r"attention\.(head_count(_kv)?|key_length|causal|(layer_norm|layer_norm_rms|group_norm)_epsilon|group_norm_groups)|"
    r"rope\.(dimension_count|freq_base|scale_linear|scaling\.(type|factor|original_context_length|finetuned))"
)
"""Those that are read, or say nothing of what attention computes: norms before it, and how long RoPE was trained."""

READ_OF_FAMILIES = "attention.sliding_window"
"""What is read of the families of `GGUF_LAYOUTS` alone."""

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
        raise Refusal(f"the values of {file.path}", f"be understood: {error}") from None
    return tuple(replace(layer, path=f"blk.{layer.index}", layout=layout) for layer in found)


def _in_gguf(file: TensorFile) -> tuple[dict[str, Any], dict[str, Any]]:
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
    unread: dict[str, Any] = {
        f"rope.{key}": value for key, value in scaling.items() if value not in (None, "none", "1.0", "1")
    }
    if "rope_freqs.weight" in file.infos:  # a factor for each frequency
        unread["rope_freqs.weight"] = None
    if rotated not in (None, size):
        unread["rope.dimension_count"] = rotated
    unread |= _unread_in_gguf(values, {"attention.value_length": str(size)})
    found = {
        "num_heads": heads,
        "num_kv_heads": number("attention.head_count_kv", int),
        "head_dim": head_dim,
        "rope_theta": number("rope.freq_base", float),
    }
    return found, unread


def _unread_in_gguf(values: Mapping[str, str], usual: Mapping[str, str]) -> dict[str, str]:
    """What the metadata of a model say of its attention and nothing here reads, unless it is what is usual."""
    begin = f"{values.get('general.architecture')}."
    found: dict[str, str] = {}
    for key, value in values.items():
        name = key.removeprefix(begin)
        is_ours = key.startswith(begin) and OF_ATTENTION.match(name) and not READ_IN_GGUF.fullmatch(name)
        if is_ours and value not in (*NOTHING_IN_GGUF, usual.get(name)):
            found[name] = value
    return found


def is_of_rope(name: str) -> bool:
    """Whether something that is not carried is about RoPE: a caller who says that has said it all."""
    words = ("rope", "rotary", "partial_rotary", "mrope")
    return any(word.startswith(words) for word in name.split("."))


COUNTS = {"num_attention_heads", "n_head", "num_key_value_heads", "head_dim", "num_heads", "n_heads", "num_kv_heads"}
"""Keys with numbers of heads, which the shapes or the caller must agree with."""

ROPE = {"rope_theta", "rope_parameters", "rope_scaling", "rope_type", "partial_rotary_factor", "rotary_pct"}
"""Keys of RoPE that `_in_config` looks at."""

SHOWN = re.compile(
    r".*drop(out)?(_.*)?|((use|add|no|attention|attn)_)?((qkv|out|norm|layer_norm)_)?bias|scale_embedding|n_positions"
)
"""Keys that tensors show, as biases, or that say nothing of what attention computes when it is not trained."""


def _attention_keys(values: Mapping[str, Any], others: Collection[str] = ()) -> dict[str, Any]:
    """The keys of a configuration that could speak of attention, with their values."""
    unread = Config(values).unread(COUNTS.union(others))
    return {name: value for name, value in unread if not SHOWN.fullmatch(name)}


def _in_config(config: Mapping[str, Any], known: Collection[str]) -> Beside:
    """What a configuration says of layers without a known family.

    Args:
        config: the values.
        known: the keys of its parts whose layers are known.
    """
    rope = config.get("rope_parameters")
    rope = {**config, **rope} if isinstance(rope, dict) else config
    # Only plain RoPE is read: neither frequencies that are scaled, nor features that are not rotated.
    usual = {"rope_scaling": None, "rope_type": "default", "partial_rotary_factor": 1.0, "rotary_pct": 1.0}
    unread = {name: rope[name] for name in usual if rope.get(name) not in (None, usual[name])}
    if rope is not config and any(isinstance(each, Mapping) for each in config["rope_parameters"].values()):
        unread["rope_parameters"] = config["rope_parameters"]  # for each kind of layer
    unread |= _attention_keys(config, ROPE)
    for name in set(sections_of(config)) - set(known):
        unread |= {f"{name}.{key}": value for key, value in _attention_keys(config[name]).items()}
    heads = {
        "num_heads": config.get("num_attention_heads", config.get("n_head")),
        "num_kv_heads": config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"),
        "rope_theta": rope.get("rope_theta"),
    }
    return replace(_beside("config.json", heads, unread), values=config)


def _beside(origin: str, told: Mapping[str, Any], unread: Mapping[str, Any]) -> Beside:
    """Those heads that are numbers, if the most important one is."""
    heads = {name: told[name] for name in HEADS[:3] if type(told[name]) is int and told[name] > 0}
    theta = told["rope_theta"]
    if type(theta) in (int, float) and 0 < theta < math.inf and "num_heads" in heads:
        if not any(map(is_of_rope, unread)):
            heads["rope"] = Rope(theta)
    elif theta is not None:
        unread = {**unread, "rope_theta": theta}
    heads = heads if "num_heads" in heads else {}
    return Beside(heads, origin, unread) if heads or unread else Beside()
