"""Configurations that record which keys were read."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mha_spec import InputError, InputTypeError
from parity.measure.files.small import read_json
from parity.port.models.keys import check_kind

ABOUT_ATTENTION = re.compile(
    r"attn|attention|rope|rotary|theta|yarn|ntk|mscale|window|sliding|chunk|softcap|alibi|relative|"
    r"clip_qkv|lora_rank|temperature|layer_types|position|causal|query|softmax|"
    # Whole words of a name: `n_head` and `kv_n_heads`, but not `header`.
    r"(^|_)(q|k|v|kv|qk|qkv|n?heads?|headdim|sinks?|bias|scale)(_|$)",
    re.IGNORECASE,
)
"""Keys that may concern attention; one that is neither read nor known to be irrelevant is
rejected.
"""

SAYS_NOTHING = re.compile(
    r"(output|router?|routed|mlp|lm_head|residual|embedding|embd|expert|moe|mtp|logit|final|linear|"
    r"first_k|tie)_.*|"
    r"_?attn_implementation.*|max_position_embeddings|chunk_size_feed_forward|"
    r"cross_attention_hidden_size|scale_emb|scale_depth|max_window_layers|temperature|top_k"
)
"""Such keys that are irrelevant in all families."""

SAYS_NOTHING_IF_EMPTY = {"add_cross_attention", "pruned_heads", "use_bidirectional_attention"}
"""Keys that are irrelevant only if false or empty."""


def read_config(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Return the values of a config.json, or of the one in a folder.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not a configuration.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
        if not os.path.lexists(path):
            raise FileNotFoundError(
                f"the folder of a model must have a config.json, and {path.parent} has none"
            )
    values = read_json(path)
    if not isinstance(values, Mapping):
        raise InputError(path, "hold the values of a configuration by name")
    return values


def values_of(config: Any) -> Mapping[str, Any]:
    """Return the values of a configuration: a mapping, a transformers object, or the path of a file
    or folder.

    Raises:
        OSError: if the file cannot be read.
        TypeError: if it is anything else.
        ValueError: if the file is not a configuration.
    """
    if isinstance(config, Mapping):
        return config
    to_dict: Callable[[], Mapping[str, Any]] | None = getattr(config, "to_dict", None)
    if to_dict is not None:
        return to_dict()
    if isinstance(config, str | os.PathLike):
        return read_config(config)
    raise InputTypeError(
        "config", "be the configuration of a model, its values or a path", type(config).__name__
    )


class MissingKeyError(InputError):
    """A required key is missing."""


class Value(NamedTuple):
    """Value and its origin, as text."""

    value: Any
    origin: str

    @classmethod
    def derived(cls, value: Any, *sources: Value) -> Value:
        """Return a value that follows from others, with all of their origins."""
        return cls(value, ", ".join(source.origin for source in sources))


class Config:
    """Values of a configuration; None counts as missing, except in `required_or_none`.

    Attributes:
        where: prefix of key names in messages: empty, or `rope_parameters.`.
        looked_up: names of keys that were looked up, also in sections, with missing ones; callers
            may clear it.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str = "",
        defaults: Mapping[str, Any] | None = None,
        looked_up: list[str] | None = None,
    ) -> None:
        self.where = where
        self.looked_up = [] if looked_up is None else looked_up
        self._values = dict(values)
        # A key that is present and None has no default.
        self._defaults = {
            name: value for name, value in (defaults or {}).items() if name not in values
        }
        self._read: set[str] = set()
        self._sections: dict[str, Config] = {}

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def required_or_none(self, *names: str) -> Value | None:
        """Return the value of the first key that is present; one of them must be, but may be None.

        Raises:
            MissingKeyError: if all keys are missing.
        """
        has_none = self._values.keys().isdisjoint(names) and self._defaults.keys().isdisjoint(names)
        if has_none:
            return self.read(*names)  # raises the error
        return self.find(*names)

    def find(self, *names: str) -> Value | None:
        """Return the value of the first key that is present, or None; all of them count as read.

        Raises:
            TypeError, ValueError: if its value is of a kind that the key cannot have.
        """
        self._read.update(names)
        for name in names:
            self.looked_up.append(f"{self.where}{name}")
            if name in self:
                check_kind(name, self._values[name], self.where)
                return Value(self._values[name], f"{self.where}{name}")
        for name in names:
            if name in self._defaults:
                return _default(name, self._defaults[name])
        return None

    def read(self, *names: str, default: Any = None) -> Value:
        """Return the value of the first key that is present, or this family's default.

        Raises:
            MissingKeyError: if all keys are missing and there is no default.
        """
        value = self.find(*names)
        if value is not None:
            return value
        if default is None:
            raise MissingKeyError(
                "the configuration", f"have {self.where}{' or '.join(names)}, and it is not there"
            )
        return _default(names[0], default)

    def pass_over(self, kind: type) -> bool:
        """Count keys whose values have a type as read; return whether there are any.

        Raises:
            TypeError, ValueError: if one of them cannot have a value of this type.
        """
        names = [name for name, value in self._values.items() if isinstance(value, kind)]
        for name in names:
            check_kind(name, self._values[name], self.where)
        self._read.update(names)
        return bool(names)

    def section(self, name: str) -> Config:
        """Return a section, the same object each time.

        Raises:
            MissingKeyError: if it is missing.
            ValueError: if it is not a mapping.
        """
        if name not in self._sections:
            values = self.read(name).value
            if not isinstance(values, Mapping):
                raise InputError(f"{self.where}{name}", "hold values by name", {name: values})
            self._sections[name] = Config(values, f"{self.where}{name}.", looked_up=self.looked_up)
        return self._sections[name]

    def names_read(self) -> set[str]:
        """Return the keys that were read and have values, with the keys of sections, by their own
        names.
        """
        names = {name for name in self._read if name in self}
        for section in self._sections.values():
            names |= section.names_read()
        return names

    def numbers_read(self) -> dict[str, Any]:
        """Return the numbers and lists among the values that were read, with the ones of
        sections.
        """
        numbers: dict[str, Any] = {}
        for name in sorted(self._read & self._values.keys()):
            value = self._values[name]
            if isinstance(value, int | float | list | tuple) and not isinstance(value, bool):
                numbers[f"{self.where}{name}"] = value
        for section in self._sections.values():
            numbers |= section.numbers_read()
        return numbers

    def unread(self, says_nothing: Collection[str]) -> Iterator[tuple[str, Any]]:
        """Yield the unread keys that may concern attention, with their values; in sections, all
        unread keys.
        """
        for name, value in self._values.items():
            if value is None or name in self._read or name in says_nothing:
                continue
            if name in SAYS_NOTHING_IF_EMPTY and not value:
                continue
            # All keys of a section are about its subject, such as RoPE.
            if self.where or is_about_attention(name):
                yield f"{self.where}{name}", value
        for section in self._sections.values():
            yield from section.unread(says_nothing)


def is_about_attention(name: str) -> bool:
    """Return whether a key may concern attention, by its name alone."""
    return bool(ABOUT_ATTENTION.search(name)) and not SAYS_NOTHING.fullmatch(name)


def _default(name: str, value: Any) -> Value:
    return Value(value, f"family default: {name} is not set")
