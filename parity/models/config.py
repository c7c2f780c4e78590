"""A configuration that is read key by key, so that what was not read is known."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mha_spec import Refusal, WrongType
from parity.files.tensor_file import parse_json

ABOUT_ATTENTION = re.compile(
    r"attn|attention|rope|rotary|theta|yarn|ntk|mscale|window|sliding|chunk|softcap|alibi|relative|clip_qkv|lora_rank|"
    r"temperature|layer_types|position|causal|query|softmax|(^|_)(q|k|v|kv|qk|qkv|n?heads?|headdim|sinks?|bias|scale)(_|$)",
    re.IGNORECASE,
)
"""Keys that could speak of attention: one that is neither read nor known to say nothing of it is refused."""

SAYS_NOTHING = re.compile(
    r"(output|router?|routed|mlp|lm_head|residual|embedding|embd|expert|moe|mtp|logit|final|linear|first_k|tie)_.*|"
    r"_?attn_implementation.*|max_position_embeddings|chunk_size_feed_forward|cross_attention_hidden_size|"
    r"scale_emb|scale_depth|max_window_layers|temperature|top_k"
)
"""Those of all families that say nothing of what an attention layer computes."""

SAYS_NOTHING_IF_EMPTY = {"add_cross_attention", "pruned_heads", "use_bidirectional_attention"}
"""Those that say something where they are neither false nor empty."""


LARGEST = 1 << 24  # bytes of a config.json


def read_config(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The values of a config.json, or of that in a folder.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not a configuration.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
        if not path.exists():
            raise FileNotFoundError(f"the folder of a model must have a config.json, and {path.parent} has none")
    if path.stat().st_size > LARGEST:
        raise Refusal("a configuration", f"have at most {LARGEST} bytes", str(path))
    try:
        values = parse_json(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise Refusal("a configuration", "be JSON", f"{path}: {error}") from None
    if not isinstance(values, Mapping):
        raise Refusal("a configuration", "hold values by name", str(path))
    return values


def values_of(config: Any) -> Mapping[str, Any]:
    """The values of a configuration, whoever holds them: a mapping, transformers, or a file or folder by its path.

    Raises:
        OSError: if the file cannot be read.
        TypeError: if it is nothing of the kind.
        ValueError: if the file is not a configuration.
    """
    if isinstance(config, Mapping):
        return config
    to_dict: Callable[[], Mapping[str, Any]] | None = getattr(config, "to_dict", None)
    if to_dict is not None:
        return to_dict()
    if isinstance(config, str | os.PathLike):
        return read_config(config)
    raise WrongType("config", "be that of a model, its values or a path", type(config).__name__)


class MissingKey(Refusal):
    """A key that must be there is not."""


class Value(NamedTuple):
    """A value, and where it comes from, in words."""

    value: Any
    origin: str


class Config:
    """The values of a configuration; what is None is not there, but for `asked`.

    Attributes:
        where: what the names of its keys begin with in messages: nothing, or `rope_parameters.`.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "", defaults: Mapping[str, Any] | None = None) -> None:
        self.where = where
        self._values = dict(values)
        self._defaults = {name: value for name, value in (defaults or {}).items() if name not in values}
        self._read: set[str] = set()
        self._sections: dict[str, Config] = {}

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def asked(self, *names: str) -> Value | None:
        """The value of the first of these keys that is there; None where one is there and says so.

        Raises:
            MissingKey: if none of them is there.
        """
        if self._values.keys().isdisjoint(names) and self._defaults.keys().isdisjoint(names):
            self.read(*names)
        return self.find(*names)

    def find(self, *names: str) -> Value | None:
        """The value of the first of these keys that is there, or None; all of them count as read."""
        self._read.update(names)
        for name in names:
            if name in self:
                return Value(self._values[name], f"{self.where}{name}")
        return next((_default(name, self._defaults[name]) for name in names if name in self._defaults), None)

    def read(self, *names: str, default: Any = None) -> Value:
        """The value of the first of these keys that is there, or what this family's models have without it.

        Raises:
            MissingKey: if none is there, and there is no default.
        """
        found = self.find(*names)
        if found is not None:
            return found
        if default is None:
            raise MissingKey("the configuration", f"have {self.where}{' or '.join(names)}, and it is not there")
        return _default(names[0], default)

    def pass_over(self, kind: type) -> bool:
        """Count as read what is of a kind, of layers that are not there; whether anything is."""
        names = [name for name, value in self._values.items() if isinstance(value, kind)]
        self._read.update(names)
        return bool(names)

    def section(self, name: str) -> Config:
        """A part of it, the same one each time.

        Raises:
            MissingKey: if it is not there.
            ValueError: if it holds no values by name.
        """
        if name not in self._sections:
            held = self.read(name).value
            if not isinstance(held, Mapping):
                raise Refusal(f"{self.where}{name}", "hold values by name", {name: held})
            self._sections[name] = Config(held, f"{self.where}{name}.")
        return self._sections[name]

    def unread(self, says_nothing: Collection[str]) -> Iterator[tuple[str, Any]]:
        """The keys that could speak of attention and were not read, with their values; of a section all unread ones."""
        for name, value in self._values.items():
            if (
                value is None
                or name in self._read
                or name in says_nothing
                or (name in SAYS_NOTHING_IF_EMPTY and not value)
            ):
                continue
            if self.where or (ABOUT_ATTENTION.search(name) and not SAYS_NOTHING.fullmatch(name)):
                yield f"{self.where}{name}", value
        for section in self._sections.values():
            yield from section.unread(says_nothing)


def _default(name: str, value: Any) -> Value:
    return Value(value, f"family default: {name} is not set")
