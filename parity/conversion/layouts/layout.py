"""A layout: how a checkpoint names, shapes and packs the weights of an attention layer, declared tensor by tensor.

Conversion is derived from the declaration, once, in both directions: see `views`. Nothing is guessed: what a layout
does not fix must be said (the number of heads, for one), and what could be read in two ways is an error that says
both: see `detection`.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mha_spec import AttentionSpec, Latent, Norm, Refusal
from mha_spec.attention import NORMS
from parity.core.records import JsonRecord

TILE = 32  # rows and columns in which TTNN keeps tensors

OTHERS = ("inputs.*", "dropout_rngs.*")
"""Names beside weights in any layout: inputs in our own files, and the state of mha_jax's dropout."""

LOGICAL = {"weight": "n h d", "bias": "n h", "out.weight": "e n h", "out.bias": "e"}
"""The axes of a projection before it is laid out: n heads, h features of a head, d input width, e output width."""


PROJECTIONS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "g": "gate_proj", "out": "out_proj"}
"""Projections as `Tensor.holds` names them, and their canonical names."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a layout.

    Attributes:
        name: its name, after the prefix of the layer; `{n}` stands for a head where each has a tensor of its own.
        holds: the projections in it: `out`, or letters of `q`, `k`, `v` and `g` (of the gate) in their order there,
            such as `qkv` or `kv`. Or, of kind `whole`, the canonical name of the one weight that it is.
        kind: `weight` or `bias`, or `whole`: a weight without heads to be laid out, such as that of a norm.
        axes: its axes, outermost first, in einops' words: n heads (of all projections in it), h features of a head, d
            input width, e output width. In `(n h) d` the rows are the features of all heads, head by head. In `p n d h`
            the projections in it, of equally many heads, are an axis. Of kind `whole`, `...` is as it is, `d e` the
            transpose, and `d n h` that with the rows of each head by themselves.
        is_shared: the projections in it are one and the same, as where values are made as keys are.
    """

    name: str
    holds: str
    kind: str
    axes: str
    is_shared: bool = False

    def __post_init__(self) -> None:
        if self.is_whole or self.holds == "out":
            return
        if not self.holds or {*self.holds} - PROJECTIONS.keys() or len({*self.holds}) < len(self.holds):
            raise Refusal("holds", "be 'out' or different letters of 'qkvg'", holds=self.holds)
        if self.is_per_head and len(self.parts) > 1:
            raise Refusal("a tensor of one head", "hold one projection", holds=self.holds)

    @cached_property
    def is_whole(self) -> bool:
        """Return whether it is one weight without heads to be laid out."""
        return self.kind == "whole"

    @cached_property
    def parts(self) -> list[str]:
        """The canonical names of what is in it."""
        if self.is_whole:
            return [self.holds]
        return [f"{PROJECTIONS[word]}.{self.kind}" for word in (["out"] if self.holds == "out" else self.holds)]

    @cached_property
    def logical(self) -> str:
        """The axes of what is in it, before it is laid out."""
        if self.is_whole:
            return {"...": "...", "d e": "e d", "d n h": "n h d"}[self.axes]
        return LOGICAL[f"out.{self.kind}" if self.holds == "out" else self.kind]

    @cached_property
    def has_projection_axis(self) -> bool:
        """Return whether the projections in it are an axis."""
        return "p" in self.axes.split()

    @cached_property
    def is_per_head(self) -> bool:
        """Return whether each head has a tensor of its own."""
        return "{n}" in self.name

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Its shape, given the sizes of the axes."""
        return tuple(math.prod(map(sizes.__getitem__, group)) for group in self.groups)

    @cached_property
    def groups(self) -> list[list[str]]:
        """Its axes, each as the letters it is made of; none for an axis of 1."""
        words = re.findall(r"\(([^)]*)\)|(\S+)", self.axes)
        return [[letter for letter in (inside or outside).split() if letter != "1"] for inside, outside in words]


@dataclass(frozen=True)
class Ranks:
    """A checkpoint whose heads a program divides over ranks: a file for each, the same names in all.

    What holds heads is divided with them, as its axes say. Of the other tensors, by names with wildcards:

    Attributes:
        file: the path of a rank's file in the folder; `{rank}` stands for its number, of two digits.
        rows: divided on the first axis.
        columns: divided on the last one.
        gated: divided on the first axis, too, which is a gate and what it multiplies, one after the other, where it is
            twice as long as the last axis of the weight that the other name is that of.
        embeddings: divided on the last axis, and written on the first: older programs and newer ones differ.
        copied: the same on all ranks.
    """

    file: str
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    gated: tuple[tuple[str, str], ...] = ()
    embeddings: str = ""
    copied: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout(JsonRecord):
    """Layout of an attention layer in a checkpoint.

    Attributes:
        name: what the command line calls it.
        about: whose it is, in a line.
        source: where that is written down.
        forms: the sets of tensors that it may consist of; the first that can hold a layer is written.
        others: the tensors of what only some layers have beside them: norms, sinks, a gate, the projections of latents.
        grouped: in a packed tensor each key/value head follows the query heads that it serves: q q k v, q q k v; else
            all query heads come first, then all key heads, then all value heads.
        blocks: a packed tensor is so many of them, one after the other, each with its share of the heads.
        rope: how features are paired where queries and keys are rotated by position: `half`, (i, i + H/2), as in
            canonical weights, or `interleaved`, (2 i, 2 i + 1).
        padded: heads are padded to whole tiles, with RoPE each half of its own.
        rules: what a layer must be for this layout to hold it; keys of `RULES`.
        ignored: names (with wildcards) under the prefix of a layer that are no weights, or none of attention's.
        unsaid: names (with wildcards) of biases on a grid, whose height and width no shape shows: without a
            specification they may be dropped.
        prefixes: where whole checkpoints have such layers; `{i}` stands for a layer.
        needs_spec: shapes alone never show such a layer, or it would be one of another layout, too.
        carries: what a layer may have that weights do not show, names of `CARRIED`: its module computes it, or is told
            of it by a configuration.
        stack_axis: on which stacked layers are written; they are read from this one and from the first.
        ranks: how checkpoints of several ranks are kept, where they are.
    """

    name: str
    about: str
    source: str
    forms: tuple[tuple[Tensor, ...], ...]
    others: tuple[Tensor, ...] = ()
    grouped: bool = False
    blocks: int = 1
    rope: str = "half"
    padded: bool = False
    rules: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    unsaid: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    needs_spec: bool = False
    carries: tuple[str, ...] = ()
    stack_axis: int = 0
    ranks: Ranks | None = None

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors of all forms."""
        return list(dict.fromkeys(tensor for form in self.forms for tensor in form))

    @property
    def packing(self) -> str:
        """The order of heads in each packed tensor, in words; empty if no tensor holds several projections."""
        words = {"q": "queries", "k": "key", "v": "value", "g": "gate"}
        orders: dict[str, None] = {}
        for holds in (tensor.holds for tensor in self.tensors if len(tensor.parts) > 1 and not tensor.is_shared):
            order = "all " + ", then all ".join(holds)
            if self.grouped:
                order = "each head's " if holds == "qg" else "each group's "
                order += ", then its ".join(words[each] for each in holds)
            elif self.blocks > 1:
                order = f"in each of {self.blocks} blocks {order}"
            orders[order] = None
        return "; ".join(orders)

    def ignores(self, name: str, others: Iterable[str] = ()) -> bool:
        """Return whether a name under the prefix of a layer is no weight, by the layout or by other patterns."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in (*OTHERS, *self.ignored, *others))

    def leaves_unsaid(self, name: str) -> bool:
        """Return whether a name under the prefix of a layer is of a bias on a grid."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.unsaid)


@dataclass(frozen=True)
class Rule:
    """A demand of a layout on a layer: in words, on which fields, and whether it holds."""

    words: str
    fields: tuple[str, ...]
    holds: Callable[[AttentionSpec], bool]


def _equal(one: str, other: str) -> Rule:
    words = f"{one} must equal {other}"
    return Rule(words, (one, other), lambda spec: getattr(spec, one) == getattr(spec, other))


def _divisible(name: str, count: int) -> Rule:
    return Rule(f"{name} must be divisible by {count}", (name,), lambda spec: getattr(spec, name) % count == 0)


RULES: dict[str, Rule] = {
    "no groups": _equal("num_kv_heads", "num_heads"),
    "one width": _equal("d_kv", "d_in"),
    "one head_dim": _equal("value_head_dim", "head_dim"),
    "square": Rule(
        "d_in, d_model and num_heads * head_dim must be equal",
        ("d_in", "d_model", "num_heads", "head_dim"),
        lambda spec: spec.d_in == spec.d_model == spec.q_width,
    ),
    "out_proj": Rule("there must be an out_proj", ("out_proj",), lambda spec: spec.out_proj),
    "no out_proj": Rule("there must be no out_proj", ("out_proj",), lambda spec: not spec.out_proj),
    "biases or none": Rule(
        "all projections must have a bias, or none",
        ("qkv_bias", "out_bias"),
        lambda spec: not spec.out_proj or spec.qkv_bias == spec.out_bias,
    ),
    "biases": Rule(
        "all projections must have a bias",
        ("qkv_bias", "out_bias"),
        lambda spec: all(spec.qkv_biases) and spec.out_bias,
    ),
    "out bias": Rule("out_proj must have a bias", ("out_bias",), lambda spec: spec.out_bias),
    "no out bias": Rule("out_proj must have no bias", ("out_bias",), lambda spec: not spec.out_bias),
    "no biases": Rule(
        "no projection may have a bias",
        ("qkv_bias", "out_bias"),
        lambda spec: not (any(spec.qkv_biases) or spec.out_bias),
    ),
    "rms norms, w": Rule("norms must be of kind 'rms' with weight='w'", NORMS, lambda spec: _has_rms_norms(spec, "w")),
    "rms norms, 1+w": Rule(
        "norms must be of kind 'rms' with weight='1+w'", NORMS, lambda spec: _has_rms_norms(spec, "1+w")
    ),
    "scale told": Rule(
        "scale must be told, 1.0 where the weights of queries hold it", ("scale",), lambda spec: spec.scale is not None
    ),
    **{f"{count} parts": _divisible("num_kv_heads", count) for count in (2, 4, 8)},
    "four blocks": _divisible("num_heads", 4),
    "even": _divisible("head_dim", 2),
    "factors of widths": Rule(
        "latents must have the factors sqrt(d_model / q_rank) and sqrt(d_model / kv_rank)",
        ("d_model", "latent"),
        lambda spec: spec.latent is None or _has_factors_of_widths(spec.latent, spec.d_model),
    ),
    "whole halves": Rule(
        "RoPE must rotate the pairs (i, i + H/2) of whole heads",
        ("rope",),
        lambda spec: (
            spec.rope is None or (spec.rope.pairs, spec.rope.rotary_dim or spec.head_dim) == ("half", spec.head_dim)
        ),
    ),
    "own keys": Rule("keys and values must be the layer's own", ("shared_kv",), lambda spec: not spec.shared_kv),
}
"""Demands of layouts on a layer."""


def _has_factors_of_widths(latent: Latent, d_model: int) -> bool:
    pairs = (latent.q_factor, latent.q_rank), (latent.kv_factor, latent.kv_rank)
    return all(rank is not None and math.isclose(factor, math.sqrt(d_model / rank)) for factor, rank in pairs)


def _has_rms_norms(spec: AttentionSpec, weight: str) -> bool:
    norms = filter(None, (getattr(spec, name) for name in NORMS))
    return all(norm.kind == "rms" and norm.weight in (weight, None) for norm in norms)


SHARING = ("canonical", "mha_jax", "transformers.LLaMA", "transformers.Gemma4")
"""Layouts whose modules can share the keys and values of another layer."""


def broken_rules(spec: AttentionSpec, layout: Layout) -> tuple[str, dict[str, Any]]:
    """The rules of a layout that a layer breaks, or "", and the fields of the layer that break them."""
    of_others = () if layout.name in SHARING else ("own keys",)
    broken = [rule for rule in map(RULES.__getitem__, (*layout.rules, *of_others)) if not rule.holds(spec)]
    got = {field: getattr(spec, field) for rule in broken for field in rule.fields}
    return "; ".join(rule.words for rule in broken), got


CARRIED = ("rope", "rope.scaling", "scale", "soft_cap", "window_size", "chunk_size", "alibi", "clip_qkv", "temperature")
CARRIED += (*NORMS, "latent.factors")
"""Fields of a layer that no weight shows, and norms, whose weights a layout may have no names for."""

UNSAID = "relative_position_bias"
"""The name of `Layout.unsaid` where it is dropped."""

DROPPABLE = (*CARRIED, UNSAID)
"""Names that a conversion may be told to leave out."""


def lost_in(layout: Layout, spec: AttentionSpec) -> dict[str, Any]:
    """Return what a layer computes and a layout loses, by names of `CARRIED`: neither weights nor a module say it."""
    named = {part for tensor in (*layout.tensors, *layout.others) for part in tensor.parts}
    held = {name for name in NORMS if _has_weights(getattr(spec, name)) and weights_of_norm(name) <= named}
    return {
        name: value
        for name, value in _carried(spec).items()
        if value is not None and name not in held and (name not in layout.carries or _has_weights(value))
    }


def _carried(spec: AttentionSpec) -> dict[str, Any]:
    """The value of each name of `CARRIED` in a layer; None where it computes nothing of the kind."""
    found = {name: getattr(spec, name, None) for name in CARRIED}
    found["rope.scaling"] = None if spec.rope is None else spec.rope.scaling
    factors = () if spec.latent is None else (spec.latent.q_factor, spec.latent.kv_factor)
    found["latent.factors"] = factors if set(factors) - {1.0} else None
    return found


def unused_in(layout: Layout, spec: AttentionSpec) -> set[str]:
    """The names of a layout that a layer may have and does not compute with: of keys, if it shares another layer's.

    Released Gemma 3n has them.
    """
    tensors = (*layout.tensors, *layout.others) if spec.shared_kv else ()
    return {tensor.name for tensor in tensors if all(part.startswith(("k_", "v_")) for part in tensor.parts)}


def weights_of_norm(name: str) -> set[str]:
    """The canonical names of the weights of a norm, one of `NORMS`."""
    return {f"{each}.weight" for each in (("q_norm", "k_norm") if name == "qk_norm" else (name,))}


def _has_weights(value: Any) -> bool:
    return isinstance(value, Norm) and value.weight is not None


def check_carried(
    spec: AttentionSpec,
    layout: Layout,
    but_for: Collection[str] = ("rope",),
    unread: Mapping[str, Any] | None = None,
) -> None:
    """Refuse to lose what a layer computes.

    Args:
        spec: the layer.
        layout: of its weights.
        but_for: what may be lost: plain RoPE, which some rotate outside, if nobody but the caller said it.
        unread: keys about attention that are in no specification, with their values. Only a layout that carries
            everything may have them.

    Raises:
        ValueError: if weights in the layout do not say all of it, nor the module that takes them.
    """
    lost = lost_in(layout, spec) | ({} if {*CARRIED} <= {*layout.carries} else dict(unread or {}))
    if set(lost) - set(but_for):
        rule = f"be one that weights in {layout.name}, and what takes them, can express"
        raise Refusal("the layer", rule, lost, remedy={"drop": ",".join(lost)}, hint="leaves it out")


def without(spec: AttentionSpec, names: Iterable[str]) -> AttentionSpec:
    """Return a layer without what some names of `CARRIED` say."""
    return _with_carried(spec, dict.fromkeys(set(names) & {*CARRIED}))


def with_dropped(spec: AttentionSpec, other: AttentionSpec, names: Iterable[str]) -> AttentionSpec:
    """Return a layer with what another one has of some names of `CARRIED`; norms with weights are gone."""
    names = set(names)
    held = {name: value for name, value in _carried(other).items() if name in names and not _has_weights(value)}
    return _with_carried(spec, held)


def _with_carried(spec: AttentionSpec, values: Mapping[str, Any]) -> AttentionSpec:
    changes = {name: value for name, value in values.items() if "." not in name}
    if "latent.factors" in values and spec.latent is not None:
        q_factor, kv_factor = values["latent.factors"] or (1.0, 1.0)
        changes["latent"] = replace(spec.latent, q_factor=q_factor, kv_factor=kv_factor)
    if "rope.scaling" in values and "rope" not in values and spec.rope is not None:
        changes["rope"] = replace(spec.rope, scaling=values["rope.scaling"])
    return replace(spec, **changes)


# ---- Names -----------------------------------------------------------------------------------------------------------


def matches(pattern: str, names: Iterable[str]) -> set[str]:
    """The names that a tensor's name stands for: itself, or one for each head."""
    if "{n}" not in pattern:
        return {pattern} & set(names)
    expression = re.compile(re.escape(pattern).replace(r"\{n\}", r"(0|[1-9]\d*)"))
    return {name for name in names if expression.fullmatch(name)}


def names_of(present: Iterable[Tensor], names: Iterable[str]) -> list[str]:
    """Return those of names that are some tensors', in the order of the tensors."""
    return [name for tensor in present for name in matches(tensor.name, names)]
