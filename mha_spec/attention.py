"""The specification of an attention layer: every field, and every rule between fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar

import numpy as np

from mha_spec.alibi import Alibi
from mha_spec.gate import Gate
from mha_spec.latent import Latent, check_latent_rope
from mha_spec.norm import Norm
from mha_spec.projection import Projection, shapes_of
from mha_spec.record import Record
from mha_spec.refusal import Refusal, WrongType
from mha_spec.relative_bias import GridBias, RelativeBias
from mha_spec.rope import Rope, check_rotated
from mha_spec.rules import as_boolean, as_count, as_factor, as_rate, check_head_groups
from mha_spec.scaling import YarnScaling
from mha_spec.serialization import from_json, to_json
from mha_spec.span import Span, span_of
from mha_spec.temperature import Temperature, check_temperature

SIZES = ("d_model", "num_heads", "num_kv_heads", "head_dim", "d_in", "d_kv", "value_head_dim")
REACHES = ("window_size", "chunk_size")
FLAGS = ("out_bias", "out_proj", "fused_qkv", "shared_kv", "sinks")
RATES = ("dropout", "output_dropout")
FACTORS = ("clip_qkv", "scale", "soft_cap")
NORMS = ("qk_norm", "v_norm", "context_norm")


@dataclass(frozen=True, repr=False)
class AttentionSpec(Record):
    """What an attention layer computes, whatever it is written in. Hashable.

    Sizes that are left out are derived from the others, so that they can be read as integers. `replace` derives them
    again: `AttentionSpec(512, 8).replace(d_model=1024)` has a head_dim of 128, while `dataclasses.replace` keeps 64. A
    size that equals its derived value counts as left out, also if it was passed: equal specifications do the same.

    Attributes:
        d_model: width of the output, E.
        num_heads: number of query heads, N.
        num_kv_heads: number of key/value heads, K, a divisor of N; N when left out.
        head_dim: features of a head, H; d_model // num_heads when left out.
        d_in: width of the query input; d_model when left out.
        d_kv: width of the key and value input; d_in when left out.
        value_head_dim: features of a head's values, Hv; head_dim when left out.
        qkv_bias: q_proj, k_proj and v_proj have a bias; or three booleans, whether each has one. Three that are equal
            are kept as one.
        out_bias: out_proj, where there is one, has a bias.
        out_proj: the combined heads, N * Hv wide, are projected to d_model; without it they are the output.
        fused_qkv: the layer holds one qkv_proj, its rows q, then k, then v, in place of three projections; the results
            are equal.
        shared_kv: the layer has no projections of keys and values; a call receives those of another layer, as they
            enter its attention: after its norms and RoPE. Biases, norms and a clip of q, k and v are then of q alone.
        latent: what keys and values of all heads are made of (MLA), or None where projections make them of the input.
            qkv_bias is then that of q_a_proj (q_proj) and kv_a_proj.
        qk_norm: how queries and keys are normalised, or None for no such norm. `q_norm` and `k_norm` have weights of
            their own.
        v_norm: how values are normalised, or None.
        clip_qkv: what q_proj, k_proj and v_proj give is clipped to [-clip_qkv, clip_qkv], before all else, or None for
            no limit.
        context_norm: how the context of all heads is normalized before out_proj, over its width, or None.
        gate: what the context is multiplied by before out_proj, or None for no gate.
        rope: how queries and keys are rotated by their positions, or None for no RoPE.
        scale: what dot products of queries and keys are multiplied by, where it is not 1 / sqrt(H).
        temperature: what queries are multiplied by, by their positions, or None.
        soft_cap: scores s are capped softly, soft_cap * tanh(s / soft_cap), before anything is added or hidden.
        sinks: each query head has a learned logit that takes part in the softmax like a score, and has no value.
        alibi: what scores lose for the distance of their keys, after the soft cap, or None for nothing.
        relative_bias: what scores gain for that distance, after the soft cap, or None for nothing: a learned number for
            each bucket of distances, or of places on a grid, and each query head.
        window_size: a query sees keys less than this many tokens away only: with causality so many, its own the last.
        chunk_size: a query sees the keys of its own chunk only, the chunks being so many tokens long.
        dropout: rate at which attention weights are dropped in training.
        output_dropout: rate at which outputs are dropped in training.

    Raises:
        TypeError: if a width or a number of heads is not an integer, rope not a `Rope`, a norm not a `Norm`, gate not a
            `Gate`, temperature not a `Temperature`, alibi not an `Alibi`, relative_bias not a `RelativeBias` or
            a `GridBias`, latent not a `Latent`, clip_qkv, scale, soft_cap or a rate not a number, or what a layer has
            or has not no boolean.
        ValueError: if the widths, heads or rates do not fit, clip_qkv, scale or soft_cap is not positive and finite, or
            there are both a window and chunks, or one of them and a grid, both ALiBi and a relative bias, a temperature
            and positions on several axes, or latents and what they leave no place for: fewer key/value heads, one
            qkv_proj, norms of heads, a clip, RoPE of other features; or a norm of the context that is not over its
            width, or comes with a gate; or shared keys and values and what they leave no place for: biases of some of
            q, k and v, keys of another width, one qkv_proj, a norm of values, latents.
    """

    d_model: int
    num_heads: int
    _: KW_ONLY
    num_kv_heads: int = None  # pyright: ignore[reportAssignmentType]  (filled in below)
    head_dim: int = None  # pyright: ignore[reportAssignmentType]
    d_in: int = None  # pyright: ignore[reportAssignmentType]
    d_kv: int = None  # pyright: ignore[reportAssignmentType]
    value_head_dim: int = None  # pyright: ignore[reportAssignmentType]
    qkv_bias: bool | tuple[bool, bool, bool] = True
    out_bias: bool = True
    out_proj: bool = True
    fused_qkv: bool = False
    shared_kv: bool = False
    latent: Latent | None = None
    qk_norm: Norm | None = None
    v_norm: Norm | None = None
    clip_qkv: float | None = None
    context_norm: Norm | None = None
    gate: Gate | None = None
    rope: Rope | None = None
    scale: float | None = None
    temperature: Temperature | None = None
    soft_cap: float | None = None
    sinks: bool = False
    alibi: Alibi | None = None
    relative_bias: RelativeBias | GridBias | None = None
    window_size: int | None = None
    chunk_size: int | None = None
    dropout: float = 0.0
    output_dropout: float = 0.0

    _positional: ClassVar[tuple[str, ...]] = SIZES[:2]

    def __post_init__(self) -> None:
        for names, rule in ((SIZES + REACHES, as_count), (FLAGS, as_boolean), (RATES, as_rate)):
            for name in names:
                value = getattr(self, name)
                if value is not None or name not in SIZES[2:] + REACHES:
                    object.__setattr__(self, name, rule(name, value))
        if self.rope is not None and not isinstance(self.rope, Rope):
            raise WrongType("rope", "be a Rope or None", rope=self.rope)
        if self.gate is not None and not isinstance(self.gate, Gate):
            raise WrongType("gate", "be a Gate or None", gate=self.gate)
        self._check_temperature()
        self._check_distance_bias()
        self._check_qkv_bias()
        self._check_norms()
        for name in FACTORS:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, as_factor(name, getattr(self, name)))
        span_of(self.window_size, self.chunk_size)
        for name in SIZES[2:]:  # in this order, since some are derived from others of these
            if getattr(self, name) is None:
                object.__setattr__(self, name, self._derived_sizes()[name])
        check_head_groups(self.num_heads, self.num_kv_heads)
        if self.head_dim is None:
            raise Refusal(
                "d_model",
                "be a multiple of num_heads",
                f"d_model={self.d_model} and num_heads={self.num_heads} without head_dim",
            )
        for what, is_asked_for in (("fused_qkv", self.fused_qkv), ("RoPE", self.rope is not None)):
            if is_asked_for and self.d_kv != self.d_in:
                raise Refusal("d_kv", f"equal d_in with {what}", d_kv=self.d_kv, d_in=self.d_in)
        if self.rope is not None:
            check_rotated(self.head_dim, self.rope)
        self._check_shared_kv()
        self._check_latent()
        if self.latent is not None:  # made once: steps ask for it, and a compiler knows no cached property
            widths = {"num_kv_heads": 1, "head_dim": self.latent.width, "value_head_dim": self.latent.kv_rank}
            absorbed = replace(self, latent=None, rope=None, scale=self.score_scale, **widths)
            object.__setattr__(self, "_absorbed", absorbed)

    def _check_shared_kv(self) -> None:
        needed = {"d_kv": self.d_in, "fused_qkv": False, "v_norm": None, "latent": None} if self.shared_kv else {}
        for name, value in needed.items():
            if getattr(self, name) != value:
                raise Refusal(name, f"be {value} with shared_kv", {name: getattr(self, name)})
        if self.shared_kv and isinstance(self.qkv_bias, tuple):
            raise Refusal("qkv_bias", "be one boolean with shared_kv", qkv_bias=self.qkv_bias)

    def _check_latent(self) -> None:
        if self.latent is None:
            return
        if not isinstance(self.latent, Latent):
            raise WrongType("latent", "be a Latent or None", latent=self.latent)
        check_latent_rope(self.latent, self.rope)
        needed = {"num_kv_heads": self.num_heads, "d_kv": self.d_in, "fused_qkv": False}
        needed |= {"qk_norm": None, "v_norm": None, "clip_qkv": None, "context_norm": None}
        for name, value in needed.items():
            if getattr(self, name) != value:
                raise Refusal(name, f"be {value} with latent", {name: getattr(self, name), "latent": self.latent})
        if self.latent.rope_dim >= self.head_dim:
            raise Refusal("rope_dim", "be less than head_dim", rope_dim=self.latent.rope_dim, head_dim=self.head_dim)
        if self.qkv_biases[1] != self.qkv_biases[2]:
            raise Refusal("qkv_bias", "be the same for k and v with latent", qkv_bias=self.qkv_bias)

    def _check_temperature(self) -> None:
        if self.temperature is None:
            return
        check_temperature(self.temperature)
        if self.rope is not None and self.rope.sections is not None:
            raise Refusal(
                "temperature",
                "be None with positions on several axes",
                temperature=self.temperature,
                sections=self.rope.sections,
            )

    def _check_distance_bias(self) -> None:
        if self.alibi is not None and not isinstance(self.alibi, Alibi):
            raise WrongType("alibi", "be an Alibi or None", alibi=self.alibi)
        if self.relative_bias is None:
            return
        if not isinstance(self.relative_bias, (RelativeBias, GridBias)):
            raise WrongType("relative_bias", "be a RelativeBias, a GridBias or None", relative_bias=self.relative_bias)
        for name in REACHES if isinstance(self.relative_bias, GridBias) else ():
            if getattr(self, name) is not None:
                raise Refusal(name, "be None with a grid", {name: getattr(self, name), "grid": self.relative_bias})
        if self.alibi is not None:
            raise Refusal("alibi", "be None with a relative_bias", alibi=self.alibi, relative_bias=self.relative_bias)

    def _check_qkv_bias(self) -> None:
        biases = self.qkv_bias if isinstance(self.qkv_bias, (tuple, list)) else (self.qkv_bias,) * 3
        if len(biases) != 3:
            raise Refusal("qkv_bias", "be one boolean, or three for q, k and v", qkv_bias=self.qkv_bias)
        q, k, v = (as_boolean("qkv_bias", bias) for bias in biases)
        object.__setattr__(self, "qkv_bias", q if q == k == v else (q, k, v))
        if self.fused_qkv and isinstance(self.qkv_bias, tuple):
            raise Refusal("qkv_bias", "be one boolean with fused_qkv", qkv_bias=self.qkv_bias)

    def _check_norms(self) -> None:
        for name in NORMS:
            norm = getattr(self, name)
            if norm is not None and not isinstance(norm, Norm):
                raise WrongType(name, "be a Norm or None", {name: norm})
        if self.qk_norm is not None and self.qk_norm.after_rope and self.rope is None:
            raise Refusal("qk_norm", "come with RoPE to come after it", after_rope=True, rope=None)
        if self.v_norm is not None and self.v_norm.after_rope:
            raise Refusal("v_norm", "not come after RoPE, which rotates no values", after_rope=True)
        if self.context_norm is not None and self.context_norm.over != "width":
            raise Refusal("context_norm", "be over='width'", context_norm=self.context_norm)
        if self.context_norm is not None and self.gate is not None:
            raise Refusal("gate", "be None with a context_norm", gate=self.gate, context_norm=self.context_norm)

    def _derived_sizes(self) -> dict[str, int | None]:
        """The values of sizes that are left out; None where no head_dim divides d_model."""
        head_dim = None if self.d_model % self.num_heads else self.d_model // self.num_heads
        sizes = {"num_kv_heads": self.num_heads, "head_dim": head_dim, "value_head_dim": self.head_dim}
        return sizes | {"d_in": self.d_model, "d_kv": self.d_in}

    def given(self) -> dict[str, Any]:
        """Arguments by name that make an equal specification: the fields that are neither default nor derived."""
        derived = self._derived_sizes().items()
        return {name: value for name, value in super().given().items() if (name, value) not in derived}

    @property
    def q_width(self) -> int:
        """Width of the queries of all heads side by side, N * H."""
        return self.num_heads * self.head_dim

    @property
    def k_width(self) -> int:
        """Width of the keys of all heads side by side, K * H."""
        return self.num_kv_heads * self.head_dim

    @property
    def v_width(self) -> int:
        """Width of the values of all heads side by side, K * Hv."""
        return self.num_kv_heads * self.value_head_dim

    @property
    def context_width(self) -> int:
        """Width of the context of all heads side by side, N * Hv: what out_proj takes."""
        return self.num_heads * self.value_head_dim

    @property
    def output_width(self) -> int:
        """Width of the output: d_model, or N * Hv without out_proj."""
        return self.d_model if self.out_proj else self.context_width

    @property
    def score_scale(self) -> float:
        """What dot products of queries and keys are multiplied by: 1 / sqrt(H) where nothing else is said.

        With latents and YaRN's mscale_all_dim it is multiplied by the square of 0.1 * mscale_all_dim * ln(factor) + 1.
        """
        if self.scale is not None:
            return self.scale
        scaling = None if self.rope is None or self.latent is None else self.rope.scaling
        factor = scaling.score_factor if isinstance(scaling, YarnScaling) else 1.0
        return factor * self.head_dim**-0.5

    @property
    def has_positions(self) -> bool:
        """Whether anything depends on the positions of tokens beside what masks hide: RoPE, or a temperature."""
        return self.rope is not None or self.temperature is not None

    @property
    def has_distance_bias(self) -> bool:
        """Whether scores depend on the distance of their keys: ALiBi, or a relative bias."""
        return self.alibi is not None or self.relative_bias is not None

    @property
    def alibi_slopes(self) -> tuple[float, ...] | None:
        """What the score of each query head loses for each token of distance, where there is ALiBi."""
        if self.alibi is None:
            return None
        factor = self.score_scale if self.alibi.scaled else 1.0
        return tuple(factor * slope for slope in self.alibi.slopes(self.num_heads))

    @property
    def span(self) -> Span | None:
        """How far a query sees, where that is less than everything."""
        return span_of(self.window_size, self.chunk_size)

    @property
    def qkv_biases(self) -> tuple[bool, bool, bool]:
        """Whether q_proj, k_proj and v_proj have a bias, each by itself."""
        if isinstance(self.qkv_bias, tuple):
            return self.qkv_bias
        return self.qkv_bias, self.qkv_bias, self.qkv_bias

    @property
    def qkv_projections(self) -> dict[str, Projection]:
        """q_proj, k_proj and v_proj, whether the layer holds three projections or one; with latents those of them.

        With shared keys and values q_proj alone.
        """
        if self.latent is not None:
            return self._latent_projections(self.latent)
        widths = {"q_proj": (self.q_width, self.d_in)}
        if not self.shared_kv:
            widths |= {"k_proj": (self.k_width, self.d_kv), "v_proj": (self.v_width, self.d_kv)}
        biases = dict(zip(widths, self.qkv_biases, strict=not self.shared_kv))
        return {name: Projection((d_out,), d_in, biases[name]) for name, (d_out, d_in) in widths.items()}

    def _latent_projections(self, latent: Latent) -> dict[str, Projection]:
        q_bias, kv_bias, _ = self.qkv_biases
        found = {"q_proj": Projection((self.q_width,), self.d_in, q_bias)}
        if latent.q_rank is not None:
            found = {"q_a_proj": Projection((latent.q_rank,), self.d_in, q_bias)}
            found["q_b_proj"] = Projection((self.q_width,), latent.q_rank, False)
        found["kv_a_proj"] = Projection((latent.width,), self.d_in, kv_bias)
        own_features = self.head_dim - latent.rope_dim + self.value_head_dim
        return {**found, "kv_b_proj": Projection((self.num_heads * own_features,), latent.kv_rank, False)}

    @property
    def absorbed(self) -> AttentionSpec:
        """The attention over latents that is equal, with one key/value head, the projections of kv_b_proj taken in.

        A query is multiplied by what kv_b_proj would make its keys of, and its keys are what a cache keeps, kv_rank +
        rope_dim wide; the values are their first kv_rank features.

        Raises:
            ValueError: if the layer has no latents.
        """
        check_latent(self)
        return self._absorbed  # pyright: ignore[reportAttributeAccessIssue]

    def absorbs(self, num_queries: int, num_slots: int | None = None) -> bool:
        """Whether so many queries cost less over latents, wider than heads, than over keys and values made of them.

        Args:
            num_queries: new tokens of a call, T.
            num_slots: for how many slots of a cache keys and values would be made, where they are made for all of them
                and no more than T are known to be filled; for those alone that are seen when absent.
        """
        latent = check_latent(self)
        wider = 2 * latent.kv_rank + latent.rope_dim - self.head_dim - self.value_head_dim
        made = latent.kv_rank * (self.head_dim - latent.rope_dim + self.value_head_dim)
        return num_queries * wider < made * (1 if num_slots is None else max(num_slots / max(num_queries, 1), 1.0))

    @property
    def projections(self) -> dict[str, Projection]:
        """The projections that the layer holds, by name, in the order of the data flow."""
        held = self.qkv_projections
        if self.fused_qkv:
            widths = tuple(projection.d_out for projection in held.values())
            held = {"qkv_proj": Projection(widths, self.d_in, any(self.qkv_biases))}
        return {**held, **self._output_projections}

    @property
    def _output_projections(self) -> dict[str, Projection]:
        """What is done with the context: out_proj and, which new weights are drawn last, gate_proj."""
        found = {"out_proj": Projection((self.d_model,), self.context_width, self.out_bias)} if self.out_proj else {}
        if self.gate is not None:
            width = self.num_heads if self.gate.per_head else self.context_width
            found["gate_proj"] = Projection((width,), self.d_in, self.gate.bias)
        return found

    @property
    def norms(self) -> dict[str, Norm]:
        """The norms of the layer by name: q_norm, k_norm, v_norm, context_norm; with latents q_a_norm, kv_a_norm."""
        if self.latent is not None:
            return {name: norm for name, (norm, _) in self.latent.norms.items()}
        norms = {"q_norm": self.qk_norm, "k_norm": None if self.shared_kv else self.qk_norm, "v_norm": self.v_norm}
        norms["context_norm"] = self.context_norm
        return {name: norm for name, norm in norms.items() if norm is not None}

    @property
    def wide_norms(self) -> dict[str, Norm]:
        """Those of them that are over the width of all heads."""
        return {} if self.latent is not None else {name: x for name, x in self.norms.items() if x.over == "width"}

    def norm_shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """The parameters of one of the norms, `weight` and `bias`, and their shapes."""
        if self.latent is not None:
            norm, width = self.latent.norms[name]
            return norm.shapes(1, width)
        num_heads = self.num_heads if name in ("q_norm", "context_norm") else self.num_kv_heads
        is_of_values = name in ("v_norm", "context_norm")
        return self.norms[name].shapes(num_heads, self.value_head_dim if is_of_values else self.head_dim)

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """What the layer learns beside its projections, by name and shape, in the order of the data flow."""
        of_norms = {f"{name}.{leaf}": shape for name in self.norms for leaf, shape in self.norm_shapes(name).items()}
        of_scores: dict[str, tuple[int, ...]] = {"sinks": (self.num_heads,)} if self.sinks else {}
        if self.relative_bias is not None:
            of_scores["relative_bias"] = (self.relative_bias.num_buckets, self.num_heads)
        return of_norms | of_scores

    @property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """The canonical weights by name and shape, (out, in) and (out,), whether q, k and v are held as one or not.

        The other parameters come after those of the projections.
        """
        return shapes_of({**self.qkv_projections, **self._output_projections}) | self.parameters

    @property
    def held_shapes(self) -> dict[str, tuple[int, ...]]:
        """The weights that the layer holds by name and shape, those of projections (out, in) and (out,)."""
        return shapes_of(self.projections) | self.parameters

    def cache_nbytes(self, batch_size: int, capacity: int, dtype: np.dtype, *, num_layers: int = 1) -> int:
        """Bytes of the keys and values, with latents of the `LatentCache`, in all slots of all layers."""
        features = self.k_width + self.v_width if self.latent is None else self.latent.width
        return batch_size * features * capacity * num_layers * dtype.itemsize

    def to_json(self) -> str:
        """The fields as a JSON object."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> AttentionSpec:
        """The specification that `to_json` wrote.

        Raises:
            ValueError: if the text is not a JSON object of these fields.
        """
        return from_json(cls, text)


def spec_from(spec: AttentionSpec | int | None, num_heads: int | None, fields: Mapping[str, Any]) -> AttentionSpec:
    """The specification of a module that is made of one, or of d_model, num_heads and other fields.

    Args:
        spec: the specification; or d_model, unless that is among the fields.
        num_heads: number of query heads; None with a specification.
        fields: fields of `AttentionSpec` by name; none with a specification.

    Raises:
        TypeError: if there is neither a specification nor d_model with num_heads, or a field is unknown or given twice.
        ValueError: if anything comes with a specification, or the fields do not fit.
    """
    for name, value in fields.items():
        if name not in AttentionSpec.__dataclass_fields__:
            raise WrongType(name, "be a keyword of the module or a field of AttentionSpec", {name: value})
    if isinstance(spec, AttentionSpec):
        if given := ({} if num_heads is None else {"num_heads": num_heads}) | dict(fields):
            raise Refusal(" and ".join(given), "be left out with a spec", given, hint="spec.replace changes fields")
        return spec
    others = dict(fields)
    d_model = others.pop("d_model", None) if spec is None else spec
    if num_heads is None or not isinstance(d_model, (int, np.integer)):
        raise WrongType("spec", "be an AttentionSpec, or d_model with num_heads", spec=d_model)
    return AttentionSpec(as_count("d_model", d_model), num_heads, **others)


def check_spec(spec: object, *, is_self_attention: bool = False) -> None:
    """Refuse what is not a specification, or not one of a layer whose keys and values come from its queries' input.

    Raises:
        TypeError: if it is not an `AttentionSpec`.
        ValueError: if the widths of the inputs differ in self-attention.
    """
    if not isinstance(spec, AttentionSpec):
        raise WrongType("spec", "be an AttentionSpec", spec=spec)
    if is_self_attention and spec.d_kv != spec.d_in:
        raise Refusal("d_kv", "equal d_in in self-attention", d_kv=spec.d_kv, d_in=spec.d_in)


def check_latent(spec: AttentionSpec) -> Latent:
    """The latents of a layer that has them.

    Raises:
        TypeError: if it is not an `AttentionSpec`.
        ValueError: if the layer has none.
    """
    check_spec(spec)
    if spec.latent is None:
        raise Refusal("spec", "have latents", spec=spec)
    return spec.latent
