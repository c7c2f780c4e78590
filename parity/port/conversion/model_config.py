"""Hints from model configurations: a GGUF file's own values, or Hugging Face's config.json."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
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
    unknown_parts,
    why_unknown,
)


class ModelConfig:
    """The configuration of a Hugging Face model, which is read once: its parts and their layers.

    Attributes:
        values: keys with their values.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> ModelConfig:
        """Read a config.json, or the one in a folder.

        Raises:
            OSError: if it cannot be read.
            ValueError: if it is not a configuration.
        """
        return cls(read_config(path))

    @cached_property
    def parts(self) -> dict[str, Mapping[str, Any]]:
        """Return the configurations of parts with known families, by key; a model without parts has
        an empty key.
        """
        return known_parts(self.values)

    @cached_property
    def unknown_parts(self) -> dict[str, str]:
        """Return why other parts are not read, by key."""
        return unknown_parts(self.values)

    @cached_property
    def layers(self) -> dict[str, list[ModelLayer]]:
        """Return the layers of the parts with known families, by key.

        Raises:
            TypeError, ValueError: if the configuration of a part is not understood.
        """
        return {name: specs_of(part) for name, part in self.parts.items()}

    @property
    def specifies_layers(self) -> bool:
        """Return whether the rules of a family specify layers of the model."""
        try:
            return any(self.layers.values())
        except (TypeError, ValueError):
            return False


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
        by_path: dict[str, dict[str, ModelLayer]] = {}
        for section, layers in self.parts.items():
            for layer in layers:
                words = [word for word in layer.path.split(".") if not word.isdigit()]
                stacked = f"{'.'.join(words)}[{layer.index}]"
                for path in (layer.path, stacked):
                    # The first of layers that share weights has the path.
                    by_path.setdefault(path, {}).setdefault(section, layer)
        return by_path

    def layer_at(self, label: str) -> ModelLayer | None:
        """Return the layer whose weights have a label (a prefix, or one with an index).

        If prefixes of several parts end alike, the label must identify the part; otherwise the
        layer is unknown.
        """
        words = label.split(".")
        # The longest ending first, because a short one may also be the ending of another part.
        for begin in range(len(words)):
            by_section = self.paths.get(".".join(words[begin:]))
            if by_section is None:
                continue
            named = sections_named(label, self.sections)
            if named:
                by_section = {name: layer for name, layer in by_section.items() if name in named}
            if len(by_section) == 1:
                return next(iter(by_section.values()))
            if by_section:
                return None
        return None

    def attention_at(self, label: str) -> ModelLayer | None:
        """Return the layer with a label if it is attention over keys."""
        layer = self.layer_at(label)
        return None if layer is None or layer.spec is None else layer

    def hints_at(self, label: str) -> LayerHints:
        """Return the hints about the layer with a label."""
        layer = self.layer_at(label)
        if layer is not None and layer.spec is not None:
            return replace(LayerHints.by(self.origin, spec=layer.spec), unread=self.unread_of_known)
        if layer is not None:
            return replace(self.plain, unread=self.unread_of_known)
        # A label that names parts is not concerned by the keys of others.
        named = sections_named(label, self.sections)
        if not named:
            return self.plain
        other_sections = {*self.sections} - named
        unread: dict[str, Any] = {}
        for key, value in self.plain.unread.items():
            if not any(key.startswith(f"{section}.") for section in other_sections):
                unread[key] = value
        return replace(self.plain, unread=unread)


def hints_of_config(
    config: ModelConfig, path: str | os.PathLike[str], caller: LayerHints
) -> ModelHints:
    """Return the hints of the configuration next to a file that mha-parity did not write.

    The caller must check that the shapes agree, because a config.json may belong to a different
    model.

    Args:
        config: the configuration.
        path: path of the file, for errors.
        caller: hints of the caller. If they count heads, RoPE of a known family also applies to
            layers with other numbers of heads, and keys that are not understood are unread.

    Raises:
        ValueError: if the family is known but the configuration is not understood, unless the
            caller counts heads.
    """
    if not caller.counts:
        try:
            layers = config.layers
        except ValueError as error:
            raise InputError(f"config.json next to {path}", f"be understood: {error}") from None
        plain = _plain_of_config(config, layers)
        if not layers:
            return _hints_of_unknown(config, plain)
        plain = LayerHints(unread=plain.unread)
        parts = {name: _with_paths(of_part) for name, of_part in layers.items()}
        return ModelHints(
            "config.json",
            plain,
            values=config.values,
            parts=parts,
            sections=tuple(sections_of(config.values)),
        )
    agreeing: dict[str, Sequence[ModelLayer]] = {}
    unread: dict[str, Any] = {}
    why = ""
    for name, part in config.parts.items():
        try:
            of_part, unread_of_part = read_layers(part)
        except ValueError as error:
            why = f"it is not understood: {error}"
            continue
        for key, value in unread_of_part.items():
            unread[f"{name}.{key}" if name else key] = value
        agreeing_layers: list[ModelLayer] = []
        for layer in _with_paths(of_part):
            if layer.spec is None or not caller.contradicted_by(layer.spec):
                agreeing_layers.append(layer)
        agreeing[name] = agreeing_layers
    plain = _plain_of_config(config, agreeing)
    if not agreeing:
        return _hints_of_unknown(config, plain, why)
    sections = tuple(sections_of(config.values))
    return ModelHints("config.json", plain, unread, config.values, agreeing, sections, why)


def _with_paths(layers: Sequence[ModelLayer]) -> list[ModelLayer]:
    """Return the layers whose weights have a known path."""
    return [layer for layer in layers if layer.path]


def _hints_of_unknown(config: ModelConfig, plain: LayerHints, why: str = "") -> ModelHints:
    """Return the hints of a configuration whose layers are unknown."""
    why = why or f"its config.json does not help: {why_unknown(config.values)}"
    return ModelHints("config.json", plain, values=config.values, why_unknown=why)


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
"""RoPE keys that `_plain_of_config` reads."""

PLAIN_ROPE = {
    "rope_scaling": None,
    "rope_type": "default",
    "partial_rotary_factor": 1.0,
    "rotary_pct": 1.0,
}
"""Values with which RoPE keys mean plain RoPE: neither scaled frequencies nor partial rotation."""

SHOWN = re.compile(
    r".*drop(out)?(_.*)?|((use|add|no|attention|attn)_)?((qkv|out|norm|layer_norm)_)?bias|"
    r"scale_embedding|n_positions"
)
"""Keys that tensors show, such as biases, or that do not affect inference."""


def _plain_of_config(config: ModelConfig, read_parts: Collection[str]) -> LayerHints:
    """Return the hints of a configuration about layers of unknown families; `read_parts` have known
    ones, whose keys are read elsewhere.
    """
    values = config.values
    parameters = values.get("rope_parameters")
    if not isinstance(parameters, dict):
        parameters = {}
    rope = {**values, **parameters}
    unread: dict[str, Any] = {}
    for name, usual in PLAIN_ROPE.items():
        if rope.get(name) not in (None, usual):
            unread[name] = rope[name]
    # transformers 5 nests them if each kind of layer has its own.
    if any(isinstance(nested, Mapping) for nested in parameters.values()):
        unread["rope_parameters"] = parameters
    unread |= _attention_keys(values, ROPE)
    for section in sections_of(values):
        if section not in read_parts:
            for key, value in _attention_keys(values[section]).items():
                unread[f"{section}.{key}"] = value
    return _numbers_of_heads("config.json", values, rope.get("rope_theta"), unread)


def _attention_keys(values: Mapping[str, Any], read: Collection[str] = ()) -> dict[str, Any]:
    """Return the keys of a configuration that may concern attention, with their values, without
    those that are `read`.
    """
    unread = Config(values).unread(COUNTS.union(read))
    return {name: value for name, value in unread if not SHOWN.fullmatch(name)}


def _numbers_of_heads(
    origin: str, config: Mapping[str, Any], theta: Any, unread: Mapping[str, Any]
) -> LayerHints:
    """Return the hints that are numbers in a configuration, if it has the number of query heads."""
    counts = {
        "num_heads": config.get("num_attention_heads", config.get("n_head")),
        "num_kv_heads": config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"),
    }
    # `type`, because True is an int for isinstance.
    hints: dict[str, Any] = {}
    for name, count in counts.items():
        if type(count) is int and count > 0:
            hints[name] = count
    if "num_heads" not in hints:
        hints = {}
    is_base = type(theta) in (int, float) and 0 < theta < math.inf
    if is_base and hints:
        if not any(is_of_rope(name) for name in unread):
            hints["rope"] = Rope(theta)
    elif theta is not None:
        unread = {**unread, "rope_theta": theta}
    return replace(LayerHints.by(origin, **hints), unread=unread)


# ---- GGUF ----------------------------------------------------------------------------------------


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
    r"attention\.(head_count(_kv)?|key_length|causal|"
    r"(layer_norm|layer_norm_rms|group_norm)_epsilon|group_norm_groups)|"
    r"rope\.(freq_base|scaling\.(original_context_length|finetuned))"
)
"""Keys that are read, or do not affect attention: norms before it, and the length that RoPE was
trained with.
"""

READ_OF_FAMILIES = "attention.sliding_window"
"""Key that is read only for the families of `GGUF_LAYOUTS`."""

NOTHING_IN_GGUF = ("0", "0.0", "False", "none")
"""Values, as text, that switch a feature off."""


def hints_of_gguf(file: TensorFile, caller: LayerHints) -> ModelHints:
    """Return the hints of a GGUF file: its layers, if it specifies them completely and the caller
    does not count heads, otherwise numbers.

    Raises:
        ValueError: if the architecture is known but its values are not understood.
    """
    family = str(file.metadata.get("general.architecture"))
    begin = f"{family}."
    values: dict[str, str] = {}
    for name, text in file.metadata.items():
        if name.startswith(begin):
            values[name.removeprefix(begin)] = text
    config: dict[str, Any] = {}
    malformed: dict[str, Any] = {}
    differ_by_layer = False
    for name, (key, kind) in GGUF_KEYS.items():
        text = values.get(key)
        if text is None:
            continue
        # The reader of GGUF describes lists instead of reading them.
        if text.startswith("a list"):
            differ_by_layer = True
            continue
        try:
            config[name] = kind(text)
        except ValueError:
            malformed[key] = text
    unread = _unread_in_gguf(values, config)
    if "rope_freqs.weight" in file.infos:  # one factor per frequency
        unread["rope_freqs.weight"] = None
    plain = _numbers_of_heads("GGUF", config, config.get("rope_theta"), unread)
    if family in GGUF_LAYOUTS and malformed:
        raise InputError(f"the values of {file.path}", "be numbers", str(malformed))
    has_counts = {"num_hidden_layers", "num_attention_heads"} <= config.keys()
    is_whole = has_counts and not differ_by_layer and not set(plain.unread) - {READ_OF_FAMILIES}
    if family not in GGUF_LAYOUTS or caller.counts or not is_whole:
        return ModelHints("GGUF", plain)
    # llama.cpp's default of RoPE's base.
    heads = config["num_attention_heads"]
    config = {"num_key_value_heads": heads, "rope_theta": 10000.0, **config}
    if family == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.infos
    try:
        layers = specs_of({"model_type": family, **config})
    except ValueError as error:
        raise InputError(f"the values of {file.path}", f"be understood: {error}") from None
    layout = GGUF_LAYOUTS[family]
    layers = [replace(layer, path=f"blk.{layer.index}", layout=layout) for layer in layers]
    return ModelHints("GGUF", parts={"": layers})


def _unread_in_gguf(values: Mapping[str, str], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a GGUF file that concern attention and are not read, with their values."""
    heads = config.get("num_attention_heads")
    size = config.get("head_dim")
    if not size:
        size = config.get("hidden_size", 0) // heads if heads else None
    size = str(size)
    # With these values the keys repeat what is read.
    usual = {
        "attention.value_length": (size, *NOTHING_IN_GGUF),
        # 0 would be no RoPE, which the other keys contradict, so it is not understood.
        "rope.dimension_count": (size,),
        "rope.scaling.factor": ("1", "1.0", *NOTHING_IN_GGUF),
        "rope.scale_linear": ("1", "1.0", *NOTHING_IN_GGUF),
    }
    unread: dict[str, Any] = {}
    for key, value in values.items():
        is_read = OF_ATTENTION.match(key) is None or READ_IN_GGUF.fullmatch(key) is not None
        if not is_read and value not in usual.get(key, NOTHING_IN_GGUF):
            unread[key] = value
    return unread
