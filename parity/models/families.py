"""The families of models: what each of their layers is, and which keys of the configuration say the rest.

A family has a rule for each field of `AttentionSpec`: a value, which every layer has, or what reads it.

Source: the modules of transformers 5.23, with which layers of these specifications agree in the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from mha_spec import Alibi, Gate, Latent, Norm, Temperature
from mha_spec.rules import as_count
from parity.models.config import Config, MissingKey, Value
from parity.models.rope import read_rope

NOTHING = Value(None, "")


class Place(NamedTuple):
    """A layer of a model.

    Attributes:
        config: of the model.
        layer: which of its layers it is, from 0.
        kind: `full_attention`, `sliding_attention`, …
    """

    config: Config
    layer: int
    kind: str


Rule = Callable[[Place], Value]


@dataclass(frozen=True)
class Family:
    """What the configurations of a family mean.

    Attributes:
        fields: the fields of `AttentionSpec`, each a value or a rule.
        kind: of each layer, where `layer_types` does not say it.
        more: fields that depend on one another.
        says_nothing: keys of this family that say nothing of what an attention layer computes.
    """

    fields: Mapping[str, Any]
    kind: Callable[[Config, int], str] = lambda config, index: "full_attention"
    says_nothing: frozenset[str] = frozenset()
    more: Callable[[Place], Mapping[str, Value]] = lambda place: {}


# ---- Rules -----------------------------------------------------------------------------------------------------------


def key(*names: str, default: Any = None, power: float = 1.0) -> Rule:
    """The value of a key, or a power of it; the family's default, where there is one."""

    def rule(place: Place) -> Value:
        found = place.config.read(*names, default=default)
        return found if power == 1.0 else Value(found.value**power, f"{found.origin} ** {power}")

    return rule


def optional(*names: str) -> Rule:
    """The value of a key, if it is there."""
    return lambda place: place.config.find(*names) or NOTHING


def asked(*names: str) -> Rule:
    """The value of a key that must be there, if only to say None: without it transformers has a number of its own."""
    return lambda place: place.config.asked(*names) or NOTHING


def rope(*, theta: float | None = None, of: str | None = None, **options: Any) -> Rule:
    """RoPE; `of` is the key that has how many features it is about, where they are not those of a head."""

    def rule(place: Place) -> Value:
        fields = dict(options)
        size = head_dim(place) if of is None else place.config.read(of).value
        if of is not None:
            fields |= {"rotary_dim": size, "rotated": "last"}
        return read_rope(place.config, size, layer_type=place.kind, theta=theta, **fields)

    return rule


def head_dim(place: Place) -> int:
    """Features of a head."""
    found = place.config.find("head_dim")
    return found.value if found else place.config.read("hidden_size").value // heads(place)


def heads(place: Place) -> int:
    """The number of query heads."""
    return place.config.read("num_attention_heads").value


def only(kind: str, rule: Rule) -> Rule:
    """What layers of a kind have; its keys count as read in the others, too."""

    def in_kind(place: Place) -> Value:
        if place.kind == kind:
            return rule(place)
        with suppress(MissingKey):  # it is not asked for here
            rule(place)
        return NOTHING

    return in_kind


def where(name: str, rule: Rule, *, default: bool | None = None) -> Rule:
    """What layers have if a key is true."""

    def if_true(place: Place) -> Value:
        found, then = place.config.read(name, default=default), rule(place)
        return Value(then.value, f"{found.origin}, {then.origin}") if found.value else NOTHING

    return if_true


def norm(*args: Any, eps: str = "rms_norm_eps", **fields: Any) -> Rule:
    """A norm with the model's own eps."""

    def rule(place: Place) -> Value:
        found = place.config.read(eps)
        return Value(Norm(*args, eps=found.value, **fields), f"{found.origin}; else as every layer of this family")

    return rule


SLIDING = only("sliding_attention", asked("sliding_window"))


def every(period: int, *names: str) -> Callable[[Config, int], str]:
    """All layers but the last of each period have a window; keys may say another period."""

    def kind(config: Config, index: int) -> str:
        is_last = _is_last(index, config.find(*names), period)
        return "full_attention" if is_last else "sliding_attention"

    return kind


def _is_last(index: int, told: Value | None, period: int) -> bool:
    """Whether a layer is the last of its period, which the configuration may tell."""
    return (index + 1) % (period if told is None else as_count(told.origin, told.value)) == 0


def _qwen(config: Config, index: int) -> str:
    uses = config.read("use_sliding_window", default=False)
    config.find("max_window_layers")
    if not uses.value:
        return "full_attention"
    return "sliding_attention" if index >= config.read("max_window_layers").value else "full_attention"


def _qwen3_next(config: Config, index: int) -> str:
    is_last = _is_last(index, config.find("full_attention_interval"), 4)
    return "full_attention" if is_last else "linear_attention"


# ---- Families --------------------------------------------------------------------------------------------------------

USUAL: dict[str, Any] = {
    "d_model": key("hidden_size"),
    "num_heads": key("num_attention_heads"),
    "num_kv_heads": optional("num_key_value_heads"),
    "head_dim": optional("head_dim"),
    "dropout": key("attention_dropout", default=0.0),
    "qkv_bias": False,
    "out_bias": False,
    "rope": rope(),
}
OF_BIAS = key("attention_bias", default=False)
BIASES = {"qkv_bias": OF_BIAS, "out_bias": OF_BIAS}
HEADS = {"num_kv_heads": asked("num_key_value_heads")}
WIDTH = {"head_dim": asked("head_dim")}
MOSTLY = key("attention_bias", default=True)
PAIRED = {"rope": rope(pairs="interleaved")}


def family(
    *others: Mapping[str, Any],
    kind: Callable[[Config, int], str] = Family.kind,
    says_nothing: Iterable[str] = (),
    more: Callable[[Place], Mapping[str, Value]] = Family.more,
    **fields: Any,
) -> Family:
    """A family whose fields are the usual ones but for these."""
    held = dict(USUAL)
    for each in others:
        held |= each
    return Family(held | fields, kind, frozenset(says_nothing), more)


def _latent(place: Place) -> Value:
    kv_rank, rope_dim = (place.config.read(name) for name in ("kv_lora_rank", "qk_rope_head_dim"))
    q_rank = place.config.asked("q_lora_rank") or NOTHING  # without one queries are projected at once
    origins = [each.origin for each in (kv_rank, rope_dim, q_rank) if each.value is not None]
    return Value(Latent(kv_rank.value, rope_dim.value, q_rank.value), ", ".join(origins))


def _sum(*names: str) -> Rule:
    return lambda place: Value(sum(place.config.read(name).value for name in names), " + ".join(names))


def _pairs_of_latents(place: Place) -> Value:
    paired = place.config.read("rope_interleave", default=True)
    found = rope(of="qk_rope_head_dim", pairs="interleaved" if paired.value else "half")(place)
    return Value(found.value, f"{found.origin}, {paired.origin}")


def _tempered_by_rope(place: Place) -> Value:
    """The temperature that Mistral keeps among the parameters of RoPE."""
    values = place.config.section("rope_parameters")
    values.find("max_position_embeddings")  # said of the model, too
    scale, length = values.find("llama_4_scaling_beta"), values.find("original_max_position_embeddings")
    if scale is None or length is None:
        return NOTHING
    return Value(Temperature(length.value, scale.value), f"{scale.origin}, {length.origin}")


def _rotates(config: Config, index: int) -> Value:
    """Whether a layer rotates anything: the last of each period does not."""
    told, period = config.find("no_rope_layers"), config.find("no_rope_layer_interval")
    if told is None or not told.value:
        return Value(not _is_last(index, period, 4), period.origin if period else "every fourth: this family's default")
    if index >= len(told.value):
        raise ValueError(f"no_rope_layers must be one for each layer, got {len(told.value)}")
    return Value(bool(told.value[index]), f"no_rope_layers[{index}]")


def _smollm3(place: Place) -> Value:
    rotates, turned = _rotates(place.config, place.layer), rope()(place)
    return Value(turned.value if rotates.value else None, f"{turned.origin}, {rotates.origin}")


def _kind_of_smollm3(config: Config, index: int) -> str:
    has_window = config.read("use_sliding_window", default=False).value and "sliding_window" in config
    return "sliding_attention" if has_window and not _rotates(config, index).value else "full_attention"


def _scale_of_gpt2(place: Place) -> Value:
    """1 / sqrt(H), divided by the number of the layer or not, or nothing."""
    config, factor = place.config, 1.0
    by_root, by_layer = (
        config.read(name, default=default)
        for name, default in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False))
    )
    if by_root.value and not by_layer.value:
        return NOTHING
    if by_root.value:
        factor = (config.read("n_embd").value / config.read("n_head").value) ** -0.5
    return Value(factor / (place.layer + 1 if by_layer.value else 1), f"{by_root.origin}, {by_layer.origin}")


def _llama4(place: Place) -> dict[str, Value]:
    """Rotated layers have chunks and norms, the others a temperature."""
    config = place.config
    rotates = _rotates(config, place.layer)
    has_norm, tunes = config.read("use_qk_norm"), config.read("attn_temperature_tuning")
    length, scale = config.read("floor_scale"), config.read("attn_scale")
    eps, turned = config.read("rms_norm_eps"), rope(pairs="interleaved")(place)
    found = {"rope": Value(turned.value, f"{turned.origin}, {rotates.origin}")} if rotates.value else {"rope": NOTHING}
    if rotates.value and has_norm.value:
        found["qk_norm"] = Value(Norm(weight=None, after_rope=True, eps=eps.value), f"use_qk_norm, {eps.origin}")
    if tunes.value and not rotates.value:
        origin = "attn_temperature_tuning, floor_scale, attn_scale"
        found["temperature"] = Value(Temperature(length.value, scale.value, first_position=1), origin)
    return found


LATENTS: dict[str, Any] = {
    "num_kv_heads": None,
    "head_dim": _sum("qk_nope_head_dim", "qk_rope_head_dim"),
    "value_head_dim": key("v_head_dim"),
    "latent": _latent,
    "rope": _pairs_of_latents,
    "qkv_bias": OF_BIAS,
    "out_bias": OF_BIAS,
}
OF_LATENTS = {"head_dim", "qk_head_dim", "num_key_value_heads"}
"""Keys that configurations of latents have and their layers do not read."""

FAMILIES: dict[str, Family] = {
    "llama": family(BIASES, rope=rope(theta=1e4)),
    "mistral": family(HEADS, window_size=asked("sliding_window"), rope=rope(theta=1e4)),
    "mixtral": family(HEADS, window_size=optional("sliding_window")),
    "ministral3": family(HEADS, WIDTH, window_size=optional("sliding_window"), temperature=_tempered_by_rope),
    "qwen2": family(HEADS, qkv_bias=True, window_size=SLIDING, kind=_qwen),
    "qwen2_moe": family(HEADS, qkv_bias=key("qkv_bias", default=True), window_size=SLIDING, kind=_qwen),
    "qwen2_vl": family(HEADS, qkv_bias=True, window_size=SLIDING, kind=_qwen),
    "qwen2_vl_text": family(HEADS, qkv_bias=True, window_size=SLIDING, kind=_qwen),
    "qwen3": family(HEADS, WIDTH, BIASES, qk_norm=norm(), window_size=SLIDING, kind=_qwen),
    "qwen3_moe": family(
        HEADS,
        BIASES,
        qk_norm=norm(),
        window_size=where("use_sliding_window", asked("sliding_window"), default=False),
        says_nothing={"max_window_layers"},
    ),
    "qwen3_vl_text": family(HEADS, WIDTH, BIASES, qk_norm=norm()),
    "gemma": family(HEADS, WIDTH, BIASES, rope=rope(theta=1e4)),
    "gemma2": family(
        HEADS,
        WIDTH,
        BIASES,
        scale=key("query_pre_attn_scalar", power=-0.5),
        soft_cap=asked("attn_logit_softcapping"),
        window_size=only("sliding_attention", asked("sliding_window", "sliding_window_size")),
        kind=every(2),
    ),
    "gemma3_text": family(
        HEADS,
        WIDTH,
        BIASES,
        scale=key("query_pre_attn_scalar", power=-0.5),
        soft_cap=optional("attn_logit_softcapping"),
        qk_norm=norm(weight="1+w"),
        window_size=SLIDING,
        rope=rope(theta=1e6, local_theta=1e4),
        kind=every(6, "sliding_window_pattern", "_sliding_window_pattern"),
    ),
    "gpt_neox": family(qkv_bias=MOSTLY, out_bias=MOSTLY),
    "gpt_oss": family(HEADS, WIDTH, qkv_bias=MOSTLY, out_bias=MOSTLY, sinks=True, window_size=SLIDING, kind=every(2)),
    "glm": family(HEADS, WIDTH, PAIRED, qkv_bias=MOSTLY),
    "glm4": family(HEADS, WIDTH, PAIRED, qkv_bias=MOSTLY),
    "cohere": family(
        BIASES, PAIRED, qk_norm=where("use_qk_norm", norm("layer", per_head=True, eps="layer_norm_eps"), default=False)
    ),
    "cohere2": family(
        BIASES,
        window_size=SLIDING,
        rope=only("sliding_attention", rope(pairs="interleaved")),
        kind=every(4, "sliding_window_pattern", "_sliding_window_pattern"),
    ),
    "phi": family(
        qkv_bias=True, out_bias=True, qk_norm=where("qk_layernorm", norm("layer", bias=True, eps="layer_norm_eps"))
    ),
    "phi3": family(window_size=optional("sliding_window"), says_nothing={"attention_bias"}),
    "persimmon": family(
        num_kv_heads=None,
        qkv_bias=True,
        out_bias=True,
        qk_norm=where("qk_layernorm", norm("layer", bias=True, eps="layer_norm_eps")),
    ),
    "gpt2": family(
        d_model=key("n_embd"),
        num_heads=key("n_head"),
        num_kv_heads=None,
        head_dim=None,
        qkv_bias=True,
        out_bias=True,
        rope=None,
        scale=_scale_of_gpt2,
        dropout=key("attn_pdrop", default=0.1),
        output_dropout=key("resid_pdrop", default=0.1),
        says_nothing={"reorder_and_upcast_attn", "n_positions"},
    ),
    "bloom": family(
        num_heads=key("n_head", "num_attention_heads"),
        num_kv_heads=None,
        head_dim=None,
        qkv_bias=True,
        out_bias=True,
        rope=None,
        alibi=Alibi(),
    ),
    "smollm3": family(HEADS, BIASES, rope=_smollm3, window_size=SLIDING, kind=_kind_of_smollm3),
    "qwen3_next": family(HEADS, WIDTH, BIASES, qk_norm=norm(weight="1+w"), gate=Gate(), kind=_qwen3_next),
    "afmoe": family(
        WIDTH,
        BIASES,
        qk_norm=norm(),
        gate=Gate(),
        window_size=SLIDING,
        rope=only("sliding_attention", rope()),
        kind=every(4, "global_attn_every_n_layers"),
    ),
    "granite": family(BIASES, scale=key("attention_multiplier")),
    "starcoder2": family(
        HEADS, qkv_bias=key("use_bias"), out_bias=key("use_bias"), window_size=optional("sliding_window")
    ),
    "olmo": family(BIASES, clip_qkv=optional("clip_qkv")),
    "olmo2": family(BIASES, qk_norm=norm(over="width")),
    "olmo3": family(BIASES, qk_norm=norm(over="width"), window_size=SLIDING, kind=every(4)),
    "stablelm": family(
        HEADS,
        qkv_bias=key("use_qkv_bias"),
        qk_norm=where("qk_layernorm", norm("layer", per_head=True, eps="layer_norm_eps")),
    ),
    "llama4_text": family(
        HEADS,
        WIDTH,
        BIASES,
        chunk_size=only("chunked_attention", asked("attention_chunk_size")),
        kind=lambda config, index: "chunked_attention" if _rotates(config, index).value else "full_attention",
        more=_llama4,
    ),
    "hunyuan_v1_dense": family(BIASES, qk_norm=norm(after_rope=True)),
    "deepseek_v2": family(LATENTS, rope=rope(of="qk_rope_head_dim", pairs="interleaved"), says_nothing=OF_LATENTS),
    "deepseek_v3": family(LATENTS, says_nothing=OF_LATENTS),
    "glm4_moe_lite": family(LATENTS, says_nothing=OF_LATENTS),
    "minicpm3": family(LATENTS, rope=rope(of="qk_rope_head_dim"), says_nothing=OF_LATENTS),
    "mistral4": family(LATENTS, temperature=_tempered_by_rope, says_nothing=OF_LATENTS),
    "youtu": family(LATENTS, says_nothing=OF_LATENTS),
}
