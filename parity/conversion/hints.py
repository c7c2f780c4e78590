"""Hints about a layer: who says its heads, its RoPE or all of it, and whose word counts first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

from mha_spec import AttentionSpec, Refusal, Rope

COUNTS = ("num_heads", "num_kv_heads", "head_dim")

CALLER, METADATA, SHAPES = "the caller", "the file's metadata", "the shapes"
"""Sources of hints, beside `config.json` and `GGUF`."""


class LayerKeywords(TypedDict, total=False):
    """Keywords of functions that read layers, where shapes leave it open. `spec` stands for all others."""

    num_heads: int | None
    num_kv_heads: int | None
    head_dim: int | None
    rope: Rope | None
    spec: AttentionSpec | None


@dataclass(frozen=True)
class LayerHints:
    """Hints about a layer, from one source or merged.

    Attributes:
        num_heads, num_kv_heads, head_dim: its heads, as far as they are known.
        rope: how its queries and keys are rotated.
        spec: the whole layer.
        origins: the source of each of these, by name.
        unread: keys about attention that are in none of these, with their values.
        may_rotate: RoPE may have been unknown when `spec` was written, so that an earlier source may add it.
        overridden: the theta of RoPE that a later source says, where an earlier one says another.
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
        if unknown := given.keys() - {*SAID}:
            raise TypeError(f"hints must be of {', '.join(SAID)}, got {', '.join(sorted(unknown))}")
        return cls(**given, origins=dict.fromkeys((name for name in SAID if given.get(name) is not None), origin))

    @property
    def given(self) -> dict[str, Any]:
        """The hints themselves, by name."""
        return {name: value for name in SAID if (value := getattr(self, name)) is not None}

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of heads that are known, by name."""
        return {name: value for name, value in self.given.items() if name in COUNTS}

    @property
    def from_model(self) -> str:
        """The configuration that some of it comes from: `config.json`, `GGUF` or nothing."""
        return next((origin for origin in self.origins.values() if origin not in (CALLER, METADATA)), "")

    def origin_of(self, name: str) -> str:
        """Return the source of a hint; a layer without one has its heads from its shapes."""
        return self.origins.get(name) or self.origins.get("spec") or SHAPES

    def contradicted_by(self, spec: AttentionSpec) -> list[str]:
        """Return the numbers of heads that a layer has otherwise."""
        return [name for name, value in self.counts.items() if value != getattr(spec, name)]


SAID = (*COUNTS, "rope", "spec")
"""Hints of a `LayerHints`, and the keywords of `LayerKeywords`."""

HintSource = Callable[[str], LayerHints | None]
"""A source of hints: what it says of the layer of a label, a prefix or one with an index."""


def merge(label: str, sources: Iterable[HintSource]) -> LayerHints:
    """Merge the hints about a layer, the first source first.

    The order is that of `file_hints`: the caller, then the file's own metadata, or else its config.json or GGUF keys.
    The shapes come last, in `find_spec`. A hint is taken from the first source that has it, by these rules:

    - Counts are taken from one source, for those of two do not mix.
    - A later `spec` must have the counts of earlier sources. Its RoPE may have another base, and nothing else.
    - Nothing is unread about RoPE where an earlier source says it.

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
        unread = {name: value for name, value in later.unread.items() if rope is None or not is_of_rope(name)}
        merged = replace(
            merged,
            **taken,
            origins={**{name: later.origins[name] for name in taken}, **merged.origins},
            unread={**merged.unread, **unread},
            overridden=known.theta if rope is not None and known is not None and known.theta != rope.theta else None,
        )
    return merged


def _with_hints(spec: AttentionSpec, hints: LayerHints, label: str, *, may_rotate: bool) -> AttentionSpec:
    """Return a layer with the RoPE of hints, if any, or refuse one with other heads, or that rotates in another way."""
    if wrong := hints.contradicted_by(spec):
        got, told = (", ".join(f"{name}={of[name]}" for name in wrong) for of in (hints.counts, spec.values()))
        raise Refusal(wrong[0], f"be what the file's metadata say of {label}, {told}", got)
    rope = hints.rope
    if rope is None:
        return spec
    is_other = not may_rotate if spec.rope is None else replace(spec.rope, theta=rope.theta) != rope
    if is_other:
        raise Refusal("rope", f"not be said of {label}, which has {spec.rope or 'none'} by what is known", rope=rope)
    return replace(spec, rope=rope)


def is_of_rope(name: str) -> bool:
    """Return whether an unread key is about RoPE: a caller who says that has said it all."""
    words = ("rope", "rotary", "partial_rotary", "mrope")
    return any(word.startswith(words) for word in name.split("."))
