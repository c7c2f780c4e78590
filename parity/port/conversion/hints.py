"""Hints about a layer: its heads, its RoPE or all of it, with their sources and precedence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

from mha_spec import AttentionSpec, InputError, Rope

COUNTS = ("num_heads", "num_kv_heads", "head_dim")

CALLER, METADATA, SHAPES = "the caller", "the file's metadata", "the shapes"
"""Sources of hints, in addition to `config.json` and `GGUF`."""

HINTS = (*COUNTS, "rope", "spec")
"""Names of hints, in `LayerHints` and `LayerKeywords`."""


class LayerKeywords(TypedDict, total=False):
    """Keyword arguments of functions that read layers; `spec` replaces all others."""

    num_heads: int | None
    num_kv_heads: int | None
    head_dim: int | None
    rope: Rope | None
    spec: AttentionSpec | None


@dataclass(frozen=True)
class LayerHints:
    """Hints about a layer, from one source or several.

    Attributes:
        num_heads, num_kv_heads, head_dim: its heads; None if unknown.
        rope: its RoPE.
        spec: the whole layer.
        origins: source of each hint, by name.
        unread: attention keys that no hint covers, with their values.
        may_rotate: RoPE may have been unknown when `spec` was written, so an earlier source may add
            it.
        overridden: RoPE theta of a later source that an earlier one overrides.
    """

    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    rope: Rope | None = None
    spec: AttentionSpec | None = None
    origins: Mapping[str, str] = field(default_factory=dict)
    unread: Mapping[str, Any] = field(default_factory=dict)
    may_rotate: bool = False
    overridden: float | None = None

    @classmethod
    def by(cls, origin: str, **keywords: Any) -> LayerHints:
        """Return the hints of one source, by the names of `LayerKeywords`."""
        unknown = keywords.keys() - {*HINTS}
        if unknown:
            raise TypeError(
                f"hints must be some of {', '.join(HINTS)}, got {', '.join(sorted(unknown))}"
            )
        names = [name for name in HINTS if keywords.get(name) is not None]
        return cls(**keywords, origins=dict.fromkeys(names, origin))

    @property
    def values(self) -> dict[str, Any]:
        """Return the hints that are set, by name."""
        values: dict[str, Any] = {}
        for name in HINTS:
            value = getattr(self, name)
            if value is not None:
                values[name] = value
        return values

    @property
    def counts(self) -> dict[str, int]:
        """Return the known numbers of heads, by name."""
        return {name: value for name, value in self.values.items() if name in COUNTS}

    @property
    def from_model(self) -> str:
        """Return the configuration that some hint comes from: `config.json`, `GGUF` or an empty
        string.
        """
        for origin in self.origins.values():
            if origin not in (CALLER, METADATA):
                return origin
        return ""

    def origin_of(self, name: str) -> str:
        """Return the source of a hint; heads without a source come from the shapes."""
        return self.origins.get(name) or self.origins.get("spec") or SHAPES

    def contradicted_by(self, spec: AttentionSpec) -> list[str]:
        """Return the names of the numbers of heads that differ from a layer's."""
        names: list[str] = []
        for name, count in self.counts.items():
            if count != getattr(spec, name):
                names.append(name)
        return names


def merge(label: str, in_order: Iterable[LayerHints]) -> LayerHints:
    """Merge the hints of several sources about a layer; earlier sources take precedence.

    A hint comes from the first source that has it, with these rules:

    - All counts come from one source, because counts of two sources do not mix.
    - A later `spec` must have the counts of earlier sources. It may differ from them only in the
      base of RoPE.
    - Keys about RoPE are not unread if an earlier source specifies RoPE.

    Args:
        label: label of the layer, for errors: a prefix, or one with an index.
        in_order: the hints, those with precedence first. `FileHints` has the order of a file's
            sources.

    Raises:
        ValueError: if sources contradict each other.
    """
    merged = LayerHints()
    for later in in_order:
        merged = _with_later(merged, later, label)
    return merged


def _with_later(earlier: LayerHints, later: LayerHints, label: str) -> LayerHints:
    """Add the hints of a later source to the hints of earlier ones."""
    earlier_names = {*earlier.values}
    if earlier.counts:
        earlier_names.update(COUNTS)  # counts of two sources do not mix
    added: dict[str, Any] = {}
    for name, value in later.values.items():
        if name not in earlier_names:
            added[name] = value
    later_rope = later.rope
    if later.spec is not None:
        added["spec"] = _agreeing(later.spec, earlier, label, may_rotate=later.may_rotate)
        later_rope = later.spec.rope
    unread = later.unread
    overridden = None
    if earlier.rope is not None:
        unread = without_rope_keys(unread)
        if later_rope is not None and later_rope.theta != earlier.rope.theta:
            overridden = later_rope.theta
    origins = {name: later.origins[name] for name in added}
    return replace(
        earlier,
        **added,
        origins={**origins, **earlier.origins},
        unread={**earlier.unread, **unread},
        overridden=overridden,
    )


def _agreeing(
    spec: AttentionSpec, earlier: LayerHints, label: str, *, may_rotate: bool
) -> AttentionSpec:
    """Return a layer with the RoPE of earlier hints, if any; reject it if its heads or its rotation
    differ from theirs.
    """
    wrong = earlier.contradicted_by(spec)
    if wrong:
        got = ", ".join(f"{name}={earlier.counts[name]}" for name in wrong)
        expected = ", ".join(f"{name}={getattr(spec, name)}" for name in wrong)
        raise InputError(wrong[0], f"match the file's metadata for {label}, {expected}", got)
    rope = earlier.rope
    if rope is None:
        return spec
    if spec.rope is None:
        contradicts = not may_rotate
    else:
        contradicts = replace(spec.rope, theta=rope.theta) != rope
    if contradicts:
        raise InputError(
            "rope", f"not be given for {label}, which has {spec.rope or 'none'}", rope=rope
        )
    return replace(spec, rope=rope)


def is_of_rope(name: str) -> bool:
    """Return whether an unread key is about RoPE; a caller who passes RoPE replaces all such
    keys.
    """
    beginnings = ("rope", "rotary", "partial_rotary", "mrope")
    return any(word.startswith(beginnings) for word in name.split("."))


def without_rope_keys(unread: Mapping[str, Any]) -> dict[str, Any]:
    """Return unread keys without those about RoPE."""
    return {name: value for name, value in unread.items() if not is_of_rope(name)}
