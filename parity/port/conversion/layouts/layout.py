"""A layout: how a checkpoint names, shapes and packs a layer's weights, declared tensor by tensor.

Both directions of a conversion follow from this declaration: see `placement`. Nothing is guessed:
the caller must specify anything that the layout leaves open, such as the number of heads, and
ambiguous tensors raise an error that lists the alternatives: see `detection`.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mha_spec import AttentionSpec, InputError, Latent, Norm
from mha_spec.attention import NORMS
from parity.measure.core.records import JsonRecord

TILE = 32  # rows and columns of a TTNN tile

OTHERS = ("inputs.*", "dropout_rngs.*")
"""Names of other tensors in any layout: inputs in our own files, state of mha_jax's dropout."""

LOGICAL = {"weight": "n h d", "bias": "n h", "out.weight": "e n h", "out.bias": "e"}
"""Logical axes of a projection: n heads, h features of a head, d input width, e output width."""

LOGICAL_OF_WHOLE = {"...": "...", "d e": "e d", "d n h": "n h d", "(n h) d": "d n h"}
"""Logical axes of a single weight, by its axes in the layout."""


PROJECTIONS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "g": "gate_proj", "out": "out_proj"}
"""Letters of projections in `Tensor.holds`, and their canonical names."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a layout.

    Attributes:
        name: its name, after the prefix of the layer; `{n}` stands for a head if each head has its
            own tensor.
        holds: the projections in it: `out`, or letters of `q`, `k`, `v` and `g` (the gate) in
            storage order, such as `qkv` or `kv`. For kind `whole`, the canonical name of its single
            weight.
        kind: `weight`, `bias`, or `whole`: a weight without heads, such as the weight of a norm.
        axes: its axes, outermost first, in einops notation: n heads (of all projections in it), h
            features of a head, d input width, e output width. In `(n h) d` the rows are the
            features of all heads, head by head. In `p n d h` the axis p runs over projections with
            the same number of heads. For kind `whole`, `...` means unchanged, `d e` transposed, and
            `d n h` transposed with the rows split by head. `(n h) d` is the transpose of a weight
            that has features of heads last.
        is_shared: whether the projections in it share one weight, for example if values are made
            like keys.
    """

    name: str
    holds: str
    kind: str
    axes: str
    is_shared: bool = False

    def __post_init__(self) -> None:
        if self.is_whole or self.holds == "out":
            return
        letters = {*self.holds}
        has_repeated = len(letters) < len(self.holds)
        if not letters or has_repeated or not letters <= PROJECTIONS.keys():
            raise InputError("holds", "be 'out' or different letters of 'qkvg'", holds=self.holds)
        if self.is_per_head and len(self.parts) > 1:
            raise InputError("a tensor of one head", "hold one projection", holds=self.holds)

    @cached_property
    def is_whole(self) -> bool:
        """Return whether it is a single weight without heads."""
        return self.kind == "whole"

    @cached_property
    def parts(self) -> list[str]:
        """Return the canonical names of its content."""
        if self.is_whole:
            return [self.holds]
        words = ["out"] if self.holds == "out" else self.holds
        return [f"{PROJECTIONS[word]}.{self.kind}" for word in words]

    @cached_property
    def logical(self) -> str:
        """Return the logical axes of its content."""
        if self.is_whole:
            return LOGICAL_OF_WHOLE[self.axes]
        if self.holds == "out":
            return LOGICAL[f"out.{self.kind}"]
        return LOGICAL[self.kind]

    @cached_property
    def has_projection_axis(self) -> bool:
        """Return whether the projections in it form an axis."""
        return any("p" in group for group in self.groups)

    @cached_property
    def is_per_head(self) -> bool:
        """Return whether each head has its own tensor."""
        return "{n}" in self.name

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return its shape, given the sizes of the axes."""
        return tuple(math.prod(map(sizes.__getitem__, group)) for group in self.groups)

    @cached_property
    def groups(self) -> list[list[str]]:
        """Return its axes, each as a list of letters; an axis of size 1 is empty."""
        groups = []
        # An axis is a letter, or several in parentheses.
        for inside, outside in re.findall(r"\(([^)]*)\)|(\S+)", self.axes):
            letters = (inside or outside).split()
            groups.append([letter for letter in letters if letter != "1"])
        return groups


def parts_of(tensors: Iterable[Tensor]) -> set[str]:
    """Return the canonical names of the content of tensors."""
    parts: set[str] = set()
    for tensor in tensors:
        parts.update(tensor.parts)
    return parts


@dataclass(frozen=True)
class Ranks:
    """A checkpoint whose heads are divided over ranks: one file per rank, with the same names in
    each.

    A tensor with heads is divided along them, as its axes declare. For other tensors, by names with
    wildcards:

    Attributes:
        file: path of a rank's file in the folder; `{rank}` stands for its number, with two digits.
        rows: divided on the first axis.
        columns: divided on the last axis.
        gated: divided on the first axis, with the name of the weight that follows. If the first
            axis is twice as long as the last axis of that weight, it holds a gate and its factor,
            which are divided separately.
        embeddings: read with either axis divided, because older programs divide the last; written
            with the first divided.
        copied: identical on all ranks.
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
        name: its name on the command line.
        about: a one-line description.
        source: the code or document that defines it.
        forms: alternative sets of tensors; the first that can represent a layer is written.
        others: tensors that only some layers have: norms, sinks, a gate, the projections of
            latents.
        grouped: whether, in a packed tensor, each key/value head follows its query heads: q q k v,
            q q k v. Otherwise all query heads come first, then all key heads, then all value heads.
        blocks: number of consecutive blocks of a packed tensor, each with its share of the heads.
        rope: pairing of rotated features: `half`, (i, i + H/2), as in canonical weights, or
            `interleaved`, (2 i, 2 i + 1).
        padded: whether heads are padded to whole tiles; with RoPE, each half is padded separately.
        rules: requirements on a layer, as keys of `RULES`.
        ignored: names (with wildcards) under the prefix of a layer that are not attention weights.
        grid_biases: names (with wildcards) of biases on a grid; shapes do not show its height and
            width, so without a specification such biases can only be dropped.
        prefixes: prefixes of such layers in whole checkpoints; `{i}` stands for the number of a
            layer.
        prefix: the only prefix that its layers have; a conversion uses it unless the caller passes
            a different one. Empty: layers may have any.
        needs_spec: whether shapes alone never identify such a layer, or would suggest a different
            layout.
        carries: features that the module computes or a configuration specifies, although weights do
            not show them: names of `CARRIED`.
        shares: canonical weights that layers of its library may share; a file then has them once.
        stack_axis: axis on which layers are stacked when written; this one and the first are read.
        ranks: storage of checkpoints of several ranks, if the layout supports them.
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
    grid_biases: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    prefix: str = ""
    needs_spec: bool = False
    carries: tuple[str, ...] = ()
    shares: tuple[str, ...] = ()
    stack_axis: int = 0
    ranks: Ranks | None = None

    @cached_property
    def tensors(self) -> list[Tensor]:
        """Return the tensors of all forms."""
        tensors: dict[Tensor, None] = {}
        for form in self.forms:
            tensors |= dict.fromkeys(form)
        return list(tensors)

    def equals(self, other: Layout) -> bool:
        """Return whether another layout is the same, except for the texts about it."""
        return replace(self, about="", source="") == replace(other, about="", source="")

    @cached_property
    def digest(self) -> str:
        """Return a hash of the fields that decide where the weights of a layer are.

        Others may change without an effect on files that were written: the name, descriptions,
        prefixes, which files hold themselves, and requirements on layers.
        """
        forms = [sorted(map(_fields_of_tensor, form)) for form in self.forms]
        fields = {
            "forms": sorted(forms),
            "others": sorted(map(_fields_of_tensor, self.others)),
            "grouped": self.grouped,
            "blocks": self.blocks,
            "rope": self.rope,
            "padded": self.padded,
            "stack_axis": self.stack_axis,
        }
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    @property
    def packing(self) -> str:
        """Describe the order of heads in packed tensors; empty if each holds one projection."""
        orders: dict[str, None] = {}
        for tensor in self.tensors:
            if len(tensor.parts) > 1 and not tensor.is_shared:
                orders[self._order_in(tensor)] = None
        return "; ".join(orders)

    def _order_in(self, tensor: Tensor) -> str:
        letters = tensor.holds
        if self.grouped:
            words = {"q": "queries", "k": "key", "v": "value", "g": "gate"}
            owner = "each group's "
            if letters == "qg":
                owner = "each head's "
            return owner + ", then its ".join(words[letter] for letter in letters)
        order = "all " + ", then all ".join(letters)
        if self.blocks > 1:
            return f"in each of {self.blocks} blocks {order}"
        return order

    def ignores(self, name: str, others: Iterable[str] = ()) -> bool:
        """Return whether a name under the prefix of a layer is not a weight of it.

        Args:
            name: the name after the prefix.
            others: names (with wildcards) that are not weights, besides the names of the layout.
        """
        return matches_any(name, (*OTHERS, *self.ignored, *others))

    def name_of(self, weight: str) -> str | None:
        """Return the name of the optional tensor of a canonical weight; None without one."""
        for tensor in self.others:
            if tensor.parts == [weight]:
                return tensor.name
        return None

    def is_grid_bias(self, name: str) -> bool:
        """Return whether a name under the prefix of a layer is the name of a bias on a grid."""
        return matches_any(name, self.grid_biases)


def _fields_of_tensor(tensor: Tensor) -> list[Any]:
    return [tensor.name, tensor.holds, tensor.kind, tensor.axes, tensor.is_shared]


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name fits one of some names with wildcards."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True)
class Requirement:
    """A requirement of a layout on a layer: its description, its fields, and its predicate."""

    words: str
    fields: tuple[str, ...]
    holds: Callable[[AttentionSpec], bool]


def _equal(one: str, other: str) -> Requirement:
    words = f"{one} must equal {other}"
    return Requirement(words, (one, other), lambda spec: getattr(spec, one) == getattr(spec, other))


def _divisible(name: str, count: int) -> Requirement:
    return Requirement(
        f"{name} must be divisible by {count}",
        (name,),
        lambda spec: getattr(spec, name) % count == 0,
    )


RULES: dict[str, Requirement] = {
    "no groups": _equal("num_kv_heads", "num_heads"),
    "one width": _equal("d_kv", "d_in"),
    "one head_dim": _equal("value_head_dim", "head_dim"),
    "square": Requirement(
        "d_in, d_model and num_heads * head_dim must be equal",
        ("d_in", "d_model", "num_heads", "head_dim"),
        lambda spec: spec.d_in == spec.d_model == spec.q_width,
    ),
    "out_proj": Requirement("there must be an out_proj", ("out_proj",), lambda spec: spec.out_proj),
    "no out_proj": Requirement(
        "there must be no out_proj", ("out_proj",), lambda spec: not spec.out_proj
    ),
    "biases or none": Requirement(
        "all projections must have a bias, or none",
        ("qkv_bias", "out_bias"),
        lambda spec: not spec.out_proj or spec.qkv_bias == spec.out_bias,
    ),
    "biases": Requirement(
        "all projections must have a bias",
        ("qkv_bias", "out_bias"),
        lambda spec: all(spec.qkv_biases) and spec.out_bias,
    ),
    "out bias": Requirement("out_proj must have a bias", ("out_bias",), lambda spec: spec.out_bias),
    "no out bias": Requirement(
        "out_proj must have no bias", ("out_bias",), lambda spec: not spec.out_bias
    ),
    "no biases": Requirement(
        "no projection may have a bias",
        ("qkv_bias", "out_bias"),
        lambda spec: not (any(spec.qkv_biases) or spec.out_bias),
    ),
    "rms norms, w": Requirement(
        "norms must have kind 'rms' and weight='w'", NORMS, lambda spec: _has_rms_norms(spec, "w")
    ),
    "rms norms, 1+w": Requirement(
        "norms must have kind 'rms' and weight='1+w'",
        NORMS,
        lambda spec: _has_rms_norms(spec, "1+w"),
    ),
    "scale set": Requirement(
        "scale must be set, to 1.0 if the query weights include it",
        ("scale",),
        lambda spec: spec.scale is not None,
    ),
    **{f"{count} parts": _divisible("num_kv_heads", count) for count in (2, 4, 8)},
    "four blocks": _divisible("num_heads", 4),
    "even": _divisible("head_dim", 2),
    "factors of widths": Requirement(
        "latents must have the factors sqrt(d_model / q_rank) and sqrt(d_model / kv_rank)",
        ("d_model", "latent"),
        lambda spec: spec.latent is None or _has_factors_of_widths(spec.latent, spec.d_model),
    ),
    "whole halves": Requirement(
        "RoPE must rotate the pairs (i, i + H/2) of whole heads",
        ("rope",),
        lambda spec: (
            spec.rope is None
            or (spec.rope.pairs, spec.rope.rotary_dim or spec.head_dim) == ("half", spec.head_dim)
        ),
    ),
    "own keys": Requirement(
        "keys and values must be the layer's own", ("shared_kv",), lambda spec: not spec.shared_kv
    ),
}
"""Requirements of layouts on a layer."""


def _has_factors_of_widths(latent: Latent, d_model: int) -> bool:
    pairs = (latent.q_factor, latent.q_rank), (latent.kv_factor, latent.kv_rank)
    for factor, rank in pairs:
        if rank is None or not math.isclose(factor, math.sqrt(d_model / rank)):
            return False
    return True


def _has_rms_norms(spec: AttentionSpec, weight: str) -> bool:
    for name in NORMS:
        norm = getattr(spec, name)
        if norm is not None and (norm.kind != "rms" or norm.weight not in (weight, None)):
            return False
    return True


SHARING = ("canonical", "mha_jax", "transformers.LLaMA", "transformers.Gemma4")
"""Layouts whose modules can share the keys and values of another layer."""


def broken_rules(spec: AttentionSpec, layout: Layout) -> tuple[str, dict[str, Any]]:
    """Return the requirements of a layout that a layer breaks, or "", and the fields involved."""
    names = layout.rules
    if layout.name not in SHARING:
        names = (*names, "own keys")
    words: list[str] = []
    fields: dict[str, Any] = {}
    for name in names:
        rule = RULES[name]
        if not rule.holds(spec):
            words.append(rule.words)
            fields |= {field: getattr(spec, field) for field in rule.fields}
    return "; ".join(words), fields


CARRIED = (
    "rope",
    "rope.scaling",
    "scale",
    "soft_cap",
    "window_size",
    "chunk_size",
    "alibi",
    "clip_qkv",
    "temperature",
    *NORMS,
    "latent.factors",
)
"""Features of a layer that no weight shows, and norms: layouts may have no names for their
weights.
"""

GRID_BIAS = "relative_position_bias"
"""The name by which `Layout.grid_biases` are dropped."""

DROPPABLE = (*CARRIED, GRID_BIAS)
"""Names of features that a conversion may drop."""


def lost_in(layout: Layout, spec: AttentionSpec) -> dict[str, Any]:
    """Return the features of a layer that a layout loses, by names of `CARRIED`."""
    named = parts_of((*layout.tensors, *layout.others))
    lost = {}
    for name, value in _carried(spec).items():
        if value is None:
            continue
        has_weights = _has_weights(value)
        if has_weights and weights_of_norm(name) <= named:
            continue
        # A configuration may say that there is a norm, but it does not hold its weights.
        if name not in layout.carries or has_weights:
            lost[name] = value
    return lost


def _carried(spec: AttentionSpec) -> dict[str, Any]:
    """Return the value of each name of `CARRIED`; None if the layer does not have the feature."""
    features = {name: getattr(spec, name, None) for name in CARRIED}
    if spec.rope is not None:
        features["rope.scaling"] = spec.rope.scaling
    if spec.latent is not None:
        factors = spec.latent.q_factor, spec.latent.kv_factor
        features["latent.factors"] = factors if factors != (1.0, 1.0) else None
    return features


def unused_in(layout: Layout, spec: AttentionSpec) -> set[str]:
    """Return the names of tensors that a layer may have but does not compute with.

    These are the keys and values of a layer that shares another layer's: files of Gemma 3n
    have them.
    """
    if not spec.shared_kv:
        return set()
    unused = set()
    for tensor in (*layout.tensors, *layout.others):
        if all(part.startswith(("k_", "v_")) for part in tensor.parts):
            unused.add(tensor.name)
    return unused


def weights_of_norm(name: str) -> set[str]:
    """Return the canonical names of the weights of a norm, one of `NORMS`."""
    if name == "qk_norm":
        return {"q_norm.weight", "k_norm.weight"}
    return {f"{name}.weight"}


def _has_weights(value: Any) -> bool:
    return isinstance(value, Norm) and value.weight is not None


def without(spec: AttentionSpec, names: Iterable[str]) -> AttentionSpec:
    """Return a layer without the features with these names of `CARRIED`."""
    left_out = set(names) & {*CARRIED}
    if not left_out:
        return spec
    return _with_carried(spec, dict.fromkeys(left_out))


def with_dropped(spec: AttentionSpec, other: AttentionSpec, names: Iterable[str]) -> AttentionSpec:
    """Return a layer with the named features of another; norms with weights stay removed."""
    names = set(names)
    features = {}
    for name, value in _carried(other).items():
        if name in names and not _has_weights(value):
            features[name] = value
    return _with_carried(spec, features)


def _with_carried(spec: AttentionSpec, values: Mapping[str, Any]) -> AttentionSpec:
    changes = {name: value for name, value in values.items() if "." not in name}
    if "latent.factors" in values and spec.latent is not None:
        q_factor, kv_factor = values["latent.factors"] or (1.0, 1.0)
        changes["latent"] = replace(spec.latent, q_factor=q_factor, kv_factor=kv_factor)
    if "rope.scaling" in values and "rope" not in values and spec.rope is not None:
        changes["rope"] = replace(spec.rope, scaling=values["rope.scaling"])
    return replace(spec, **changes)


# ---- Names ---------------------------------------------------------------------------------------


def matches(pattern: str, names: Collection[str]) -> set[str]:
    """Return the names that a tensor's name stands for: itself, or one per head."""
    if "{n}" not in pattern:
        return {pattern} if pattern in names else set()
    expression = re.compile(re.escape(pattern).replace(r"\{n\}", r"(0|[1-9]\d*)"))
    return {name for name in names if expression.fullmatch(name)}


def names_of(present: Iterable[Tensor], names: Collection[str]) -> list[str]:
    """Return the names that belong to some tensors, in the order of the tensors."""
    own_names: list[str] = []
    for tensor in present:
        own_names += matches(tensor.name, names)
    return own_names
