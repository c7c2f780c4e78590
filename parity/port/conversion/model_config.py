"""Hints from model configurations: a GGUF file's own values, or Hugging Face's config.json."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mha_spec import InputError, Rope
from parity.measure.files import TensorFile
from parity.port.conversion.hints import LayerHints, is_of_rope
from parity.port.models.config import Config, read_config
from parity.port.models.specs import (
    ModelLayer,
    known_parts,
    read_layers,
    sections_named,
    sections_of,
    specs_of,
    why_unknown,
)


@dataclass(frozen=True)
class ModelHints:
    """Hints from a model's configuration: its config.json, or the keys of its GGUF file.

    Attributes:
        origin: `config.json` or `GGUF`.
        plain: hints for layers of unknown families; without RoPE if a RoPE key is unread.
        unread_of_known: attention keys that the layers in `parts` do not cover, with their values;
            empty unless the caller specifies the number of heads.
        values: the configuration.
        parts: layers of each part of a model with a known family, by the part's configuration key;
            a model without parts has an empty key. Layers without a path, or with heads other than
            the caller's, are left out.
        sections: keys of all its parts.
        why_unknown: why there are no hints about layers.
    """

    origin: str = ""
    plain: LayerHints = field(default_factory=LayerHints)
    unread_of_known: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Sequence[ModelLayer]] = field(default_factory=dict)
    sections: tuple[str, ...] = ()
    why_unknown: str = ""

    @cached_property
    def paths(self) -> dict[str, dict[str, ModelLayer]]:
        """Return the layers by the ends of their prefixes, numbered or stacked, and then by
        part.
        """
        found: dict[str, dict[str, ModelLayer]] = {}
        for section, layers in self.parts.items():
            for layer in layers:
                words = (word for word in layer.path.split(".") if not word.isdigit())
                for path in (layer.path, f"{'.'.join(words)}[{layer.index}]"):
                    found.setdefault(path, {}).setdefault(
                        section, layer
                    )  # the first of layers that share weights
        return found

    def layer_at(self, label: str) -> ModelLayer | None:
        """Return the layer whose weights have a label (a prefix, or one with an index).

        If prefixes of several parts end alike, the label must identify the part; otherwise the
        layer is unknown.
        """
        for tail in filter(self.paths.__contains__, _tails(label)):
            named = sections_named(label, self.sections)
            found = [
                layer
                for section, layer in self.paths[tail].items()
                if not named or section in named
            ]
            if found:
                return found[0] if len(found) == 1 else None
        return None

    def attention_at(self, label: str) -> ModelLayer | None:
        """Return the layer with a label if it is attention over keys."""
        layer = self.layer_at(label)
        return None if layer is None or layer.spec is None else layer

    def hints(self, label: str) -> LayerHints:
        """Return the hints about the layer with a label; the method is a `HintSource`."""
        layer = self.layer_at(label)
        if layer is not None and layer.spec is not None:
            return replace(LayerHints.by(self.origin, spec=layer.spec), unread=self.unread_of_known)
        named = sections_named(label, self.sections)
        others = tuple(f"{name}." for name in self.sections if named and name not in named)
        unread = {
            name: value for name, value in self.plain.unread.items() if not name.startswith(others)
        }
        return replace(self.plain, unread=unread if layer is None else self.unread_of_known)


def model_hints(file: TensorFile, caller: LayerHints) -> ModelHints:
    """Read a model's configuration, next to a file or in it; empty hints if there is none.

    The caller must check that the shapes agree, because a config.json may belong to another model.

    Args:
        file: an open file that mha-parity did not write.
        caller: hints of the caller. If they count heads, RoPE of a known family also applies to
            layers with other numbers of heads, and keys that are not understood are unread.

    Raises:
        OSError: if there is a config.json that cannot be read.
        ValueError: if the family is known but the configuration is not understood, unless the
            caller counts heads.
    """
    is_told = bool(caller.counts)
    if file.format == "gguf":
        return _gguf_hints(file, is_told=is_told)
    path = Path(file.path)
    path = (path if path.is_dir() else path.parent) / "config.json"
    if not os.path.lexists(path):
        return ModelHints(why_unknown="there is no config.json next to it")
    try:
        config = read_config(path)
    except InputError as error:  # truncated, or another kind of file: no hint can be trusted
        error.hint = "correct it, or remove it"
        raise
    layers: dict[str, Sequence[ModelLayer]] = {}
    unread: dict[str, Any] = {}
    why = ""
    for name, part in known_parts(config).items():
        try:
            held, others = read_layers(part) if is_told else (specs_of(part), {})
            unread |= {f"{name}.{key}" if name else key: value for key, value in others.items()}
            held = [each for each in held if each.path]
            layers[name] = [
                each for each in held if not (each.spec and caller.contradicted_by(each.spec))
            ]
        except ValueError as error:
            if not is_told:
                raise InputError(
                    f"config.json next to {file.path}", f"be understood: {error}"
                ) from None
            why = f"it is not understood: {error}"
    plain = _in_config(config, known=layers)
    if not layers:
        why = why or f"its config.json does not help: {why_unknown(config)}"
        return ModelHints("config.json", plain, values=config, why_unknown=why)
    plain = plain if is_told else LayerHints(unread=plain.unread)
    return ModelHints("config.json", plain, unread, config, layers, tuple(sections_of(config)), why)


GGUF_LAYOUTS = {"llama": "gguf.LLaMA", "qwen2": "gguf.Qwen2", "qwen3": "gguf.Qwen2"}
"""Layouts of the architectures whose values are read as a configuration; Mistral also uses
`llama`.
"""

GGUF_KEYS = {
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
"""Configuration keys, each with its key in a GGUF file, after the name of the architecture, and its
type.
"""

OF_ATTENTION = re.compile(r"attention\.|attn_|rope\.")
"""Beginnings of GGUF keys that concern attention."""

READ_IN_GGUF = re.compile(
    r"attention\.(head_count(_kv)?|key_length|causal|(layer_norm|layer_norm_rms|group_norm)_epsilon|group_norm_groups)|"
    r"rope\.(freq_base|scaling\.(original_context_length|finetuned))"
)
"""Keys that are read, or do not affect attention: norms before it, and the length that RoPE was
trained with.
"""

READ_OF_FAMILIES = "attention.sliding_window"
"""Key that is read only for the families of `GGUF_LAYOUTS`."""

NOTHING_IN_GGUF = ("0", "0.0", "False", "none")


def _gguf_hints(file: TensorFile, *, is_told: bool) -> ModelHints:
    """Return the hints of a GGUF file: its layers, if it specifies them completely, otherwise
    numbers.
    """
    family = str(file.metadata.get("general.architecture"))
    begin = f"{family}."
    own = {
        name.removeprefix(begin): value
        for name, value in file.metadata.items()
        if name.startswith(begin)
    }
    config: dict[str, Any] = {}
    malformed: dict[str, Any] = {}
    for name, (key, kind) in GGUF_KEYS.items():
        try:
            config[name] = kind(own[key])
        except KeyError:
            continue
        except ValueError:  # a list with one value per layer is not a number either
            malformed |= {} if own[key].startswith("a list") else {key: own[key]}
    heads = config.get("num_attention_heads")
    size = str(config.get("head_dim") or (config.get("hidden_size", 0) // heads if heads else None))
    usual = {"attention.value_length": (size,), "rope.dimension_count": (size,)}
    usual |= dict.fromkeys(("rope.scaling.factor", "rope.scale_linear"), ("1", "1.0"))
    unread: dict[str, Any] = {
        key: value
        for key, value in own.items()
        if OF_ATTENTION.match(key) and not READ_IN_GGUF.fullmatch(key)
        if value
        not in (*usual.get(key, ()), *(() if key == "rope.dimension_count" else NOTHING_IN_GGUF))
    }
    if "rope_freqs.weight" in file.infos:  # one factor per frequency
        unread["rope_freqs.weight"] = None
    plain = _plain("GGUF", config, config.get("rope_theta"), unread)
    is_of_layers = any(
        own.get(key, "").startswith("a list") for key, _ in GGUF_KEYS.values()
    )  # one value per layer
    is_whole = {"num_hidden_layers", "num_attention_heads"} <= config.keys() and not is_of_layers
    if family in GGUF_LAYOUTS and malformed:
        raise InputError(f"the values of {file.path}", "be numbers", str(malformed))
    if (
        family not in GGUF_LAYOUTS
        or is_told
        or not is_whole
        or set(plain.unread) - {READ_OF_FAMILIES}
    ):
        return ModelHints("GGUF", plain)
    config = {"num_key_value_heads": heads, "rope_theta": 10000.0, **config}  # llama.cpp's default
    if family == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.infos
    try:
        layers = specs_of({"model_type": family, **config})
    except ValueError as error:
        raise InputError(f"the values of {file.path}", f"be understood: {error}") from None
    layout = GGUF_LAYOUTS[family]
    return ModelHints(
        "GGUF",
        parts={"": [replace(each, path=f"blk.{each.index}", layout=layout) for each in layers]},
    )


COUNTS = {
    "num_attention_heads",
    "n_head",
    "num_key_value_heads",
    "head_dim",
    "num_heads",
    "n_heads",
    "num_kv_heads",
}
"""Keys with numbers of heads, which the shapes or the caller must confirm."""

ROPE = {
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "rope_type",
    "partial_rotary_factor",
    "rotary_pct",
}
"""RoPE keys that `_in_config` reads."""

SHOWN = re.compile(
    r".*drop(out)?(_.*)?|((use|add|no|attention|attn)_)?((qkv|out|norm|layer_norm)_)?bias|scale_embedding|n_positions"
)
"""Keys that tensors show, such as biases, or that do not affect inference."""


def _attention_keys(values: Mapping[str, Any], others: Collection[str] = ()) -> dict[str, Any]:
    """Return the keys of a configuration that may concern attention, with their values."""
    unread = Config(values).unread(COUNTS.union(others))
    return {name: value for name, value in unread if not SHOWN.fullmatch(name)}


def _in_config(config: Mapping[str, Any], known: Collection[str]) -> LayerHints:
    """Return the hints of a configuration about layers of unknown families; `known` are the parts
    with known ones.
    """
    rope = config.get("rope_parameters")
    rope = {**config, **rope} if isinstance(rope, dict) else config
    # Only plain RoPE is read: neither scaled frequencies nor partial rotation.
    usual = {
        "rope_scaling": None,
        "rope_type": "default",
        "partial_rotary_factor": 1.0,
        "rotary_pct": 1.0,
    }
    unread = {name: rope[name] for name in usual if rope.get(name) not in (None, usual[name])}
    if rope is not config and any(
        isinstance(each, Mapping) for each in config["rope_parameters"].values()
    ):
        unread["rope_parameters"] = config["rope_parameters"]  # one per kind of layer
    unread |= _attention_keys(config, ROPE)
    for name in set(sections_of(config)) - set(known):
        unread |= {f"{name}.{key}": value for key, value in _attention_keys(config[name]).items()}
    return _plain("config.json", config, rope.get("rope_theta"), unread)


def _plain(
    origin: str, config: Mapping[str, Any], theta: Any, unread: Mapping[str, Any]
) -> LayerHints:
    """Return the numeric hints of a configuration, if it has the number of query heads."""
    counts = {
        "num_heads": config.get("num_attention_heads", config.get("n_head")),
        "num_kv_heads": config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"),
    }
    heads: dict[str, Any] = {name: n for name, n in counts.items() if type(n) is int and n > 0}
    if type(theta) in (int, float) and 0 < theta < math.inf and "num_heads" in heads:
        if not any(map(is_of_rope, unread)):
            heads["rope"] = Rope(theta)
    elif theta is not None:
        unread = {**unread, "rope_theta": theta}
    return replace(LayerHints.by(origin, **(heads if "num_heads" in heads else {})), unread=unread)


def _tails(label: str) -> list[str]:
    """Return the endings of a label, from all of it to its last word."""
    words = label.split(".")
    return [".".join(words[begin:]) for begin in range(len(words))]
