"""A layout: how a checkpoint names, shapes and packs the weights of an attention layer, declared tensor by tensor.

Conversion is derived from the declaration, once, in both directions: see `views`. Nothing is guessed: what a layout
does not fix must be said (the number of heads, for one), and what could be read in two ways is an error that says
both: see `detection`.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mha_spec import AttentionSpec, Rope

TILE = 32  # rows and columns in which TTNN keeps tensors

OTHERS = ("inputs.*", "dropout_rngs.*")
"""What lies beside weights in any layout: inputs in our own files, and the state of mha_jax's dropout."""

LOGICAL = {"weight": "n h d", "bias": "n h", "out.weight": "e n h", "out.bias": "e"}
"""What a projection is before it is laid out, by axis: n heads, h features of a head, d input width, e output width."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a layout.

    Attributes:
        name: its name, after the prefix of the layer; `{n}` stands for a head where each has a tensor of its own.
        holds: the projections in it: `out`, or letters of `q`, `k` and `v` in their order there, such as `qkv` or `kv`.
        kind: `weight` or `bias`.
        axes: its axes, outermost first, in einops' words: n heads (of all projections in it), h features of a head, d
            input width, e output width. In `(n h) d` the rows are the features of all heads, head by head.
    """

    name: str
    holds: str
    kind: str
    axes: str

    def __post_init__(self) -> None:
        if self.holds != "out" and (not self.holds or {*self.holds} - {*"qkv"} or len({*self.holds}) < len(self.holds)):
            raise ValueError(f"holds must be 'out' or different letters of 'qkv', got holds={self.holds!r}")
        if self.is_per_head and len(self.parts) > 1:
            raise ValueError(f"a tensor of one head must hold one projection, got holds={self.holds!r}")

    @property
    def parts(self) -> list[str]:
        """The canonical names of what is in it."""
        return [f"{projection}_proj.{self.kind}" for projection in (["out"] if self.holds == "out" else self.holds)]

    @property
    def logical(self) -> str:
        """The axes of what is in it, before it is laid out."""
        return LOGICAL[f"out.{self.kind}" if self.holds == "out" else self.kind]

    @property
    def is_per_head(self) -> bool:
        """Whether each head has a tensor of its own."""
        return "{n}" in self.name

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Its shape, given the sizes of the axes."""
        return tuple(math.prod(sizes[axis] for axis in group) for group in self.groups())

    def groups(self) -> list[list[str]]:
        """Its axes, each as the letters it is made of; none for an axis of 1."""
        words = re.findall(r"\(([^)]*)\)|(\S+)", self.axes)
        return [[letter for letter in (inside or outside).split() if letter != "1"] for inside, outside in words]


@dataclass(frozen=True)
class Layout:
    """How a checkpoint holds an attention layer.

    Attributes:
        name: what the command line calls it.
        about: whose it is, in a line.
        source: where that is written down.
        forms: the sets of tensors that it may consist of; the first that can hold a layer is written.
        grouped: in a packed tensor each key/value head follows the query heads that it serves: q q k v, q q k v; else
            all query heads come first, then all key heads, then all value heads.
        rope: how features are paired where queries and keys are rotated by position: `half`, (i, i + H/2), as in
            canonical weights, or `interleaved`, (2 i, 2 i + 1).
        padded: heads are padded to whole tiles, with RoPE each half of its own.
        rules: what a layer must be for this layout to hold it; keys of `RULES`.
        ignored: names (with wildcards) under the prefix of a layer that are no weights, or none of attention's.
        prefixes: where whole checkpoints have such layers; `{i}` stands for a layer.
    """

    name: str
    about: str
    source: str
    forms: tuple[tuple[Tensor, ...], ...]
    grouped: bool = False
    rope: str = "half"
    padded: bool = False
    rules: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of all forms."""
        return list(dict.fromkeys(tensor for form in self.forms for tensor in form))

    def ignores(self, name: str) -> bool:
        """Whether a name under the prefix of a layer is not a weight."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in (*OTHERS, *self.ignored))

    def to_dict(self) -> dict[str, Any]:
        """The layout as JSON takes it."""
        return asdict(self)


@dataclass(frozen=True)
class Rule:
    """What a layout may ask of a layer: in words, of which fields, and whether it holds."""

    words: str
    fields: tuple[str, ...]
    holds: Callable[[AttentionSpec], bool]


RULES: dict[str, Rule] = {
    "no groups": Rule(
        "num_kv_heads must equal num_heads",
        ("num_heads", "num_kv_heads"),
        lambda spec: spec.num_kv_heads == spec.num_heads,
    ),
    "one width": Rule("d_kv must equal d_in", ("d_in", "d_kv"), lambda spec: spec.d_kv == spec.d_in),
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
        "all projections must have a bias", ("qkv_bias", "out_bias"), lambda spec: spec.qkv_bias and spec.out_bias
    ),
    "out bias": Rule("out_proj must have a bias", ("out_bias",), lambda spec: spec.out_bias),
    "one head_dim": Rule(
        "value_head_dim must equal head_dim",
        ("head_dim", "value_head_dim"),
        lambda spec: spec.value_head_dim == spec.head_dim,
    ),
    "no norms": Rule(
        "queries, keys and values must not be normalised",
        ("qk_norm", "v_norm"),
        lambda spec: not spec.norms,
    ),
    "no clipping": Rule("projections must not be clipped", ("clip_qkv",), lambda spec: spec.clip_qkv is None),
    "equal biases": Rule(
        "q_proj, k_proj and v_proj must all have a bias, or none",
        ("qkv_bias",),
        lambda spec: not isinstance(spec.qkv_bias, tuple),
    ),
    "no gate": Rule("there must be no gate", ("gate",), lambda spec: spec.gate is None),
    "no sinks": Rule("there must be no sinks", ("sinks",), lambda spec: not spec.sinks),
    "no ALiBi": Rule("there must be no ALiBi", ("alibi",), lambda spec: spec.alibi is None),
    "no relative bias": Rule(
        "there must be no relative bias", ("relative_bias",), lambda spec: spec.relative_bias is None
    ),
    "no latents": Rule("there must be no latents", ("latent",), lambda spec: spec.latent is None),
    "even": Rule("head_dim must be even", ("head_dim",), lambda spec: spec.head_dim % 2 == 0),
    "whole halves": Rule(
        "RoPE must rotate the pairs (i, i + H/2) of whole heads",
        ("rope",),
        lambda spec: spec.rope is None or _rotates_whole_halves(spec.rope, spec.head_dim),
    ),
}
"""What layouts may ask of a layer."""


def _rotates_whole_halves(rope: Rope, head_dim: int) -> bool:
    return rope.pairs == "half" and rope.rotary_dim in (None, head_dim)


OF_ALL = (
    *("no latents", "one head_dim", "no norms", "no clipping", "equal biases", "no gate"),
    *("no sinks", "no ALiBi", "no relative bias"),
)
"""The rules of every layout: what none of them has names for yet."""


def broken_rules(spec: AttentionSpec, layout: Layout) -> str:
    """Which rules of a layout a layer breaks, or nothing."""
    broken = [rule for rule in map(RULES.__getitem__, (*layout.rules, *OF_ALL)) if not rule.holds(spec)]
    fields = dict.fromkeys(field for rule in broken for field in rule.fields)
    got = ", ".join(f"{field}={getattr(spec, field)}" for field in fields)
    return f"{'; '.join(rule.words for rule in broken)}, got {got}" if broken else ""


# ---- Names and sizes -------------------------------------------------------------------------------------------------


def matches(pattern: str, names: Iterable[str]) -> set[str]:
    """The names that a tensor's name stands for: itself, or one for each head."""
    if "{n}" not in pattern:
        return {pattern} & set(names)
    expression = re.compile(re.escape(pattern).replace(r"\{n\}", r"(0|[1-9]\d*)"))
    return {name for name in names if expression.fullmatch(name)}


def names_of(present: list[Tensor], names: Iterable[str]) -> list[str]:
    """Those of names that are some tensors', in the order of the tensors."""
    return [name for tensor in present for name in matches(tensor.name, names)]


def shapes_of(present: list[Tensor], spec: AttentionSpec, layout: Layout) -> dict[str, tuple[int, ...]]:
    """The names and shapes of some tensors of a layout that hold a layer."""
    shapes = {}
    for tensor in present:
        sizes = sizes_of(tensor, spec, layout)
        names = [tensor.name.format(n=n) for n in range(sizes["n"])] if tensor.is_per_head else [tensor.name]
        shapes |= dict.fromkeys(names, tensor.shape(sizes))
    return shapes


def sizes_of(tensor: Tensor, spec: AttentionSpec, layout: Layout) -> dict[str, int]:
    """The sizes of the axes in a tensor of a layout that holds a layer."""
    heads = {"q": spec.num_heads, "k": spec.num_kv_heads, "v": spec.num_kv_heads, "out": spec.num_heads}
    total = heads["out"] if tensor.holds == "out" else sum(heads[projection] for projection in tensor.holds)
    features = padded_width(spec.head_dim, spec.rope is not None) if layout.padded else spec.head_dim
    return {"n": total, "h": features, "d": spec.d_in if "q" in tensor.holds else spec.d_kv, "e": spec.d_model}


def padded_width(head_dim: int, rope: bool) -> int:
    """Features of a head in whole tiles; with RoPE each half has its own."""
    return 2 * padded_width(-(-head_dim // 2), False) if rope else -(-head_dim // TILE) * TILE
