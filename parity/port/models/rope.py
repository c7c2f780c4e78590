"""RoPE from configurations: `rope_parameters`, or, before transformers 5, `rope_theta` and
`rope_scaling`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mha_spec import (
    DynamicScaling,
    InputError,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    YarnScaling,
)
from parity.port.models.config import Config, Value

KINDS = {"su": "longrope", "mrope": "default"}
"""Older names of scalings."""


def read_rope(
    config: Config,
    head_dim: int,
    *,
    layer_type: str,
    theta: float | None,
    fraction: float | None = None,
    local_theta: float | None = None,
    names: tuple[str, str] = ("rope_theta", "rope_local_base_freq"),
    **fields: Any,
) -> Value:
    """Return the RoPE of a layer.

    Args:
        config: configuration of the model.
        head_dim: features of a head for RoPE.
        layer_type: type of layer, for `rope_parameters` by type.
        theta: default base of this family; None if the configuration must have one.
        fraction: default fraction of rotated features; None in families that always rotate all.
        local_theta: separate base of layers with a window, which then have no scaling.
        names: keys of both bases, before `rope_parameters` existed.
        fields: other fields of `Rope` in this family; `sections` are defaults.

    Raises:
        ValueError: if a key is missing, the scaling is unknown, or a fraction is set in a family
            without one.
    """
    values, is_local = _parameters(config, layer_type, local_theta)
    base = _base(config, values, theta, local_theta if is_local else None, names)
    kind = values.find("rope_type", "type")
    word = "default" if kind is None else KINDS.get(str(kind.value), str(kind.value))
    if word not in ("default", "proportional", *SCALINGS):
        raise InputError(f"{values.where}rope_type", f"be one of {sorted(SCALINGS)}", repr(word))
    share = _once(
        values.find("partial_rotary_factor"), config.find("partial_rotary_factor", "rotary_pct")
    )
    part = share.value if share is not None else 1.0 if fraction is None else fraction
    origins = [base.origin] + (
        [] if kind is None or word == "default" else [f"{kind.origin} {kind.value}"]
    )
    if word == "proportional":
        factor = values.find("factor")
        scaling = ProportionalScaling(part, *(() if factor is None else (factor.value,)))
        return Value(Rope(base.value, scaling=scaling, **fields), ", ".join(origins))
    if share is not None and part != 1.0 and fraction is None:
        said = share.origin
        raise InputError(
            said, "be 1 in models of this family, which rotate whole heads", {said: part}
        )
    if part != 1.0 and "rotary_dim" in fields:  # redundant
        whole = config.read("head_dim").value
        if int(whole * part) != fields["rotary_dim"]:
            said = "the rotated part" if share is None else share.origin
            raise InputError(
                said, f"give {fields['rotary_dim']} of head_dim={whole} features", {said: part}
            )
    elif part != 1.0:
        fields["rotary_dim"] = int(head_dim * part)
        origins.append(
            f"{share.origin} {part}" if share else f"{part} of a head: this family's default"
        )
    sections = values.find("mrope_section") if "sections" in fields else None
    if sections is not None:
        values.find("mrope_interleaved")  # these families have one order
        fields["sections"] = tuple(sections.value)
        origins.append(sections.origin)
    elif "sections" in fields:
        origins.append("family default: mrope_section is not set")
    if word == "default":
        for held in (values, config):  # transformers reads neither
            held.find("factor", "original_max_position_embeddings")
        return Value(Rope(base.value, **fields), ", ".join(origins))
    return Value(
        Rope(base.value, scaling=SCALINGS[word](values, config), **fields), ", ".join(origins)
    )


def _parameters(config: Config, layer_type: str, local_theta: float | None) -> tuple[Config, bool]:
    """Return the RoPE parameters of a layer, and whether they are a family's older keys for layers
    with a window.
    """
    if "rope_parameters" in config:
        values = config.section("rope_parameters")
        is_by_type = values.pass_over(Mapping)
        return (values.section(layer_type) if is_by_type else values), False
    is_local = local_theta is not None and layer_type == "sliding_attention"
    if is_local or "rope_scaling" not in config:
        config.find("rope_scaling")
        return Config({}), is_local
    return config.section("rope_scaling"), False


def _base(
    config: Config,
    values: Config,
    theta: float | None,
    local_theta: float | None,
    names: tuple[str, str],
) -> Value:
    of_model, of_windows = (names[0], "rotary_emb_base"), names[1]
    if local_theta is not None:
        config.find(*of_model)
        return config.read(of_windows, default=local_theta)
    said = _once(values.find("rope_theta"), config.find(*of_model))
    return said or config.read(*of_model, default=theta)


def _once(own: Value | None, of_model: Value | None) -> Value | None:
    """Return a value from the parameters of RoPE, or else from the model.

    Raises:
        ValueError: if both exist and differ.
    """
    if own is not None and of_model is not None and own.value != of_model.value:
        both = f"{own.origin}={own.value} and {of_model.origin}={of_model.value}"
        raise InputError(of_model.origin, "be set once, or to equal values", str(both))
    return own or of_model


# ---- Scaling -------------------------------------------------------------------------------------


def _original_length(values: Config, config: Config) -> int:
    own, of_model = (held.find("original_max_position_embeddings") for held in (values, config))
    return (own or of_model or config.read("max_position_embeddings")).value


def _factor(values: Config, config: Config, original: int) -> float:
    """Return the extension of the context; default: the ratio of both lengths."""
    found = values.find("factor")
    return (
        found.value
        if found is not None
        else config.read("max_position_embeddings").value / original
    )


def _given(values: Config, *names: str) -> dict[str, Any]:
    found = {name: values.find(name) for name in names}
    return {name: each.value for name, each in found.items() if each is not None}


def _linear(values: Config, config: Config) -> LinearScaling:
    return LinearScaling(values.read("factor").value)


def _dynamic(values: Config, config: Config) -> DynamicScaling:
    values.find("original_max_position_embeddings")  # transformers uses the other length
    return DynamicScaling(values.read("factor").value, config.read("max_position_embeddings").value)


def _llama3(values: Config, config: Config) -> Llama3Scaling:
    factors = (values.read(name).value for name in ("low_freq_factor", "high_freq_factor"))
    return Llama3Scaling(values.read("factor").value, _original_length(values, config), *factors)


def _yarn(values: Config, config: Config) -> YarnScaling:
    original = _original_length(values, config)
    told = _given(
        values, "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"
    )
    both = told.get("mscale") and told.get("mscale_all_dim")
    if "attention_factor" in told or not both:  # transformers ignores one alone
        told = {name: value for name, value in told.items() if not name.startswith("mscale")}
    return YarnScaling(_factor(values, config, original), original, **told)


def _longrope(values: Config, config: Config) -> LongRopeScaling:
    original = _original_length(values, config)
    short, long = (tuple(values.read(name).value) for name in ("short_factor", "long_factor"))
    told = _given(values, "attention_factor")
    short_scale, long_scale = (
        values.find(name) for name in ("short_mscale", "long_mscale")
    )  # PhiMoE's names
    if short_scale is not None and long_scale is not None:
        if short_scale.value != long_scale.value:
            both = (
                f"{short_scale.origin}={short_scale.value} and "
                f"{long_scale.origin}={long_scale.value}"
            )
            raise InputError("calls of both lengths", "have one factor", str(both))
        told["attention_factor"] = long_scale.value
    return LongRopeScaling(_factor(values, config, original), original, short, long, **told)


SCALINGS: Mapping[str, Callable[[Config, Config], Any]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
