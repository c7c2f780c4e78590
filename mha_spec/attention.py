"""Specification of an attention layer: its fields and the rules between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from dataclasses import fields as dataclass_fields
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from mha_spec.aliases import unknown_argument
from mha_spec.errors import InputError, InputTypeError
from mha_spec.features.alibi import Alibi
from mha_spec.features.gate import Gate
from mha_spec.features.latent import Latent, check_latent_rope
from mha_spec.features.norm import Norm
from mha_spec.features.relative_bias import GridBias, RelativeBias
from mha_spec.features.relative_products import RelativeProducts, SinusoidProducts
from mha_spec.features.rope import Rope, check_rotated
from mha_spec.features.scaling import YarnScaling
from mha_spec.features.temperature import Temperature
from mha_spec.projection import Projection, shapes_of
from mha_spec.record import Record
from mha_spec.rules import (
    as_boolean,
    as_count,
    as_factor,
    as_rate,
    check_head_groups,
    check_is_record,
)
from mha_spec.serialization import from_json, to_json
from mha_spec.span import Span, span_of

SIZES = ("d_model", "num_heads", "num_kv_heads", "head_dim", "d_in", "d_kv", "value_head_dim")
SPANS = ("window_size", "chunk_size")
FLAGS = ("out_bias", "out_proj", "fused_qkv", "shared_kv", "sinks")
RATES = ("dropout", "output_dropout")
FACTORS = ("clip_qkv", "scale", "soft_cap")
NORMS = ("qk_norm", "v_norm", "context_norm")
READ_IN_EACH_CALL = (
    "norms",
    "span",
    "score_scale",
    "score_shapes",
    "alibi_slopes",
    "q_width",
    "k_width",
    "v_width",
    "has_positions",
    "has_distance_bias",
)
"""Cached properties that a call of a layer reads: they are computed with the specification."""


@dataclass(frozen=True, repr=False)
class AttentionSpec(Record):
    """Framework-independent specification of an attention layer. Hashable.

    Omitted sizes are derived from the others and can be read as integers. `replace` derives them
    again: `AttentionSpec(512, 8).replace(d_model=1024)` has a head_dim of 128, while
    `dataclasses.replace` keeps 64. A size equal to its derived value counts as omitted even if it
    was passed, so that equal specifications behave the same.

    Attributes:
        d_model: width of the output, E.
        num_heads: number of query heads, N.
        num_kv_heads: number of key/value heads, K, a divisor of N; default: N.
        head_dim: features per head, H; default: d_model // num_heads.
        d_in: width of the query input; default: d_model.
        d_kv: width of the key and value input; default: d_in.
        value_head_dim: value features per head, Hv; default: head_dim.
        qkv_bias: q_proj, k_proj and v_proj have a bias; or one boolean for each. Three equal ones
            are stored as one.
        out_bias: out_proj, if present, has a bias.
        out_proj: project the combined heads, N * Hv wide, to d_model; otherwise they are the
            output.
        fused_qkv: store one qkv_proj (rows of q, then k, then v) instead of three projections;
            results are equal.
        shared_kv: the layer has no projections of keys and values: a call receives the keys and
            values of another layer, after its norms and RoPE. Biases, norms and a clip of q, k and
            v then apply to q alone.
        latent: latents from which keys and values of all heads are expanded (MLA), or None. With
            latents qkv_bias applies to q_a_proj (or q_proj) and kv_a_proj.
        qk_norm: norm of queries and keys, or None. `q_norm` and `k_norm` have separate weights.
        v_norm: norm of values, or None.
        clip_qkv: clip the outputs of q_proj, k_proj and v_proj to [-clip_qkv, clip_qkv], before
            anything else; or None.
        context_norm: norm of the context before out_proj, over the width of all heads, or None.
        gate: gate that multiplies the context before out_proj, or None.
        rope: rotary position embedding of queries and keys, or None.
        scale: factor of the dot products of queries and keys; default: 1 / sqrt(H).
        temperature: position-dependent factor of queries, or None.
        soft_cap: replace scores s by soft_cap * tanh(s / soft_cap), before any bias or mask; or
            None.
        sinks: each query head has an attention sink: a learned logit in the softmax, without a
            value.
        alibi: linear biases subtracted from scores after the soft cap, or None.
        relative_bias: biases added to scores after the soft cap, or None: one learned number per
            query head and bucket of distances or of grid offsets.
        relative_products: scaled products of queries, keys or both with learned vectors of their
            distance, or with projected sinusoids of it, added to scores; or None.
        window_size: queries attend only to keys less than this many tokens away. With a causal mask
            these are the last window_size keys, including the query's own.
        chunk_size: queries attend only to keys of their own chunk of this many tokens.
        dropout: dropout rate of attention weights in training.
        output_dropout: dropout rate of the output in training.

    Raises:
        TypeError: if a width or a number of heads is not an integer, rope not a `Rope`, a norm not
            a `Norm`, gate not a `Gate`, temperature not a `Temperature`, alibi not an `Alibi`,
            relative_bias not a `RelativeBias` or a `GridBias`, relative_products not a
            `RelativeProducts` or a `SinusoidProducts`, latent not a `Latent`, clip_qkv, scale,
            soft_cap or a rate not a number, or a flag not a boolean.
        ValueError: if widths, heads or rates do not fit, or clip_qkv, scale or soft_cap is not
            positive and finite. Some fields exclude each other: a window and chunks; either of
            these and a grid; ALiBi and a relative bias; a temperature and positions on several
            axes. RoPE and fused_qkv exclude a different key width, and fused_qkv separate biases.
            Latents exclude fewer key/value heads, a different key width, different biases of k and
            v, fused_qkv, norms of heads and of the context, a clip, RoPE of other features and a
            rope_dim of the whole head. A context norm must be over the width, and excludes a gate.
            Relative products exclude a soft cap and latents. Shared keys and values exclude
            separate biases, a different key width, fused_qkv, a norm of values and latents.

    Example:
        >>> from mha_spec import AttentionSpec, Rope
        >>> spec = AttentionSpec(64, 8, num_kv_heads=2, rope=Rope(theta=500_000.0))
        >>> spec.head_dim, spec.score_scale == 8**-0.5
        (8, True)
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
    relative_products: RelativeProducts | SinusoidProducts | None = None
    window_size: int | None = None
    chunk_size: int | None = None
    dropout: float = 0.0
    output_dropout: float = 0.0

    _positional: ClassVar[tuple[str, ...]] = SIZES[:2]

    def __post_init__(self) -> None:
        for names, rule in ((SIZES + SPANS, as_count), (FLAGS, as_boolean), (RATES, as_rate)):
            for name in names:
                value = getattr(self, name)
                may_be_none = name in SIZES[2:] + SPANS
                if value is not None or not may_be_none:
                    object.__setattr__(self, name, rule(name, value))
        check_is_record("rope", self.rope, Rope)
        check_is_record("gate", self.gate, Gate)
        self._check_temperature()
        self._check_distance_bias()
        self._check_relative_products()
        self._check_qkv_bias()
        self._check_norms()
        for name in FACTORS:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, as_factor(name, getattr(self, name)))
        span_of(self.window_size, self.chunk_size)  # raises an error for a window with chunks
        for name in SIZES[2:]:  # in this order: some are derived from earlier ones
            if getattr(self, name) is None:
                object.__setattr__(self, name, self._derived_sizes()[name])
        check_head_groups(self.num_heads, self.num_kv_heads)
        if self.head_dim is None:
            raise InputError(
                "d_model",
                "be a multiple of num_heads",
                f"d_model={self.d_model} and num_heads={self.num_heads} without head_dim",
            )
        for what, is_asked_for in (("fused_qkv", self.fused_qkv), ("RoPE", self.rope is not None)):
            if is_asked_for and self.d_kv != self.d_in:
                raise InputError("d_kv", f"equal d_in with {what}", d_kv=self.d_kv, d_in=self.d_in)
        if self.rope is not None:
            check_rotated(self.head_dim, self.rope)
        self._check_shared_kv()
        self._check_latent()
        # In Python 3.11 torch.compile cannot trace the lock of a cached property that is unset.
        for name in READ_IN_EACH_CALL:
            getattr(self, name)
        if self.latent is not None:
            widths = {
                "num_kv_heads": 1,
                "head_dim": self.latent.width,
                "value_head_dim": self.latent.kv_rank,
            }
            absorbed = replace(self, latent=None, rope=None, scale=self.score_scale, **widths)
            object.__setattr__(self, "_absorbed", absorbed)

    def _check_shared_kv(self) -> None:
        if self.shared_kv:
            needed = {"d_kv": self.d_in, "fused_qkv": False, "v_norm": None, "latent": None}
        else:
            needed = {}
        for name, value in needed.items():
            if getattr(self, name) != value:
                raise InputError(name, f"be {value} with shared_kv", {name: getattr(self, name)})
        if self.shared_kv and isinstance(self.qkv_bias, tuple):
            raise InputError("qkv_bias", "be one boolean with shared_kv", qkv_bias=self.qkv_bias)

    def _check_latent(self) -> None:
        check_is_record("latent", self.latent, Latent)
        if self.latent is None:
            return
        check_latent_rope(self.latent, self.rope)
        needed = {
            "num_kv_heads": self.num_heads,
            "d_kv": self.d_in,
            "fused_qkv": False,
            "qk_norm": None,
            "v_norm": None,
            "clip_qkv": None,
            "context_norm": None,
            "relative_products": None,
        }
        for name, value in needed.items():
            if getattr(self, name) != value:
                raise InputError(
                    name,
                    f"be {value} with latent",
                    {name: getattr(self, name), "latent": self.latent},
                )
        if self.latent.rope_dim >= self.head_dim:
            raise InputError(
                "rope_dim",
                "be less than head_dim",
                rope_dim=self.latent.rope_dim,
                head_dim=self.head_dim,
            )
        if self.qkv_biases[1] != self.qkv_biases[2]:
            raise InputError(
                "qkv_bias", "be the same for k and v with latent", qkv_bias=self.qkv_bias
            )

    def _check_temperature(self) -> None:
        check_is_record("temperature", self.temperature, Temperature)
        if self.temperature is None:
            return
        if self.rope is not None and self.rope.sections is not None:
            raise InputError(
                "temperature",
                "be None with positions on several axes",
                temperature=self.temperature,
                sections=self.rope.sections,
            )

    def _check_distance_bias(self) -> None:
        check_is_record("alibi", self.alibi, Alibi)
        check_is_record("relative_bias", self.relative_bias, RelativeBias, GridBias)
        if self.relative_bias is None:
            return
        for name in SPANS:
            if isinstance(self.relative_bias, GridBias) and getattr(self, name) is not None:
                raise InputError(
                    name,
                    "be None with a grid",
                    {name: getattr(self, name), "grid": self.relative_bias},
                )
        if self.alibi is not None:
            raise InputError(
                "alibi",
                "be None with a relative_bias",
                alibi=self.alibi,
                relative_bias=self.relative_bias,
            )

    def _check_relative_products(self) -> None:
        products = self.relative_products
        check_is_record("relative_products", products, RelativeProducts, SinusoidProducts)
        if products is None:
            return
        if self.soft_cap is not None:
            raise InputError("soft_cap", "be None with relative_products", soft_cap=self.soft_cap)

    def _check_qkv_bias(self) -> None:
        if isinstance(self.qkv_bias, (tuple, list)):
            biases = self.qkv_bias
        else:
            biases = (self.qkv_bias,) * 3
        if len(biases) != 3:
            raise InputError(
                "qkv_bias", "be one boolean, or three for q, k and v", qkv_bias=self.qkv_bias
            )
        q, k, v = (as_boolean("qkv_bias", bias) for bias in biases)
        object.__setattr__(self, "qkv_bias", q if q == k == v else (q, k, v))
        if self.fused_qkv and isinstance(self.qkv_bias, tuple):
            raise InputError("qkv_bias", "be one boolean with fused_qkv", qkv_bias=self.qkv_bias)

    def _check_norms(self) -> None:
        for name in NORMS:
            check_is_record(name, getattr(self, name), Norm)
        if self.qk_norm is not None and self.qk_norm.after_rope and self.rope is None:
            raise InputError(
                "qk_norm.after_rope", "be False without rope", after_rope=True, rope=None
            )
        if self.v_norm is not None and self.v_norm.after_rope:
            raise InputError(
                "v_norm", "not come after RoPE, which rotates no values", after_rope=True
            )
        if self.context_norm is not None and self.context_norm.over != "width":
            raise InputError("context_norm", "be over='width'", context_norm=self.context_norm)
        if self.context_norm is not None and self.gate is not None:
            raise InputError(
                "gate",
                "be None with a context_norm",
                gate=self.gate,
                context_norm=self.context_norm,
            )

    def _derived_sizes(self) -> dict[str, int | None]:
        """Return the defaults of omitted sizes; head_dim is None if num_heads does not divide
        d_model.
        """
        if self.d_model % self.num_heads:
            head_dim = None
        else:
            head_dim = self.d_model // self.num_heads
        sizes = {
            "num_kv_heads": self.num_heads,
            "head_dim": head_dim,
            "value_head_dim": self.head_dim,
        }
        return sizes | {"d_in": self.d_model, "d_kv": self.d_in}

    def given(self) -> dict[str, Any]:
        """Return keyword arguments of an equal specification: fields that are neither default nor
        derived.
        """
        derived = self._derived_sizes().items()
        return {
            name: value for name, value in super().given().items() if (name, value) not in derived
        }

    @cached_property
    def q_width(self) -> int:
        """Width of the concatenated queries of all heads, N * H."""
        return self.num_heads * self.head_dim

    @cached_property
    def k_width(self) -> int:
        """Width of the concatenated keys of all heads, K * H."""
        return self.num_kv_heads * self.head_dim

    @cached_property
    def v_width(self) -> int:
        """Width of the concatenated values of all heads, K * Hv."""
        return self.num_kv_heads * self.value_head_dim

    @property
    def context_width(self) -> int:
        """Width of the concatenated context of all heads, N * Hv: the input of out_proj."""
        return self.num_heads * self.value_head_dim

    @property
    def output_width(self) -> int:
        """Width of the output: d_model, or N * Hv without out_proj."""
        if self.out_proj:
            return self.d_model
        return self.context_width

    @cached_property
    def score_scale(self) -> float:
        """Factor of the dot products of queries and keys; default: 1 / sqrt(H).

        With latents and YaRN's mscale_all_dim it is multiplied by the square of 0.1 *
        mscale_all_dim * ln(factor) + 1.
        """
        if self.scale is not None:
            return self.scale
        if self.rope is None or self.latent is None:
            scaling = None
        else:
            scaling = self.rope.scaling
        if isinstance(scaling, YarnScaling):
            factor = scaling.score_factor
        else:
            factor = 1.0
        return factor * self.head_dim**-0.5

    @cached_property
    def has_positions(self) -> bool:
        """True if RoPE or a temperature makes the layer depend on the positions of tokens."""
        return self.rope is not None or self.temperature is not None

    @cached_property
    def has_distance_bias(self) -> bool:
        """True if ALiBi, a relative bias or relative products make scores depend on the distance of
        query and key.
        """
        return (
            self.alibi is not None
            or self.relative_bias is not None
            or self.relative_products is not None
        )

    @cached_property
    def alibi_slopes(self) -> tuple[float, ...] | None:
        """ALiBi's slope of each query head, or None."""
        if self.alibi is None:
            return None
        if self.alibi.scaled:
            factor = self.score_scale
        else:
            factor = 1.0
        return tuple(factor * slope for slope in self.alibi.slopes(self.num_heads))

    @cached_property
    def span(self) -> Span | None:
        """Attention span (window or chunks), or None for all keys."""
        return span_of(self.window_size, self.chunk_size)

    @property
    def qkv_biases(self) -> tuple[bool, bool, bool]:
        """Biases of q_proj, k_proj and v_proj: True for each that has one."""
        if isinstance(self.qkv_bias, tuple):
            return self.qkv_bias
        return self.qkv_bias, self.qkv_bias, self.qkv_bias

    @property
    def qkv_projections(self) -> dict[str, Projection]:
        """Unfused input projections: q_proj, k_proj and v_proj; the projections of latents; or
        q_proj alone with shared_kv.
        """
        if self.latent is not None:
            return self._latent_projections(self.latent)
        widths = {"q_proj": (self.q_width, self.d_in)}
        if not self.shared_kv:
            widths |= {"k_proj": (self.k_width, self.d_kv), "v_proj": (self.v_width, self.d_kv)}
        biases = dict(zip(widths, self.qkv_biases, strict=not self.shared_kv))
        return {
            name: Projection((d_out,), d_in, biases[name]) for name, (d_out, d_in) in widths.items()
        }

    def _latent_projections(self, latent: Latent) -> dict[str, Projection]:
        q_bias, kv_bias, _ = self.qkv_biases  # kv_a_proj stands for k_proj and v_proj
        if latent.q_rank is None:
            projections = {"q_proj": Projection((self.q_width,), self.d_in, q_bias)}
        else:
            projections = {
                "q_a_proj": Projection((latent.q_rank,), self.d_in, q_bias),
                "q_b_proj": Projection((self.q_width,), latent.q_rank, False),
            }
        kv_b_width = self.num_heads * (self.head_dim - latent.rope_dim + self.value_head_dim)
        return {
            **projections,
            "kv_a_proj": Projection((latent.width,), self.d_in, kv_bias),
            "kv_b_proj": Projection((kv_b_width,), latent.kv_rank, False),
        }

    @property
    def absorbed(self) -> AttentionSpec:
        """Return the equivalent attention over latents, with one key/value head and kv_b_proj
        absorbed.

        Queries are multiplied by the key part of kv_b_proj. The keys are the cached vectors,
        kv_rank + rope_dim wide, and the values are their first kv_rank features.

        Raises:
            ValueError: if the layer has no latents.
        """
        check_latent(self)
        return self._absorbed  # pyright: ignore[reportAttributeAccessIssue]

    def absorbs(self, num_queries: int, num_slots: int | None = None) -> bool:
        """Return whether attention over latents (wider than heads) costs less than expanding keys
        and values.

        Args:
            num_queries: new tokens of a call, T.
            num_slots: cache slots to expand, if all are expanded and only T are known to be filled;
                default: only the slots that are attended to.
        """
        latent = check_latent(self)
        # Multiplications of a head: more for each query and slot, whose vectors are wider, against
        # the operations of expanding a slot once.
        wider = 2 * latent.kv_rank + latent.rope_dim - self.head_dim - self.value_head_dim
        expansion = latent.kv_rank * (self.head_dim - latent.rope_dim + self.value_head_dim)
        slots_per_query = 1.0
        if num_slots is not None:
            slots_per_query = max(num_slots / max(num_queries, 1), 1.0)
        return num_queries * wider < expansion * slots_per_query

    @property
    def projections(self) -> dict[str, Projection]:
        """Projections of the layer by name, in the order of the data flow."""
        projections = self.qkv_projections
        if self.fused_qkv:
            widths = tuple(projection.d_out for projection in projections.values())
            projections = {"qkv_proj": Projection(widths, self.d_in, any(self.qkv_biases))}
        return {**projections, **self._output_projections}

    @property
    def _output_projections(self) -> dict[str, Projection]:
        """Return out_proj and gate_proj. New weights of gate_proj are drawn last."""
        if self.out_proj:
            projections = {
                "out_proj": Projection((self.d_model,), self.context_width, self.out_bias)
            }
        else:
            projections = {}
        if self.gate is not None:
            if self.gate.per_head:
                width = self.num_heads
            else:
                width = self.context_width
            projections["gate_proj"] = Projection((width,), self.d_in, self.gate.bias)
        return projections

    @cached_property
    def norms(self) -> dict[str, Norm]:
        """Norms of the layer by name: q_norm, k_norm, v_norm, context_norm; with latents q_a_norm,
        kv_a_norm.
        """
        if self.latent is not None:
            return {name: norm for name, (norm, _) in self.latent.norms.items()}
        norms = {
            "q_norm": self.qk_norm,
            "k_norm": None if self.shared_kv else self.qk_norm,
            "v_norm": self.v_norm,
            "context_norm": self.context_norm,
        }
        return {name: norm for name, norm in norms.items() if norm is not None}

    @property
    def wide_norms(self) -> dict[str, Norm]:
        """Norms over the width of all heads."""
        if self.latent is not None:
            return {}
        return {name: x for name, x in self.norms.items() if x.over == "width"}

    def norm_shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a norm's parameters, `weight` and `bias`."""
        if self.latent is not None:
            norm, width = self.latent.norms[name]
            return norm.shapes(1, width)
        if name in ("q_norm", "context_norm"):
            num_heads = self.num_heads
        else:
            num_heads = self.num_kv_heads
        if name in ("v_norm", "context_norm"):
            head_dim = self.value_head_dim
        else:
            head_dim = self.head_dim
        return self.norms[name].shapes(num_heads, head_dim)

    @cached_property
    def score_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights that change scores, by name: see `SCORE_WEIGHTS`."""
        shapes: dict[str, tuple[int, ...]] = {}
        if self.sinks:
            shapes["sinks"] = (self.num_heads,)
        if self.relative_bias is not None:
            shapes["relative_bias"] = (self.relative_bias.num_buckets, self.num_heads)
        if self.relative_products is not None:
            shapes |= self.relative_products.weight_shapes(self.num_heads, self.head_dim, self.d_in)
        return shapes

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters that are not of projections, by name, in the order of the data
        flow.
        """
        of_norms = {
            f"{name}.{leaf}": shape
            for name in self.norms
            for leaf, shape in self.norm_shapes(name).items()
        }
        return of_norms | self.score_shapes

    @property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the canonical weights by name, (out, in) and (out,), with q, k and v unfused.

        Projections come first, then the other parameters.
        """
        return shapes_of({**self.qkv_projections, **self._output_projections}) | self.parameters

    @property
    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the stored weights by name; projections are (out, in) and (out,)."""
        return shapes_of(self.projections) | self.parameters

    def cache_nbytes(
        self, batch_size: int, capacity: int, dtype: np.dtype, *, num_layers: int = 1
    ) -> int:
        """Return the bytes of cached keys and values (or latents) in all slots of all layers."""
        if self.latent is None:
            features = self.k_width + self.v_width
        else:
            features = self.latent.width
        return batch_size * features * capacity * num_layers * dtype.itemsize

    def to_json(self) -> str:
        """Return the fields as a JSON object."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> AttentionSpec:
        """Return the specification that `to_json` wrote.

        Raises:
            ValueError: if the text is not a JSON object of these fields.
        """
        return from_json(cls, text)


def spec_from(
    spec: AttentionSpec | int | None, num_heads: int | None, fields: Mapping[str, Any]
) -> AttentionSpec:
    """Return the specification that a module was called with, or one of d_model, num_heads and
    other fields.

    Args:
        spec: the specification; or d_model, unless it is among the fields.
        num_heads: number of query heads; only without a specification.
        fields: fields of `AttentionSpec` by name; only without a specification.

    Raises:
        TypeError: if there is neither a specification nor d_model with num_heads, or a field is
            unknown or passed twice.
        ValueError: if other arguments accompany a specification, or the fields do not fit.
    """
    known_names = [field.name for field in dataclass_fields(AttentionSpec)]
    for name in fields:
        if name not in known_names:
            raise unknown_argument(name, known_names)
    if isinstance(spec, AttentionSpec):
        superfluous = dict(fields)
        if num_heads is not None:
            superfluous = {"num_heads": num_heads} | superfluous
        if superfluous:
            raise InputError(
                " and ".join(superfluous),
                "be left out with a spec",
                superfluous,
                hint="spec.replace changes fields",
            )
        return spec
    others = dict(fields)
    d_model = others.pop("d_model", None) if spec is None else spec
    if num_heads is None or not isinstance(d_model, (int, np.integer)):
        raise InputTypeError("spec", "be an AttentionSpec, or d_model with num_heads", spec=d_model)
    return AttentionSpec(as_count("d_model", d_model), num_heads, **others)


def check_spec(spec: object, *, is_self_attention: bool = False) -> None:
    """Reject anything but a specification; with self-attention both inputs have one width.

    Raises:
        TypeError: if it is not an `AttentionSpec`.
        ValueError: if the inputs of self-attention differ in width.
    """
    if not isinstance(spec, AttentionSpec):
        raise InputTypeError("spec", "be an AttentionSpec", spec=spec)
    if is_self_attention and spec.d_kv != spec.d_in:
        raise InputError("d_kv", "equal d_in in self-attention", d_kv=spec.d_kv, d_in=spec.d_in)


def check_latent(spec: AttentionSpec) -> Latent:
    """Return the latents of a layer.

    Raises:
        TypeError: if spec is not an `AttentionSpec`.
        ValueError: if the layer has none.
    """
    check_spec(spec)
    if spec.latent is None:
        raise InputError("spec", "have latents", spec=spec)
    return spec.latent
