"""Hints about a layer: its heads, its RoPE or all of it, with their sources and precedence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

from mha_spec import AttentionSpec, InputError, Rope

COUNTS = ("num_heads", "num_kv_heads", "head_dim")

CALLER, METADATA, SHAPES = "the caller", "the file's metadata", "the shapes"
"""Sources of hints, in addition to `config.json` and `GGUF`."""


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
    def by(cls, origin: str, **given: Any) -> LayerHints:
        """Return the hints of one source, by the names of `LayerKeywords`."""
        if unknown := given.keys() - {*HINTS}:
            raise TypeError(
                f"hints must be some of {', '.join(HINTS)}, got {', '.join(sorted(unknown))}"
            )
        return cls(
            **given,
            origins=dict.fromkeys((name for name in HINTS if given.get(name) is not None), origin),
        )

    @property
    def given(self) -> dict[str, Any]:
        """Return the hints that are set, by name."""
        return {name: value for name in HINTS if (value := getattr(self, name)) is not None}

    @property
    def counts(self) -> dict[str, int]:
        """Return the known numbers of heads, by name."""
        return {name: value for name, value in self.given.items() if name in COUNTS}

    @property
    def from_model(self) -> str:
        """Return the configuration that some hint comes from: `config.json`, `GGUF` or an empty
        string.
        """
        return next(
            (origin for origin in self.origins.values() if origin not in (CALLER, METADATA)), ""
        )

    def origin_of(self, name: str) -> str:
        """Return the source of a hint; heads without a source come from the shapes."""
        return self.origins.get(name) or self.origins.get("spec") or SHAPES

    def contradicted_by(self, spec: AttentionSpec) -> list[str]:
        """Return the names of the numbers of heads that differ from a layer's."""
        return [name for name, value in self.counts.items() if value != getattr(spec, name)]


HINTS = (*COUNTS, "rope", "spec")
"""Names of hints, in `LayerHints` and `LayerKeywords`."""

HintSource = Callable[[str], LayerHints | None]
"""A source of hints: a function from the label of a layer (a prefix, or one with an index) to its
hints.
"""


def merge(label: str, sources: Iterable[HintSource]) -> LayerHints:
    """Merge the hints about a layer; earlier sources take precedence.

    The order is that of `file_hints`: the caller, then the file's own metadata, otherwise its
    config.json or GGUF keys. `find_spec` uses the shapes last. A hint comes from the first source
    that has it, with these rules:

    - All counts come from one source, because counts of two sources do not mix.
    - A later `spec` must have the counts of earlier sources. It may differ from them only in the
      base of RoPE.
    - Keys about RoPE are not unread if an earlier source specifies RoPE.

    Raises:
        ValueError: if sources contradict each other.
    """
    merged = LayerHints()
    for source in sources:
        if (later := source(label)) is None:
            continue
        rope, known = merged.rope, later.spec.rope if later.spec is not None else later.rope
        taken = {name: value for name, value in later.given.items() if name not in merged.given}
        if merged.counts:
            taken = {name: value for name, value in taken.items() if name not in COUNTS}
        if later.spec is not None:
            taken["spec"] = _with_hints(later.spec, merged, label, may_rotate=later.may_rotate)
        unread = {
            name: value
            for name, value in later.unread.items()
            if rope is None or not is_of_rope(name)
        }
        merged = replace(
            merged,
            **taken,
            origins={**{name: later.origins[name] for name in taken}, **merged.origins},
            unread={**merged.unread, **unread},
            overridden=known.theta
            if rope is not None and known is not None and known.theta != rope.theta
            else None,
        )
    return merged


def _with_hints(
    spec: AttentionSpec, hints: LayerHints, label: str, *, may_rotate: bool
) -> AttentionSpec:
    """Return a layer with the RoPE of hints, if any; reject it if its heads or its rotation differ
    from theirs.
    """
    if wrong := hints.contradicted_by(spec):
        got, expected = (
            ", ".join(f"{name}={of[name]}" for name in wrong)
            for of in (hints.counts, spec.values())
        )
        raise InputError(wrong[0], f"match the file's metadata for {label}, {expected}", got)
    rope = hints.rope
    if rope is None:
        return spec
    is_other = not may_rotate if spec.rope is None else replace(spec.rope, theta=rope.theta) != rope
    if is_other:
        raise InputError(
            "rope", f"not be given for {label}, which has {spec.rope or 'none'}", rope=rope
        )
    return replace(spec, rope=rope)


def is_of_rope(name: str) -> bool:
    """Return whether an unread key is about RoPE; a caller who passes RoPE replaces all such
    keys.
    """
    words = ("rope", "rotary", "partial_rotary", "mrope")
    return any(word.startswith(words) for word in name.split("."))
